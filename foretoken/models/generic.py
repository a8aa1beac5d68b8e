"""The generic decoder: any Hugging Face causal LM, unmodified, through its public plug-in points, and its features.

Hooks read features by boundary (`foretoken.core.passes`). Each hook is checked at load against `output_hidden_states`
of the model. The model with transformers' attention and cache is the reference for all other decoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.attention.layout import AttentionLayout
from foretoken.core.errors import ModelError, PassError
from foretoken.decoder.base import PassOutput
from foretoken.decoder.memory import check_memory, plain_tensors
from foretoken.models.forward_pass import ForwardPass, current_pass, running
from foretoken.models.level_states import LevelStates
from foretoken.models.parts import target_parts

if TYPE_CHECKING:
    from foretoken.core.passes import Pass, Tap
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.models.loaded import LoadedModel

_PROBE = torch.tensor([[1, 2, 3]])  # three different tokens, so that a block that mixes up positions is noticed


@contextmanager
def own_attention(model: Any, kind: str = "eager") -> Iterator[None]:
    """Restores a model's own attention inside the context; kind: "eager", which every model has, or "sdpa"."""
    name = model.config._attn_implementation
    try:
        model.set_attn_implementation(kind)
    except (ValueError, ImportError):  # not every architecture has every kind
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(name)


def run_plain(model: Any, input_ids: Tensor, **kwargs: Any) -> Any:
    """Runs a transformers causal LM on (B, T) int64 ids with its own attention; passes on other arguments."""
    with own_attention(model), torch.inference_mode():
        return model(input_ids.to(next(model.parameters()).device), **kwargs)


def generate_plain(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Returns `max_tokens` greedy tokens of transformers' `generate`, without stopping at the end-of-sequence token."""
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    with own_attention(model), torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, eos_token_id=-1,
            pad_token_id=0,
        )  # fmt: skip
    result: list[int] = output[0, len(prompt) :].tolist()
    return result


def place_taps(model: nn.Module, num_layers: int, wanted: Sequence[Tap]) -> None:
    """Places hooks that store the wanted features in the current pass, and checks them.

    Raises `ModelError` if a tap does not exist, or the blocks cannot be found.
    """
    blocks = find_blocks(model, num_layers)
    for tap in wanted:
        if tap == "final":
            find_final_norm(model, blocks).register_forward_hook(_keep_output(tap))
        elif tap == 0:
            blocks[0].register_forward_pre_hook(_keep_input, with_kwargs=True)
        elif isinstance(tap, int) and 0 < tap <= num_layers:
            blocks[tap - 1].register_forward_hook(_keep_output(tap))
        else:
            raise ModelError(
                f"tap {tap!r} does not exist: the target has {num_layers} blocks. Expected 0..{num_layers} or 'final'."
            )
    _prove(model, num_layers, wanted)


def find_blocks(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """Returns the only module list with L entries. Raises `ModelError` without exactly one."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    outermost = [m for m in lists if not any(m in other.modules() for other in lists if other is not m)]
    if len(outermost) != 1:
        raise ModelError(
            f"{type(model).__name__} has {len(outermost)} lists of {num_layers} blocks. Expected exactly one. "
            "Drafters that read features cannot be used with this target."
        )
    return outermost[0]


def find_final_norm(model: nn.Module, blocks: nn.ModuleList) -> nn.Module:
    """Returns the module between the last block and the LM head.

    The function runs the model: the first module outside the blocks that takes the last block's output is the norm.
    Raises `ModelError` if there is none.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    found: list[nn.Module] = []
    block_output: list[Tensor] = []

    def watch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if block_output and args and args[0] is block_output[-1] and isinstance(output, Tensor):
            found.append(module)

    outside = [m for m in model.modules() if id(m) not in inside and not list(m.children())]
    handles = [module.register_forward_hook(watch) for module in outside]
    handles.append(blocks[-1].register_forward_hook(lambda *event: block_output.append(first_output(event[2]))))
    try:
        run_plain(model, _PROBE)
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no norm after its last block. The tap 'final' cannot be read from it."
        )
    return found[0]


def _prove(model: nn.Module, num_layers: int, wanted: Sequence[Tap]) -> None:
    """Compares every tap with the hidden states that the model itself reports."""
    with running(ForwardPass(layout=None)) as forward_pass:
        states = run_plain(model, _PROBE, output_hidden_states=True).hidden_states
    for tap in wanted:
        # The model reports L + 1 states: the input of block 1, the outputs of blocks 1..L-1, and the final norm's.
        if tap == num_layers:
            continue
        expected = states[-1] if tap == "final" else states[tap]
        if not torch.allclose(forward_pass.features[tap], expected, rtol=1e-3, atol=1e-5):
            raise ModelError(
                f"tap {tap!r} of {type(model).__name__} is not the hidden state that the model reports. "
                "Drafters that read features cannot be used with this target."
            )


def first_output(output: Any) -> Tensor:
    """Returns a block's hidden states, whether the block returns a tensor or a tuple."""
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


def _keep(tap: Tap, hidden: Tensor) -> None:
    forward_pass = current_pass()
    if forward_pass is not None:
        forward_pass.features[tap] = hidden


def _keep_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _keep(0, args[0] if args else kwargs["hidden_states"])


def _keep_output(tap: Tap) -> Callable[..., None]:
    return lambda *event: _keep(tap, first_output(event[2]))


class _ExitError(Exception):
    """Carries (1, M, D), the output of the last block that runs, out of the model's forward."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _exit_after(number: int) -> Callable[[Any, Any, Any], None]:
    """Returns a hook for block `number`, counted from 1."""

    def hook(module: Any, args: Any, output: Any) -> None:
        del module, args
        forward_pass = current_pass()
        if forward_pass is not None and forward_pass.num_layers == number:
            raise _ExitError(first_output(output))

    return hook


class GenericDecoder:
    """Calls the transformers model; see `Decoder`."""

    name = "generic"
    is_exact = False

    def __init__(self, model: LoadedModel, cache: SlotCache, taps: Sequence[Tap]) -> None:
        """Raises `ModelError` if a tap cannot be read."""
        from foretoken.models.plugin import as_transformers_cache  # imports transformers' models

        self._model, self._cache, self._taps = model, as_transformers_cache(cache), tuple(taps)
        self._states, takes = cache.states, signature(model.module.forward).parameters
        self._takes_rows = "logits_to_keep" in takes
        self._cache_name = "cache_params" if "cache_params" in takes else "past_key_values"  # Mamba names it so
        self._weights, self._device = plain_tensors(model.module), cache.keys[0].device
        if taps:
            place_taps(model.module, model.num_layers, taps)

    def run(self, work: Pass) -> PassOutput:
        """Computes a pass as one sequence of M tokens; our attention separates the sequences."""
        check_memory(self._weights)
        work = work.to(self._device)
        arguments: dict[str, Any] = {
            "input_ids": work.tokens.unsqueeze(0),
            "position_ids": work.token_positions.unsqueeze(0),
            self._cache_name: self._cache,
            "use_cache": True,
        }
        logits, rows = None, work.logit_rows
        layout = AttentionLayout(work)
        states = None if self._states is None else LevelStates.of(work, self._states)
        begun = ForwardPass(layout=layout, num_layers=work.num_layers, states=states)
        with torch.inference_mode(), running(begun) as forward_pass:
            if work.num_layers is not None:
                logits = self._early_logits(arguments, work.num_layers, rows)
            elif rows is None:
                self._model.backbone(**arguments)
            elif self._takes_rows and not work.has_all_logits:
                logits = self._model.module(**arguments, logits_to_keep=rows).logits[0]
            else:
                logits = self._model.module(**arguments).logits[0]
                logits = logits if work.has_all_logits else logits[rows]
        if self._states is not None and states is not None:
            self._states.finish(work, states)
        features = None
        if self._taps and work.num_layers is None:
            features = torch.stack([forward_pass.features[tap][0] for tap in self._taps], dim=1)
        return PassOutput(
            logits=None if logits is None else logits.float(), features=features, attention=layout.attention
        )

    def _early_logits(self, arguments: dict[str, Any], num_layers: int, rows: Tensor | None) -> Tensor | None:
        """Returns (R, V) logits after the first blocks; None computes keys and values alone."""
        if num_layers > self._model.num_layers:
            raise PassError(f"the pass goes through {num_layers} blocks, the target has {self._model.num_layers}.")
        norm, lm_head = self._early_end
        try:
            self._model.backbone(**arguments)
        except _ExitError as end:
            return None if rows is None else lm_head(norm(end.hidden[0][rows]))
        raise ModelError(f"{type(self._model.module).__name__} does not run its blocks one after another.")

    @cached_property
    def _early_end(self) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        """The final norm and the LM head, after hooks are placed that end passes after a block."""
        blocks = find_blocks(self._model.module, self._model.num_layers)
        norm = find_final_norm(self._model.module, blocks)
        for index, block in enumerate(blocks):
            block.register_forward_hook(_exit_after(index + 1))
        return norm, target_parts(self._model).lm_head

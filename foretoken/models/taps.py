"""Reads features of a transformers model by boundary (`foretoken.core.passes`), with hooks.

Each hook is checked at load against `output_hidden_states` of the model. The model with transformers' attention and
cache is the reference for all other decoders.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import ModelError
from foretoken.models.plugin import ForwardPass, current_pass, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from foretoken.core.passes import Tap


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


_PROBE = torch.tensor([[1, 2, 3]])


class Taps:
    """Hooks on a model that store the wanted features in the current pass."""

    def __init__(self, model: nn.Module, num_layers: int, wanted: Sequence[Tap]) -> None:
        """Places and checks the hooks.

        Args:
            model: The causal LM.
            num_layers: L.
            wanted: Boundary indices 0..L and `final`.

        Raises:
            ModelError: If a tap does not exist, or the blocks cannot be found.
        """
        blocks = find_blocks(model, num_layers)
        for tap in wanted:
            if tap == "final":
                find_final_norm(model, blocks).register_forward_hook(_output_hook(tap))
            elif tap == 0:
                blocks[0].register_forward_pre_hook(_input_hook, with_kwargs=True)
            elif isinstance(tap, int) and 0 < tap <= num_layers:
                blocks[tap - 1].register_forward_hook(_output_hook(tap))
            else:
                raise ModelError(
                    f"tap {tap!r} does not exist: the target has {num_layers} blocks. "
                    f"Expected 0..{num_layers} or 'final'."
                )
        _prove(model, num_layers, wanted)


def find_blocks(model: nn.Module, num_layers: int) -> list[nn.Module]:
    """Returns the blocks in order: the only module list with L entries. Raises `ModelError` without exactly one."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    outermost = [m for m in lists if not any(m in other.modules() for other in lists if other is not m)]
    if len(outermost) != 1:
        raise ModelError(
            f"{type(model).__name__} has {len(outermost)} lists of {num_layers} blocks. Expected exactly one. "
            "Drafters that read features cannot be used with this target."
        )
    return list(outermost[0])


def find_final_norm(model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
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


def _input_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    del module
    forward_pass = current_pass()
    if forward_pass is not None:
        forward_pass.features[0] = args[0] if args else kwargs["hidden_states"]


def _output_hook(tap: Tap) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        forward_pass = current_pass()
        if forward_pass is not None:
            forward_pass.features[tap] = first_output(output)

    return hook

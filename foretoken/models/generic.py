"""The generic decoder: any Hugging Face causal LM, unmodified, through its public plug-in points."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from foretoken.attention.layout import AttentionLayout
from foretoken.core.errors import ModelError, PassError
from foretoken.decoder.base import PassOutput
from foretoken.decoder.memory import check_memory, plain_tensors
from foretoken.models.parts import target_parts
from foretoken.models.plugin import ForwardPass, as_transformers_cache, current_pass, running
from foretoken.models.taps import Taps, find_blocks, find_final_norm, first_output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from foretoken.core.passes import Pass, Tap
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.models.loading import LoadedModel


class _ExitError(Exception):
    """Carries (1, M, D), the output of the last block that runs, out of the model's forward."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class EarlyExit:
    """Hooks on the blocks of a model, with its final norm and LM head."""

    def __init__(self, model: LoadedModel) -> None:
        """Places the hooks; raises `ModelError` if the blocks or the final norm cannot be found."""
        self._model = model
        blocks = find_blocks(model.module, model.num_layers)
        self._norm, self._lm_head = find_final_norm(model.module, blocks), target_parts(model).lm_head
        for index, block in enumerate(blocks):
            block.register_forward_hook(_exit_after(index + 1))

    def logits(self, arguments: dict[str, Any], forward_pass: ForwardPass, rows: Tensor | None) -> Tensor | None:
        """Computes the logits after the first `ForwardPass.num_layers` blocks.

        Args:
            arguments: Of the model's forward.
            forward_pass: The current pass.
            rows: (R,) int64, tokens that need logits; None for keys and values alone.

        Returns:
            (R, V), or None without rows.

        Raises:
            PassError: If the model has fewer blocks.
        """
        wanted = forward_pass.num_layers
        if wanted is None or wanted > self._model.num_layers:
            raise PassError(f"the pass goes through {wanted} blocks, of which there are {self._model.num_layers}.")
        try:
            self._model.backbone(**arguments)
        except _ExitError as end:
            return None if rows is None else self._lm_head(self._norm(end.hidden[0][rows]))
        raise ModelError(f"{type(self._model.module).__name__} does not run its blocks one after another.")


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
        """Places hooks for the taps; raises `ModelError` if a tap cannot be read."""
        self._model, self._cache, self._taps = model, as_transformers_cache(cache), tuple(taps)
        self._takes_rows = "logits_to_keep" in signature(model.module.forward).parameters
        self._weights = plain_tensors(model.module)
        self._early_exit: EarlyExit | None = None  # created on first use
        if taps:
            Taps(model.module, model.num_layers, taps)

    def run(self, work: Pass) -> PassOutput:
        """Computes a pass as one sequence of M tokens; our attention separates the sequences."""
        check_memory(self._weights)
        arguments: dict[str, Any] = {
            "input_ids": work.tokens.unsqueeze(0),
            "position_ids": work.token_positions.unsqueeze(0),
            "past_key_values": self._cache,
            "use_cache": True,
        }
        logits, rows = None, work.logit_rows
        begun = ForwardPass(layout=AttentionLayout(work), num_layers=work.num_layers)
        with torch.inference_mode(), running(begun) as forward_pass:
            if work.num_layers is not None:
                if self._early_exit is None:
                    self._early_exit = EarlyExit(self._model)
                logits = self._early_exit.logits(arguments, forward_pass, rows)
            elif rows is None:
                self._model.backbone(**arguments)
            elif self._takes_rows and not work.has_all_logits:
                logits = self._model.module(**arguments, logits_to_keep=rows).logits[0]
            else:
                logits = self._model.module(**arguments).logits[0]
                logits = logits if work.has_all_logits else logits[rows]
        features = None
        if self._taps and work.num_layers is None:
            features = torch.stack([forward_pass.features[tap][0] for tap in self._taps], dim=1)
        return PassOutput(logits=None if logits is None else logits.float(), features=features)

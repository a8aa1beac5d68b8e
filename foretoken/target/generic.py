"""The generic decoder: any Hugging Face causal LM, unmodified, through its public plug-in points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.target.decoder import PassOutput
from foretoken.target.held_memory import check_memory, plain_tensors
from foretoken.target.plugin import ForwardPass, as_transformers_cache, running
from foretoken.target.taps import Tap, Taps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.attention.layout import AttentionLayout
    from foretoken.target.loading import LoadedModel
    from foretoken.target.slot_cache import SlotCache


class GenericDecoder:
    """Calls the transformers model; see `Decoder`."""

    name = "generic"
    is_exact = False

    def __init__(self, model: LoadedModel, cache: SlotCache, taps: Sequence[Tap]) -> None:
        """Places hooks for the taps.

        Raises:
            ModelError: When a tap cannot be read.
        """
        self._model, self._cache, self._taps = model, as_transformers_cache(cache), tuple(taps)
        self._weights = plain_tensors(model.module)
        if taps:
            Taps(model.module, model.num_layers, taps)

    def run(self, tokens: Tensor, layout: AttentionLayout) -> PassOutput:
        """See `Decoder`."""
        check_memory(self._weights)
        with torch.inference_mode(), running(ForwardPass(layout=layout)) as forward_pass:
            output = self._model.module(**self._arguments(tokens, layout))
        return PassOutput(logits=output.logits.float(), features=self._stacked(forward_pass))

    def fill(self, tokens: Tensor, layout: AttentionLayout) -> Tensor | None:
        """See `Decoder`."""
        check_memory(self._weights)
        with torch.inference_mode(), running(ForwardPass(layout=layout)) as forward_pass:
            self._model.backbone(**self._arguments(tokens, layout))
        return self._stacked(forward_pass)

    def _arguments(self, tokens: Tensor, layout: AttentionLayout) -> dict[str, Any]:
        """Arguments of the model's forward."""
        return {
            "input_ids": tokens,
            "position_ids": layout.positions,
            "past_key_values": self._cache,
            "use_cache": True,
        }

    def _stacked(self, forward_pass: ForwardPass) -> Tensor | None:
        """(B, T, F, D) features of a finished pass, or None without taps."""
        if not self._taps:
            return None
        return torch.stack([forward_pass.features[tap] for tap in self._taps], dim=2)

"""The generic decoder: any Hugging Face causal LM, unmodified, through its public plug-in points."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from foretoken.attention.layout import AttentionLayout
from foretoken.decoder.base import PassOutput
from foretoken.decoder.held_memory import check_memory, plain_tensors
from foretoken.hf.early_exit import EarlyExit
from foretoken.hf.plugin import ForwardPass, as_transformers_cache, running
from foretoken.hf.taps import Taps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.passes import Pass, Tap
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.hf.loading import LoadedModel


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
        self._takes_rows = "logits_to_keep" in signature(model.module.forward).parameters
        self._weights = plain_tensors(model.module)
        self._early_exit: EarlyExit | None = None  # made when a pass first asks for it
        if taps:
            Taps(model.module, model.num_layers, taps)

    def run(self, work: Pass) -> PassOutput:
        """See `Decoder`. The model sees one sequence of M tokens; attention, which is ours, tells them apart."""
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

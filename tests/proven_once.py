"""Tests build thousands of engines over a few models: a decoder proves itself once on the same weights and settings."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from foretoken.decoder.base import Decoder
from foretoken.decoder.slot_cache import SlotCache
from foretoken.models.loaded import LoadedModel

_MOST = 64  # models whose weights are kept, so that no others come to their addresses


def proven_once(check: Callable[..., None]) -> Callable[..., None]:
    """`check_tree_attention`, which passes over what it has proven before."""
    proven: OrderedDict[Any, tuple[list[torch.Tensor], set[Any]]] = OrderedDict()

    def checked(model: LoadedModel, decoder: Decoder, cache: SlotCache, *, context_len: int, **options: Any) -> None:
        weights = [each.detach() for each in model.module.parameters()]
        key = (type(model.module), *((each.data_ptr(), _version(each), each.dtype) for each in weights))
        settings = (
            type(decoder), model.config.to_json_string(), model.quantization, cache.num_slots > 1, cache.is_rounded,
            cache.num_positions, context_len, torch.get_num_threads(),
        )  # fmt: skip
        _, known = proven.setdefault(key, (weights, set()))
        proven.move_to_end(key)
        if settings in known:
            return
        check(model, decoder, cache, context_len=context_len, **options)
        known.add(settings)
        while len(proven) > _MOST:
            proven.popitem(last=False)

    return checked


def _version(weight: torch.Tensor) -> int:
    return 0 if weight.is_inference() else weight._version

"""Tests build thousands of engines over a few models: a decoder proves itself once on equal weights and settings."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from foretoken.decoder.base import Decoder
from foretoken.decoder.slot_cache import SlotCache
from foretoken.models.borrowed import foreign_call
from foretoken.models.loaded import LoadedModel


def proven_once(check: Callable[..., None]) -> Callable[..., None]:
    """`check_tree_attention`, which passes over what it has proven before."""
    proven = set[Any]()

    def checked(model: LoadedModel, decoder: Decoder, cache: SlotCache, *, context_len: int, **options: Any) -> None:
        case = (
            type(decoder), model.config.to_json_string(), cache.num_slots > 1, cache.is_rounded, cache.num_positions,
            context_len, torch.get_num_threads(), _digest(model),
        )  # fmt: skip
        if None in case or case not in proven:
            check(model, decoder, cache, context_len=context_len, **options)
            proven.add(case)

    return checked


def _digest(model: LoadedModel) -> str | None:
    """What modules and weights are told by; None if some weights are elsewhere, or hooks or other forwards run."""
    if model.lean is not None or model.quantization is not None or foreign_call(model.module) is not None:
        return None
    found = hashlib.blake2b(repr(model.module).encode())
    for weight in (*model.module.parameters(), *model.module.buffers()):
        found.update(weight.detach().cpu().flatten().clone().view(torch.uint8).numpy())  # not of storage that may go
    return found.hexdigest()

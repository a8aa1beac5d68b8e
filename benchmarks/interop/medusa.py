"""Runs FasterDecoding/Medusa's `from_pretrained` on what foretoken writes.

Its own Llama needs a transformers of 2023, so transformers' Llama stands in for it, and nothing for the tokenizer: the
heads, and how they are built and loaded, are the original's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from transformers import LlamaForCausalLM, MistralForCausalLM

from benchmarks.interop.borrowed import borrow
from benchmarks.interop.outcome import Outcome, compared
from benchmarks.interop.samples import LENGTH, E, V, our_logits, random_head, texts, written_pickle
from foretoken.formats.conversion import MEDUSA_CODE
from foretoken.heads.medusa import MedusaConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from benchmarks.interop.samples import Target

# Heads, blocks, whether tied, whether foretoken writes the pickle.
_CASES = ((5, 0, False, True), (5, 1, False, True), (5, 3, True, True), (5, 2, False, False), (4, 1, False, True))


def outcomes(root: Path, target: Target, work: Path) -> Iterator[Outcome]:
    """Every case."""
    (module,) = borrow(
        root,
        "medusa.model.medusa_model",
        stand_ins={
            "medusa.model.modeling_llama_kv": {"LlamaForCausalLM": LlamaForCausalLM},
            "medusa.model.modeling_mistral_kv": {"MistralForCausalLM": MistralForCausalLM},
        },
    )
    for index, (heads, blocks, tied, is_written) in enumerate(_CASES):
        config = MedusaConfig(hidden_size=E, vocab_size=V, num_heads=heads, num_layers=blocks, tied_blocks=tied,
                              own_lm_head=True)  # fmt: skip
        head, place = random_head(config, target), work / str(index)
        back, claimed = written_pickle("medusa", head, target, place, reader=MEDUSA_CODE, is_refused=not is_written)
        kind = "tied" if tied else "different"
        case = (
            f"{heads} heads of {blocks} {kind} blocks, medusa"
            if blocks > 1
            else f"{heads} heads of {blocks} block(s), medusa"
        )
        ours = our_logits(back, target)
        yield compared(MEDUSA_CODE, case, claimed=claimed, ours=ours, theirs=partial(_logits, module, place, heads))


def _logits(module: Any, place: Path, num_heads: int) -> list[Tensor]:
    """What the original model's heads say of the features."""
    with mock.patch.object(module, "AutoTokenizer"), torch.no_grad():
        model = module.MedusaModelLlama.from_pretrained(str(place))
        found = [head(texts()[0]) for head in model.medusa_head]
    return [each[:, : LENGTH - 1 - index] for index, each in enumerate(found[:num_heads])]

"""Runs the `from_pretrained` of FasterDecoding/Medusa and zankner/Hydra on the pickles that foretoken writes.

Nothing stands in for the tokenizer: the heads, and how they are built and loaded, are the originals'.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, MistralForCausalLM

from benchmarks.interop.borrowed import borrow
from benchmarks.interop.outcome import Outcome, compared
from benchmarks.interop.samples import LENGTH, PREFIX, E, Target, V, our_logits, random_head, texts, written_pickle
from foretoken.formats.conversion import HYDRA_CODE, MEDUSA_CODE
from foretoken.heads.hydra import HydraConfig
from foretoken.heads.medusa import MedusaConfig

# Heads, blocks, whether tied, whether foretoken writes the pickle.
_MEDUSA_CASES = (
    (5, 0, False, True),
    (5, 1, False, True),
    (5, 3, True, True),
    (5, 2, False, False),
    (4, 1, False, True),
)


def medusa(root: Path, target: Target, work: Path) -> Iterator[Outcome]:
    """Every case of Medusa heads. Transformers' Llama stands in for its own, which needs transformers of 2023."""
    (module,) = borrow(
        root,
        "medusa.model.medusa_model",
        stand_ins={
            "medusa.model.modeling_llama_kv": {"LlamaForCausalLM": LlamaForCausalLM},
            "medusa.model.modeling_mistral_kv": {"MistralForCausalLM": MistralForCausalLM},
        },
    )
    for index, (heads, blocks, tied, is_written) in enumerate(_MEDUSA_CASES):
        config = MedusaConfig(hidden_size=E, vocab_size=V, num_heads=heads, num_layers=blocks, tied_blocks=tied,
                              own_lm_head=True)  # fmt: skip
        head, place = random_head(config, target), work / str(index)
        back, claimed = written_pickle("medusa", head, target, place, reader=MEDUSA_CODE, is_refused=not is_written)
        kind = "tied" if tied else "different"
        case = f"{heads} heads of {blocks} {f'{kind} blocks' if blocks > 1 else 'block(s)'}, medusa"
        ours = our_logits(back, target)
        yield compared(
            MEDUSA_CODE, case, claimed=claimed, ours=ours, theirs=partial(_medusa_logits, module, place, heads)
        )


def _medusa_logits(module: Any, place: Path, num_heads: int) -> list[Tensor]:
    """What the original model's heads say of the features."""
    with mock.patch.object(module, "AutoTokenizer"), torch.no_grad():
        model = module.MedusaModelLlama.from_pretrained(str(place))
        found = [head(texts()[0]) for head in model.medusa_head]
    return [each[:, : LENGTH - 1 - index] for index, each in enumerate(found[:num_heads])]


_LINEAR = {"rope_type": "linear", "factor": 4.0}
_PLAIN, _SCALED = None, _LINEAR
# Name, blocks, whether tied, changes of the prefix layer or None without, the target's scaling, whether it is written.
_HYDRA_CASES: tuple[tuple[str, int, bool, dict[str, Any] | None, dict[str, Any] | None, bool], ...] = (
    ("Hydra, 1 block", 1, False, None, _PLAIN, True),
    ("Hydra, 2 blocks", 2, False, None, _PLAIN, True),
    ("Hydra, 4 blocks, tied", 4, True, None, _PLAIN, True),
    ("Hydra, 4 blocks that differ", 4, False, None, _PLAIN, False),
    ("Hydra++, 2 blocks", 2, False, {}, _PLAIN, True),
    ("Hydra++, 4 blocks, tied", 4, True, {}, _PLAIN, True),
    ("Hydra++, 4 blocks that differ", 4, False, {}, _PLAIN, False),
    ("Hydra++, rope_theta 500000", 2, False, {"rope_theta": 5e5}, _PLAIN, False),
    ("Hydra++, linear scaling as the target", 2, False, {"rope_scaling": _LINEAR}, _SCALED, True),
    ("Hydra++, no scaling, the target's linear", 2, False, {}, _SCALED, False),
    ("Hydra++, linear scaling, the target's none", 2, False, {"rope_scaling": _LINEAR}, _PLAIN, False),
)


def hydra(root: Path, target: Target, work: Path) -> Iterator[Outcome]:
    """Every case of Hydra heads, around transformers' Llama."""
    (module,) = borrow(root, "hydra.model.hydra_model")
    scaled = Target.made(work / "scaled-target", _LINEAR)
    for index, (case, blocks, tied, prefix, scaling, is_written) in enumerate(_HYDRA_CASES):
        around = target if scaling is None else scaled
        config = HydraConfig(
            hidden_size=E, vocab_size=V, num_heads=3, num_layers=blocks, tied_blocks=tied, own_lm_head=True,
            prefix=None if prefix is None else PREFIX.model_copy(update=prefix),
        )  # fmt: skip
        head, place = random_head(config, around), work / str(index)
        back, claimed = written_pickle("hydra", head, around, place, reader=HYDRA_CODE, is_refused=not is_written)
        ours = our_logits(back, around)
        yield compared(HYDRA_CODE, f"{case}, hydra", claimed=claimed, ours=ours,
                       theirs=partial(_hydra_logits, module, place, around))  # fmt: skip


def _hydra_logits(module: Any, place: Path, target: Target) -> list[Tensor]:
    """What the original heads say of the features and tokens."""
    features, tokens = texts()

    class Base(LlamaForCausalLM):
        """transformers' Llama, whose configuration says of scaling what that of 2023 did."""

        @classmethod
        def from_pretrained(cls, *arguments: Any, **keywords: Any) -> Any:
            model = super().from_pretrained(*arguments, attn_implementation="eager", **keywords)
            scaling = target.rope_scaling
            old = None if scaling is None else {"type": scaling["rope_type"], "factor": scaling["factor"]}
            object.__setattr__(model.config, "rope_scaling", old)
            return model

    with mock.patch.multiple(module, KVLlamaForCausalLM=Base, AutoTokenizer=mock.DEFAULT), torch.no_grad():
        head = module.HydraModel.from_pretrained(str(place)).hydra_head.eval()
        positions = torch.arange(LENGTH).unsqueeze(0)
        more = {"position_ids": positions} if hasattr(head, "prefix_embeding_layer") else {}
        found, _ = head(base_hidden_states=features, input_ids=tokens, noise=None, **more)
    return [each[:, : LENGTH - 1 - index] for index, each in enumerate(found)]

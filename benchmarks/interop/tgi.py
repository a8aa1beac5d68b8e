"""Runs text-generation-inference's Medusa and MLP speculator layers on what foretoken writes.

Stand-ins for its linear layers, embedding and LM head, on one process, take tensors by the names that its layers ask
for, from one file; an absent name is an error, as there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from benchmarks.interop.borrowed import borrow
from benchmarks.interop.fms import CASES, case_name, speculator
from benchmarks.interop.outcome import Outcome, compared
from benchmarks.interop.samples import E, Target, V, our_chain, our_logits, random_head, texts, written
from foretoken.formats.conversion import OLD_TGI, TGI
from foretoken.heads.medusa import MedusaConfig

if TYPE_CHECKING:
    from foretoken.heads.base import HeadConfig

_PACKAGE = "text_generation_server"
_LM_HEAD = "lm_head"


class _Weights:
    """Tensors by name, of one rank."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.routing: dict[str, str] = {}
        self.process_group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    def get_tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise RuntimeError(f"weight {name} does not exist")
        return self._tensors[name].clone()


class _Linear(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    @classmethod
    def load(cls, config: Any, prefix: str, weights: _Weights, bias: bool = False) -> _Linear:  # noqa: ARG003
        return cls(weights.get_tensor(f"{prefix}.weight"), weights.get_tensor(f"{prefix}.bias") if bias else None)

    @classmethod
    def load_multi(cls, config: Any, prefixes: list[str], dim: int, weights: _Weights, bias: bool) -> _Linear:
        parts = [cls.load(config, prefix, weights, bias) for prefix in prefixes]
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(torch.cat([part.weight for part in parts], dim), torch.cat(biases) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Head(_Linear):
    @classmethod
    def load(cls, config: Any, prefix: str, weights: _Weights, bias: bool = False) -> _Head:  # noqa: ARG003
        return cls(weights.get_tensor(f"{prefix}.weight"), None)


class _Embedding(nn.Module):
    def __init__(self, prefix: str, weights: _Weights) -> None:
        super().__init__()
        self.weight = nn.Parameter(weights.get_tensor(f"{prefix}.weight"), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


def outcomes(root: Path, target: Target, work: Path) -> Iterator[Outcome]:
    """Every case."""
    speculate = SimpleNamespace(number=0)
    layers = {"FastLinear": _Linear, "TensorParallelEmbedding": _Embedding, "TensorParallelHead": _Head}
    names = (f"{_PACKAGE}.layers.medusa", f"{_PACKAGE}.layers.mlp")
    parallel = {"TensorParallelHead": _Head, "TensorParallelColumnLinear": _Linear}
    medusa, mlp = borrow(
        root / "server" if (root / "server").is_dir() else root, *names,
        stand_ins={
            f"{_PACKAGE}.layers": layers,
            f"{_PACKAGE}.layers.linear": {"FastLinear": _Linear},
            f"{_PACKAGE}.layers.tensor_parallel": parallel,
            f"{_PACKAGE}.utils.speculate": {"get_speculate": lambda: speculate.number},
        },
    )  # fmt: skip
    for index, (case, name, config) in enumerate(_heads()):
        place = work / str(index)
        options = {"as_safetensors": True} if name.startswith("medusa") else {}
        back, readers = written(name, random_head(config, target), target, place, **options)
        run = _mlp if name == "mlp_speculator" else _medusa
        program = OLD_TGI if run is _mlp and not hasattr(mlp, "simple_norm") else TGI  # scaling came with 2.3
        roots = target.parts.lm_head(texts()[0][:, 0]).argmax(-1)
        ours = our_chain(back, target, roots) if run is _mlp else [each[:, 0] for each in our_logits(back, target)]
        speculate.number = config.steps
        used = mlp if run is _mlp else medusa
        yield compared(
            program,
            case,
            claimed=readers[program].reads,
            ours=ours,
            theirs=partial(run, used, place, target),
        )


def _heads() -> Iterator[tuple[str, str, HeadConfig]]:
    """Name of the case, format, head."""
    for blocks, own in ((1, True), (2, True), (1, False)):
        name = "medusa" if own else "medusa_v2"
        sizes = MedusaConfig(hidden_size=E, vocab_size=V, num_heads=3, num_layers=blocks, own_lm_head=own)
        yield f"3 heads of {blocks} block(s) that differ, {name}, safetensors", name, sizes
    for stages, tied, scaled in CASES:
        kind = {"tied": tied, "scaled": scaled}
        yield case_name(stages, **kind), "mlp_speculator", speculator(stages, **kind)


def _loaded(place: Path, target: Target) -> tuple[Any, _Weights]:
    """What its loader passes on: a configuration with the speculator's in it, and all tensors."""
    (file,) = place.glob("*.safetensors")
    config = SimpleNamespace(
        speculator={"path": str(place), "model_paths": [file.name]}, hidden_size=E, vocab_size=V, quantize=None,
        speculator_config=json.loads((place / "config.json").read_text()),
    )  # fmt: skip
    return config, _Weights(load_file(file) | {f"{_LM_HEAD}.weight": target.parts.lm_head_weight})


@torch.no_grad()
def _medusa(module: ModuleType, place: Path, target: Target) -> list[Tensor]:
    """Logits of each head at the first position; by the second class where the first does not load, as theirs does."""
    config, weights = _loaded(place, target)
    try:
        head = module.MedusaHeadV1.load(config, _LM_HEAD, weights)
    except RuntimeError:
        weights.routing.clear()
        with mock.patch("torch.distributed.all_gather", _gather_alone):
            return list(module.MedusaHeadV2(config, _LM_HEAD, weights)(texts()[0][:, 0])[1].unbind(-2))
    return list(head(texts()[0][:, 0])[1].unbind(1))


def _gather_alone(outputs: list[Tensor], part: Tensor, group: Any = None) -> None:  # noqa: ARG001 - torch's signature
    """What gathering is on one process."""
    outputs[0].copy_(part)


@torch.no_grad()
def _mlp(module: ModuleType, place: Path, target: Target) -> list[Tensor]:
    """Probabilities of each stage of a greedy chain from the first feature."""
    config, weights = _loaded(place, target)
    _, probs = module.MLPSpeculatorHead.load(config, _LM_HEAD, weights)(texts()[0][:, 0])
    return list(probs.unbind(1))

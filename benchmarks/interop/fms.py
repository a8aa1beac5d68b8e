"""Runs fms-extras' MLPSpeculator on the tensors that foretoken writes.

Where IBM's fms is not installed, a norm written here from the published formula stands in for the one class it imports.
"""

import json
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.interop.borrowed import borrow
from benchmarks.interop.outcome import Outcome, compared
from benchmarks.interop.samples import LENGTH, E, Target, V, our_logits, random_head, texts, written
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig

PROGRAM = "fms-extras"
# Stages, whether tied, whether the feature is scaled.
CASES = ((3, False, False), (3, False, True), (3, True, False), (3, True, True), (1, False, True), (1, True, True))


class Norm(nn.Module):
    """x / rms(x), times a weight and plus a bias where there are some."""

    def __init__(self, width: int, *, elementwise_shift: bool = False, elementwise_scale: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if elementwise_scale else None
        self.bias = nn.Parameter(torch.zeros(width)) if elementwise_shift else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        x = x if self.weight is None else x * self.weight
        return x if self.bias is None else x + self.bias


def speculator(stages: int, *, tied: bool, scaled: bool) -> MlpSpeculatorConfig:
    """A tiny one."""
    return MlpSpeculatorConfig(
        hidden_size=E, vocab_size=V, num_heads=stages, inner_dim=12, tie_weights=tied, scale_input=scaled
    )


def case_name(stages: int, *, tied: bool, scaled: bool) -> str:
    """Of a row."""
    kind = "tied" if tied else "untied"
    return f"{stages} stage(s), {kind}, input {'scaled' if scaled else 'as it is'}, mlp_speculator"


def outcomes(root: Path, target: Target, work: Path) -> Iterator[Outcome]:
    """Every case."""
    stand_ins: dict[str, dict[str, Any]] = {
        "fms": {"models": _Ignored()},
        "fms.modules.layernorm": {"LayerNormParameterized": Norm},
        "fms.utils": {"serialization": _Ignored()},
    }
    is_installed = find_spec("fms") is not None
    (module,) = borrow(root, "fms_extras.models.speculator", stand_ins={} if is_installed else stand_ins)
    for index, (stages, tied, scaled) in enumerate(CASES):
        head, place = random_head(speculator(stages, tied=tied, scaled=scaled), target), work / str(index)
        back, readers = written("mlp_speculator", head, target, place)
        case = case_name(stages, tied=tied, scaled=scaled)
        yield compared(PROGRAM, case, claimed=readers[PROGRAM].reads, ours=our_logits(back, target),
                       theirs=partial(_logits, module, place))  # fmt: skip


class _Ignored:
    """Takes calls of any name: the module registers its architectures when it is imported."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _logits(module: Any, place: Path) -> list[Tensor]:
    """What the original says of the features and tokens, built by the file's own words."""
    config = json.loads((place / "config.json").read_text())
    keys = ("emb_dim", "inner_dim", "vocab_size", "n_predict", "tie_weights", "scale_input")
    model = module.MLPSpeculator(**{key: config[key] for key in keys}).eval()
    tensors = load_file(place / "model.safetensors")
    missing, unexpected = model.load_state_dict(
        {key.removeprefix("speculator."): part for key, part in tensors.items()}, strict=False
    )
    if missing or unexpected:
        raise KeyError(f"missing {missing}, unexpected {unexpected}")
    features, tokens = texts()
    stages = config["n_predict"]
    with torch.no_grad():
        found = model(features[:, : LENGTH - stages], tokens[:, 1:])
        rows = [found[index] for index in range(stages)]
        # The training pass wants all tokens of a position: the last positions of the first stages are computed alone.
        rest = model(features, torch.nn.functional.pad(tokens[:, 1:], (0, stages)))
    return [
        torch.cat([row, rest[index][:, LENGTH - stages : LENGTH - 1 - index]], dim=1) for index, row in enumerate(rows)
    ]

"""Runs vLLM's Medusa configuration and model on what foretoken writes, and its EAGLE heads, see `eagle.vllm`.

Stand-ins on one rank take the place of its parallel LM head, which checks a file's rows as the original does, and of
its logits processor. Whether vLLM drafts with MLP speculators is looked up in its table of models.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.interop import eagle
from benchmarks.interop.borrowed import UnusableError, borrow
from benchmarks.interop.fms import speculator
from benchmarks.interop.outcome import Outcome, compared
from benchmarks.interop.samples import E, V, given_files, our_logits, random_head, texts, written
from foretoken.formats.conversion import VLLM
from foretoken.heads.medusa import MedusaConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

    from benchmarks.interop.samples import Target

_MODELS = "vllm.model_executor"
_CASES: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("1 block", "vllm_medusa", {}, {}),
    ("2 blocks that differ", "vllm_medusa", {"num_layers": 2}, {}),
    ("no bias", "vllm_medusa", {"has_bias": False}, {}),
    ("no blocks", "vllm_medusa", {"num_layers": 0}, {}),
    ("the target's LM head", "vllm_medusa", {"own_lm_head": False}, {}),
    ("token_map of 20", "vllm_medusa", {"draft_vocab_size": 20}, {}),
    ("1 block, pickle", "medusa", {}, {}),
    ("2 blocks that differ, safetensors", "medusa", {"num_layers": 2}, {"as_safetensors": True}),
    ("1 block without LM heads", "medusa_v2", {"own_lm_head": False}, {}),
)


class _LmHead(nn.Module):
    def __init__(self, rows: int, width: int, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width), requires_grad=False)
        self.weight.weight_loader = self._load  # type: ignore[attr-defined]

    def _load(self, parameter: Tensor, tensor: Tensor) -> None:
        assert tensor.shape[0] == parameter.shape[0], f"{tensor.shape[0]} rows instead of {parameter.shape[0]}"
        parameter.data.copy_(tensor)


class _LogitsProcessor:
    def __init__(self, vocab_size: int, org_vocab_size: int, scale: float) -> None:  # noqa: ARG002 - its signature
        self._rows, self._scale = org_vocab_size, scale

    def __call__(self, lm_head: _LmHead, hidden: Tensor) -> Tensor:
        return linear(hidden, lm_head.weight)[..., : self._rows] * self._scale


def outcomes(root: Path, target: Target, work: Path) -> Iterator[Outcome]:
    """Every case of EAGLE and Medusa heads."""
    yield from eagle.vllm(root, target, work / "eagle")
    if target.given is None:
        yield from _random_heads(root, target, work)
    elif target.given.checkpoint.config.method == "medusa":
        model, config = _borrowed(root)
        for name, back, claimed in given_files(("vllm_medusa", "medusa"), VLLM, target, work):
            yield compared(VLLM, f"{target.given.name}, {name}", claimed=claimed, ours=our_logits(back, target),
                           theirs=partial(_logits, model, config, work / name, target))  # fmt: skip


def _random_heads(root: Path, target: Target, work: Path) -> Iterator[Outcome]:
    """Every case of Medusa heads, and whether MLP speculators are read."""
    model, config = _borrowed(root)
    for index, (case, name, changes, options) in enumerate(_CASES):
        sizes = {"hidden_size": E, "vocab_size": V, "num_heads": 3, "own_lm_head": True, **changes}
        place = work / str(index)
        back, readers = written(name, random_head(MedusaConfig(**sizes), target), target, place, **options)
        yield compared(VLLM, f"3 heads, {case}, {name}", claimed=readers[VLLM].reads, ours=our_logits(back, target),
                       theirs=partial(_logits, model, config, place, target))  # fmt: skip
    place = work / "mlp"
    head = random_head(speculator(3, tied=True, scaled=True), target)
    _, readers = written("mlp_speculator", head, target, place)
    table = (root / "vllm" / "model_executor" / "models" / "registry.py").read_text(encoding="utf-8")
    is_known = any(line.strip().startswith('"MLPSpeculatorPreTrainedModel"') for line in table.splitlines())
    yield Outcome(
        program=VLLM, case="3 stages, mlp_speculator", claimed="same" if readers[VLLM].reads else "not read",
        found="skipped" if is_known else "stops",
        note="its table of models has it; not run" if is_known else "its table of models does not have it",
    )  # fmt: skip


def _borrowed(root: Path) -> tuple[ModuleType, ModuleType]:
    """Its model and configuration."""
    if not (root / "vllm").is_dir():
        raise UnusableError(f"'{root}' has no directory vllm")
    (model,) = borrow(
        root, f"{_MODELS}.models.medusa",
        stand_ins={
            "vllm.config": {"VllmConfig": object},
            f"{_MODELS}.layers.logits_processor": {"LogitsProcessor": _LogitsProcessor},
            f"{_MODELS}.layers.vocab_parallel_embedding": {"ParallelLMHead": _LmHead},
            f"{_MODELS}.model_loader.weight_utils": {"default_weight_loader": lambda to, tensor: to.data.copy_(tensor)},
            f"{_MODELS}.models.utils": {"maybe_prefix": lambda prefix, name: f"{prefix}.{name}"},
        },
    )  # fmt: skip
    (config,) = borrow(
        root, "vllm.transformers_utils.configs.medusa",
        stand_ins={"vllm.transformers_utils.utils": {"without_trust_remote_code": dict}},
    )  # fmt: skip
    return model, config


@torch.no_grad()
def _logits(module: ModuleType, configs: ModuleType, place: Path, target: Target) -> list[Tensor]:
    """Logits of each head; every parameter must come from the file, as its loader demands."""
    config = configs.MedusaConfig.from_pretrained(str(place))
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    model = module.Medusa(vllm_config=SimpleNamespace(speculative_config=draft))
    pickles = list(place.glob("*.pt"))
    tensors = torch.load(pickles[0], weights_only=True) if pickles else load_file(next(place.glob("*.safetensors")))
    missing = dict(model.named_parameters()).keys() - model.load_weights(tensors.items())
    if missing:
        raise ValueError(f"weights were not initialized from the checkpoint: {sorted(missing)}")
    features, _ = texts(target)
    found: list[Tensor] = model.compute_logits(model(features))
    return [each[:, : features.shape[1] - 1 - index] for index, each in enumerate(found)]

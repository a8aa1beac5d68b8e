"""Runs speculators' `from_pretrained` and training pass on what foretoken writes of EAGLE-3 heads.

Its pass feeds the text itself, as ours does, and gives no logits: they are taken where its LM head gives them. Its
attention masks count in blocks of 128 tokens, so the text has that length.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.interop.borrowed import UnusableError
from benchmarks.interop.outcome import Outcome, compared
from benchmarks.interop.samples import Target, written
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.formats.conversion import SPECULATORS, head_shapes
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.eagle3 import Eagle3Config
from foretoken.models.loading import load_model
from foretoken.models.parts import target_parts

_E, _V, _VD, _LAYERS, _LENGTH = 32, 128, 64, 12, 128
_STEPS = 4
_LAYER = LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48, rms_norm_eps=1e-5)
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# Name, changes of the head, dtype of its weights, dtype that both compute in, tolerance of the largest logit.
_EXACT, _ROUNDED = 1e-5, 5e-2
_FLOAT, _HALF = torch.float32, torch.bfloat16
_CASES: tuple[tuple[str, dict[str, Any], torch.dtype, torch.dtype, float], ...] = (
    ("as published", {}, _FLOAT, _FLOAT, _EXACT),
    ("stored in bfloat16", {}, _HALF, _FLOAT, _EXACT),
    ("stored and computed in bfloat16", {}, _HALF, _HALF, _ROUNDED),
    ("an embedding of its own", {"own_embedding": True}, _FLOAT, _FLOAT, _EXACT),
    ("norm_before_residual", {"norm_before_residual": True}, _FLOAT, _FLOAT, _EXACT),
    ("norm_before_fc", {"norm_before_fc": True}, _FLOAT, _FLOAT, _EXACT),
    ("fc_norm and norm_output", {"fc_norms": True, "feeds_normed": True}, _FLOAT, _FLOAT, _EXACT),
    ("the whole vocabulary", {"draft_vocab_size": None}, _FLOAT, _FLOAT, _EXACT),
    ("four taps", {"boundaries": (0, 2, 9, 12)}, _FLOAT, _FLOAT, _EXACT),
    ("biased attention", {"layer": _LAYER.model_copy(update={"attention_bias": True})}, _FLOAT, _FLOAT, _EXACT),
    ("rope_theta 500000", {"layer": _LAYER.model_copy(update={"rope_theta": 5e5})}, _FLOAT, _FLOAT, _EXACT),
    ("Llama 3's scaling", {"layer": _LAYER.model_copy(update={"rope_scaling": _LLAMA3})}, _FLOAT, _FLOAT, _EXACT),
    ("narrower than the target", {"draft_hidden_size": 16, "own_embedding": True}, _FLOAT, _FLOAT, _EXACT),
)


def outcomes(root: Path, target: Target, work: Path) -> Iterator[Outcome]:  # noqa: ARG001 - its own target has taps
    """Every case."""
    around = Target.made(work / "target", hidden_size=_E, vocab_size=_V, num_layers=_LAYERS, dtype=_HALF)
    with _imported(root) as package:
        for index, (case, changes, stored, computed, tolerance) in enumerate(_CASES):
            config = Eagle3Config(
                **{"hidden_size": _E, "vocab_size": _V, "boundaries": (2, 6, 9), "num_steps": _STEPS, "layer": _LAYER,
                   "draft_vocab_size": _VD, **changes}
            )  # fmt: skip
            place = work / str(index)
            back, readers = written("speculators", _random_head(config, around, stored), around, place)
            yield compared(
                SPECULATORS, f"EAGLE-3, {case}, speculators", claimed=readers[SPECULATORS].reads,
                ours=_our_logits(back, around, computed), tolerance=tolerance,
                theirs=partial(_logits, package, place, computed),
            )  # fmt: skip


@contextmanager
def _imported(root: Path) -> Iterator[ModuleType]:
    """The package from a directory that holds it; what is installed here comes before what lies beside it."""
    place = root / "src" if (root / "src" / "speculators").is_dir() else root
    if not (place / "speculators").is_dir():
        raise UnusableError(f"'{root}' has no directory speculators")
    sys.path.append(str(place))
    try:
        package = importlib.import_module("speculators")
        importlib.import_module("loguru").logger.disable("speculators")  # which tells of every file
        yield package
    except Exception as err:  # whatever its imports meet here
        raise UnusableError(f"speculators does not run here: {type(err).__name__}: {err}") from err
    finally:
        sys.path.remove(str(place))


def _random_head(config: Eagle3Config, target: Target, dtype: torch.dtype) -> HeadCheckpoint:
    """A head whose numbers are about as large as a trained one's, so that no step drowns in another."""
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for key, shape in head_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and not key.endswith("bias")
        weights[key] = (1 + 0.2 * noise if is_norm or key == "feature_norms" else 1.5 * noise / shape[-1] ** 0.5).to(
            dtype
        )
    if config.draft_vocab_size is not None:
        weights["token_map"] = torch.randperm(_V, generator=generator)[:_VD].sort().values
    named = TargetFingerprint(name=str(target.directory), hidden_size=_E, vocab_size=_V, num_layers=_LAYERS)
    return HeadCheckpoint(config=config, weights=weights, target=named)


def _text(dtype: torch.dtype, num_taps: int) -> tuple[Tensor, Tensor]:
    """(1, S, F E) features and (1, S) tokens."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, _LENGTH, num_taps * _E, generator=generator)
    return features.to(dtype), torch.randint(_V, (1, _LENGTH), generator=generator)


@torch.no_grad()
def _our_logits(head: HeadCheckpoint, target: Target, dtype: torch.dtype) -> list[Tensor]:
    """(S - 1 - i, Vd) of step i, at the positions whose tokens are there."""
    config: Any = head.config
    features, tokens = _text(dtype, len(config.boundaries))
    loaded = load_model(str(target.directory), dtype=str(dtype).removeprefix("torch."), device="cpu")
    module, parts = head.module(dtype=dtype), target_parts(loaded)
    hidden = module.teacher_forced(features, tokens, parts)
    logits = [module.draft_logits(index, each, parts) for index, each in enumerate(hidden)]
    return [each[0, : _LENGTH - 1 - index] for index, each in enumerate(logits)]


@torch.no_grad()
def _logits(package: ModuleType, place: Path, dtype: torch.dtype) -> list[Tensor]:
    """What its training pass says of the features and tokens."""
    model = package.SpeculatorModel.from_pretrained(str(place), dtype=dtype).eval()
    features, tokens = _text(dtype, len(model.config.eagle_aux_hidden_state_layer_ids))
    found: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: found.append(logits))
    model(
        hidden_states=features, input_ids=tokens.roll(-1, dims=1), document_ids=torch.zeros_like(tokens),
        position_ids=torch.arange(_LENGTH).unsqueeze(0), ttt_steps=_STEPS,
    )  # fmt: skip
    return [each[0, : _LENGTH - 1 - index] for index, each in enumerate(found)]

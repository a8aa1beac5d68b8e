"""A draft head independent of its file format, and the known facts about the target that it was trained for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.functional import linear

from foretoken.core.checks import validated
from foretoken.core.errors import ConfigError, ModelError, listed
from foretoken.decoder.memory import in_own_memory
from foretoken.heads.base import Head, HeadConfig, build_head
from foretoken.models.config import check_model_files
from foretoken.models.loaded import DTYPES, HASHED_ROWS, LoadedModel
from foretoken.models.loading import load_config, load_model
from foretoken.models.parts import final_norm, target_parts


class TargetFingerprint(BaseModel):
    """Identifies the target of a head."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = None  # directory or hub id of the target, for people
    architecture: str | None = None  # class of the transformers model, or None if unknown
    hidden_size: int
    vocab_size: int  # V, width of the logits
    num_layers: int | None = None  # number of blocks, or None if unknown
    weights: str | None = None  # hash of part of the LM head, or None if unknown

    @classmethod
    def of(cls, model: LoadedModel) -> TargetFingerprint:
        """Returns that of a loaded target, the same in bfloat16 and float32; without `weights` in float16."""
        lm_head = model.first_head_rows
        if lm_head is None:
            lm_head = target_parts(model).lm_head_weight
        return cls(
            name=model.name,
            architecture=type(model.module).__name__,
            hidden_size=lm_head.shape[1],
            vocab_size=model.vocab_size,
            num_layers=model.num_layers,
            weights=None if lm_head.is_meta or lm_head.dtype == torch.float16 else lm_head_hash(lm_head),
        )

    def differences(self, other: TargetFingerprint) -> list[str]:
        """Returns the fields that both know and that differ, except the name."""
        found = []
        for key in ("architecture", "hidden_size", "vocab_size", "num_layers", "weights"):
            ours, theirs = getattr(self, key), getattr(other, key)
            if ours is not None and theirs is not None and ours != theirs:
                found.append(f"{key} {ours} instead of {theirs}")
        return found


def lm_head_hash(weight: Tensor) -> str:
    """Returns `TargetFingerprint.weights` of an LM head, (V, E)."""
    rows = weight[:HASHED_ROWS].to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


_Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Rank = Annotated[int, Field(ge=0, strict=True)]


class HeadExtras(BaseModel):
    """Entries of a `config.json` besides the sizes of a head; see `HeadCheckpoint`."""

    target: TargetFingerprint | None = None
    acceptance: Annotated[list[Annotated[list[_Probability], Field(min_length=1)]], Field(min_length=1)] | None = None
    choices: list[Annotated[list[_Rank], Field(min_length=1)]] | None = None
    draft_vocab: Annotated[list[_Rank], Field(min_length=1)] | None = None
    notes: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCheckpoint:
    """A head with its target."""

    config: HeadConfig
    weights: Mapping[str, Tensor]  # state dictionary of `build_head(config)`
    target: TargetFingerprint | None = None  # the target that the head was trained for, or None if unknown
    # Measured on held-out text: entry i, r is P(candidate r of head i is the target's token | the heads before were
    # right); None if unknown.
    acceptance: Sequence[Sequence[float]] | None = None
    # The static tree that the checkpoint recommends, in Medusa's notation, or None.
    choices: Sequence[Sequence[int]] | None = None
    # Ascending ids of the tokens that a head with the target's LM head learned over, and drafts on CPUs unless told
    # otherwise; None for all.
    draft_vocab: Sequence[int] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)  # origin of the head, for people

    def check_target(self, target: TargetFingerprint, *, what: str) -> None:
        """Raises `ConfigError` if the head, named `what`, was trained for another target."""
        own = self.target or TargetFingerprint(hidden_size=self.config.hidden_size, vocab_size=self.config.vocab_size)
        differences = own.differences(target)
        if differences:
            trained_for = f"'{own.name}'" if own.name else "another target"
            raise ConfigError(
                f"head '{what}' was trained for {trained_for}, not for '{target.name}': it has "
                f"{', '.join(differences)}. Expected a head for this target. Train one with `foretoken train`."
            )

    def extras(self) -> dict[str, Any]:
        """Returns the entries of `HeadExtras`, JSON-ready."""
        return {
            "target": None if self.target is None else self.target.model_dump(mode="json"),
            "acceptance": self.acceptance,
            "choices": self.choices,
            "draft_vocab": self.draft_vocab,
            "notes": dict(self.notes),
        }

    def module(self, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Head:
        """Returns the head, ready to draft; dtype: of its weights, None for the stored one."""
        with torch.device("meta"):
            head = build_head(self.config)
        own_dtype = dtype or next(tensor.dtype for tensor in self.weights.values() if tensor.is_floating_point())
        weights = {
            key: in_own_memory(tensor.to(device, own_dtype if tensor.is_floating_point() else None))
            for key, tensor in self.weights.items()
        }
        head.load_state_dict(weights, assign=True, strict=True)
        head.draft_vocab = self.draft_vocab
        return head.requires_grad_(requires_grad=False).eval()

    @classmethod
    def of_head(cls, head: Head, **more: Any) -> HeadCheckpoint:
        """Returns the checkpoint of a module; more: further attributes."""
        weights = {key: tensor.detach().cpu().contiguous() for key, tensor in head.state_dict().items()}
        return cls(config=head.config, weights=weights, draft_vocab=head.draft_vocab, **more)


def checked_extras(values: Any, vocab_size: int, what: str, *, advice: str = "") -> HeadExtras:
    """Returns entries besides the sizes of a head; raises `ModelError` for invalid ones, naming `what`."""
    extras = validated(HeadExtras, values, what, error=ModelError, advice=advice)
    ids = extras.draft_vocab or []
    if ids and (ids[-1] >= vocab_size or any(one >= other for one, other in pairwise(ids))):
        expected = f"Expected ascending ids below {vocab_size}. {advice}".strip()
        raise ModelError(f"'draft_vocab' of {what} is no draft vocabulary. {expected}")
    return extras


def check_keys(name: str, found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]) -> None:
    """Compares shapes by key with those of a configuration; raises `ModelError` with the first keys that differ."""
    groups = {
        "missing": wanted.keys() - found.keys(),
        "unexpected": found.keys() - wanted.keys(),
        "wrong shape": [
            f"{key} {list(found[key])} instead of {list(shape)}"
            for key, shape in wanted.items()
            if key in found and tuple(found[key]) != tuple(shape)
        ],
    }
    parts = [f"{kind}: {listed(keys)}" for kind, keys in groups.items() if keys]
    if parts:
        raise ModelError(
            f"the weights of head '{name}' do not fit its config.json: {'; '.join(parts)}. "
            "Expected exactly the tensors of its configuration. Copy or convert it again."
        )


_HEAD = re.compile(r"(first|lm_heads)\.(\d+)\..*")
_STACKED = ("weight", "bias", "lm_head")


def with_dtype(checkpoint: HeadCheckpoint, dtype: torch.dtype) -> HeadCheckpoint:
    """Returns the head in another dtype; raises `ConfigError` if numbers become infinite."""
    weights = {key: part.to(dtype) if part.is_floating_point() else part for key, part in checkpoint.weights.items()}
    lost = sorted(key for key, part in weights.items() if not bool(torch.isfinite(part).all()))
    if lost:
        raise ConfigError(f"{dtype} cannot hold numbers of {', '.join(lost)}. Expected a wider dtype, as bfloat16.")
    return replace(checkpoint, weights=weights)


def first_heads(checkpoint: HeadCheckpoint, num_heads: int) -> HeadCheckpoint:
    """Returns a head with its first few heads; raises `ConfigError` if it has fewer, or needs the rest."""
    config: Any = checkpoint.config
    if num_heads == config.num_heads:
        return checkpoint
    if not 1 <= num_heads < config.num_heads:
        raise ConfigError(f"{num_heads} heads are asked for. Expected 1 to {config.num_heads}, as its tensors hold.")
    if config.method not in ("medusa", "hydra"):
        raise ConfigError(
            f"a head of method '{config.method}' computes something else with fewer stages. Keep them all."
        )
    weights = {}
    for key, tensor in checkpoint.weights.items():
        match = _HEAD.fullmatch(key)
        if match is None:
            weights[key] = tensor[:num_heads].contiguous() if key in _STACKED else tensor
        elif int(match[2]) < num_heads:
            weights[key] = tensor
    choices = checkpoint.choices
    return replace(
        checkpoint,
        config=config.model_copy(update={"num_heads": num_heads}),
        weights=weights,
        acceptance=None if checkpoint.acceptance is None else checkpoint.acceptance[:num_heads],
        choices=None if choices is None else [path for path in choices if len(path) <= num_heads],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetWeights:
    """Tensors of the target that other formats copy."""

    lm_head: Tensor  # (V, E)
    embedding: Tensor  # (V, E), rows as stored
    lm_head_bias: Tensor | None = None  # (V,), or None
    norm: Tensor | None = None  # (E,), of the final norm, or None if it is not found
    is_plain: bool = True  # whether logits are LM head times feature plus bias, neither scaled nor capped
    is_embedding_plain: bool = True  # whether embeddings are the stored rows, not scaled

    @classmethod
    def of_model(cls, model: LoadedModel) -> TargetWeights:
        """Returns the tensors of a loaded target, not copied."""
        if model.quantization is not None:
            raise ModelError(f"'{model.name}' was quantized to {model.quantization}. Load it without quantization.")
        module: Any = model.module
        parts, head = target_parts(model), module.get_output_embeddings()
        norm = final_norm(model.backbone)
        with torch.no_grad():
            probe = parts.lm_head_weight[:4] * 100  # large enough for any cap to show
            plain = linear(probe, parts.lm_head_weight, head.bias)
            is_plain = torch.allclose(parts.lm_head(probe).double(), plain.double(), rtol=1e-2)
            embedding = module.get_input_embeddings().weight.detach()
            first = torch.arange(min(4, len(embedding)), device=embedding.device)
            is_embedding_plain = torch.equal(parts.embed(first), embedding[first])
        return cls(
            lm_head=parts.lm_head_weight,
            lm_head_bias=None if head.bias is None else head.bias.detach(),
            embedding=embedding,
            norm=None if norm is None else norm.weight.detach(),
            is_plain=is_plain,
            is_embedding_plain=is_embedding_plain,
        )


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """The known facts about the target; every part may be missing.

    `config` is its transformers text configuration. `load` returns its weights; called once, and only by formats that
    need them.
    """

    fingerprint: TargetFingerprint | None = None
    config: Any | None = None
    load: Callable[[], TargetWeights] | None = None

    @classmethod
    def of_directory(cls, name: str) -> TargetInfo:
        """Returns the facts about a model directory without loading it; raises `ModelError` if it is no model."""
        check_model_files(name)
        config = load_config(name).get_text_config()
        stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
        fingerprint = TargetFingerprint(
            name=name,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
        )
        dtype = stored if stored in DTYPES else "float32"
        return cls(
            fingerprint=fingerprint,
            config=config,
            load=lambda: TargetWeights.of_model(load_model(name, dtype=dtype, device="cpu")),
        )

    @cached_property
    def weights(self) -> TargetWeights | None:
        """The target's weights, or None without `load`."""
        return None if self.load is None else self.load()

    def loaded(self) -> TargetWeights:
        """Returns the target's weights, loaded once; raises `ConfigError` without `load`."""
        if self.weights is None:
            raise ConfigError("the target's weights are needed. Pass --target.")
        return self.weights

    @property
    def vocab_size(self) -> int | None:
        """Width of the target's logits, or None."""
        return self._known("vocab_size", "vocab_size")

    @property
    def num_layers(self) -> int | None:
        """Number of the target's blocks, or None."""
        return self._known("num_layers", "num_hidden_layers")

    def _known(self, ours: str, theirs: str) -> int | None:
        found = getattr(self.fingerprint, ours, None)
        number = getattr(self.config, theirs, None) if found is None else found
        return None if number is None else int(number)

    def copy_of_embedding(self, key: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the target's embedding, (V, E), under the name `key`; nothing without the target's weights."""
        return {} if self.weights is None else {key: self.weights.embedding.to("cpu", dtype, copy=True)}

    def copy_of_lm_head(self, what: str, *, with_bias: bool) -> tuple[Tensor, Tensor | None]:
        """Returns the target's LM head and bias, for the format `what` that has an LM head in each head.

        Raises `ConfigError` if the target is missing, or a copy would compute other logits, such as without its bias.
        """
        weights = self.weights
        if weights is None:
            raise ConfigError(
                f"the heads share the target's LM head, and {what} keeps a copy of it in each head. Pass --target."
            )
        if not weights.is_plain or (weights.lm_head_bias is not None and not with_bias):
            raise ConfigError(
                f"the heads share the target's LM head, which has a bias, a scale or a cap that {what} cannot express. "
                "Expected a plain LM head. Keep the head in another format."
            )
        return weights.lm_head, weights.lm_head_bias

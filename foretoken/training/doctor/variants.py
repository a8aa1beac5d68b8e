"""Other configurations of a head, and what the head predicts with each: finds faults that raise no error.

The weights of the head stay. A variant that is right more often names the fault. `readings` has the variants of the
feature: other blocks, positions, and places around the final norm.

Letters: B texts, S positions, E hidden size, K heads, V vocabulary, Vd vocabulary of the drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.drafters.head_drafter import drafting_dtype
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.models.parts import target_parts, target_scaling, taught_parts
from foretoken.training.doctor.readings import (
    IN_PLACE,
    Variant,
    compared_steps,
    measure,
    predictions,
    read_features,
    target_choices,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from foretoken.formats.checkpoint import HeadCheckpoint
    from foretoken.heads.base import Head
    from foretoken.models.loaded import LoadedModel
    from foretoken.models.parts import TargetParts
    from foretoken.training.doctor.readings import Agreement, Texts

_RELEASED_BASE = 10000.0  # of the rotary embedding of most released heads, whatever the target has


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A head in the dtype in which it drafts.

    Attributes:
        head: Made from the checkpoint.
        parts: In the dtype of the head.
        features: (B, S, F E), what drafting reads, in the dtype of the head.
        choices: (B, S) int64, the target's choice at the judged positions, -1 elsewhere.
    """

    checkpoint: HeadCheckpoint
    head: Head
    target: LoadedModel
    parts: TargetParts
    features: Tensor
    texts: Texts
    choices: Tensor

    def said(self, head: Head) -> Tensor:
        """Returns (K, B, S) int64, the predictions of a head at the judged positions; K as in `Agreement.table`."""
        return predictions(head, self.parts, self.features, self.texts, num_steps=compared_steps(head))


def compare(checkpoint: HeadCheckpoint, target: LoadedModel, texts: Texts) -> tuple[Case, Agreement]:
    """Compares a head with the target, in the dtype in which it drafts: every reading of the feature, every variant."""
    dtype, taps = drafting_dtype(target), checkpoint.config.taps
    readings = {name: each.to(dtype) for name, each in read_features(target, texts.tokens, taps).items()}
    case = Case(
        checkpoint=checkpoint,
        head=checkpoint.module(device=target.device, dtype=dtype),
        target=target,
        parts=taught_parts(target_parts(target, dtype=dtype), checkpoint.draft_vocab),
        features=readings[IN_PLACE],
        texts=texts,
        choices=target_choices(target, texts),
    )
    agreement = measure(case.head, case.parts, readings, texts, choices=case.choices, variants=variants(case))
    return case, agreement


def variants(case: Case) -> dict[str, Variant]:
    """Returns the variants that the head can have, by name."""
    return {name: Variant(said, advice) for make, advice in _VARIANTS for name, said in make(case)}


def _rotary(case: Case) -> Iterator[tuple[str, Tensor]]:
    config, target = case.checkpoint.config, case.target.config
    for key in ("layer", "prefix"):
        layer = getattr(config, key, None)
        if isinstance(layer, LayerConfig):
            bases = dict.fromkeys((layer.rope_theta, *_target_bases(target), _RELEASED_BASE))
            own, others = layer.rope_scaling, [target_scaling(target), None]
            for base, scaling in product(bases, [own, *(each for each in others if each != own)]):
                if (base, scaling) == (layer.rope_theta, own):
                    continue
                other = layer.model_copy(update={"rope_theta": base, "rope_scaling": scaling})
                changed = replace(case.checkpoint, config=config.model_copy(update={key: other}))
                head = changed.module(device=case.target.device, dtype=case.features.dtype)
                yield f"rotary base {base:g}, scaling {scaling or 'none'}", case.said(head)


def _target_bases(config: Any) -> list[float]:
    rope = getattr(config, "rope_parameters", None) or {}  # with one entry for each kind of layer in some models
    return [each["rope_theta"] for each in (rope, *rope.values()) if isinstance(each, dict) and "rope_theta" in each]


@torch.no_grad()
def _lm_head(case: Case) -> Iterator[tuple[str, Tensor]]:
    head, parts = case.head, case.parts
    few = slice(0, 1), slice(0, 4)
    hidden = next(iter(head.teacher_forced(case.features[few], case.texts.tokens[few], parts)))
    is_readable = hidden.shape[-1] == parts.lm_head_weight.shape[1]
    if is_readable and not head.has_target_lm_head and head.token_map is None:  # a wrong map looks like a wrong LM head
        yield "the target's LM head", predictions(
            head, parts, case.features, case.texts, num_steps=compared_steps(head),
            logits=lambda _, rows: parts.lm_head(rows),
        )  # fmt: skip


def _order(case: Case) -> Iterator[tuple[str, Tensor]]:
    """Other orders of the parts that `fc` reads, and of the rows that a rotary embedding turns in pairs."""
    weights, hidden = case.checkpoint.weights, case.features.shape[-1] // len(case.checkpoint.config.taps)
    changed: dict[str, dict[str, Tensor]] = {}
    if (fc := weights.get("fc.weight")) is not None and fc.shape[1] in (2 * hidden, 3 * hidden):
        parts = fc.split(hidden, dim=1)
        for order in list(permutations(range(len(parts))))[1:]:
            name = f"the parts of `fc` in the order {', '.join(str(part + 1) for part in order)}"
            changed[name] = {"fc.weight": torch.cat([parts[part] for part in order], dim=1)}
    for block, layer in ((key, getattr(case.checkpoint.config, key, None)) for key in ("layer", "prefix")):
        if isinstance(layer, LayerConfig):
            keys = [f"{block}.{name}_proj.{kind}" for name, kind in product("qk", ("weight", "bias"))]
            rows = {key: weights[key].unflatten(0, (-1, layer.head_dim)) for key in keys if key in weights}
            for name, split in (("from halves to pairs", (2, -1)), ("from pairs to halves", (-1, 2))):
                changed[f"rotary rows of `q_proj` and `k_proj` {name}"] = {
                    key: each.unflatten(1, split).transpose(1, 2).reshape(weights[key].shape)
                    for key, each in rows.items()
                }
    for name, others in changed.items():
        if others:
            checkpoint = replace(case.checkpoint, weights={**weights, **others})
            yield name, case.said(checkpoint.module(device=case.target.device, dtype=case.features.dtype))


def _token_map(case: Case) -> Iterator[tuple[str, Tensor]]:
    """Maps a predicted token to the target's choice at most of its positions; counts in the other half of the texts."""
    if case.head.token_map is None:
        return
    said, size = case.said(case.head), case.checkpoint.config.vocab_size
    labels = torch.stack([case.choices.roll(-1 - step, dims=1) for step in range(len(said))])
    is_known, mapped = (said >= 0) & (labels >= 0), said.clone()
    is_odd = torch.zeros_like(is_known)
    is_odd[:, 1::2] = True
    for half in (is_odd, ~is_odd):
        counted = is_known & ~half
        pairs, counts = (said[counted] * size + labels[counted]).unique(return_counts=True)
        is_most = 2 * counts > said[counted].bincount(minlength=size)[pairs // size]
        token_map = torch.arange(size, device=said.device)
        token_map[pairs[is_most] // size] = pairs[is_most] % size
        mapped[half] = token_map[said[half].clamp_min(0)].where(said[half] >= 0, -1)
    yield "another token map", mapped


def _dtype(case: Case) -> Iterator[tuple[str, Tensor]]:
    if case.features.dtype != torch.float32:
        head = case.checkpoint.module(device=case.target.device, dtype=torch.float32)
        parts = taught_parts(target_parts(case.target, dtype=torch.float32), head.draft_vocab)
        yield "float32", replace(case, parts=parts, features=case.features.float()).said(head)


_VARIANTS: tuple[tuple[Callable[[Case], Iterator[tuple[str, Tensor]]], str], ...] = (
    (_rotary, "the head was trained with another rotary embedding than its configuration says. Set rope_theta and "
              "rope_scaling to those, or convert the head again"),
    (_lm_head, "the head was trained with the target's LM head, and its files hold another one. Convert it again "
               "without an LM head of its own"),
    (_order, "its files hold these weights in another order, as after a conversion that took the feature and the "
             "embedding, the taps, or the pairs of the rotary embedding otherwise. Convert it again"),
    (_token_map, "the rows of the LM head stand for other tokens than the token map says (`d2t` is missing, or of "
                 "another head). Convert it again with its own `d2t`"),
    (_dtype, "the dtype in which the head drafts is too narrow for it. Load the target with `--dtype bfloat16`, or "
             "`--dtype float32` if it is bfloat16 already"),
)  # fmt: skip

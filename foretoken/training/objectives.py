"""The objectives of the methods, sizes and first weights of new heads, and the table of trainable methods.

Hydra++ learns the target's distributions alone, all heads with the same weight: Ankner et al. 2024 (arXiv 2402.05109),
sections 4.2 and 4.3. MLP speculators have the same weight for all stages, as in the published runs: Wertheimer et al.
2024 (arXiv 2404.19124), section 3. These two use `Objective` itself.

Letters: B sequences, S positions, N rows that learn, K size of a block, E hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from foretoken.core.checks import validated
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.heads.base import Head, HeadConfig, UnrolledHead
from foretoken.heads.eagle import EagleConfig, EagleHead
from foretoken.heads.eagle3 import Eagle3Config
from foretoken.heads.falcon import FalconConfig, FalconHead
from foretoken.heads.hydra import HydraConfig
from foretoken.heads.medusa import MedusaConfig
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig
from foretoken.heads.mtp import MtpConfig
from foretoken.heads.spire import SpireConfig
from foretoken.models.parts import STATIC_KINDS, TargetParts, target_base, target_scaling
from foretoken.training.objective_base import Examples, Fed, Objective, first_candidates

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel
    from foretoken.training.losses import LossWeights

DRAFT_MODEL = "draft_model"  # the method that trains no head, but a whole model
_NOISE_WINDOW = 512  # window length of the published noise


class MedusaObjective(Objective):
    """Weights 0.8^i as published, by default towards the target's distribution, as section 2.3.2 has it.

    Source: Cai et al. 2024 (arXiv 2401.10774), sections 2.2 and 2.3.2.
    """

    head_decay: float = Field(default=0.8, gt=0, le=1)


class UnrolledObjective(Objective):
    """Trains several steps of a draft of an `UnrolledHead`, the later ones on the head's own states.

    Drafts from neighbouring positions teach nearly the same. Following only those at a distance of `stride` beyond the
    first step, with a new offset in each batch, gives the same gradient on average, for a fraction of the work.
    """

    is_detached: ClassVar[bool] = False  # whether no gradient flows from a step into earlier ones

    passes: int = Field(default=1, ge=1)  # steps that are unrolled, K at most
    stride: int = Field(default=1, ge=1)  # 1 as published

    @override
    def steps(self, config: HeadConfig) -> int:
        """Returns `passes`, K at most."""
        return min(self.passes, config.steps)

    @override
    def fed(self, head: Head, given: Examples, parts: TargetParts) -> Iterator[Fed]:
        """Yields the steps; draws from torch's global generator unless all drafts are followed."""
        assert isinstance(head, UnrolledHead), "the table of methods says so"
        offset = int(torch.randint(self.stride, ())) if self.stride > 1 else 0
        starts = slice(offset, None, self.stride)
        steps = head.unrolled(
            given.features, given.tokens, parts, given.positions, starts=starts, is_detached=self.is_detached
        )
        for index, hidden in enumerate(steps):
            yield Fed(hidden, offset, self.stride) if index else Fed(hidden)


class EagleObjective(UnrolledObjective):
    """The next feature and, with a tenth of the weight, the target's distribution, one step ahead.

    The noise is that of the released code, which grows for shorter windows. Source: Li et al. 2024 (arXiv 2401.15077),
    section 4.2.
    """

    noise_window: ClassVar[int | None] = _NOISE_WINDOW

    kl_weight: float = Field(default=0.1, ge=0)
    feature_weight: float = Field(default=1.0, ge=0)
    noise: float = Field(default=0.1, ge=0)


class HassObjective(EagleObjective):
    """EAGLE's objective over several steps, without a gradient between steps, and `LossWeights.top`.

    Source: Zhang et al. 2024 (arXiv 2408.15766), sections 3.1 and 3.2.
    """

    is_detached: ClassVar[bool] = True

    passes: int = Field(default=3, ge=1)
    top_weight: float = Field(default=1.0, ge=0)
    num_top: int = Field(default=10, ge=1)

    @property
    @override
    def distance_weights(self) -> LossWeights:
        """The weights of EAGLE's distances and of `top_weight`."""
        return super().distance_weights._replace(top=self.top_weight, num_top=self.num_top)


class Eagle3Objective(UnrolledObjective):
    """The target's distributions over several steps (training-time test), later ones with less weight.

    The gradient flows through all steps. Source: Li et al. 2025 (arXiv 2503.01840), section 3.1.

    Over a draft vocabulary, the target's distribution is its part in that vocabulary; positions with a choice
    outside teach nothing. With s_j the sum of pass j's losses over its supervised positions and n_j their number, the
    loss is

        (s_0 + 0.8 s_1 + ... + 0.8^6 s_6) / n_0

    so that a position has the same weight in every pass. The released code and SpecForge also divide the sums of all
    passes by one count, but by that of all tokens of the batch, padding and prompts included.
    """

    head_decay: float = Field(default=0.8, gt=0, le=1)
    passes: int = Field(default=7, ge=1)

    @override
    def divisors(self, counts: Tensor) -> Tensor:
        """Returns the number of positions of the first pass, for all passes."""
        return counts[:1].expand_as(counts)


class MtpObjective(UnrolledObjective):
    """The target's distributions over three steps of the head's own drafts, later ones with less weight.

    Steps and weights are FastMTP's, which learns the text's own tokens: `ce_weight` 1 and `kl_weight` 0. Source: Cai et
    al. 2025 (arXiv 2509.18362), section 3.
    """

    head_decay: float = Field(default=0.6, gt=0, le=1)
    passes: int = Field(default=3, ge=1)


class SpireObjective(UnrolledObjective):
    """The target's distributions alone; steps and weights are EAGLE-3's, as the paper's are not known.

    A draft without feedback has the same output at a token whichever step it is: one step teaches all of them. Source:
    Neelam et al. 2025 (arXiv 2504.06419).
    """

    head_decay: float = Field(default=0.8, gt=0, le=1)
    passes: int = Field(default=7, ge=1)

    @override
    def steps(self, config: HeadConfig) -> int:
        """Returns `passes`, K at most; 1 without feedback."""
        assert isinstance(config, SpireConfig), "the table of methods says so"
        return super().steps(config) if config.has_feedback else 1


class FalconObjective(Objective):
    """Coupled sequential glancing distillation (Gao et al. 2024, 2412.12639; Qian et al. 2020, 2008.07905).

    A text is read as blocks of K pairs; each of the rows r learns feature r + K and the token after it. Rows are
    predicted once without a gradient. Then a share of the wrong rows, which falls during training, gets the answers
    (feature and token) in place of their own pair. The other rows of the block learn from these.

    Weights and noise are those of the released code. That code draws the tokens of the cross-entropy from the target,
    where this one takes the text's own, and sharpens a part of the divergence by a temperature of 0.95. Step i is row i
    of the blocks.
    """

    noise_window: ClassVar[int | None] = _NOISE_WINDOW

    ce_weight: float = Field(default=0.01, ge=0)
    kl_weight: float = Field(default=0.09, ge=0)
    feature_weight: float = Field(default=1.0, ge=0)
    noise: float = Field(default=0.1, ge=0)
    glancing: float = Field(default=0.4, ge=0, le=1)  # initial share of wrong rows that get answers; falls to 0
    glancing_floor: float = Field(default=0.0, ge=0, le=1)  # added to that share; the released code has 0.35 and 0.1

    @override
    def steps(self, config: HeadConfig) -> int:
        """Returns K."""
        assert isinstance(config, FalconConfig), "the table of methods says so"
        return config.block

    @override
    def fed(self, head: Head, given: Examples, parts: TargetParts) -> Iterator[Fed]:
        """Yields the steps of the text as blocks; the first block begins at position 0."""
        assert isinstance(head, FalconHead), "the table of methods says so"
        block = head.config.block
        following = parts.embed(given.tokens).to(given.features.dtype).roll(-1, dims=1)
        share = self.glancing_floor + self.glancing * (1 - given.progress)
        if share:
            rows = learning_rows(given.supervised, block)
            with torch.no_grad():
                outputs = head.block_outputs(given.features, following, given.positions)
                said = first_candidates(
                    lambda hidden: head.draft_logits(0, hidden, parts),
                    outputs[rows.sequence, rows.row],
                    head.config.vocab_size,
                )
                right = first_candidates(
                    parts.lm_head, given.final[rows.sequence, rows.row + block], head.config.vocab_size
                )
            chosen = glanced(rows, said != right, share, block)
            given = replace(given, features=with_answers(given.features, given.final, chosen, block))
            following = with_answers(following, following, chosen, block)
        outputs = head.block_outputs(given.features, following, given.positions)
        for index in range(block):  # row i of a block is step i of the draft that begins at the block's last position
            yield Fed(outputs[:, index::block], block - 1, block)


class Rows(NamedTuple):
    """Rows of texts: (N,) int64 sequences, and positions in them."""

    sequence: Tensor
    row: Tensor


def learning_rows(supervised: Tensor, block: int) -> Rows:
    """Returns the rows r, in order, that learn token r + K + 1; supervised: (B, S) bool, tokens that are labels."""
    return Rows(*supervised[:, block + 1 :].nonzero().unbind(1))


def glanced(rows: Rows, is_wrong: Tensor, share: float, block: int) -> Rows:
    """Draws the rows that get their answers, with torch's global generator.

    Draws come from every K-th learning row of a sequence. Their number is `share` of the sequence's wrong rows, rounded
    down; for K above 2 it is divided by K, and each draw begins a run of 1 to K - 1 learning rows. `rows` has (N,)
    learning rows, sequence by sequence in order; `is_wrong` is (N,) bool; `block` is K.
    """
    chosen: list[tuple[int, int]] = []
    sequences, numbers, wrong = torch.stack([rows.sequence, rows.row, is_wrong.long()]).cpu()  # one transfer
    for sequence in sequences.unique().tolist():
        is_own = sequences == sequence
        own, num_wrong = numbers[is_own].tolist(), int(wrong[is_own].sum())
        starts, known = own[::block], set(own)
        count = int(share * num_wrong) // (1 if block == 2 else block)
        for place in torch.randperm(len(starts))[:count].tolist():
            run = 1 + int(torch.randint(block - 1, ()))
            chosen += [(sequence, row) for row in range(starts[place], starts[place] + run) if row in known]
    table = torch.tensor(sorted(set(chosen)), dtype=torch.int64, device=rows.row.device).view(-1, 2)
    return Rows(table[:, 0], table[:, 1])


def with_answers(values: Tensor, answers: Tensor, chosen: Rows, block: int) -> Tensor:
    """Returns (B, S, E) values, with `answers` from K positions later at the chosen rows."""
    changed = values.clone()
    changed[chosen.sequence, chosen.row] = answers[chosen.sequence, chosen.row + block].to(values.dtype)
    return changed


def _layer_like(target: LoadedModel) -> dict[str, Any]:
    config = target.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    scaling = target_scaling(config)
    if scaling is not None and scaling["rope_type"] not in STATIC_KINDS:
        logging.getLogger(__name__).warning(
            "%s: its rotary scaling '%s' depends on the length of texts; the head's decoder block rotates without",
            target.name,
            scaling["rope_type"],
        )
        scaling = None
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim + head_dim % 2,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        **({} if scaling is None else {"rope_scaling": scaling}),
    }


def _eagle3_sizes(target: LoadedModel) -> dict[str, Any]:
    last = target.num_layers
    published = (2, last // 2, last - 3)
    is_deep = last >= 7
    return {"boundaries": published if is_deep else tuple(range(last + 1))[-3:], "layer": _layer_like(target)}


def _mtp_sizes(target: LoadedModel) -> dict[str, Any]:
    layer = {**_layer_like(target), "rope_theta": target_base(target.config)}
    if layer.pop("rope_scaling", None) is not None:
        logging.getLogger(__name__).warning(
            "%s: its rotary scaling is not the head's, whose decoder block rotates without", target.name
        )
    rope = getattr(target.config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor") or getattr(target.config, "partial_rotary_factor", None) or 1.0
    return {"layer": {**layer, "rotary_dim": int(layer["head_dim"] * share) // 2 * 2}}


def _spire_sizes(target: LoadedModel) -> dict[str, Any]:
    has_bias = any(name.endswith((".q_proj.bias", ".qkv_proj.bias")) for name, _ in target.module.named_parameters())
    layer = {**_layer_like(target), "rope_theta": target_base(target.config), "attention_bias": has_bias}
    return {"target_layers": target.num_layers, "layer": layer}


TOKENS_AN_INPUT = 100  # that the map is fitted to, for each of its 2 E inputs; 36 follow the noise, see the notes
_FEWEST_AN_INPUT = 8  # a choice: a map through fewer points follows their noise, and the head starts as it was
_RIDGE = 1e-3  # added to the mean square of each input, relative; a choice: 1e-4 to 1e-2 guess alike in the notes


class LinearStart:
    """The first weights of an EAGLE head: the linear map of (embedding, feature) that is nearest to the next feature.

    Gradient descent finds that map slowly, for features have a few directions that are ten times as wide as the others.
    Solved at once, it guessed better on SmolLM2 than 150,000 tokens of training did; see "First weights of EAGLE heads
    by least squares" in `benchmarks/NOTES.md`. Moments are summed in float64 on the CPU, over positions of texts. The
    map should be fitted to `num_tokens` tokens.
    """

    def __init__(self, head: EagleHead, parts: TargetParts) -> None:
        self._head, self._parts = head, parts
        size = head.config.width
        rows = 2 * size + (head.fc.bias is not None)
        self._moments = torch.zeros(rows, rows + size, dtype=torch.float64)
        self.num_tokens, self._num_added = TOKENS_AN_INPUT * rows, torch.zeros((), dtype=torch.float64)

    def add(self, tokens: Tensor, features: Tensor) -> None:
        """Adds the positions of (B, S) int64 tokens with (B, S, E) features, a sequence at a time."""
        for text, known in zip(tokens, features, strict=True):
            embedded, now, following = self._parts.embed(text[1:]), known[:-1], known[1:]
            one = [torch.ones_like(now[:, :1])] if self._head.fc.bias is not None else []
            values = torch.cat([embedded.to(now.dtype), now, *one, following], dim=1)
            self._moments += (values[:, : len(self._moments)].T @ values).to("cpu", torch.float64)
            self._num_added += len(now)

    def finish(self, summed: Callable[[Tensor], Tensor]) -> None:
        """Writes the map to the head's `fc`; summed: over all processes.

        `fc` stays as it is if positions are too few for its inputs, or their values are not finite.
        """
        moments = summed(self._moments)
        if float(summed(self._num_added)) < _FEWEST_AN_INPUT * len(moments):
            return
        gram, cross = moments.split([len(moments), moments.shape[1] - len(moments)], dim=1)
        size = gram.diagonal()
        ridge = _RIDGE * torch.where(size > 0, size, size.amax())
        solution, info = torch.linalg.solve_ex(gram + torch.diag(ridge), cross)
        if int(info) or not bool(solution.isfinite().all()):
            return
        with torch.no_grad():
            fc, inputs = self._head.fc, self._head.fc.weight.shape[1]
            fc.weight.copy_(solution[:inputs].T)
            if fc.bias is not None:
                fc.bias.copy_(solution[inputs])


class TrainedMethod(NamedTuple):
    """A trainable method; `default_sizes` returns a new head's sizes besides vocabulary and hidden size."""

    config: type[HeadConfig]
    objective: type[Objective]
    default_sizes: Callable[[LoadedModel], dict[str, Any]]


METHODS = {
    "medusa": TrainedMethod(MedusaConfig, MedusaObjective, lambda _: {}),
    "hydra": TrainedMethod(HydraConfig, Objective, lambda target: {"prefix": _layer_like(target)}),
    "mlp_speculator": TrainedMethod(
        MlpSpeculatorConfig, Objective, lambda target: {"inner_dim": target.config.hidden_size}
    ),
    "eagle": TrainedMethod(EagleConfig, EagleObjective, lambda target: {"layer": _layer_like(target)}),
    "hass": TrainedMethod(EagleConfig, HassObjective, lambda target: {"layer": _layer_like(target)}),
    "eagle3": TrainedMethod(Eagle3Config, Eagle3Objective, _eagle3_sizes),
    "mtp": TrainedMethod(MtpConfig, MtpObjective, _mtp_sizes),
    "spire": TrainedMethod(SpireConfig, SpireObjective, _spire_sizes),
    "falcon": TrainedMethod(FalconConfig, FalconObjective, lambda target: {"layer": _layer_like(target)}),
}


def trained_method(method: str) -> TrainedMethod:
    """Returns the row of `METHODS`; raises `ConfigError` for an unknown method, with the nearest name."""
    if method not in METHODS:
        known = sorted({*METHODS, DRAFT_MODEL})
        raise ConfigError(f"there is no head '{method}' to train. {nearest_name_hint(method, known)}")
    return METHODS[method]


def head_config(method: str, target: LoadedModel, sizes: Mapping[str, Any]) -> HeadConfig:
    """Returns a new head's configuration with `sizes`; raises `ConfigError` for unknown names and wrong values."""
    found = trained_method(method)
    fixed = sorted({"hidden_size", "vocab_size"} & sizes.keys())
    if fixed:
        raise ConfigError(f"'{fixed[0]}' of a {method} head is the target's. Expected no value here. Leave it out.")
    own = {"hidden_size": int(target.config.hidden_size), "vocab_size": target.vocab_size}
    return validated(found.config, {**own, **found.default_sizes(target), **sizes}, f"a {method} head")


def objective_config(method: str, weights: Mapping[str, Any]) -> Objective:
    """Returns the objective of a head; weights: values that replace its defaults. Raises as `head_config`."""
    return validated(trained_method(method).objective, weights, f"the objective of {method}")

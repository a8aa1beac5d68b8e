"""Measures how often a head predicts the target's token: at the right position and at others, as configured and not.

The texts are prompts that the target continued greedily. There the target's choice, the text and the label are the same
token, and a head that is fed the text is in the same situation as in drafting.

Letters: B texts, S positions, E hidden size, K heads, V vocabulary, Vd vocabulary of the drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, permutations, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelError, RequestError
from foretoken.core.sampling_params import SamplingParams
from foretoken.drafters.head_drafter import drafting_dtype
from foretoken.entrypoints.llm import LLM
from foretoken.heads.base import Head, UnrolledHead
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.models.generic import find_blocks, find_final_norm
from foretoken.models.parts import TargetParts, target_parts, target_scaling, taught_parts
from foretoken.training.objective_base import first_candidates
from foretoken.training.teacher import Teacher

if TYPE_CHECKING:
    from foretoken.core.passes import Tap
    from foretoken.formats.checkpoint import HeadCheckpoint
    from foretoken.models.loaded import LoadedModel

BLOCK_BEFORE, BLOCK_AFTER = "one block earlier", "one block later"
MOVED_BLOCKS = {BLOCK_BEFORE: -1, BLOCK_AFTER: 1}


SHIFTS = (0, -1, 1, 2)  # offsets from head i's own label; 0 is the right one
AT_ONCE = 8  # sequences decoded together; a choice
_LONGEST_PROMPT = 128  # tokens; a choice: a longer one shows the same faults and takes longer
IN_PLACE, PRE_NORM, NORMED_TWICE = "in place", "pre-norm", "normed twice"
EARLIER, LATER = "one position earlier", "one position later"
_MOVED = {EARLIER: -1, LATER: 1}  # positions by which these readings are off
_CLEAR = 1.5  # standard deviations by which the configured taps must lead; a choice: a head is rarely off
_RELEASED_BASE = 10000.0  # of the rotary embedding of most released heads, whatever the target has
SURE = 3.0  # standard deviations; a choice: by chance, one of 370 readings differs by more


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Prompts and the target's continuations; `texts` are the prompts with their continuations."""

    prompts: Sequence[Sequence[int]]
    texts: Sequence[Sequence[int]]
    device: torch.device

    @property
    def tokens(self) -> Tensor:
        """Returns (B, S) int64, padded on the right, where no causal model looks."""
        rows = [torch.tensor(list(text), device=self.device) for text in self.texts]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def judged(self, *, last: int = 0) -> Tensor:
        """Returns (B, S) bool: positions from which drafts start, without the last ones of each text.

        The first draft is made when the last token of the prompt is the root, from the feature before it. Raises
        `RequestError` when no position is left.
        """
        mask = torch.zeros(self.tokens.shape, dtype=torch.bool)
        for row, (prompt, text) in enumerate(zip(self.prompts, self.texts, strict=True)):
            mask[row, len(prompt) - 2 : max(len(text) - last, 0)] = True
        if not bool(mask.any()):
            raise RequestError("the target wrote too little to look as far ahead as the heads do. Raise --max-tokens.")
        return mask.to(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How often head i's first candidate is the target's choice, by its input feature and its label.

    `table` has, by reading of the feature and by variant of the configuration, (K, shifts) shares, shifts as in
    `SHIFTS`. For autoregressive heads K is 1, since later steps depend on the output of the first one. `next_token` has
    (K,) shares of answers that are the token right after the input feature. Untrained heads give that token, since the
    LM head computes it from the feature. `gains` has, for each variant and each reading one block off, by how many
    standard deviations its first step is right more often than with the present reading; over positions at which
    exactly one of the two is right.
    """

    table: Mapping[str, Sequence[Sequence[float]]]
    next_token: Mapping[str, Sequence[float]]
    most_frequent: float  # share of the most frequent label: the accuracy of a constant guess
    num_positions: int  # at which the deepest head was judged
    reads_tokens: bool  # whether heads read the tokens between the feature and their own
    num_texts: int = 1  # at which the head was judged
    is_autoregressive: bool = False  # whether heads read their own states
    taps: Sequence[Tap] = ("final",)
    gains: Mapping[str, float] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)  # cause and remedy of each variant

    @property
    def margin(self) -> float:
        """The difference below which shares differ by chance: three standard deviations, at least 0.05."""
        return max(0.05, 1.5 / math.sqrt(max(self.num_positions, 1)))

    def score(self, reading: str) -> float:
        """Returns the mean over heads of the share at the best shift: high for the right feature."""
        return sum(max(row) for row in self.table[reading]) / len(self.table[reading])

    @property
    def best_reading(self) -> str:
        """The best reading or variant for the head: the present reading unless another is better beyond chance."""
        return max((name for name in self.table if self._is_better(name)), key=self.score, default=IN_PLACE)

    def _is_better(self, name: str) -> bool:
        if name in self.variants and self.score(name) < self.most_frequent + self.margin:
            return False  # the head knows nothing in this configuration either
        if name in self.gains:  # neighbouring blocks are similar, and so are variants: compared position by position
            return self.gains[name] > SURE
        # The feature of the next position contains the first step's label. A head that hands features on, as a fresh
        # one does, repeats that label. `lagging` finds a head trained on that feature.
        if name == LATER and self.is_autoregressive:
            return False
        return self.score(name) > self.score(IN_PLACE) + self.margin

    @property
    def num_deciding_texts(self) -> int | None:
        """Texts that would tell the taps from those one block off; None if these texts do.

        Neighbouring blocks are similar: on few texts either may be right more often by chance.
        """
        gains = [self.gains[name] for name in self.gains if name in MOVED_BLOCKS]
        closest = max(gains, default=-SURE)
        if not -_CLEAR < closest <= SURE:
            return None
        return math.ceil(self.num_texts * (SURE / max(abs(closest), 0.5)) ** 2)

    @property
    def best_shifts(self) -> list[int]:
        """Returns the best shift of each head with the best reading; 0 if another could be chance or little training.

        A head that has learnt little still predicts the token right after its feature, which may be the label of a
        shift. Such a head counts as shifted only if another head, with another shifted label, is shifted too.
        """
        reading = self.best_reading
        found, doubtful = [], []
        for row, next_token in zip(self.table[reading], self.next_token[reading], strict=True):
            best = max(range(len(SHIFTS)), key=lambda index: row[index])
            shift = SHIFTS[best] if row[best] > row[0] + self.margin else 0
            is_explained = row[best] <= next_token
            found.append(0 if is_explained else shift)
            doubtful.append(shift if row[best] == next_token else 0)
        return [sure or (doubt if doubt in found else 0) for sure, doubt in zip(found, doubtful, strict=True)]

    @property
    def lagging(self) -> list[int]:
        """The heads that predict the token right after their feature more often than their own token.

        Empty if a head fits shifted labels better, see `best_shifts`.
        """
        if any(self.best_shifts):
            return []
        rows = zip(self.table[self.best_reading], self.next_token[self.best_reading], strict=True)
        return [index for index, (row, next_token) in enumerate(rows) if next_token > row[0] + self.margin]


def greedy_texts(
    target: LoadedModel, tokenizer: Any, prompts: Sequence[str | Sequence[int]], *, max_tokens: int, runner: str
) -> Texts:
    """Continues prompts greedily with `max_tokens` tokens, or fewer if the context is short.

    Long text is cut. Prompts of token ids that exceed the context, and prompts of one token, are left out. Raises
    `RequestError` when no prompt is left.
    """
    max_tokens = min(max_tokens, target.context_len // 2)
    room = target.context_len - max_tokens - 1
    encoded = [
        list(tokenizer(prompt)["input_ids"])[: min(_LONGEST_PROMPT, room)] if isinstance(prompt, str) else list(prompt)
        for prompt in prompts
    ]
    encoded = [ids for ids in encoded if 1 < len(ids) <= room]
    if not encoded:
        raise RequestError("no prompt has two tokens. Expected text to try a head on. Pass other --prompts.")
    needed = max(map(len, encoded)) + max_tokens + 1
    served = target.stored or target
    llm = LLM(served, tokenizer=tokenizer, max_num_seqs=AT_ONCE, max_model_len=needed, runner=runner)
    outputs = llm.generate(encoded, greedy(max_tokens))
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    return Texts(prompts=encoded, texts=texts, device=target.device)


def greedy(max_tokens: int) -> SamplingParams:
    """Returns greedy sampling parameters that ignore the end-of-sequence token."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def read_features(target: LoadedModel, tokens: Tensor, taps: Sequence[Tap] = ("final",)) -> dict[str, Tensor]:
    """Returns the features of a head's F taps for (B, S) int64 tokens, and features that are mistaken for them.

    The result is (B, S, F E) float32 by name, the right features first. For `final` the others are those before and
    after the final norm, if the norm is found; for other taps those one block earlier and later, if these exist.
    """
    if tuple(taps) == ("final",):
        readings = _around_the_norm(target, tokens)
    else:
        readings = _around_the_blocks(target, tokens, taps)
    features = readings[IN_PLACE]
    readings[EARLIER] = torch.cat([features[:, :1], features[:, :-1]], dim=1)
    readings[LATER] = torch.cat([features[:, 1:], features[:, -1:]], dim=1)
    return {name: reading.float() for name, reading in readings.items()}


def _around_the_blocks(target: LoadedModel, tokens: Tensor, taps: Sequence[Tap]) -> dict[str, Tensor]:
    """Returns (B, S, F E) readings of the taps and of those a block earlier and later, from one run of the target."""
    wanted: dict[str, tuple[Tap, ...]] = {IN_PLACE: tuple(taps)}
    for name, by in MOVED_BLOCKS.items():
        moved = tuple(tap if tap == "final" else tap + by for tap in taps)
        if moved != tuple(taps) and all(tap == "final" or 0 <= tap <= target.num_layers for tap in moved):
            wanted[name] = moved
    numbers = sorted({tap for each in wanted.values() for tap in each if tap != "final"})
    order: tuple[Tap, ...] = (*numbers, "final")
    parts = dict(zip(order, Teacher(target, order).read_features(tokens).chunk(len(order), dim=-1), strict=True))
    return {name: torch.cat([parts[tap] for tap in each], dim=-1) for name, each in wanted.items()}


def _around_the_norm(target: LoadedModel, tokens: Tensor) -> dict[str, Tensor]:
    """Returns (B, S, E) readings: the feature `final`, the final norm's input, and the output of a second norm."""
    teacher, inputs = Teacher(target), []
    try:
        norm = find_final_norm(target.module, find_blocks(target.module, target.num_layers))
    except ModelError:
        norm = None
    handle = None if norm is None else norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        features = teacher.features(tokens)
    finally:
        if handle is not None:
            handle.remove()
    readings = {IN_PLACE: features}
    if norm is not None and inputs:
        with torch.no_grad():
            readings |= {PRE_NORM: inputs[-1], NORMED_TWICE: norm(features)}
    return readings


@torch.no_grad()
def predictions(
    head: Head,
    parts: TargetParts,
    features: Tensor,
    texts: Texts,
    *,
    num_steps: int | None = None,
    logits: Callable[[int, Tensor], Tensor] | None = None,
) -> Tensor:
    """Returns (K, B, S) int64: first candidates at the judged positions, with the text as input; -1 at other positions.

    The head, parts and (B, S, F E) features are in one dtype. `num_steps` is K, to compute fewer than all steps.
    `logits` turns a step and its (M, W) hidden values into (M, V) logits; None for the head's own.
    """
    own = partial(head.logits, parts=parts)
    tokens, where = texts.tokens, texts.judged()
    steps = head.config.steps if num_steps is None else num_steps
    said = torch.full((steps, *tokens.shape), -1, device=tokens.device)
    for index, hidden in enumerate(islice(head.teacher_forced(features, tokens, parts), steps)):
        said[index, where] = first_candidates(partial(logits or own, index), hidden[where], head.config.vocab_size)
    return said


@torch.no_grad()
def target_choices(target: LoadedModel, texts: Texts) -> Tensor:
    """Returns (B, S) int64, the target's most probable next token at the judged positions; -1 elsewhere."""
    parts, features = target_parts(target, dtype=torch.float32), Teacher(target).features(texts.tokens).float()
    where = texts.judged()
    said = torch.full(where.shape, -1, device=where.device)
    said[where] = first_candidates(parts.lm_head, features[where], parts.lm_head_weight.shape[0])
    return said


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A head in the dtype in which it drafts."""

    checkpoint: HeadCheckpoint
    head: Head  # made from the checkpoint
    target: LoadedModel
    parts: TargetParts  # in the dtype of the head
    features: Tensor  # (B, S, F E), what drafting reads, in the dtype of the head
    texts: Texts
    choices: Tensor  # (B, S) int64, see `target_choices`

    def said(self, head: Head) -> Tensor:
        """Returns (K, B, S) int64, the predictions of a head at the judged positions; K as in `Agreement.table`."""
        return predictions(head, self.parts, self.features, self.texts, num_steps=_compared_steps(head))


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
    return case, _agreement(case, readings)


def _agreement(case: Case, readings: Mapping[str, Tensor]) -> Agreement:
    head, parts, texts, choices = case.head, case.parts, case.texts, case.choices
    # For a head of features alone, a position off and a label off are the same: the shifts cover that case.
    looks = _reads_tokens(head, parts, case.features)
    heads, variants = range(_compared_steps(head)), dict[str, str]()
    said = {
        name: predictions(head, parts, reading, texts, num_steps=len(heads))
        for name, reading in readings.items()
        if looks or name not in _MOVED
    }
    for make, advice in _VARIANTS:
        for name, predicted in make(case):
            said[name], variants[name] = predicted, advice
    where = [texts.judged(last=2 + index + max(SHIFTS)) for index in heads]

    def right(name: str, index: int, offset: int) -> Tensor:
        return (said[name][index] == choices.roll(-offset, dims=1))[where[index]]

    def share(name: str, index: int, offset: int) -> float:
        return float(right(name, index, offset).float().mean())

    labels = choices.roll(-1, dims=1)[where[0]]
    compared = [name for name in said if name in MOVED_BLOCKS or name in variants]
    return Agreement(
        table={name: [[share(name, i, 1 + i + shift) for shift in SHIFTS] for i in heads] for name in said},
        next_token={name: [share(name, i, _MOVED.get(name, 0)) for i in heads] for name in said},
        most_frequent=float(labels.bincount().max() / labels.numel()),
        num_positions=int(where[-1].sum()),
        num_texts=len(texts.texts),
        reads_tokens=looks,
        is_autoregressive=isinstance(head, UnrolledHead),
        taps=head.config.taps,
        gains={name: _gain(right(IN_PLACE, 0, 1), right(name, 0, 1)) for name in compared},
        variants=variants,
    )


def _compared_steps(head: Head) -> int:
    return 1 if isinstance(head, UnrolledHead) else head.config.steps


def _gain(before: Tensor, after: Tensor) -> float:
    """Returns the gain of (N,) bool in standard deviations, at the positions that changed."""
    changed = int((before ^ after).sum())
    return (int(after.sum()) - int(before.sum())) / math.sqrt(max(changed, 1))


@torch.no_grad()
def _reads_tokens(head: Head, parts: TargetParts, features: Tensor) -> bool:
    """Decides by trial whether a head reads the tokens after the feature; features: (B, S, E)."""
    few = features[:1, :4]
    zeros = torch.zeros(few.shape[:2], dtype=torch.int64, device=few.device)
    with_zeros, with_ones = (next(iter(head.teacher_forced(few, zeros + token, parts))) for token in (0, 1))
    return not torch.equal(with_zeros, with_ones)


# Other configurations of a head find faults that raise no error: the weights of the head stay, and a configuration that
# is right more often names the fault.


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
            head, parts, case.features, case.texts, num_steps=_compared_steps(head),
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
            for name, split in (("from halves to pairs", (2, -1)), ("from pairs to halves", (-1, 2))):
                changed[f"rotary rows of `q_proj` and `k_proj` {name}"] = {
                    key: reordered_rows(weights[key], split, layer) for key in keys if key in weights
                }
    for name, others in changed.items():
        if others:
            checkpoint = replace(case.checkpoint, weights={**weights, **others})
            yield name, case.said(checkpoint.module(device=case.target.device, dtype=case.features.dtype))


def reordered_rows(weight: Tensor, split: tuple[int, int], layer: LayerConfig) -> Tensor:
    """Returns `q_proj` or `k_proj` with the rows that turn in another order: not those of gates behind queries."""
    rows: Tensor = weight.unflatten(0, (-1, layer.head_dim)).clone()
    step = 1 + (len(rows) > layer.num_attention_heads)
    turned = rows[::step, : getattr(layer, "rotary_dim", layer.head_dim)]
    turned.copy_(turned.unflatten(1, split).transpose(1, 2).flatten(1, 2))
    return rows.flatten(0, 1)


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

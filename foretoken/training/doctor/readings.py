"""Measures how often a head predicts the target's token, at the right position and at others, and what is drafted.

The texts are prompts that the target continued greedily. There the target's choice, the text and the label are the same
token, and a head that is fed the text is in the same situation as in drafting.

Letters: B texts, S positions, E hidden size, K heads, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.errors import ModelError, RequestError
from foretoken.core.sampling_params import SamplingParams
from foretoken.entrypoints.llm import LLM
from foretoken.heads.base import Head, UnrolledHead
from foretoken.models.generic import find_blocks, find_final_norm
from foretoken.models.parts import target_parts
from foretoken.training.objective_base import first_candidates
from foretoken.training.teacher import Teacher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from foretoken.core.passes import Tap
    from foretoken.core.records import StepRecord
    from foretoken.core.results import RequestOutput
    from foretoken.models.loaded import LoadedModel
    from foretoken.models.parts import TargetParts

BLOCK_BEFORE, BLOCK_AFTER = "one block earlier", "one block later"
MOVED_BLOCKS = {BLOCK_BEFORE: -1, BLOCK_AFTER: 1}


SHIFTS = (0, -1, 1, 2)  # offsets from head i's own label; 0 is the right one
AT_ONCE = 8  # sequences decoded together; a choice
_LONGEST_PROMPT = 128  # tokens; a choice: a longer one shows the same faults and takes longer
IN_PLACE, PRE_NORM, NORMED_TWICE = "in place", "pre-norm", "normed twice"
EARLIER, LATER = "one position earlier", "one position later"
_MOVED = {EARLIER: -1, LATER: 1}  # positions by which these readings are off
_CLEAR = 1.5  # standard deviations by which the configured taps must lead; a choice: a head is rarely off
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


class Variant(NamedTuple):
    """What a head predicts in another configuration, (K, B, S) int64; and the cause and remedy if that is right."""

    said: Tensor
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How often head i's first candidate is the target's choice, by its input feature and its label.

    Attributes:
        table: By reading of the feature, and by variant of the configuration: (K, shifts) shares, shifts as in
            `SHIFTS`. For autoregressive heads the first step alone, since later steps depend on its output.
        next_token: By reading: (K,) shares of answers that are the token right after the input feature. Untrained heads
            give that token, since the LM head computes it from the feature.
        most_frequent: Share of the most frequent label: the accuracy of a constant guess.
        num_positions: Positions at which the deepest head was judged.
        num_texts: Texts at which it was judged.
        reads_tokens: Whether heads read the tokens between the feature and their own.
        is_autoregressive: Whether heads read their own states.
        taps: The taps that the head reads.
        gains: For each variant and each reading one block off, by how many standard deviations its first step is right
            more often than with the present reading; over positions at which exactly one of the two is right.
        variants: For each variant of the configuration the cause and the remedy.
    """

    table: Mapping[str, Sequence[Sequence[float]]]
    next_token: Mapping[str, Sequence[float]]
    most_frequent: float
    num_positions: int
    reads_tokens: bool
    num_texts: int = 1
    is_autoregressive: bool = False
    taps: Sequence[Tap] = ("final",)
    gains: Mapping[str, float] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)

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
    """Continues prompts greedily; cuts long prompts, and leaves out those below two tokens.

    Prompts of token ids are not cut, but left out if they exceed the context. Writes `max_tokens`, or fewer if the
    context is short. Raises `RequestError` when no prompt is left.
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
    """Returns the features of a head's F taps for (B, S) int64 tokens, and features that are confused with them.

    The result is (B, S, F E) float32 by reading, the right one first. For `final` also the features around the norm, if
    the norm is found; for other taps also those one block earlier and later, if these exist.
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


def measure(
    head: Head,
    parts: TargetParts,
    readings: Mapping[str, Tensor],
    texts: Texts,
    *,
    choices: Tensor,
    variants: Mapping[str, Variant] = MappingProxyType({}),
) -> Agreement:
    """Compares a head with `target_choices`, by reading of `read_features`, by variant and by shift.

    The head, parts and readings are in one dtype.
    """
    is_autoregressive = isinstance(head, UnrolledHead)
    # For a head of features alone, a position off and a label off are the same: the shifts cover that case.
    looks = reads_tokens(head, parts, readings[IN_PLACE])
    tried = [name for name in readings if looks or name not in (EARLIER, LATER)]
    heads = range(compared_steps(head))
    said = {name: predictions(head, parts, readings[name], texts, num_steps=len(heads)) for name in tried}
    said |= {name: each.said for name, each in variants.items()}
    where = [texts.judged(last=2 + index + max(SHIFTS)) for index in heads]

    def right(name: str, index: int, offset: int) -> Tensor:
        return (said[name][index] == choices.roll(-offset, dims=1))[where[index]]

    def share(name: str, index: int, offset: int) -> float:
        return float(right(name, index, offset).float().mean())

    labels = choices.roll(-1, dims=1)[where[0]]
    return Agreement(
        table={name: [[share(name, i, 1 + i + shift) for shift in SHIFTS] for i in heads] for name in said},
        next_token={name: [share(name, i, _MOVED.get(name, 0)) for i in heads] for name in said},
        most_frequent=float(labels.bincount().max() / labels.numel()),
        num_positions=int(where[-1].sum()),
        num_texts=len(texts.texts),
        reads_tokens=looks,
        is_autoregressive=is_autoregressive,
        taps=head.config.taps,
        gains={
            name: _gain(right(IN_PLACE, 0, 1), right(name, 0, 1))
            for name in said
            if name in MOVED_BLOCKS or name in variants
        },
        variants={name: each.advice for name, each in variants.items()},
    )


def compared_steps(head: Head) -> int:
    """Returns K of `Agreement.table`: 1 for autoregressive heads, whose later steps read the first one's output."""
    return 1 if isinstance(head, UnrolledHead) else head.config.steps


def _gain(before: Tensor, after: Tensor) -> float:
    """Returns the gain of (N,) bool in standard deviations, at the positions that changed."""
    changed = int((before ^ after).sum())
    return (int(after.sum()) - int(before.sum())) / math.sqrt(max(changed, 1))


@torch.no_grad()
def reads_tokens(head: Head, parts: TargetParts, features: Tensor) -> bool:
    """Decides by trial whether a head reads the tokens after the feature; features: (B, S, E)."""
    few = features[:1, :4]
    zeros = torch.zeros(few.shape[:2], dtype=torch.int64, device=few.device)
    with_zeros, with_ones = (next(iter(head.teacher_forced(few, zeros + token, parts))) for token in (0, 1))
    return not torch.equal(with_zeros, with_ones)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingFigures:
    """The engine's acceptance, and the expected one from the head's predictions at the same positions.

    Attributes:
        accepted: Share of passes that accepted at least d drafted tokens, from d = 1.
        expected: The same, from the head with the text as input.
        num_errors: Passes with a draft that was dropped because the drafter failed.
    """

    accepted: Sequence[float]
    expected: Sequence[float]
    num_passes: int
    num_errors: int

    @property
    def drop(self) -> float:
        """Greatest difference of `accepted` and `expected` at any depth."""
        return max((want - got for want, got in zip(self.expected, self.accepted, strict=True)), default=0.0)


def draft(
    target: LoadedModel, config: Mapping[str, Any], texts: Texts, said: Tensor, *, tokenizer: Any, runner: str,
    quantization: str = "none",
) -> DraftingFigures:  # fmt: skip
    """Drafts the continuations with chains in the engine, and compares pass by pass.

    Args:
        config: The `speculative_config` with the head.
        said: (K, B, S), its predictions with the right feature.
        quantization: Of the head: as trained, or "auto", which drafts with int8 copies where it can.

    Raises:
        ForetokenError: When the head cannot be loaded as a drafter.
    """
    records: list[StepRecord] = []
    lengths = {len(text) - len(prompt) for prompt, text in zip(texts.prompts, texts.texts, strict=True)}
    shape = {"tree": "chain", "num_speculative_tokens": len(said), "quantization": quantization}
    llm = LLM(
        target.stored or target,
        speculative_config={**config, **shape},
        tokenizer=tokenizer,
        max_num_seqs=AT_ONCE,
        max_model_len=min(max(map(len, texts.texts)) + 1, target.context_len),
        runner=runner,
        on_step=records.append,
    )
    outputs = llm.generate([list(prompt) for prompt in texts.prompts], greedy(max(lengths)))
    rows = {output.request_id: row for row, output in enumerate(outputs)}
    accepted, expected = _by_depth(records, rows, _followed(outputs, texts), texts, said.tolist())
    passes = sum(not step.ends_prompt for record in records for step in record.sequences)
    errors = sum(record.draft_error is not None for record in records)
    return DraftingFigures(accepted=accepted, expected=expected, num_passes=passes, num_errors=errors)


def _followed(outputs: Sequence[RequestOutput], texts: Texts) -> list[int]:
    """Returns how far each text was repeated; less than all of it only if two tokens tie within rounding."""
    found = []
    for output, prompt, text in zip(outputs, texts.prompts, texts.texts, strict=True):
        pairs = zip(output.outputs[0].token_ids, text[len(prompt) :], strict=False)
        same = next((index for index, (got, want) in enumerate(pairs) if got != want), len(text) - len(prompt))
        found.append(len(prompt) + same)
    return found


def _by_depth(
    records: Sequence[StepRecord],
    rows: Mapping[str, int],
    followed: Sequence[int],
    texts: Texts,
    said: list[list[list[int]]],
) -> tuple[list[float], list[float]]:
    """Returns shares of passes by depth: accepted by the engine, and expected from predictions (K, B, S)."""
    accepted, expected, counts = ([0] * len(said) for _ in range(3))
    roots = [len(prompt) - 1 for prompt in texts.prompts]
    for record in records:
        for step in record.sequences:
            row = rows[step.request_id]
            root = roots[row]
            roots[row] += step.num_emitted
            depth = min(step.tree_depth, len(said))
            if root + depth >= followed[row]:
                continue
            hits = [said[d][row][root - 1] == texts.texts[row][root + 1 + d] for d in range(depth)]
            right = next((d for d, hit in enumerate(hits) if not hit), depth)
            for d in range(depth):
                counts[d] += 1
                accepted[d] += step.num_accepted > d
                expected[d] += right > d
    kept = [d for d, count in enumerate(counts) if count]
    return [accepted[d] / counts[d] for d in kept], [expected[d] / counts[d] for d in kept]

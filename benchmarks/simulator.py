"""Plays a controller against a made world, without a clock.

It tells what the controller gains, and what it loses against plain decoding. A world says how long passes and drafts
take, how often drafts are right, and what the controller is told of both. Every policy meets the same text: a draft
that begins at a position is right for a number of levels that the position decides. So policies differ by their
decisions alone.

One second is a pass over one token. Letters: B sequences, D levels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, log
from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.records import AskedDrafter, SequenceStep, StageSeconds, StepRecord
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafting.goodput import Goodput
from foretoken.drafting.policies import Heuristic, SmartSpec
from foretoken.runner.costs import WIDTHS, CostCurve

if TYPE_CHECKING:
    from foretoken.drafting.base import Controller

_LENGTH = 1 << 14  # positions of a text; then it begins again
_APART = 1009  # positions between the beginnings of two sequences
Curve = tuple[tuple[int, ...], tuple[float, ...]]  # widths, and seconds of a pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDrafter:
    """A drafter of a world."""

    rates: tuple[float, ...]  # P(a token is right | those before it are), one for each kind of text, which take turns
    fades: float = 0.97  # each level is right this many times as often as the level above
    stretch: int = 400  # tokens of one kind of text
    hits: float = 1.0  # share of positions at which it proposes anything
    level_s: float = 0.05  # seconds of a level
    fixed_s: float = 0.0  # seconds of a draft of any depth
    told: float = 1.0  # what it is told to take, divided by what it takes
    siblings: int = 1  # tokens proposed at each level; the next level follows the first one
    spread: float = 0.0  # what its probabilities tell: standard deviation of their log-odds; 0 for no probabilities
    deepest: int = 8  # most levels

    @property
    def nodes_by_depth(self) -> list[int]:
        """See `foretoken.drafters.base.Drafter`."""
        return [1 + depth * self.siblings for depth in range(self.deepest + 1)]

    @property
    def timed(self) -> list[tuple[int, float]]:
        """Depth and seconds of the drafts that were timed at load."""
        depths = (1, min(4, self.deepest)) * 2
        return [(depth, self.told * self.seconds(depth)) for depth in depths]

    def seconds(self, depth: int) -> float:
        """Returns what a draft takes."""
        return self.fixed_s + self.level_s * depth


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A target, its drafters and its requests."""

    name: str  # what is special about the world
    drafters: Sequence[SimulatedDrafter]
    curve: Curve  # seconds of passes by tokens
    told: Curve | None = None  # the same as measured at load; None for `curve`
    host: tuple[float, float] = (0.05, 0.01)  # seconds of the host for an iteration, and for each emitted token
    noise: float = 0.02  # standard deviation of the logarithm of all measured seconds
    slow: float = 0.0  # share of iterations that take five times as long
    busy: int = 0  # every second stretch of this many iterations takes three times as long
    batches: Sequence[int] = (1,)  # numbers of sequences, which change every 150 tokens of a sequence
    arrivals: float = 0.0  # mean number of sequences whose requests arrive by chance; 0 for `batches`
    answer: int = 0  # tokens of a request's text, as the controller hears of it; 0 for one long text

    def cost(self) -> CostCurve:
        """Returns what a controller is told of passes."""
        return CostCurve(WIDTHS, CostCurve(*(self.told or self.curve)).seconds(WIDTHS))

    def sizes(self, seed: int) -> Iterator[int]:
        """Yields the number of sequences for each 150 tokens, without end."""
        chance = random.Random(seed + 77)
        while True:
            if not self.arrivals:
                yield from self.batches
                continue
            passed, count = chance.expovariate(self.arrivals), 0
            while passed < 1.0:
                passed, count = passed + chance.expovariate(self.arrivals), count + 1
            yield max(count, 1)


class _Text(NamedTuple):
    """One drafter's drafts, by the position at which they begin."""

    right: Sequence[int]  # levels that are right; -1 where it proposes nothing
    ranks: Sequence[int]  # which sibling is right at the first level that is wrong; 0 for none
    scores: Sequence[Sequence[float]] | None  # log-probability of the path down to each level


@lru_cache(maxsize=256)
def _text(drafter: _Key, seed: int) -> _Text:
    chance = random.Random(seed * 1000 + drafter.place)
    model = drafter.made
    right, ranks, scores = [], [], []
    for place in range(_LENGTH):
        rate = model.rates[place // model.stretch % len(model.rates)]
        has_hit = chance.random() < model.hits
        is_right, count, path, sure = has_hit, 0, 0.0, []
        for level in range(model.deepest):
            p = min(max(rate * model.fades**level, 1e-3), 0.999)
            if model.spread:
                p = 1 / (1 + exp(-log(p / (1 - p)) - chance.gauss(0.0, model.spread)))
                path += log(1 / (1 + exp(-1.6 * log(p / (1 - p)) - 0.4)))  # it is too sure of itself
                sure.append(path)
            is_right = is_right and chance.random() < p
            count += is_right
        right.append(count if has_hit else -1)
        ranks.append(1 + int(chance.expovariate(0.7)) if model.siblings > 1 else 0)
        scores.append(sure)
    return _Text(right, ranks, scores if model.spread else None)


class _Key(NamedTuple):
    made: SimulatedDrafter
    place: int


@dataclass(slots=True)
class Played:
    """What a policy did in a world."""

    tokens: float = 0.0  # emitted per sequence, summed over iterations
    seconds: float = 0.0  # of all iterations, on a quiet machine; controllers observe those of the noisy one
    early: float = 0.0  # seconds until 64 tokens of a sequence were there
    least_share: float = 9.9  # least speed beside plain decoding, up to any iteration after the 200th
    asked: float = 0.0  # share of iterations in which anybody was asked
    by_size: dict[int, list[float]] = field(default_factory=dict)  # tokens and seconds by number of sequences

    @property
    def rate(self) -> float:
        """Tokens of the batch a second."""
        return sum(size * pair[0] for size, pair in self.by_size.items()) / self.seconds


class _Fixed:
    """Asks some drafters for fixed depths, always."""

    def __init__(self, depths: Mapping[int, int]) -> None:
        self.depths = depths


class Simulator:
    """A world with one text, in which policies are played."""

    def __init__(self, world: World, seed: int) -> None:
        """Draws the text."""
        self.world, self.seed = world, seed
        self._texts = [_text(_Key(each, index), seed) for index, each in enumerate(world.drafters)]
        self._curve = CostCurve(*world.curve)

    def fixed(self, depths: Mapping[int, int], length: int) -> Played:
        """Plays drafts of fixed depths by drafter; none for plain decoding."""
        return self.play(_Fixed(depths), length)

    def play(self, policy: Controller | _Fixed, length: int) -> Played:
        """Plays a policy until each sequence has `length` tokens."""
        world, played, sizes = self.world, Played(), self.world.sizes(self.seed)
        chance = random.Random(self.seed + 5)
        places = [row * _APART % _LENGTH for row in range(256)]
        batch, until, count, plain_s = next(sizes), 150.0, 0, 0.0
        while played.tokens < length:
            if played.tokens >= until:
                batch, until = next(sizes), until + 150.0
            slowness = exp(chance.gauss(0.0, world.noise)) if world.noise else 1.0
            slowness *= 5.0 if world.slow and chance.random() < world.slow else 1.0
            slowness *= 3.0 if world.busy and count // world.busy % 2 else 1.0
            accepted, observed, is_asked = self._iterate(policy, batch, places, slowness)
            seconds = observed / slowness  # else settings would differ by how often the machine was busy
            tokens = 1.0 + sum(accepted) / batch
            before = places[0]
            for row, right in enumerate(accepted):
                places[row] = (places[row] + right + 1) % _LENGTH
            if world.answer and before // world.answer != places[0] // world.answer and isinstance(policy, Goodput):
                policy.begin_text()
            count += 1
            played.asked += is_asked
            if played.tokens < 64:
                played.early += seconds * min(1.0, (64 - played.tokens) / tokens)
            played.tokens += tokens
            played.seconds += seconds
            pair = played.by_size.setdefault(batch, [0.0, 0.0])
            pair[0], pair[1] = pair[0] + tokens, pair[1] + seconds
            plain_s += tokens * (self._curve(batch) + world.host[0] + batch * world.host[1])
            if count > 200:
                played.least_share = min(played.least_share, plain_s / played.seconds)
        played.asked /= count
        return played

    def _iterate(
        self, policy: Controller | _Fixed, batch: int, places: list[int], slowness: float
    ) -> tuple[list[int], float, bool]:
        """Returns the accepted tokens of each sequence, the seconds, and whether anybody was asked."""
        asked: dict[int, int] = {}
        if isinstance(policy, _Fixed):
            asked.update(policy.depths)
            accepted, width = self._whole(asked, batch, places)
            draft_s = sum(slowness * self.world.drafters[i].seconds(depth) for i, depth in asked.items())
            return accepted, draft_s + slowness * self._rest(width, batch + sum(accepted)), bool(asked)
        allotment, trees, steps = policy.allot(batch), dict[int, TokenTree](), list[AskedDrafter]()
        most = max(allowance.depth for allowance in allotment.allowances)
        ask = allotment.first
        indices: Sequence[int] = range(len(self._texts)) if ask is None else ask.drafters
        deepest = most if ask is None else min(most, ask.depth)
        while most and indices:
            for i in indices:
                asked[i] = min(deepest, self.world.drafters[i].deepest)
                trees[i] = self._tree(i, asked[i], places[:batch])
                took = slowness * self.world.drafters[i].seconds(asked[i])
                steps.append(AskedDrafter(index=i, name=str(i), depth=trees[i].max_depth, seconds=took))
            further = policy.further(trees)
            indices, deepest = (further.drafters, min(most, further.depth)) if further is not None else ((), 0)
        if trees:
            tree = policy.select(trees)
            if len(trees) == 1 and tree is next(iter(trees.values())):
                accepted, width = self._whole(asked, batch, places)
                depths: Sequence[int] = tree.host_facts.depths if tree.host_facts is not None else [0]
            else:
                rows = tree.rows()
                accepted, width = [_followed(row) for row in rows], sum(len(row.tokens) for row in rows)
                depths = tree.depths.amax(1).tolist()
        else:
            accepted, width, depths = [0] * batch, batch, [0] * batch
        draft_s, rest = sum(step.seconds for step in steps), slowness * self._rest(width, batch + sum(accepted))
        host = slowness * (self.world.host[0] + self.world.host[1] * (batch + sum(accepted)))
        sequences = [
            SequenceStep(
                request_id="", num_drafted=width, tree_depth=depths[b], num_accepted=n, num_emitted=n + 1,
                tokens=range(1, n + 2), accepted_by={}, num_proposed=width - batch,
            )
            for b, n in enumerate(accepted)
        ]  # fmt: skip
        policy.learn_step(
            StepRecord(
                sequences=sequences,
                num_tokens=width,
                asked=steps,
                declined=allotment.declined,
                seconds=StageSeconds(draft=draft_s, verify=rest - host, commit=host),
            )
        )
        return accepted, draft_s + rest, bool(asked)

    def _rest(self, width: int, tokens: int) -> float:
        return self._curve(width) + self.world.host[0] + self.world.host[1] * tokens

    def _whole(self, asked: Mapping[int, int], batch: int, places: list[int]) -> tuple[list[int], int]:
        """Returns what is accepted of whole drafts, and the tokens of the pass; drafts share no nodes."""
        accepted, width = [0] * batch, batch
        for i, depth in asked.items():
            text, siblings = self._texts[i], self.world.drafters[i].siblings
            for b in range(batch):
                right = text.right[places[b]]
                if right >= 0:
                    width, found = width + depth * siblings, min(right, depth)
                    found += found < depth and 0 < text.ranks[places[b]] < siblings
                    accepted[b] = max(accepted[b], found)
        return accepted, width

    def _tree(self, i: int, depth: int, places: Sequence[int]) -> TokenTree:
        text, siblings = self._texts[i], self.world.drafters[i].siblings
        rows = tuple((text.right[p], text.ranks[p]) for p in places)
        if text.scores is None:
            return _cached_tree(i, depth, rows, siblings)
        return _tree_of(i, depth, rows, siblings, [text.scores[p][:depth] for p in places])


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A policy beside the best fixed setting, for one seed."""

    share: float  # its speed divided by the speed of the best fixed setting
    early: float  # the same for the first 64 tokens
    gain: float  # its speed divided by that of plain decoding
    best: float  # speed of the best fixed setting divided by that of plain decoding
    least_share: float  # see `Played`
    setting: Mapping[int, int]  # depths of the best fixed setting, by drafter
    played: Played


def settings(world: World) -> list[dict[int, int]]:
    """Returns every fixed setting: no draft, or each set of drafters to one depth."""
    found: list[dict[int, int]] = [{}]
    for chosen in range(1, 1 << len(world.drafters)):
        members = [i for i in range(len(world.drafters)) if chosen >> i & 1]
        deepest = max(world.drafters[i].deepest for i in members)
        found += [
            {i: min(depth, world.drafters[i].deepest) for i in members} for depth in range(1, deepest + 1)
        ]  # fmt: skip
    return found


def compare(world: World, policy: Callable[[World], Controller], seed: int, length: int = 3000) -> Result:
    """Plays a policy and every fixed setting over the same text."""
    played = Simulator(world, seed).play(policy(world), length)
    plain, best, setting = _fixed_settings(world, seed, length)
    return Result(
        share=played.rate / best.rate,
        early=best.early / played.early,
        gain=played.rate / plain.rate,
        best=best.rate / plain.rate,
        least_share=played.least_share,
        setting=setting,
        played=played,
    )


_known: dict[tuple[str, int, int], tuple[Played, Played, Mapping[int, int]]] = {}


def _fixed_settings(world: World, seed: int, length: int) -> tuple[Played, Played, Mapping[int, int]]:
    """Returns plain decoding, the best fixed setting, and its depths."""
    key = repr(world), seed, length
    if key not in _known:
        simulator = Simulator(world, seed)
        every = [(simulator.fixed(depths, length), depths) for depths in settings(world)]
        best, setting = max(every, key=lambda pair: pair[0].rate)
        _known[key] = every[0][0], best, setting
    return _known[key]


def _followed(row: TreeRow) -> int:
    """Returns the depth down to which a tree is right; right tokens are 1, 2, 3, … after the root."""
    reached, right = [0] + [-1] * (len(row.tokens) - 1), 0
    for node in range(1, len(row.tokens)):
        above = reached[row.parents[node]]
        if above >= 0 and row.tokens[node] == above + 1:
            reached[node] = above + 1
            right = max(right, above + 1)
    return right


@lru_cache(maxsize=1 << 14)
def _cached_tree(i: int, depth: int, rows: tuple[tuple[int, int], ...], siblings: int) -> TokenTree:
    return _tree_of(i, depth, rows, siblings, None)


def _tree_of(
    i: int, depth: int, rows: Sequence[tuple[int, int]], siblings: int, scores: Sequence[Sequence[float]] | None
) -> TokenTree:
    """Returns combs: at each level some siblings, and the next level below the first. Right tokens are 1, 2, …, D."""
    made: list[TreeRow] = []
    values: list[list[float]] = []
    for b, (right, rank) in enumerate(rows):
        tokens, parents, value, above = [0], [-1], [0.0], 0
        for level in range(1, depth + 1 if right >= 0 else 1):
            sure = None if scores is None else scores[b][level - 1]
            before = 0.0 if scores is None or level == 1 else scores[b][level - 2]
            for sibling in range(siblings):
                is_main = level <= right and not sibling
                is_right = is_main or (level == right + 1 and sibling == rank > 0)
                tokens.append(level if is_right else 1000 * (i + 1) + 10 * level + sibling)
                parents.append(above)
                if sure is not None:
                    rest = (exp(before) - exp(sure)) * 0.5**sibling if sibling else exp(sure)
                    value.append(log(max(rest, 1e-9)))
            above = len(tokens) - siblings
        made.append(TreeRow(tokens, parents))
        values.append(value)
    return TokenTree.from_rows(made, scores=None if scores is None else values)


def controller_of(world: World, control: str = "goodput") -> Controller:
    """Returns the controller that the engine would choose, or a published policy by name."""
    nodes, timed = [each.nodes_by_depth for each in world.drafters], [each.timed for each in world.drafters]
    most = 1 + sum(each[-1] - 1 for each in nodes)
    if control == "heuristic":
        return Heuristic(most, [each[-1] for each in nodes])
    if control == "smartspec":
        return SmartSpec(world.cost(), timed, nodes, most)
    is_read = len(nodes) > 1 or world.drafters[0].siblings > 1 or not world.drafters[0].level_s
    return Goodput(world.cost(), nodes_by_depth=nodes, max_nodes=64, is_read=is_read, timed=timed)

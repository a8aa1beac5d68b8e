"""Measures what a plan needs on this machine: passes, drafts, the host, and the acceptance of drafters.

Acceptance is measured with one sequence and the deepest drafts. Shallower drafts are replayed from the same text:
drafts are cut, and a draft that was accepted as a whole goes on where it was cut.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.bench.compare import in_turn
from foretoken.bench.workload import Asked, Workload, no_progress, prompt_token_ids
from foretoken.core.errors import ConfigError
from foretoken.drafting.choice import time_drafts
from foretoken.drafting.costs import fastest_by_depth
from foretoken.entrypoints.config import PLAIN
from foretoken.entrypoints.llm import LLM
from foretoken.planning.acceptance import Curve
from foretoken.planning.costs import Iterations, MeasuredCosts, TimedDrafter, TimedPasses
from foretoken.planning.plan import PlannedDraft
from foretoken.planning.sizes import ModelSizes, sizes_of
from foretoken.runner.costs import COSTS_PREFIX, CostCurve, PassCosts, measure_costs

if TYPE_CHECKING:
    from foretoken.core.records import StepRecord
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.models.loaded import LoadedModel

DEEPEST = 8  # levels of measured drafts; a choice: chains that pay are rarely deeper, and shallower ones are replayed
FREE = "ngram:chain"  # the drafter whose iterations tell the host's seconds
_LARGEST_TIMED = 8  # sequences decoded at once while the host is timed; a choice, larger batches are extrapolated
_FARTHEST = 2048  # tokens of the long context; a choice: a few seconds on the models of one CPU
_HOST_TOKENS = 16  # output tokens of a prompt where only the host is timed; a choice
_HOST_TEXTS = 4  # texts of one sequence, where only the host is timed; a choice
_DRAFT_ROWS = 64  # KV rows of a slot while drafts are timed; more than their text and levels
_PASS_ROUNDS, _ROUND_S = 3, 0.6  # of timed passes; a choice: some round is quiet on a machine that others use
_DRAFT_ROUNDS = 2  # of timed drafts; the same
_PAUSE = 2.0  # an iteration as many times as long as the median was interrupted and does not count; a choice
_ONE_TEXT = 0.2  # relative standard error of an acceptance length from a single text; a choice


class ReplayedStep(NamedTuple):
    """One sequence in one iteration: levels of its draft, its drafted nodes, and its accepted tokens."""

    depth: int
    nodes: int
    accepted: int


@dataclass(slots=True)
class Observed:
    """Iterations of one engine at one temperature and batch size.

    Seconds and tokens are those of iterations that read no prompt and in which the batch is full.
    """

    batch: int = 1  # sequences decoded at once
    texts: list[list[ReplayedStep]] = field(default_factory=list)  # the steps of each text, in order, of all iterations
    # Tokens of the pass, and seconds of the pass, of drafting, and of accepting and committing.
    iterations: list[tuple[int, float, float, float]] = field(default_factory=list)
    other_s: list[float] = field(default_factory=list)  # seconds outside of the stages, an iteration, of all iterations

    def add(self, record: StepRecord) -> None:
        """Adds the seconds of an iteration, if it counts."""
        if record.num_prompt_tokens or len(record.sequences) != self.batch:
            return
        if any(step.ends_prompt for step in record.sequences):
            return
        seconds = record.seconds
        self.iterations.append((record.num_tokens, seconds.verify, seconds.draft, seconds.accept + seconds.commit))

    @property
    def draft(self) -> PlannedDraft:
        """The mean draft of the texts."""
        steps = [step for text in self.texts for step in text]
        asks = sum(step.depth > 0 for step in steps) / len(steps)
        nodes = sum(step.nodes for step in steps) / len(steps)
        return PlannedDraft("", max(step.depth for step in steps), nodes, 1.0, asks)

    def means(self, passes: TimedPasses, context: float) -> Iterations:
        """Returns means an iteration; passes: seconds of passes as timed alone."""
        usual = _PAUSE * median(sum(each[1:]) for each in self.iterations)
        counted = [each for each in self.iterations if sum(each[1:]) <= usual]
        tokens, verify_s, draft_s, host_s = (fmean(column) for column in zip(*counted, strict=True))
        drafted = self.draft._replace(nodes=tokens / self.batch - 1)
        return Iterations(
            tokens=tokens,
            pass_ratio=verify_s / passes(drafted, self.batch, context),
            draft_s=draft_s,
            host_s=host_s + max(median(self.other_s), 0.0),
        )


class _ObservedEngine:
    """An engine whose iterations are observed."""

    def __init__(self, config: Mapping[str, Any] | None, **options: Any) -> None:
        self._records: list[StepRecord] = []
        self.llm = LLM(speculative_config=config, on_step=self._records.append, **options)

    def observe(self, into: Observed, prompts: Sequence[Asked], params: Sequence[SamplingParams]) -> None:
        """Decodes some prompts at once and adds the iterations to `into`."""
        self._records.clear()
        begin = time.perf_counter()
        self.llm.generate(list(prompts), list(params))
        seconds = time.perf_counter() - begin - sum(record.seconds.total for record in self._records)
        into.other_s.append(seconds / len(self._records))
        texts = defaultdict[str, list[ReplayedStep]](list)
        for record in self._records:
            into.add(record)
            for step in record.sequences:
                if not step.ends_prompt:
                    texts[step.request_id].append(ReplayedStep(step.tree_depth, step.num_drafted, step.num_accepted))
        into.texts += texts.values()

    def lines(self, batches: Sequence[int]) -> dict[int, tuple[float, float]]:
        """Returns seconds of a draft without levels, and of a level, by batch; empty if the drafter was not timed."""
        lines: dict[int, tuple[float, float]] = {}
        cache = self.llm.target.cache
        for batch in batches:
            for slot in range(batch):
                cache.reserve(slot, _DRAFT_ROWS)
            rounds = [time_drafts(self.llm.drafters[0], self.llm.handle, batch) for _ in range(_DRAFT_ROUNDS)]
            fastest = fastest_by_depth([each for timed in rounds for each in timed])
            for slot in range(batch):
                cache.trim(slot, 0)
            if fastest:
                shallow, deep = min(fastest), max(fastest)
                level = max((fastest[deep] - fastest[shallow]) / max(deep - shallow, 1), 0.0)
                lines[batch] = max(fastest[shallow] - shallow * level, 0.0), level or fastest[deep] / deep
        return lines


def replayed(text: Sequence[ReplayedStep], depth: int) -> tuple[int, int, int, int]:
    """Counts the passes that chains of at most `depth` need for a text that deeper chains wrote.

    A run is a draft, with the drafts before it that were accepted as a whole. Its tokens come in passes of `depth` + 1.

    Returns:
        Tokens, passes, passes with a draft, and drafted nodes.
    """
    tokens = passes = asked = nodes = run = widest = 0
    for step in [*text, ReplayedStep(0, 0, 0)]:
        if not step.depth:  # nothing was drafted: the run is over, and this pass gives a token
            ended = -(-run // (depth + 1))
            passes, asked, nodes, run = passes + ended, asked + ended, nodes + ended * min(depth, widest), 0
            widest = 0
            tokens, passes = tokens + 1, passes + 1
            continue
        tokens += step.accepted + 1
        run += step.accepted + 1
        widest = max(widest, step.depth)
        if step.accepted < step.depth:
            ended = -(-run // (depth + 1))
            passes, asked, nodes, run, widest = passes + ended, asked + ended, nodes + ended * min(depth, widest), 0, 0
    return tokens - 1, passes - 1, asked, nodes  # without the step that ends the loop


def curve_of(name: str, temperature: float, texts: Sequence[Sequence[ReplayedStep]], source: str) -> Curve:
    """Returns the acceptance in texts that one sequence at a time wrote, from the steps of each text.

    Chains are replayed at every depth; other trees keep their depth.
    """
    deepest = max(step.depth for text in texts for step in text) or 1
    is_chain = name.endswith(":chain")
    depths = range(1, deepest + 1)
    rows = [[replayed(text, depth) if is_chain else _counted(text) for text in texts] for depth in depths]
    sums = [[sum(column) for column in zip(*row, strict=True)] for row in rows]
    lengths = [tokens / passes for tokens, passes, _, _ in rows[-1]]
    error = stdev(lengths) / fmean(lengths) / len(lengths) ** 0.5 if len(lengths) > 1 else _ONE_TEXT
    return Curve(
        name=name,
        temperature=temperature,
        lengths=[tokens / passes for tokens, passes, _, _ in sums],
        nodes=[nodes / passes for _, passes, _, nodes in sums],
        asks=[asked / passes for _, passes, asked, _ in sums],
        depths=depths if is_chain else [deepest],
        error=error,
        source=source,
    )


def _counted(text: Sequence[ReplayedStep]) -> tuple[int, int, int, int]:
    asked = sum(step.depth > 0 for step in text)
    return sum(step.accepted + 1 for step in text), len(text), asked, sum(step.nodes for step in text)


class Measured(NamedTuple):
    """Costs by temperature, and curves of the drafters whose acceptance was measured."""

    costs: dict[float, MeasuredCosts]
    curves: list[Curve]
    context: float
    runner: str


def measure(
    model: LoadedModel,
    tokenizer: Any,
    setups: Mapping[str, Mapping[str, Any]],
    workload: Workload,
    *,
    batches: Sequence[int],
    has_acceptance: bool,
    runner: str = "auto",
    on_progress: Callable[[int, int], None] = no_progress,
) -> Measured:
    """Measures this machine with a target and its drafters.

    Iterations of all engines are made in turn, prompt by prompt, so that a drift of the machine's speed affects all
    alike.

    Args:
        setups: Configurations of existing drafters, by `Curve.name`.
        batches: Sequences that are planned for.
        has_acceptance: Whether to measure acceptance; else plain decoding and prompt lookup alone run, for the host.
        on_progress: Called with prompts done and prompts in all.

    Raises:
        ForetokenError: If a drafter does not fit the target.
    """
    timed = sorted({1, *(min(batch, _LARGEST_TIMED) for batch in batches)})
    # Acceptance is that of drafters that read each text alone; the host needs each prompt once.
    make = partial(
        _ObservedEngine, model=model, tokenizer=tokenizer, max_num_seqs=timed[-1], runner=runner,
        enable_prefix_caching=not has_acceptance,
    )  # fmt: skip
    engines = {PLAIN: make(None), FREE: _deepest(make, setups.get(FREE, {"method": "ngram"}))}
    engines |= {name: _deepest(make, config) for name, config in setups.items() if name != FREE}
    decoder = engines[PLAIN].llm.target.name
    passes = time_passes(model, decoder)
    lines = {name: engine.lines(timed) for name, engine in engines.items() if name != PLAIN}
    # The mean committed tokens of a sequence in the middle of its output.
    context = fmean(len(prompt_token_ids(each, tokenizer)) for each in workload.prompts) + workload.max_tokens / 2
    num_alone = len(workload.prompts)
    if not has_acceptance:
        workload = replace(workload, prompts=workload.prompts[: timed[-1]], max_tokens=_HOST_TOKENS)
        engines, num_alone = {name: engines[name] for name in (PLAIN, FREE)}, _HOST_TEXTS
    seen = _observe(engines, workload, timed, num_alone, on_progress)
    if any(not observed.iterations for (_, _, batch), observed in seen.items() if batch == 1):
        raise ConfigError(
            f"{workload.max_tokens} output tokens are too few to time iterations. Expected more: pass --max-tokens 64."
        )
    target = sizes_of(model.module, model.config, model.dtype.itemsize)
    temperatures = workload.temperatures
    costs = {at: _costs_at(at, seen, lines, target=target, passes=passes, context=context) for at in temperatures}
    curves: list[Curve] = []
    if has_acceptance:
        what = f"measured, {len(workload.prompts)} prompts, {workload.max_tokens} tokens each"
        drafters = [name for name in engines if name != PLAIN]
        curves = [curve_of(name, at, seen[name, at, 1].texts, what) for at in temperatures for name in drafters]
    return Measured(costs, curves, context, decoder)


def _costs_at(
    temperature: float,
    seen: Mapping[tuple[str, float, int], Observed],
    lines: Mapping[str, Mapping[int, tuple[float, float]]],
    *,
    target: ModelSizes,
    passes: TimedPasses,
    context: float,
) -> MeasuredCosts:
    observed = {(name, batch): each for (name, at, batch), each in seen.items() if at == temperature}
    means = {key: each.means(passes, context) for key, each in observed.items() if each.iterations}
    drafters = {}
    for name, timed in lines.items():
        own = means.get((name, 1))
        # A lookup may find nothing in the text on which drafts are timed.
        its = timed or ({} if own is None else {1: (own.draft_s, 0.0)})
        if its:
            depth = observed[name, 1].draft.depth if (name, 1) in observed else 0
            drafters[name] = TimedDrafter(lines=its, seen=own, seen_depth=depth)
    return MeasuredCosts(
        target=target,
        passes=passes,
        plain={batch: each for (name, batch), each in means.items() if name == PLAIN},
        free={batch: each for (name, batch), each in means.items() if name == FREE},
        drafters=drafters,
    )


def _observe(
    engines: Mapping[str, _ObservedEngine],
    workload: Workload,
    timed: Sequence[int],
    num_alone: int,
    on_progress: Callable[[int, int], None],
) -> dict[tuple[str, float, int], Observed]:
    """Returns the iterations of every engine with one sequence, and of the first two with larger batches.

    The first `num_alone` prompts are decoded one by one too.
    """
    seen = {
        (name, temperature, batch): Observed(batch)
        for (name, temperature), batch in product(product(engines, workload.temperatures), timed)
        if batch == 1 or name in (PLAIN, FREE)
    }
    prompts, total = workload.prompts, len(workload.prompts) * len(workload.temperatures)
    for engine in engines.values():
        engine.observe(Observed(), prompts[:1], [replace(workload.params(0.0)[0], max_tokens=8)])  # warms up
    for number, temperature in product(range(len(prompts)), workload.temperatures):
        params = workload.params(temperature)
        for name, engine in in_turn(list(engines.items()), number) if number < num_alone else ():
            engine.observe(seen[name, temperature, 1], [prompts[number]], [params[number]])
        for batch in timed[1:]:
            if number % batch == batch - 1 or number == len(prompts) - 1 < batch:
                chosen = [each % len(prompts) for each in range(number + 1 - batch, number + 1)]
                short = [replace(params[each], max_tokens=min(_HOST_TOKENS, workload.max_tokens)) for each in chosen]
                for name in (PLAIN, FREE):
                    engines[name].observe(seen[name, temperature, batch], [prompts[each] for each in chosen], short)
        on_progress(number * len(workload.temperatures) + workload.temperatures.index(temperature) + 1, total)
    return seen


def time_passes(model: LoadedModel, decoder: str) -> TimedPasses:
    """Times passes alone, behind a short and a long context in turn; the fastest of several rounds counts.

    Other programs only add to a pass. Their share comes from the passes that the engine makes.
    """
    far = max(min(_FARTHEST, model.context_len // 2), COSTS_PREFIX + 1)
    rounds = [
        [measure_costs(model, decoder, limit_s=_ROUND_S, prefix=prefix) for prefix in (COSTS_PREFIX, far)]
        for _ in range(_PASS_ROUNDS)
    ]
    near_costs, far_costs = (_fastest(each) for each in zip(*rounds, strict=True))
    return TimedPasses(near=near_costs, far=far_costs, near_context=COSTS_PREFIX, far_context=far)


def _fastest(rounds: Sequence[PassCosts]) -> PassCosts:
    def curve(name: str) -> CostCurve:
        points = [dict(getattr(each, name).points) for each in rounds]
        widths = sorted(set(points[0]).intersection(*points))
        return CostCurve(widths, [min(each[width] for each in points) for width in widths])

    return PassCosts(*map(curve, PassCosts._fields))


def _deepest(make: Callable[[Mapping[str, Any]], _ObservedEngine], config: Mapping[str, Any]) -> _ObservedEngine:
    """Returns an engine that always drafts, as deep as `DEEPEST`, the drafter or its configuration allow."""
    if config.get("num_speculative_tokens") is not None:
        return make(config)
    for depth in range(DEEPEST, 1, -1):
        try:
            return make({**config, "num_speculative_tokens": depth})
        except ConfigError:  # a head of fewer levels
            continue
    return make({**config, "num_speculative_tokens": 1})

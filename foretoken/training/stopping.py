"""Trains the stop rules of DISCO and SpecDec++ from logged drafts, and replays drafts of other lengths.

The target continues prompts, and the drafter guesses at every position of the text. As long as all drafted tokens are
accepted, draft and text are the same. The log therefore holds the drafts from every position, down to the first
rejection, and any rule can be replayed: where a draft ends decides where the next draft begins. Below a rejected token
the log reads the text instead of the draft, so a replayed length is approximate there, and its seconds are too.

Labels are acceptance probabilities: for greedy texts 1 or 0, at a temperature `min(1, p / q)` of a token drawn from
`q`. A token counts with the probability that all tokens before it are accepted. Tokens after a rejection thus count
nothing. SpecDec++ trains on drafted texts with some tokens of the target mixed in; here all contexts are the target's,
as in decoding.

Letters: S positions where drafts begin, D tokens of a draft, F statistics, M examples, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from foretoken.core.errors import ConfigError
from foretoken.core.sampling_params import SamplingParams
from foretoken.drafters.registry import create_drafter
from foretoken.entrypoints.llm import LLM
from foretoken.heads.base import Head
from foretoken.models.parts import target_parts
from foretoken.training.evaluation import guesses_of, target_texts
from foretoken.training.teacher import Teacher
from foretoken.trees.stopping import POSITION_SCALE, TRAINED, StopRule, acceptance_network, statistics

if TYPE_CHECKING:
    from foretoken.bench.workload import Asked, TokenProgress, Workload
    from foretoken.core.records import StageSeconds, StepRecord
    from foretoken.drafters.base import DrafterOptions
    from foretoken.models.loaded import LoadedModel

_REJECTION_WEIGHT = {"disco": 1.0, "specdec_pp": 6.0}  # of SpecDec++'s code; DISCO weighs both alike
_STEPS, _BATCH, _LEARNING_RATE = 1500, 2048, 5e-3  # choices: the loss is level after a third of the steps
_THRESHOLDS = (0.02, *(step / 20 for step in range(1, 20)), 0.98, 0.99)
HELD_BACK = 4  # every fourth text chooses thresholds; a choice
_NUM_BINS = 10
_TIMED_PROMPTS, _TIMED_TOKENS = 4, 64  # a choice: a few seconds on a small model
_SURE, _NEVER = 10.0, 1e-9  # log-odds of an estimate, and a threshold, that end no draft
_QUIET = 0.1  # quantile of an iteration's seconds: other programs only add to them; a choice


class LoggedText(NamedTuple):
    """The drafts from every position of a text."""

    statistics: Tensor  # (S, D, F) float32, see `foretoken.trees.stopping`
    acceptance: Tensor  # (S, D) float32, P(the token is accepted | all before it are); NaN after the end of the text
    num_right: list[int]  # S, accepted tokens of a draft of D tokens


@torch.no_grad()
def log_drafts(
    drafter: Head | LoadedModel,
    target: LoadedModel,
    tokenizer: Any,
    workload: Workload,
    *,
    depth: int,
    progress: TokenProgress | None = None,
) -> list[LoggedText]:
    """Returns the drafts of chains of D = `depth` tokens in what the target writes.

    `drafter` is a head in float32 with at least D steps, which is moved to the target's device, or a draft model.
    """
    generator, guess = torch.Generator(target.device).manual_seed(workload.seed), guesses_of(drafter, target)
    teacher, parts, log = Teacher(target), target_parts(target, dtype=torch.float32), []
    for temperature, num_prompt, text in target_texts(target, tokenizer, workload, progress=progress):
        tokens, steps = torch.tensor([text], device=target.device), []
        for logits, labels in guess(tokens, num_prompt):
            log_probs = (logits / (temperature or 1.0)).log_softmax(1)
            chosen = log_probs.argmax(1, keepdim=True)
            acceptance = (chosen[:, 0] == labels).float()
            if temperature:
                chosen = torch.multinomial(log_probs.exp(), 1, generator=generator)
                wanted = parts.lm_head(teacher.features(tokens)[0, -1 - len(labels) : -1].float())
                p = (wanted / temperature).log_softmax(1).gather(1, chosen)
                acceptance = (p - log_probs.gather(1, chosen)).exp().clamp_max(1.0)[:, 0]
            own, place = log_probs.gather(1, chosen).T, torch.arange(len(chosen), device=target.device)
            steps.append((statistics(log_probs.unsqueeze(0), place, own, 0)[0].cpu(), acceptance.cpu()))
        of_model = not isinstance(drafter, Head)
        found = [(steps[0][0][d:], steps[0][1][d:]) if of_model else steps[d] for d in range(depth)]
        log.append(_logged(found, generator))
    return log


def _logged(steps: Sequence[tuple[Tensor, Tensor]], generator: torch.Generator) -> LoggedText:
    num_starts = len(steps[0][1])
    values = torch.stack([functional.pad(each, (0, 0, 0, num_starts - len(each))) for each, _ in steps], dim=1)
    values[..., -1] = torch.arange(len(steps)) * POSITION_SCALE
    acceptance = torch.stack(
        [functional.pad(each, (0, num_starts - len(each)), value=torch.nan) for _, each in steps], dim=1
    )
    is_right = torch.rand(acceptance.shape, generator=generator, device=generator.device).cpu() < acceptance
    return LoggedText(values, acceptance, is_right.int().cumprod(1).sum(1).tolist())


class LabelledTokens(NamedTuple):
    """Drafted tokens: (M, F) statistics, (M,) acceptance probabilities, (M,) probabilities that they are reached."""

    statistics: Tensor
    acceptance: Tensor
    weights: Tensor


def examples_of(texts: Sequence[LoggedText]) -> LabelledTokens:
    """Returns the tokens that may be reached."""
    acceptance = torch.cat([text.acceptance for text in texts])
    reached = functional.pad(acceptance.nan_to_num()[:, :-1].cumprod(1), (1, 0), value=1.0)
    counts = (reached > 0) & ~acceptance.isnan()
    return LabelledTokens(torch.cat([text.statistics for text in texts])[counts], acceptance[counts], reached[counts])


def train_network(control: str, examples: LabelledTokens) -> nn.Module:
    """Returns the trained network of `disco` or `specdec_pp`: weighted binary cross-entropy with soft labels."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = acceptance_network(control)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    weight = _REJECTION_WEIGHT[control]
    for _ in range(_STEPS):
        rows = torch.randint(len(examples.acceptance), (_BATCH,), generator=generator)
        odds, labels = network(examples.statistics[rows])[:, 0], examples.acceptance[rows]
        losses = -labels * functional.logsigmoid(odds) - weight * (1 - labels) * functional.logsigmoid(-odds)
        optimizer.zero_grad()
        (losses * examples.weights[rows]).mean().backward()
        optimizer.step()
        schedule.step()
    return network.requires_grad_(requires_grad=False)


class TrainedRule(NamedTuple):
    """A trained rule, what it replays on the texts that chose its threshold, and its calibration error there."""

    rule: StopRule
    replayed: Replayed
    calibration_error: float


def train_rules(log: Sequence[LoggedText], seconds: Mapping[str, Sequence[float]]) -> dict[str, TrainedRule]:
    """Trains a rule of each control of `TRAINED` on most of the texts; the others choose threshold and greatest length.

    `log` has at least two texts; `seconds` are those of `iteration_seconds`.
    """
    chosen, rest = log[::HELD_BACK], [text for index, text in enumerate(log) if index % HELD_BACK]
    examples, held_back, made = examples_of(rest), examples_of(chosen), {}
    for control in TRAINED:
        network = train_network(control, examples)
        rule = tuned_rule(control, network, chosen, seconds[control])
        replayed = replay(chosen, [rule_lengths(rule, text) for text in chosen], seconds[control])
        made[control] = TrainedRule(rule, replayed, calibration_error(control, rule, held_back))
    return made


def calibration_error(control: str, rule: StopRule, examples: LabelledTokens) -> float:
    """Returns the expected calibration error of the estimates over ten bins, without the weight of rejections."""
    assert rule.network is not None, "trained"
    odds = rule.network(examples.statistics)[:, 0] + torch.tensor(_REJECTION_WEIGHT[control]).log()
    estimates, weights = odds.sigmoid(), examples.weights / examples.weights.sum()
    bins = (estimates * _NUM_BINS).long().clamp_max(_NUM_BINS - 1)
    gaps = torch.zeros(_NUM_BINS).index_add_(0, bins, weights * (estimates - examples.acceptance))
    return float(gaps.abs().sum())


def rule_lengths(rule: StopRule, text: LoggedText) -> list[int]:
    """Returns S lengths of drafts: the tokens down to the first token that ends the draft."""
    odds = text.statistics if rule.network is None else rule.network(text.statistics)
    estimates = functional.logsigmoid(odds[..., 0])
    passes = rule.thresholds.token_passes(estimates, None) & rule.thresholds.path_passes(estimates.cumsum(1))
    deepest = min(rule.max_depth or passes.shape[1], passes.shape[1])
    lengths: list[int] = (1 + passes[:, : deepest - 1].int().cumprod(1).sum(1)).tolist()
    return lengths


class Replayed(NamedTuple):
    """Tokens, target passes and seconds of replayed texts."""

    tokens: int
    passes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def replay(texts: Sequence[LoggedText], lengths: Sequence[Sequence[int]], seconds: Sequence[float]) -> Replayed:
    """Decodes logged texts with drafts of given lengths.

    `lengths` are S for each text, at most D; `seconds` those of an iteration with a draft of 0, 1, … D tokens.
    """
    tokens = passes = 0
    total = 0.0
    for text, of_text in zip(texts, lengths, strict=True):
        start, end = 1, len(text.num_right)  # the pass that reads the prompt gives the first token
        while start < end:
            length = min(of_text[start], end - start - 1)  # the last token is never drafted
            start, passes, total = start + 1 + min(text.num_right[start], length), passes + 1, total + seconds[length]
        tokens += end - 1
    return Replayed(tokens, passes, total)


def tuned_rule(
    control: str, network: nn.Module | None, texts: Sequence[LoggedText], seconds: Sequence[float]
) -> StopRule:
    """Returns the rule with the threshold and the greatest length that give most tokens a second; see `replay`."""
    rules = [
        StopRule.of(control, threshold, network, depth) for depth in range(1, len(seconds)) for threshold in _THRESHOLDS
    ]
    return max(rules, key=lambda rule: replay(texts, [rule_lengths(rule, text) for text in texts], seconds).rate)


def best_length(texts: Sequence[LoggedText], seconds: Sequence[float]) -> tuple[int, Replayed]:
    """Returns the fixed length, 0 to D, with most tokens a second."""
    every = [
        replay(texts, [[length] * len(text.num_right) for text in texts], seconds) for length in range(len(seconds))
    ]
    best = max(range(len(every)), key=lambda length: every[length].rate)
    return best, every[best]


def iteration_seconds(
    model: LoadedModel,
    tokenizer: Any,
    prompts: Sequence[Asked],
    *,
    options: DrafterOptions,
    controls: Sequence[str],
    depth: int,
) -> dict[str, list[float]]:
    """Returns the seconds of an iteration with a draft of 0, 1, … D tokens under each control, as the engine decodes.

    Chains of a few lengths up to D = `depth` are timed in turn, under rules that end no draft. Seconds are linear in
    between. `prompts` has at least one prompt, and the first few are decoded. `options` are those of the drafter.
    `controls` are "fixed" for chains without a stop rule, and any of `STOP_CONTROLS`.
    """
    params = SamplingParams(temperature=0.0, max_tokens=_TIMED_TOKENS, ignore_eos=True)
    lengths = sorted({1, min(4, depth), depth})
    timed: dict[tuple[str, int], list[StageSeconds]] = {key: [] for key in [("plain", 0), *product(controls, lengths)]}
    engines = {key: _timed_engine(model, tokenizer, options, *key, timed[key]) for key in timed}
    for prompt, engine in product(prompts[:_TIMED_PROMPTS], engines.values()):
        engine.generate(prompt, params)
    if not all(timed.values()):
        raise ConfigError(f"no draft of {depth} tokens was made. Expected a head or a draft model with such drafts.")
    # What follows a draft depends on its length alone.
    rest = [
        _quiet([each.total - each.draft for (_, at), row in timed.items() if at == length for each in row])
        for length in (0, *lengths)
    ]
    found = {}
    for control in controls:
        draft = [0.0, *(_quiet([each.draft for each in timed[control, length]]) for length in lengths)]
        lines = (np.interp(range(depth + 1), [0, *lengths], row).tolist() for row in (draft, rest))
        found[control] = [sum(parts) for parts in zip(*lines, strict=True)]
    return found


def _timed_engine(
    model: LoadedModel, tokenizer: Any, options: DrafterOptions, control: str, length: int, timed: list[StageSeconds]
) -> LLM:
    def note(record: StepRecord) -> None:
        (step,) = record.sequences
        if step.tree_depth == length and not step.ends_prompt:
            timed.append(record.seconds)

    config: dict[str, Any] = {}
    if length:
        rule = None if control == "fixed" else untrained_rule(control)
        chain = options.model_copy(update={"tree": "chain", "num_speculative_tokens": length, "stop": rule})
        config = {"drafter": partial(create_drafter, chain, model), "trust_drafter": True}
    return LLM(model, tokenizer=tokenizer, max_num_seqs=1, on_step=note, enable_prefix_caching=False, **config)


def _quiet(seconds: Sequence[float]) -> float:
    return float(np.quantile(seconds, _QUIET))


def untrained_rule(control: str) -> StopRule:
    """Returns a rule that ends no draft, to time its drafts."""
    network = None
    if control in TRAINED:
        network = acceptance_network(control).requires_grad_(requires_grad=False)
        last = network[-1]
        assert isinstance(last, nn.Linear), "of both networks"
        last.weight.zero_()
        last.bias.fill_(_SURE)
    return StopRule.of(control, 1 - _NEVER if control == "specdec_pp" else _NEVER, network)

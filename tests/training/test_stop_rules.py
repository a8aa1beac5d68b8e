"""Stop rules: logged drafts and replays beside the engine, and networks that learn a known function."""

import random
from pathlib import Path

import pytest
import torch
from end_to_end.stop_rules import NUM_STATISTICS, stop_rule
from end_to_end.tiny_heads import head
from end_to_end.tiny_llms import draft_model, llm, noisy, target, tokenizer

from foretoken.bench.workload import Workload
from foretoken.core.records import StepRecord
from foretoken.formats.registry import read_head
from foretoken.models.loading import wrap_model
from foretoken.training import stopping
from foretoken.training.stopping import LoggedText
from foretoken.trees.stopping import STOP_CONTROLS, TRAINED, StopRule

DEPTH, LENGTH = 6, 40
PROMPTS = ["the cat sat on", "def f(x): return", "abc abc abc"]


def log_of_tiny_models(temperature: float) -> list[LoggedText]:
    """Drafts of a draft model that is right now and then."""
    workload = Workload(prompts=PROMPTS, temperatures=[temperature], max_tokens=LENGTH)
    draft, whole = wrap_model(noisy(), name="draft"), wrap_model(target(), name="target")
    return stopping.log_drafts(draft, whole, tokenizer(), workload, depth=DEPTH)


@pytest.mark.parametrize("control", ["fixed", *STOP_CONTROLS])
def test_a_replay_makes_the_drafts_of_the_engine(control: str) -> None:
    """The same tokens are accepted in every pass, and drafts end at the same tokens down to the first rejection."""
    rule, records = None if control == "fixed" else stop_rule(control), list[StepRecord]()
    drafter = draft_model(noisy(), num_speculative_tokens=DEPTH, quantization="none", stop=rule)
    engine = llm({"drafter": drafter, "trust_drafter": True}, max_num_seqs=1, on_step=records.append)
    params = Workload(prompts=PROMPTS, max_tokens=LENGTH).params(0.0)
    lengths_seen: set[int] = set()
    for text, prompt, each in zip(log_of_tiny_models(0.0), PROMPTS, params, strict=True):
        records.clear()
        engine.generate(prompt, each)
        steps = [record.sequences[0] for record in records if not record.sequences[0].ends_prompt]
        lengths = [DEPTH] * LENGTH if rule is None else stopping.rule_lengths(rule, text)
        found, start = [], 1
        while start < LENGTH:
            length = min(lengths[start], LENGTH - start - 1)
            found.append((length, min(text.num_right[start], length)))
            start += 1 + found[-1][1]
        known = [(min(length, right + 1), right) for length, right in found]
        assert known == [(min(step.tree_depth, step.num_accepted + 1), step.num_accepted) for step in steps]
        assert stopping.replay([text], [lengths], [1.0] * 7) == (LENGTH - 1, len(steps), float(len(steps)))
        lengths_seen |= {length for length, _ in found}
    assert len(lengths_seen) > 2


def test_labels_of_sampled_texts_are_acceptance_probabilities() -> None:
    """Their mean is the overlap of target and draft distributions, which a copy of the target has whole."""
    for text in log_of_tiny_models(0.9):
        first = text.acceptance[:, 0]
        assert ((first > 0) & (first <= 1)).all()
        assert 0.2 < first.mean() < 0.999
        assert text.acceptance[-1, 1:].isnan().all()
        assert torch.equal(text.statistics[0, :, -1], torch.arange(DEPTH) / 16)
    workload = Workload(prompts=PROMPTS[:1], temperatures=[0.9], max_tokens=LENGTH)
    whole = wrap_model(target(), name="target")
    (same,) = stopping.log_drafts(whole, whole, tokenizer(), workload, depth=DEPTH)
    assert same.acceptance[:, 0].min() > 1 - 1e-4


def made_log(num_texts: int, seed: int) -> list[LoggedText]:
    """Drafts whose tokens are accepted with their own probability, whatever else the statistics say."""
    generator, log = torch.Generator().manual_seed(seed), []
    for _ in range(num_texts):
        values = torch.randn(80, DEPTH, NUM_STATISTICS, generator=generator)
        acceptance = (2 * values[..., 0]).sigmoid()
        values[..., 0] *= 2
        is_right = torch.rand(acceptance.shape, generator=generator) < acceptance
        log.append(LoggedText(values, is_right.float(), is_right.int().cumprod(1).sum(1).tolist()))
    return log


@pytest.mark.parametrize(
    "control", [pytest.param(each, marks=pytest.mark.slow) if each == "disco" else each for each in TRAINED]
)
def test_networks_learn_probabilities(control: str) -> None:
    """Labels of 0 and 1; the weight of rejections lowers the estimates of SpecDec++, and is known."""
    network = stopping.train_network(control, stopping.examples_of(made_log(60, seed=0)))
    rule, held_out = StopRule.of(control, 0.5, network), stopping.examples_of(made_log(30, seed=1))
    assert stopping.calibration_error(control, rule, held_out) < 0.05
    estimates = network(held_out.statistics)[:, 0]
    assert torch.corrcoef(torch.stack([estimates, held_out.statistics[:, 0]]))[0, 1] > 0.95
    other = "specdec_pp" if control == "disco" else "disco"
    assert stopping.calibration_error(other, rule, held_out) > 0.15, "the weight matters"


def test_tokens_after_a_rejection_count_nothing() -> None:
    acceptance = torch.tensor([[1.0, 0.0, 1.0], [0.5, 1.0, torch.nan], [0.0, torch.nan, torch.nan]])
    values = torch.arange(9.0).view(3, 3, 1).expand(3, 3, NUM_STATISTICS)
    found = stopping.examples_of([LoggedText(values, acceptance, [1, 1, 0])])
    assert found.statistics[:, 0].tolist() == [0, 1, 3, 4, 6]
    assert found.acceptance.tolist() == [1.0, 0.0, 0.5, 1.0, 0.0]
    assert found.weights.tolist() == [1.0, 1.0, 1.0, 0.5, 1.0]


@pytest.mark.slow
def test_rules_that_are_tuned_beat_the_best_fixed_length() -> None:
    """Drafts cost a tenth of a pass a token; the bound is a draft of exactly the accepted tokens."""
    log, seconds = made_log(40, seed=2), [1.0 + n / 10 for n in range(DEPTH + 1)]
    _, best = stopping.best_length(log[::4], seconds)
    assert best.rate == max(stopping.replay(log[::4], [[n] * 80] * 10, seconds).rate for n in range(DEPTH + 1))
    bound = stopping.replay(log[::4], [text.num_right for text in log[::4]], seconds)
    for trained in stopping.train_rules(log, dict.fromkeys(TRAINED, seconds)).values():
        assert 1.02 * best.rate < trained.replayed.rate < bound.rate


def test_greatest_lengths_bound_drafts() -> None:
    rng = random.Random(0)
    text = made_log(1, seed=3)[0]
    for depth in (1, 3, DEPTH, None):
        rule = StopRule.of("confidence", rng.choice([0.02, 0.5]), max_depth=depth)
        lengths = stopping.rule_lengths(rule, text)
        whole = stopping.rule_lengths(StopRule.of("confidence", rule.threshold), text)
        assert lengths == [min(length, depth or DEPTH) for length in whole]


@pytest.mark.parametrize("name", ["eagle", pytest.param("medusa", marks=pytest.mark.slow)])
def test_logged_drafts_of_heads_are_those_of_the_engine(name: str) -> None:
    """A head's guesses depend on how deep they are drafted."""
    params = Workload(prompts=PROMPTS, max_tokens=LENGTH).params(0.0)
    plain = llm({}, max_num_seqs=1).generate(PROMPTS, params)
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in plain]
    records: list[StepRecord] = []
    arguments = head(name, num_speculative_tokens=3, tree="chain", quantization="none")(texts)
    llm(arguments, max_num_seqs=1, on_step=records.append).generate(PROMPTS, params)
    _, checkpoint = read_head(Path(arguments["speculative_config"]["model"]))
    log = stopping.log_drafts(
        checkpoint.module(dtype=torch.float32), wrap_model(target(), name="target"), tokenizer(),
        Workload(prompts=PROMPTS, temperatures=[0.0], max_tokens=LENGTH), depth=3,
    )  # fmt: skip
    replayed = stopping.replay(log, [[3] * LENGTH] * len(log), [1.0] * 4)
    assert replayed.passes == sum(not record.sequences[0].ends_prompt for record in records)
    assert replayed.tokens > replayed.passes

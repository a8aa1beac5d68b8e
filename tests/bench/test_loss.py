"""The causes of lost speed sum to the loss, and the constructed cause comes first, in runs of real engines.

The engines really draft and verify. Their clock is replaced by stated costs, so that no figure depends on the machine.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from benchmarks.losses import cases, write_shuffled
from foretoken import LLM
from foretoken.bench.compare import Measurement
from foretoken.bench.loss import split_loss
from foretoken.bench.workload import Workload, load_prompts
from foretoken.core.errors import ConfigError
from foretoken.core.records import GenerationMetrics, StageSeconds, StepRecord
from foretoken.entrypoints.model_arguments import load_target

TARGET = "models/tinycode"
WORKLOAD = Workload(prompts=load_prompts(limit=3), max_tokens=48)


class Costs(NamedTuple):
    """Seconds of a level of a draft, of a token of a pass beyond the first, and of the host beside a draft."""

    level: float = 0.02
    token: float = 0.02
    host: float = 0.1

    def of(self, record: StepRecord) -> StageSeconds:
        depth = max(step.tree_depth for step in record.sequences)
        verify = 1 + self.token * (record.num_tokens - 1)
        return StageSeconds(draft=self.level * depth, verify=verify, commit=self.host if depth else 0.1)


COSTS = {
    "head of shuffled weights": Costs(),
    "target as its draft model": Costs(level=1.0),
    "wide tree, all right": Costs(token=0.3),
    "work at each commit": Costs(host=2.0),
    "long chain, one right": Costs(token=0.15),
    "work at each draft and commit": Costs(level=1.0, host=2.0),
}


class Loaded(NamedTuple):
    """The target, its tokenizer, plain decoding, and the six cases."""

    target: Any
    tokenizer: Any
    plain: Measurement
    cases: Mapping[str, tuple[Any, ...]]


def played(name: str, llm: LLM, records: list[StepRecord], costs: Costs) -> tuple[Measurement, list[list[int]]]:
    """Decodes for real; one second passes around each call, and every iteration takes what it costs."""
    row, now = Measurement(name, 0.0, "", ""), 0.0
    texts = []
    for prompt in WORKLOAD.prompts:
        records.clear()
        output = llm.generate(prompt, WORKLOAD.params(0.0)[0])[0]
        row.last_step, begin = None, now
        for record in records:
            is_prefill = all(step.ends_prompt for step in record.sequences)
            seconds = StageSeconds() if is_prefill else costs.of(record)
            now += seconds.total
            row.add_step(replace(record, seconds=seconds, num_prompt_tokens=0), now)
        now += 1.0
        row.metrics = GenerationMetrics.total([row.metrics, output.metrics])
        row.seconds.append(now - begin)
        row.tokens.append(output.metrics.num_emitted - output.metrics.num_prefill_emitted)
        texts.append([*output.prompt_token_ids, *output.outputs[0].token_ids])
    return row, texts


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    target, tokenizer = load_target(TARGET, dtype="auto", device="auto")
    records: list[StepRecord] = []
    plain, texts = played("plain", LLM(target, tokenizer=tokenizer, on_step=records.append), records, Costs())
    head = tmp_path_factory.mktemp("losses") / "head"
    write_shuffled("models/tinycode-eagle3", head)
    return Loaded(target, tokenizer, plain, cases(TARGET, str(head), texts))


# Each cause is the first of one of the others.
MIXED = ("long chain, one right", "work at each draft and commit")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in MIXED else name for name in sorted(COSTS)]
)
def test_the_constructed_cause_comes_first(name: str, loaded: Loaded) -> None:
    config, *constructed = loaded.cases[name]
    config = {key: value for key, value in config.items() if not key.endswith("_ms")}  # no work on the real clock
    records: list[StepRecord] = []
    llm = LLM(loaded.target, tokenizer=loaded.tokenizer, speculative_config=config, on_step=records.append)
    row, _ = played(name, llm, records, COSTS[name])
    loss = split_loss(row, loaded.plain)
    assert [cause.name for cause in loss.causes][: len(constructed)] == constructed
    assert sum(cause.seconds for cause in loss.causes) == pytest.approx(loss.seconds, rel=0.05)
    assert loss.seconds == pytest.approx(sum(row.seconds) / sum(row.tokens) - loss.ideal)
    assert loss.unexplained != 0  # the clock around the engine is another one


def test_all_six_cases_have_costs(loaded: Loaded) -> None:
    assert COSTS.keys() == loaded.cases.keys()


def measured(tokens: int, passes: int, seconds: tuple[float, float, float], levels: int = 0) -> Measurement:
    """A run with (draft, pass, host) seconds of a pass, and `levels` levels of each draft."""
    draft, verify, host = (passes * each for each in seconds)
    metrics = GenerationMetrics(
        steps=passes, num_emitted=tokens, drafted_at_depth=Counter(dict.fromkeys(range(1, levels + 1), passes))
    )
    return Measurement(
        "made", 0.0, "", "", seconds=[draft + verify + host], tokens=[tokens], metrics=metrics, iterations=passes,
        verify_seconds=verify, draft_seconds=draft, host_seconds=host,
    )  # fmt: skip


def test_the_formula() -> None:
    """By hand: x = 1/2 and y = 1/4 passes per token; d, v, r = 2, 3, 1; p, h = 1, 1/2."""
    loss = split_loss(measured(8, 4, (2, 3, 1), levels=3), measured(10, 10, (0, 1, 0.5)))
    assert {cause.name: cause.seconds for cause in loss.causes} == pytest.approx(
        {"acceptance": 0.9375, "drafting": 0.75, "wide passes": 0.75, "host": 0.1875}
    )
    assert (loss.measured, loss.plain, loss.ideal, loss.seconds) == pytest.approx((3, 1.5, 0.375, 2.625))
    assert loss.unexplained == pytest.approx(0)
    assert [each["share"] for each in loss.as_dict()["causes"]] == pytest.approx([0.9375 / 2.625, *[0.75 / 2.625] * 2,
                                                                                  0.1875 / 2.625])  # fmt: skip


def test_the_ideal_loses_nothing() -> None:
    loss = split_loss(measured(16, 4, (0, 1, 0.5), levels=3), measured(10, 10, (0, 1, 0.5)))
    assert [cause.seconds for cause in loss.causes] == pytest.approx([0] * 4)
    assert loss.seconds == pytest.approx(0)


def test_drafts_that_are_missing_are_said() -> None:
    rare = measured(8, 4, (1, 1, 1), levels=3)
    rare.metrics.drafted_at_depth = Counter({1: 2, 2: 2, 3: 2})
    plain = measured(10, 10, (0, 1, 0.5))
    advice = {cause.name: cause.advice for cause in split_loss(rare, plain).causes}["acceptance"]
    assert "2.00 of 4.00 tokens a pass; 50% of the passes have a draft" in advice


def test_a_drafter_that_never_drafts() -> None:
    with pytest.raises(ConfigError, match=r"'made' drafted nothing.* Set num_speculative_tokens"):
        split_loss(measured(10, 10, (0, 1, 0.5)), measured(10, 10, (0, 1, 0.5)))

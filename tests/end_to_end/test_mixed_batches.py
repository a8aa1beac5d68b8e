"""Requests that follow different rules share batches: none of them can tell who its neighbours are."""

from typing import Any

import pytest
from end_to_end.request_mix import CONTEXT_LEN, plain_mix, references, request_mix
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_llms import RUNNERS, WIDTHS, draft_model, drafters, llm, noisy

from foretoken import SamplingParams
from foretoken.acceptance.select import AcceptancePolicy
from foretoken.engine.loop import Engine

DRAFTERS = {runner: drafters(dtype=dtype) for runner, dtype in RUNNERS.items()}
UNSEEDED = [SamplingParams(temperature=t, top_k=k, max_tokens=20) for t, k in ((0.7, 0), (1.2, 5), (2.0, 1))]
SEEDED = [SamplingParams(temperature=0.9, seed=seed, max_tokens=20) for seed in range(6)]


@pytest.fixture
def rule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes every engine follow a rule."""
    original = Engine.__init__

    def with_rule(self: Engine, *args: Any, policy: AcceptancePolicy, **more: Any) -> None:
        original(self, *args, policy=AcceptancePolicy(rule=request.param), **more)

    monkeypatch.setattr(Engine, "__init__", with_rule)
    return str(request.param)


NAMES = (
    "draft", "draft tree", "draft gapped choices", "ngram tree", "oracle tree", "nan", "eagle", "eagle3 dynamic",
    "sampled draft and lookahead",
)  # fmt: skip


@pytest.mark.parametrize(
    ("drafter", "runner"),
    [
        *((name, "lean-native") for name in NAMES), ("draft tree", "generic"), ("eagle3 dynamic", "lean-stock"),
        *(pytest.param(name, "generic", marks=pytest.mark.slow) for name in NAMES if name != "draft tree"),
    ],
)  # fmt: skip
def test_unseeded_neighbours_change_nothing(drafter: str, runner: str) -> None:
    """Drafts with and without a distribution, greedy, coupled, block and sequential verification side by side."""
    half = slice(NAMES.index(drafter) % 2, None, 2)
    mix, plain = request_mix()[half], plain_mix(runner)[half]
    engine = llm(
        DRAFTERS[runner][drafter](references(plain_mix())), max_num_seqs=7, max_model_len=CONTEXT_LEN, runner=runner
    )
    prompts, params = [], []
    for index, request in enumerate(mix):
        prompts += [request.prompt, [3 + index, 4, 5]]
        params += [request.params, UNSEEDED[index % 3]]
    outputs = engine.generate(prompts, params)
    assert_same_text(outputs[::2], plain, [r.name for r in mix])
    assert all(o.outputs[0].finish_reason in ("length", "stop") for o in outputs[1::2])
    assert all(o.metrics.draft_errors == 0 for o in outputs)


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        pytest.param(
            rule, shape, marks=[] if (rule == "block") == (name == "chain") else pytest.mark.slow, id=f"{name}-{rule}"
        )
        for name, shape in (("chain", {"num_speculative_tokens": 3}), ("tree", {"tree": WIDTHS}))
        for rule in ("block", "sequential", "traversal")
    ],
    indirect=["rule"],
)  # fmt: skip
def test_a_seed_is_reproducible_under_the_other_rules_too(rule: str, shape: dict[str, Any]) -> None:
    """Same seed, drafter and shape: same text, alone, in a batch, and among greedy requests."""
    prompts = [[5 + index, 6, 7] for index in range(len(SEEDED))]

    def texts(max_num_seqs: int, neighbours: int) -> list[list[int]]:
        made = draft_model(noisy(), **shape)
        engine = llm({"drafter": made}, trust_drafter=True, max_num_seqs=max_num_seqs)
        greedy = [SamplingParams(temperature=0.0, max_tokens=20)] * neighbours
        outputs = engine.generate([[9]] * neighbours + prompts, greedy + SEEDED)
        assert sum(o.metrics.num_accepted for o in outputs) > 10
        return [o.outputs[0].token_ids for o in outputs[neighbours:]]

    alone = texts(1, 0)
    assert texts(6, 0) == alone
    assert texts(4, 2) == alone
    coupled = llm({}).generate(prompts, SEEDED)
    assert [o.outputs[0].token_ids for o in coupled] != alone, f"{rule} draws in its own way"

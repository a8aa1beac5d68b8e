"""Drafters that are asked by turns: they catch up with what they missed, and the text is plain decoding's."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from end_to_end.request_mix import CONTEXT_LEN, plain_mix, references, request_mix
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_heads import head
from end_to_end.tiny_llms import llm, lookup, noisy, tokenizer

from foretoken.core.records import StepRecord
from foretoken.core.token_tree import TokenTree
from foretoken.drafting import choice
from foretoken.drafting.base import UNBOUNDED, Allotment, Allowance, Ask
from foretoken.drafting.costs import CostModel
from foretoken.drafting.goodput import Goodput
from foretoken.runner.costs import CostCurve, PassCosts


class ByTurns(Goodput):
    """Asks the first drafter always and each other one in every third iteration, for one to four levels."""

    num_continuations = _turn = 0

    def allot(self, batch_size: int, num_prompt_tokens: int = 0) -> Allotment:
        ByTurns.num_continuations += len(self._continued)
        self._begin(batch_size)
        self._free, self._turn = frozenset({0}), self._turn + 1
        allowance = Allowance(depth=UNBOUNDED, nodes=self._max_nodes)
        return Allotment(allowances=[allowance] * batch_size, first=self._asking(Ask((0,))))

    def further(self, trees: Mapping[int, TokenTree]) -> Ask | None:
        self._take(trees)
        for i in range(1, len(self._known)):
            if i not in self._asked and (self._turn + i) % 3 == 0:
                return self._asking(Ask((i,), 1 + self._turn % 4))
        return None


@pytest.fixture(scope="module")
def draft_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is the target itself."""
    place = tmp_path_factory.mktemp("draft")
    noisy(noise=0.0).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_drafters_asked_by_turns_change_no_text(
    batch: int, draft_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = CostCurve((1,), (1.0,))  # width costs nothing: everything is selected
    monkeypatch.setattr("foretoken.entrypoints.llm.pass_costs", lambda model, name: PassCosts(*[free] * 3))
    monkeypatch.setattr(choice, "Goodput", ByTurns)
    monkeypatch.setattr(choice, "time_drafts", lambda drafter, target: [])
    monkeypatch.setattr(CostModel, "learn", lambda *_, **__: None)  # width goes on to cost nothing
    monkeypatch.setattr(ByTurns, "num_continuations", 0)
    mix, plain, records = request_mix(), plain_mix(), list[StepRecord]()
    config: dict[str, Any] = {
        "drafters": [
            lookup(), {"method": "draft_model", "model": str(draft_directory)},
            head("hydra++")(references(plain))["speculative_config"],
        ]
    }  # fmt: skip
    engine = llm({"speculative_config": config}, max_num_seqs=batch, max_model_len=CONTEXT_LEN, on_step=records.append)
    got = engine.generate([r.prompt for r in mix], [r.params for r in mix])
    assert_same_text(got, plain, [r.name for r in mix])
    turns = Counter(asked.name for record in records for asked in record.asked)
    assert turns["ngram"] > 2 * turns["draft_model"] > 0
    assert turns["hydra"] > 0
    assert ByTurns.num_continuations > 20
    assert not any(record.draft_error for record in records)
    greedy = {output.request_id for output, request in zip(got, mix, strict=True) if request.name == "greedy"}
    for record in records:
        depths = {asked.name: asked.depth for asked in record.asked}
        assert sum(asked.seconds for asked in record.asked) <= record.seconds.draft + 1e-6
        for step in record.sequences:
            for name, count in step.accepted_by.items():
                assert count <= step.drafted_by[name]
            assert max(step.drafted_by.values(), default=0) <= step.num_drafted <= sum(step.drafted_by.values())
            if step.request_id in greedy and step.drafted_by.get("draft_model"):
                # It is the target itself: when it has caught up, everything that it drafts is right.
                assert step.accepted_by["draft_model"] == min(depths["draft_model"], step.drafted_by["draft_model"])
    shares = got[0].metrics.by_drafter
    assert shares["ngram"].num_asked == got[0].metrics.steps
    assert shares["draft_model"].num_accepted > 0

"""A lookup is asked in every iteration, and what it found is judged: through the drafters, without a model or a clock.

Texts are scripted: the target writes them whatever is drafted, and seconds are those of a curve.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from drafters.drafting_contexts import GREEDY, context, handle

from foretoken.core.records import AskedDrafter, SequenceStep, StageSeconds, StepRecord
from foretoken.drafters.base import Committed, DraftRequest
from foretoken.drafters.registry import create_drafter, drafter_options
from foretoken.drafting.choice import choose_controller, choose_for_predictions
from foretoken.drafting.drafting import Drafting
from foretoken.drafting.goodput import Goodput
from foretoken.runner.costs import CostCurve

VOCABULARY, ASKING_S = 5000, 0.002
CHEAP = CostCurve((1, 4, 8, 16, 64), (1.0, 1.2, 2.0, 2.5, 9.0))  # as a real model of 500 million parameters
STEEP = CostCurve((1, 64), (1.0, 1.0 + 63 * 0.25))


@pytest.fixture(autouse=True)
def _timed_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = [(1, ASKING_S), (4, ASKING_S)]
    monkeypatch.setattr("foretoken.drafting.choice.time_drafts", lambda drafter, target: timed)


class Text(NamedTuple):
    """A prompt, what the target writes after it, and the request's prediction."""

    prompt: Sequence[int]
    written: Sequence[int]
    prediction: Sequence[int] | None = None


COPIED = list(range(100, 164))
COPY = Text([*range(50), *COPIED, 60], COPIED)
NOVEL = Text([1, 2, 3], range(1000, 1300))
PAIRS = Text([1, 2, 3], [token for i in range(100) for token in (i % 20, 30 + i % 20, 2000 + i)])  # matches mislead


class Step(NamedTuple):
    """What an iteration did for one sequence."""

    proposed: int | None
    verified: int
    accepted: int
    position: int


class Loop:
    """The engine's loop over scripted texts."""

    def __init__(self, *methods: str, cost: CostCurve = CHEAP, is_predicting: bool = False, **keys: Any) -> None:
        options = [drafter_options({"method": method, **keys}) for method in methods]
        drafters = [create_drafter(each, None) for each in options]  # type: ignore[arg-type]
        target = handle(measured_costs=lambda: cost)
        for drafter in drafters:
            drafter.attach(target)
        controller = choose_controller(options, drafters, target, keeps_acceptance=False)
        predicting = choose_for_predictions(options, drafters, target) if is_predicting else None
        made = predicting or controller
        assert isinstance(made, Goodput)
        self.controller, self._cost = made, cost
        self.drafting = Drafting(
            drafters, None if is_predicting else controller, vocab_size=VOCABULARY, max_nodes=64,
            device=torch.device("cpu"), for_predictions=predicting,
        )  # fmt: skip
        self.seconds = self.plain_s = 0.0
        self.declined = 0

    def write(self, *texts: Text, num_prompt_tokens: int = 0) -> list[list[Step]]:
        """Writes some texts at once, until the first of them ends; returns what each iteration did."""
        slots = range(len(texts))
        for slot, text in enumerate(texts):
            request = DraftRequest(
                request_id=str(slot), prompt=list(text.prompt), params=GREEDY, prediction=text.prediction
            )  # fmt: skip
            self.drafting.begin(slot, request)
            self.drafting.commit(Committed(slots=[slot], starts=[0], tokens=[list(text.prompt)], features=None))
        places, steps = [1] * len(texts), list[list[Step]]()
        while all(place < len(text.written) for place, text in zip(places, texts, strict=True)):
            steps.append(self._iterate(texts, places, num_prompt_tokens))
            places = [place + step.accepted + 1 for place, step in zip(places, steps[-1], strict=True)]
        for slot in slots:
            self.drafting.release(slot)
        return steps

    def _iterate(self, texts: Sequence[Text], places: list[int], num_prompt_tokens: int) -> list[Step]:
        tokens = [[*text.prompt, *text.written[:place]] for text, place in zip(texts, places, strict=True)]
        room = [len(text.written) - place - 1 for text, place in zip(texts, places, strict=True)]
        draft = self.drafting.propose(context(tokens, slots=range(len(texts)), max_depth=room), num_prompt_tokens)
        self.declined += draft.declined is not None
        found, records = list[Step](), list[SequenceStep]()
        for row, (tree, text, place) in enumerate(zip(draft.tree.rows(), texts, places, strict=True)):
            reached = {0: 0}
            for node, parent in enumerate(tree.parents):
                above = reached.get(parent)
                if above is not None and text.written[place + above] == tree.tokens[node]:
                    reached[node] = above + 1
            accepted = max(reached.values())
            emitted = list(text.written[place : place + accepted + 1])
            found.append(Step(draft.num_proposed[row], len(tree.tokens) - 1, accepted, place))
            records.append(SequenceStep(
                request_id=str(row), num_drafted=len(tree.tokens) - 1, tree_depth=draft.tree.max_depth,
                num_accepted=accepted, num_emitted=accepted + 1, tokens=emitted, accepted_by={},
                num_proposed=draft.num_proposed[row],
            ))  # fmt: skip
        width = sum(step.verified + 1 for step in found)
        asked = [
            AskedDrafter(index=each.drafter, name=str(each.drafter), depth=each.depth, seconds=ASKING_S)
            for each in draft.asked
        ]
        seconds = StageSeconds(draft=ASKING_S * len(asked), verify=self._cost(width + num_prompt_tokens))
        self.seconds += seconds.total
        self.plain_s += sum(step.accepted + 1 for step in found) / len(found) * self._cost(len(found))
        if draft.is_committed:
            starts = [len(each) - 1 for each in tokens]
            paths = [
                [each[-1], *record.tokens[: record.num_accepted]] for each, record in zip(tokens, records, strict=True)
            ]
            self.drafting.commit(Committed(slots=range(len(texts)), starts=starts, tokens=paths, features=None))
        record = StepRecord(
            sequences=records, num_tokens=width, seconds=seconds, asked=asked, num_prompt_tokens=num_prompt_tokens,
            declined=draft.declined,
        )  # fmt: skip
        self.drafting.learn_step(draft, record)
        return found


def first_with(steps: list[list[Step]], name: str) -> int:
    """The first iteration that proposed or verified a node."""
    return next(i for i, step in enumerate(steps) if getattr(step[0], name))


@pytest.mark.parametrize(
    ("method", "tree", "cost"),
    [("ngram", "chain", CHEAP), ("ngram", "tree", STEEP), ("suffix", "chain", STEEP), ("suffix", "tree", CHEAP)],
)
def test_a_copied_prompt_is_drafted_at_its_first_match(method: str, tree: str, cost: CostCurve) -> None:
    """Before and after texts in which nothing was found; each match makes the next draft longer."""
    loop = Loop(method, cost=cost, tree=tree)
    for text in (COPY, NOVEL, Text([4], range(2000, 2300)), COPY):
        steps = loop.write(text)
        if text is COPY:
            assert first_with(steps, "verified") == first_with(steps, "proposed")
            assert len(steps) <= len(COPIED) / 4
        else:
            assert not any(step.verified for (step,) in steps)
    assert not loop.declined


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_matches_that_misled_cost_little_and_keep_no_longer_one_from_being_tried(method: str) -> None:
    """A pair of tokens is followed by something new a hundred times; a longer match is another event."""
    loop = Loop(method, cost=STEEP)
    loop.write(PAIRS)
    assert loop.seconds <= 1.02 * loop.plain_s
    steps = loop.write(COPY)
    assert steps[first_with(steps, "verified")][0].position <= 6, "of a match of two, which came as a surprise"
    assert len(steps) <= len(COPIED) / 3
    assert not loop.declined


@pytest.mark.parametrize("methods", [("ngram",), ("ngram", "suffix")])
def test_an_iteration_without_a_match_is_one_of_plain_decoding(methods: tuple[str, ...]) -> None:
    """Nothing is verified, charged or learned of acceptance, and plain decoding need not be measured apart."""
    loop = Loop(*methods)
    loop.write(COPY)
    before = [each.state() for each in loop.controller.learners]
    amount, num_seen = loop.controller._exploration.drafts.amount, loop.controller._costs.num_passes(1)
    steps = [step for (step,) in loop.write(NOVEL)]
    assert [step[:2] for step in steps] == [(0, 0)] * (len(NOVEL.written) - 2) + [(None, 0)]
    assert [each.state() for each in loop.controller.learners] == before
    assert loop.controller._exploration.drafts.amount >= amount
    assert loop.controller._costs.num_passes(1) > num_seen + len(steps) / 16
    assert loop.controller.plain_seconds(1) == pytest.approx(1.0, rel=0.02)


def test_each_sequence_is_judged_by_its_own_match() -> None:
    loop = Loop("ngram")
    loop.write(PAIRS)
    other = random.Random(1)
    rows = [PAIRS.prompt, [other.randrange(30) for _ in range(80)]]
    steps = loop.write(COPY, Text(rows[0], rows[1]), Text([3, 2, 1], range(3000, 3100)))
    verified = [sum(step[row].verified for step in steps) for row in range(3)]
    assert verified[0] >= len(COPIED) - 12
    assert verified[2] == 0
    assert verified[1] < verified[0] / 4


def test_a_long_match_is_drafted_beside_a_prompt() -> None:
    steps = Loop("ngram").write(COPY, num_prompt_tokens=4)
    assert sum(step.accepted for (step,) in steps) > len(COPIED) / 2


def test_a_prediction_is_asked_in_every_iteration() -> None:
    """Of which half a text is wrong: the other half is copied from its first match."""
    loop = Loop("prediction", is_predicting=True)
    steps = loop.write(Text([1, 2, 3], [*range(1000, 1100), *COPIED], COPIED))
    assert all(step.proposed is not None for (step,) in steps[:-1])
    assert sum(step.verified for (step,) in steps if step.position < 100) <= 80
    assert len([step for (step,) in steps if step.position >= 100]) <= len(COPIED) / 4


def test_asking_in_vain_is_not_free_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup whose empty answers take half a pass is asked now and then only, with a reason."""
    monkeypatch.setattr(f"{__name__}.ASKING_S", 0.5)
    loop = Loop("ngram")
    steps = loop.write(Text([1, 2, 3], range(1000, 2500)))
    assert sum(step.proposed is not None for (step,) in steps) < 0.1 * len(steps)
    assert loop.declined > 0.8 * len(steps)
    assert loop.seconds <= 1.02 * loop.plain_s + 8


def test_a_reason_names_no_wider_pass_than_there_is() -> None:
    """Where each level is as wide as the whole tree, levels together seem wider."""
    made = Goodput(STEEP, nodes_by_depth=[(1, *[64] * 16)], max_nodes=64, is_read=False)
    made._exploration.drafts.is_spent = True
    declined = made.allot(1).declined
    assert declined is not None
    assert declined.width <= 64

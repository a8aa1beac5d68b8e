"""What a drafter reads before it drafts: how much it missed, what that takes, and whether that pays."""

from dataclasses import replace
from typing import Any

import pytest
from drafters.drafting_contexts import context, record, step

from foretoken import SamplingParams
from foretoken.drafters.base import DraftRequest, Prefix
from foretoken.drafting.exploration import _USUAL_LEN, CREDIT, SHARE, Followed, Reading, Unread
from foretoken.drafting.goodput import Goodput
from foretoken.runner.costs import CostCurve

LEVEL, TOKEN = 0.3, 0.1  # seconds of a level, and that a token adds to a pass of one second
READ = 0.5 * LEVEL * TOKEN  # expected of a token that is read


def controller() -> Goodput:
    curve = CostCurve(range(1, 129), [1 + TOKEN * (width - 1) for width in range(1, 129)])
    return Goodput(curve, nodes_by_depth=[range(1, 10)], max_nodes=16, timed=[[(1, LEVEL), (4, 4 * LEVEL)]])


def learn(made: Goodput, missed: int, seconds: float) -> None:
    """An iteration with a draft of one level that read tokens first."""
    made._costs.learn(record([step([9], 1)], 2, (0, 1, seconds, missed), verify=1.1))


def test_a_draft_that_read_a_prompt_says_nothing_of_drafts_and_tells_what_reading_takes() -> None:
    """Nor does one after a rest. Before any, a token takes half of what it adds to a pass, in proportion to a level."""
    made = controller()
    known = list(made._costs.draft(0))
    assert made._costs.reading(0) == pytest.approx(READ, rel=0.05)
    learn(made, 200, 200 * 0.05 + LEVEL)
    assert made._costs.reading(0) == pytest.approx(0.05, rel=0.05)
    learn(made, 33, 33 * 0.05 + LEVEL)
    assert made._costs.draft(0) == known
    assert made._costs.reading(0) == pytest.approx(0.05, rel=0.05)
    learn(made, 33, 5000.0)
    assert made._costs.reading(0) < 0.1, "an interruption"


@pytest.mark.parametrize(("missed", "remaining", "is_asked"), [
    (1000, 32, False), (1000, 1000, True), (40, 64, True), (0, 1, True), (5000, 100, False),
])  # fmt: skip
def test_a_long_text_is_read_for_a_long_answer(missed: int, remaining: float, is_asked: bool) -> None:
    """A good drafter saves about half of the passes: 1,000 tokens take the time of 15 passes."""
    made = controller()
    made.expect(Unread({0: missed}, remaining))
    allotment = made.allot(1)
    assert allotment.is_empty is not is_asked
    if not is_asked:
        assert allotment.declined is not None
        assert allotment.declined.reading_cost == pytest.approx(missed * READ, rel=0.05)
        assert f"reading the text first {missed * READ:.0f}x" in str(allotment.declined)


def test_another_text_is_decided_anew() -> None:
    made = controller()
    made.expect(Unread({0: 3000}, 64))
    assert made.allot(1).is_empty
    made.expect(Unread({0: 20}, 64))
    assert made.allot(1).is_empty, "a decision holds"
    made.begin_text()
    assert not made.allot(1).is_empty


def test_beside_other_texts_estimates_go_on() -> None:
    made = controller()
    (levels,) = made._known[0].levels.values()
    levels.learn([0] * 4, [0] * 4, [4] * 4)
    made.begin_text(is_alone=False)
    assert levels.num_seen > 0
    made.begin_text()
    assert levels.num_seen == 0


def request(length: int, most: int | None) -> DraftRequest:
    return DraftRequest(request_id="r", prompt=[1] * length, params=SamplingParams(max_tokens=most))


def test_how_much_is_unread_and_how_long_a_text_goes_on() -> None:
    """To its bound, to the usual length, or once more as long as it is; outputs that end teach what is usual."""
    followed = Followed()
    followed.begin(0, request(10, 50))
    followed.begin(1, request(5, None))
    texts: list[Any] = [[1] * 12, [1] * 6]
    assert followed.unread(context(texts, slots=[0, 1]), 2) == Unread({0: 18, 1: 18}, 48 + _USUAL_LEN - 1)
    followed.missed(1, context(texts, slots=[0, 1]), 3)
    texts = [[1] * 14, [1] * 405]
    found = followed.unread(context(texts, slots=[0, 1]), 2)
    assert found == Unread({0: 419, 1: 395}, 46 + 400)
    assert followed.release(1) == 400
    followed.begin(1, request(5, None))
    assert followed.unread(context([[1] * 6], slots=[1]), 1).remaining > _USUAL_LEN + 10
    assert followed.release(0) == 46
    assert followed.release(0) == 0


def test_what_was_followed_of_a_prefix_need_not_be_read_again() -> None:
    """In the same slot or another one; a drafter that was not asked has followed nothing."""
    followed, text = Followed(), [1] * 30
    followed.begin(0, request(30, None))
    followed.missed(0, context([text]), 2)
    followed.release(0)
    for slot, length in ((1, 25), (0, 28)):
        followed.begin(slot, replace(request(40, None), prefix=Prefix(slot=0, length=length)))
        assert followed.unread(context([[1] * 41], slots=[slot]), 2).missed == {0: 41 - length, 1: 41}


def test_how_many_tokens_a_drafter_missed() -> None:
    """Those of the prompt, then those of iterations in which it was not asked; all sequences together."""
    followed, text = Followed(), list(range(20))
    followed.begin(0, request(20, None))
    assert followed.missed(0, context([text]), 3) == 20
    assert followed.missed(0, context([text + [1] * 4]), 2) == 0, "three accepted tokens and one more"
    assert followed.missed(0, context([text + [1] * 5]), 2) == 0, "a rejected draft"
    assert followed.missed(0, context([text + [1] * 12]), 1) == 4
    assert followed.missed(1, context([text + [1] * 12]), 1) == 32, "another drafter"
    followed.begin(1, request(7, None))
    assert followed.missed(0, context([text + [1] * 14, [2] * 8], slots=[0, 1]), 1) == 8, "nothing of the first"
    followed.begin(0, request(20, None))
    assert followed.missed(0, context([[5, 6]]), 1) == 2


def lost(made: Goodput, missed: int) -> float:
    """Runs an iteration; its draft of one level is right, and reads tokens first. Returns what it loses, in seconds."""
    is_asked = not made.allot(1).is_empty
    draft_s, emitted = LEVEL + missed * 0.05 if is_asked else 0.0, 1 + is_asked
    drafts = [(0, 1, draft_s, missed)] * is_asked
    told = record([step([9] * emitted, int(is_asked))], emitted, *drafts, verify=1 + TOKEN * is_asked)
    made.learn_step(told)
    made.begin_text()
    return told.seconds.total - emitted


def test_texts_are_not_read_where_reading_was_not_paid_off() -> None:
    """Each text is expected to be long, and ends after four iterations, which pay for a third of what was read."""
    made, losses = controller(), list[float]()
    for _ in range(400):
        made.expect(Unread({0: 150}, 100))
        losses.append(lost(made, 150))
        for _ in range(3):
            made.expect(Unread({0: 0 if losses[-1] > 1 else 150}, 8))
            losses[-1] += lost(made, 0 if losses[-1] > 1 else 150)
    num_read = sum(loss > 0.1 for loss in losses)
    assert 1 <= num_read < 10
    assert sum(losses) < CREDIT + 1600 * SHARE + 150 * 0.05
    assert not made._exploration.drafts.is_spent, "drafts themselves gain"


def test_an_output_that_ends_early_has_not_paid_for_what_was_read() -> None:
    made = controller()
    made.expect(Unread({0: 150}, 100))
    lost(made, 150)
    owed_s, amount = made._reading.owed_s, made._exploration.reading.amount
    assert owed_s == pytest.approx(150 * 0.05 * 0.98)
    made.end_text(98)
    assert made._reading.owed_s == pytest.approx(0.02 * owed_s, rel=0.1)
    assert made._exploration.reading.amount == pytest.approx(amount - owed_s, rel=0.1)
    made.end_text(0.0)


def test_a_try_counts_all_that_it_reads() -> None:
    """A drafter that is not expected to gain is not tried at the price of a text, however long the answer may be."""
    made = Goodput(
        CostCurve(range(1, 129), [1.0 * width for width in range(1, 129)]), nodes_by_depth=[range(1, 10)], max_nodes=16,
        timed=[[(1, 0.01), (4, 0.04)]], expected=[0.9],
    )  # fmt: skip
    made.expect(Unread({0: 1000}, 1e6))
    assert made.allot(1).is_empty
    made.begin_text()
    made.expect(Unread({0: 0}, 1e6))
    assert not made.allot(1).is_empty


def test_what_was_read_is_paid_by_the_tokens_to_come_that_are_not_copied() -> None:
    reading = Reading()
    reading.unread, reading.owed_s = Unread({}, 100), 10.0
    assert reading.pay(10) == pytest.approx(1.0)
    reading.unread = Unread({}, 45)
    for _ in range(1000):
        reading.saw(1, are_copied=True)
        reading.saw(1, are_copied=False)
    assert reading.share(5) == pytest.approx(5 / (45 / 2), rel=0.02)
    for _ in range(2000):
        reading.saw(5, are_copied=True)
    assert reading.share(5) == reading.share(500) == 1.0
    assert reading.pay(1) == pytest.approx(9.0)
    assert reading.owed_s == 0.0

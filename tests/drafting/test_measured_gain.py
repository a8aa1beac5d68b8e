"""Drafting against the clock: what it may lose, what looking at plain decoding costs, and who hears of what."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from foretoken.core.records import AskedDrafter, SequenceStep, StageSeconds, StepRecord
from foretoken.core.token_tree import TokenTree
from foretoken.drafting.base import Allotment, Allowance
from foretoken.drafting.measured_gain import MeasuredGain

World = Callable[[int, bool], tuple[float, int]]  # seconds and tokens of an iteration, drafted or not


class Always:
    """Asks for a draft in every iteration."""

    def __init__(self) -> None:
        self.num_allotted = self.num_learned = 0

    def allot(self, batch_size: int) -> Allotment:
        self.num_allotted += 1
        return Allotment(allowances=[Allowance(depth=4, nodes=5)] * batch_size)

    def further(self, trees: Any) -> None: ...

    def select(self, trees: Any, continued: Any = None) -> TokenTree:
        raise AssertionError("nobody asks here")

    def learn_step(self, record: StepRecord) -> None:
        self.num_learned += 1
        assert record.asked


def record(
    batch: int, seconds: float, tokens: int, *, is_drafted: bool, num_prompt_tokens: int = 0, width: int = 5
) -> StepRecord:
    step = SequenceStep(
        request_id="r", num_drafted=4 * is_drafted, tree_depth=4 * is_drafted, num_accepted=tokens - 1,
        num_emitted=tokens, accepted_by={},
    )  # fmt: skip
    return StepRecord(
        sequences=[step] * batch,
        num_tokens=batch * (width if is_drafted else 1),
        num_prompt_tokens=num_prompt_tokens,
        seconds=StageSeconds(draft=0.25 * seconds * is_drafted, verify=seconds * (0.75 if is_drafted else 1.0)),
        asked=[AskedDrafter(index=0, name="d", depth=4, seconds=0.25 * seconds)] if is_drafted else [],
    )


class Run:
    """Iterations that were made."""

    def __init__(self) -> None:
        self.inner = Always()
        self.controller = MeasuredGain(self.inner)
        self.drafted: list[bool] = []
        self.seconds = self.tokens = 0.0
        self.num_declined = self.num_looks = 0
        self.width = 5  # of passes with drafts

    def go_on(self, world: World, iterations: int, batches: Iterable[int] = ()) -> list[bool]:
        """Makes some more, and says which of them drafted."""
        sizes = iter(batches)
        before = len(self.drafted)
        for i in range(iterations):
            batch = next(sizes, 1)
            allotment = self.controller.allot(batch)
            is_drafted = max(allowance.depth for allowance in allotment.allowances) > 0
            assert len(allotment.allowances) == batch
            assert is_drafted != allotment.is_empty
            assert not is_drafted or allotment.declined is None
            self.num_declined += allotment.declined is not None
            self.num_looks += not is_drafted and allotment.declined is None
            seconds, tokens = world(i, is_drafted)
            self.drafted.append(is_drafted)
            self.seconds, self.tokens = self.seconds + seconds, self.tokens + tokens
            self.controller.learn_step(record(batch, seconds, tokens, is_drafted=is_drafted, width=self.width))
        assert self.inner.num_allotted == self.inner.num_learned == sum(self.drafted)
        return self.drafted[before:]


def steady(seconds: float, tokens: int) -> World:
    """Plain decoding takes one second a token, an iteration with a draft always the same."""
    return lambda _, is_drafted: (seconds, tokens) if is_drafted else (1.0, 1)


@pytest.mark.parametrize(("seconds", "tokens"), [(4.0, 3), (1.1, 1), (7.0, 2), (2.1, 2)])
def test_what_drafts_lose_is_bounded(seconds: float, tokens: int) -> None:
    run = Run()
    run.go_on(steady(seconds, tokens), 4000)
    # The first drafts, before plain decoding was seen, whatever they take; the credit; one iteration in a hundred.
    assert run.seconds - run.tokens <= 7 * (seconds - tokens) + 8 + seconds + 0.012 * 4000
    reason = run.controller.allot(1).declined
    assert reason is not None
    assert reason.width == 5
    assert reason.pass_cost == pytest.approx(0.75 * seconds)
    assert reason.draft_cost == pytest.approx(0.25 * seconds)
    assert reason.acceptance == (1.0 if tokens > 1 else 0.0)


def test_drafts_that_gain_hardly_pay_for_looking() -> None:
    much, little = Run(), Run()
    assert sum(much.go_on(steady(1.5, 4), 2000)) >= 2000 * 0.99
    assert sum(little.go_on(steady(1.5, 2), 2000)) >= 2000 * 0.96
    assert little.num_looks > much.num_looks > 2
    assert not little.num_declined
    assert not much.num_declined


def test_a_machine_that_slows_down_is_no_reason_to_give_up() -> None:
    """Everything takes five times as long from one iteration to the next; iterations without drafts are seen again."""
    run = Run()
    run.go_on(steady(1.5, 4), 300)
    run.go_on(lambda _, is_drafted: (7.5, 4) if is_drafted else (5.0, 1), 300)
    run.go_on(lambda i, is_drafted: (60.0 if i % 50 == 0 else 1.5, 4) if is_drafted else (1.0, 1), 300)  # interrupted
    assert not run.num_declined


def test_dear_drafts_are_made_seldom() -> None:
    """A debt is limited, as texts change: drafts that lose far more than is saved cost more than they account for."""
    run = Run()
    run.go_on(steady(20.0, 2), 4000)
    assert sum(run.drafted) < 20


def test_drafts_come_back_where_the_text_changes() -> None:
    run = Run()
    assert sum(run.go_on(steady(2.5, 1), 3000)) < 100
    later = run.go_on(steady(1.5, 4), 2000)
    change = next(i for i in range(2000) if sum(later[i : i + 50]) >= 45)
    assert change <= 1000


def test_numbers_of_sequences_are_told_apart() -> None:
    """A batch that grows and shrinks looks no more often than one that stays; more sequences take longer."""
    run = Run()
    sizes = [1 + i % 3 for i in range(3000)]
    drafted = run.go_on(
        lambda i, is_drafted: (sizes[i] * (1.5 if is_drafted else 1.0), 4 if is_drafted else 1), 3000, sizes
    )
    assert sum(drafted) >= 3000 * 0.98
    assert not run.num_declined
    assert run.num_looks >= 3
    short = Run()
    short.go_on(steady(1.5, 4), 40, [1 + i // 5 for i in range(40)])
    assert short.num_looks <= 3, "a few requests that come and go are hardly held up"


@pytest.mark.parametrize("slow", [0, 2, 9, 12])
def test_one_slow_draft_is_no_reason_to_give_up(slow: int) -> None:
    """Whenever it happens: it reads a prompt, compiles, or waits for another program."""
    run = Run()
    run.go_on(lambda i, is_drafted: (80.0 if i == slow else 1.5, 4) if is_drafted else (1.0, 1), 500)
    assert not run.num_declined


@pytest.mark.parametrize("slow", [1, 2])
def test_a_slow_look_is_not_believed(slow: int) -> None:
    """Drafts that lose are found out as soon as without it: of two looks the faster one counts."""
    run, num_looks = Run(), 0

    def world(_: int, is_drafted: bool) -> tuple[float, int]:
        nonlocal num_looks
        num_looks += not is_drafted
        return (1.3, 1) if is_drafted else (30.0 if num_looks == slow else 1.0, 1)

    assert sum(run.go_on(world, 1000)) < 80


@pytest.mark.parametrize("a_missed", [0.005, 0.02])
def test_drafters_that_catch_up_after_a_rest_are_given_time(a_missed: float) -> None:
    """The first draft reads what was missed: that is paid for, but drafts are not judged by it."""
    run, idle = Run(), 0

    def world(tokens: int) -> World:
        def made(_: int, is_drafted: bool) -> tuple[float, int]:
            nonlocal idle
            catch_up, idle = (a_missed * idle, 0) if is_drafted else (0.0, idle + 1)
            return (2.0 + catch_up, tokens) if is_drafted else (1.0, 1)

        return made

    losing = run.go_on(world(1), 6000)
    assert losing.count(True) < 200
    assert run.seconds - run.tokens <= 7 + 8 + 4 + 0.02 * 6000
    later = run.go_on(world(4), 2500)
    assert sum(later[-500:]) > 480


def test_looks_that_cannot_be_counted_are_put_off() -> None:
    """Half of all passes read prompts, and none of these shows what plain decoding takes."""
    controller, looks = MeasuredGain(Always()), list[int]()
    for i in range(100):
        allotment = controller.allot(1)
        if allotment.is_empty and allotment.declined is None:
            looks.append(i)
        is_drafted = allotment.allowances[0].depth > 0
        has_prompt = is_drafted == bool(i % 2)  # of the looks those whose number is even
        controller.learn_step(record(1, 1.5, 2, is_drafted=is_drafted, num_prompt_tokens=50 * has_prompt))
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(looks))
    assert 2 <= len(looks) < 12


@pytest.mark.parametrize("sizes", [[1] * 40 + [2] * 4000, [1, 2] * 2000, [1, 2, 3, 4] * 1000, [*range(1, 9)] * 500])
def test_every_number_of_sequences_is_measured_before_drafts_lose_much(sizes: list[int]) -> None:
    run = Run()
    run.go_on(steady(10.0, 1), len(sizes), sizes)
    assert sum(run.drafted) < 110


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_drafts_that_lose_beside_prompts_are_found_out(share: float) -> None:
    """Few iterations read no prompt, so that many looks cannot be counted."""
    controller, draw = MeasuredGain(Always()), random.Random(1)
    drafted = []
    for _ in range(12000):
        allotment = controller.allot(1)
        drafted.append(allotment.allowances[0].depth > 0)
        num_prompt_tokens = 50 * (draw.random() < share)
        seconds = 3.0 if drafted[-1] else 1.0
        controller.learn_step(record(1, seconds, 1, is_drafted=drafted[-1], num_prompt_tokens=num_prompt_tokens))
    assert sum(drafted) < 4000


def test_drafts_that_lose_now_and_then_are_found_out() -> None:
    """A lookup that finds something in one iteration of five, for less than it takes: the usual iteration is plain."""
    run = Run()
    run.go_on(lambda i, is_drafted: ((4.0, 2) if i % 5 == 0 else (1.0, 1)) if is_drafted else (1.0, 1), 6000)
    assert sum(run.drafted) < 1500


@pytest.mark.parametrize("sizes", [([1] * 100 + [8] * 100) * 20, [1] * 100 + [8] * 200 + [1, 8] * 1900])
def test_losses_over_many_sequences_do_not_end_drafting_over_one(sizes: list[int]) -> None:
    run = Run()
    gaining, losing = (1.5, 4), (10.0, 1)
    drafted = run.go_on(
        lambda i, is_drafted: (gaining if sizes[i] == 1 else losing) if is_drafted else (1.0, 1), len(sizes), sizes
    )
    assert sum(drafted[i] for i in range(len(sizes)) if sizes[i] == 1) > 0.95 * 2000
    assert sum(drafted[i] for i in range(len(sizes)) if sizes[i] == 8) < 0.05 * 2000


@pytest.mark.parametrize("moment", range(0, 40, 3))
def test_a_rest_ends_as_soon_as_plain_decoding_turns_out_to_be_slower(moment: int) -> None:
    """Contexts become longer: drafts are held against iterations of shorter ones until others are seen."""
    run = Run()
    run.go_on(steady(1.5, 2), 300 + moment)
    later = run.go_on(lambda _, is_drafted: (6.0, 2) if is_drafted else (4.0, 1), 400)
    assert sum(later) > 360


@pytest.mark.parametrize(("seconds", "every"), [(3.0, 8), (4.0, 12), (8.0, 20), (8.0, 10)])
def test_drafts_that_seldom_lose_much_are_found_out(seconds: float, every: int) -> None:
    """Hits are dear and bring a token each: seconds of one count beside those of others, not of misses."""
    run, hit = Run(), (seconds, 2)

    def world(i: int, is_drafted: bool) -> tuple[float, int]:
        run.width = 9 if is_drafted and i % every == 0 else 2
        return (hit if run.width == 9 else (1.02, 1)) if is_drafted else (1.0, 1)

    run.go_on(world, 10000)
    assert run.seconds / run.tokens < 1.03


def test_a_rest_ends_while_prompts_are_read() -> None:
    run = Run()
    run.go_on(steady(3.0, 1), 200)
    for _ in range(800):
        is_drafted = run.controller.allot(1).allowances[0].depth > 0
        run.controller.learn_step(record(1, 1.0, 1, is_drafted=is_drafted, num_prompt_tokens=50))
    assert is_drafted


def test_any_number_of_sequences_costs_few_looks() -> None:
    run, sizes = Run(), random.Random(3).choices(range(1, 65), k=4000)
    run.go_on(steady(1.5, 4), 4000, sizes)
    assert run.num_looks <= 3 + 4000 / 32
    losing = Run()
    losing.go_on(steady(1.5, 1), 12000, random.Random(3).choices(range(1, 65), k=12000))
    assert sum(losing.drafted) < 2000


def test_the_reason_is_that_of_the_drafts_that_lost() -> None:
    run = Run()
    run.go_on(steady(2.5, 1), 200)
    reason = run.controller.allot(1).declined
    assert reason is not None
    assert (reason.width, reason.acceptance, reason.hit_rate) == (5, 0.0, 1.0)


def test_passes_that_read_prompts_say_nothing() -> None:
    controller = MeasuredGain(Always())
    for _ in range(200):
        allotment = controller.allot(1)
        assert allotment.allowances[0].depth == 4
        controller.learn_step(record(1, 100.0, 1, is_drafted=True, num_prompt_tokens=50))


def test_what_plain_decoding_takes_is_told_once_it_was_measured() -> None:
    controller = MeasuredGain(Always())
    told = []
    for _ in range(40):
        allotment = controller.allot(2)
        is_drafted = not allotment.is_empty
        controller.learn_step(record(2, 3.0 if is_drafted else 2.0, 4 if is_drafted else 1, is_drafted=is_drafted))
        told.append(controller.plain_seconds(2))
    assert told[0] is None
    assert told[-1] == 2.0
    assert controller.plain_seconds(1) is None

"""What was proposed stays known when less of it is verified, and for which reason."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from drafters.drafting_contexts import GREEDY, context, handle
from tiny_models import VOCAB_SIZE

from foretoken import SamplingParams
from foretoken.core.records import Declined, StageSeconds, StepRecord
from foretoken.core.token_tree import MAX_NODES, PROBE, TokenTree, TreeRow
from foretoken.drafters.base import DraftContext, DraftRequest, TargetReads
from foretoken.drafters.registry import drafter_options
from foretoken.drafting.base import Allotment, Controller, Fixed
from foretoken.drafting.choice import choose_controller, most_nodes
from foretoken.drafting.drafting import Draft, Drafting
from foretoken.drafting.goodput import Goodput
from foretoken.runner.costs import CostCurve
from foretoken.sampling.noise import Purpose

TREE = TokenTree.from_rows([TreeRow([7, 1, 2, 3], [-1, 0, 0, 1]), TreeRow([9, 4], [-1, 0])])
UNKNOWN = replace(TREE, host_facts=None)
PROBES = torch.tensor([[0, 0, PROBE, 0], [0, 0, 0, 0]])
Change = Callable[[TokenTree], Any]


class Proposer:
    """Proposes one tree, or what a function makes of it."""

    name, reads, nodes_by_depth = "proposer", TargetReads(), [1, 3, 4]

    def __init__(self, change: Change) -> None:
        self._change = change

    def propose(self, context: DraftContext) -> TokenTree:
        tree: TokenTree = self._change(TREE)
        return tree


class Declining(Fixed):
    """Asks for nothing."""

    def allot(self, batch_size: int, num_prompt_tokens: int = 0) -> Allotment:
        declined = Declined(width=2, pass_cost=2.0, draft_cost=0.1, acceptance=0.1, hit_rate=1.0)
        return Allotment.nothing(batch_size, declined)


def drafting_of(drafters: list[Any], controller: Controller, **options: Any) -> Drafting:
    """The drafters and their controller, with room for 16 nodes."""
    values = {"vocab_size": VOCAB_SIZE, "max_nodes": 16, "device": torch.device("cpu"), **options}
    return Drafting(drafters, controller, **values)


def draft(*changes: Change, controller: Controller | None = None, max_depth: tuple[int, int] = (8, 8)) -> Draft:
    """What drafters that propose the tree, each changed, come to."""
    controller = controller or Fixed(max_nodes=16)
    drafters: list[Any] = [Proposer(change) for change in changes]
    drafting = drafting_of(drafters, controller)
    return drafting.propose(context([[5, 7], [5, 9]], max_depth=max_depth))


def num_verified(made: Draft) -> list[int]:
    """Nodes of each tree that can be accepted."""
    counts: list[int] = (made.tree.without_probes().parents >= 0).sum(1).tolist()
    return counts


@pytest.mark.parametrize(
    ("change", "proposed", "verified"),
    [
        (lambda t: t, [3, 1], [3, 1]),
        (lambda t: UNKNOWN, [3, 1], [3, 1]),
        (lambda t: replace(UNKNOWN, tokens=t.tokens + (t.tokens == 2) * VOCAB_SIZE), [3, 1], [2, 1]),
        (lambda t: replace(UNKNOWN, source=PROBES), [2, 1], [2, 1]),
        (lambda t: replace(t, source=PROBES), [None, None], [2, 1]),
        (lambda t: replace(UNKNOWN, depths=t.depths * 2), [0, 0], [0, 0]),
        (lambda t: 1 / 0, [0, 0], [0, 0]),
        (lambda t: TokenTree.roots([7, 9]), [0, 0], [0, 0]),
    ],
    ids=["host facts", "no host facts", "token cut", "probes", "probes and host facts", "dropped", "raised", "nothing"],
)
def test_one_drafter(change: Change, proposed: list[int | None], verified: list[int]) -> None:
    made = draft(change)
    assert (made.num_proposed, num_verified(made)) == (proposed, verified)


def test_nodes_that_are_too_deep_were_proposed() -> None:
    made = draft(lambda t: t, max_depth=(1, 0))
    assert made.num_proposed == [3, None]  # the second was not asked for: one token of its own is all it has room for
    assert num_verified(made) == [2, 0]


def test_nodes_that_do_not_pay_were_proposed() -> None:
    dear = CostCurve((1, 64), (1.0, 64.0))
    made = draft(lambda t: t, controller=Goodput(dear, nodes_by_depth=[[1, 3, 4]], max_nodes=16))
    assert (made.num_proposed, num_verified(made)) == ([3, 1], [0, 0])


def test_nodes_beside_a_chain_count_for_the_bound_of_a_request() -> None:
    """A chain of two has three nodes, and candidates beside it make more."""

    class Beside(Proposer):
        nodes_by_depth = (1, 2, 3, 4)

    drafting = drafting_of([Beside(lambda t: t)], Fixed(max_nodes=16))
    made = drafting.propose(context([[5, 7], [5, 9]], max_nodes=3))
    assert num_verified(made) == [2, 1]


def test_each_drafter_counts() -> None:
    """Also where the nodes are the same, and not where a tree was dropped."""
    made = draft(lambda t: t, lambda t: UNKNOWN, lambda t: None)
    assert (made.num_proposed, num_verified(made)) == ([6, 2], [3, 1])
    assert made.error is not None


@pytest.mark.parametrize(("controller", "max_depth"), [(Declining(16), (8, 8)), (Fixed(16), (0, 0))])
def test_who_was_not_asked_proposed_nothing_that_is_known(controller: Controller, max_depth: tuple[int, int]) -> None:
    made = draft(lambda t: t, controller=controller, max_depth=max_depth)
    assert made.num_proposed == [None, None]
    assert (made.declined is not None) == isinstance(controller, Declining)


@pytest.mark.parametrize("fixed", [{"num_speculative_tokens": 2}, {"tree": [[0], [0, 0]]}])
def test_no_drafter_of_fixed_size_crowds_out_another(fixed: dict[str, Any]) -> None:
    """Whole drafts are verified, probes of the one listed last among them."""
    changes: list[Change] = [
        lambda t: t,
        lambda t: replace(UNKNOWN, tokens=t.tokens + 20 * (t.depths > 0)),
        lambda t: replace(UNKNOWN, tokens=t.tokens + 40 * (t.depths > 0), source=PROBES + 1),
    ]
    drafters: list[Any] = [Proposer(change) for change in changes]
    options = [drafter_options({"method": "ngram", **keys}) for keys in (fixed, {}, {})]
    most = most_nodes(drafters)
    drafting = drafting_of(drafters, choose_controller(options, drafters, handle()), max_nodes=most)
    tree = drafting.propose(context([[5, 7], [5, 9]])).tree
    assert (tree.parents >= 0).sum(1).tolist() == [9, 3]
    assert tree.width <= most == 1 + 3 * 3


def test_there_is_room_for_what_is_never_left_out() -> None:
    """Drawn nodes and probes are verified whatever else is selected, so that rows of the cache must not run short."""
    drafters: list[Any] = [Proposer(lambda t: t) for _ in range(3)]
    for drafter, nodes in zip(drafters, (100, 64, 20), strict=True):
        drafter.nodes_by_depth = (1, nodes)
    assert most_nodes(drafters) == 182
    drafters[0].nodes_by_depth = (1, 512)
    assert most_nodes(drafters) == MAX_NODES
    assert most_nodes([]) == 1


def test_the_controller_hears_of_prompts_in_the_pass() -> None:
    """And of what came of such a pass."""
    drafters: list[Any] = [Proposer(lambda tree: tree)]
    controller = mock.Mock(wraps=Fixed(max_nodes=16))
    drafting = drafting_of(drafters, controller)
    made = drafting.propose(context([[5, 7], [5, 9]]), 9)
    assert controller.allot.call_args.args == (2, 9)
    drafting.learn_step(made, StepRecord(sequences=(), num_tokens=2, num_prompt_tokens=9, seconds=StageSeconds()))
    controller.learn_step.assert_called_once()


class Scripted(Declining):
    """Drafts in the iterations that a script names; counts what it is asked for and what it learns from."""

    def __init__(self, script: str) -> None:
        super().__init__(max_nodes=16)
        self._script, self.num_learned = iter(script), 0

    def allot(self, batch_size: int, num_prompt_tokens: int = 0) -> Allotment:
        kind = next(self._script)
        return super().allot(batch_size) if kind == "-" else Fixed(max_nodes=16).allot(batch_size)

    def learn_step(self, record: StepRecord) -> None:
        self.num_learned += 1


def test_the_first_draft_after_missed_iterations_waits_for_one_commit() -> None:
    """The controller is asked once for the draft, and learns nothing from the iteration in between."""
    drafter: Any = Proposer(lambda tree: tree)
    drafter.reads = TargetReads(is_last_enough=True)
    controller = Scripted("d-ddd--d")
    drafting = drafting_of([drafter], controller)
    nothing = StepRecord(sequences=(), num_tokens=2, seconds=StageSeconds())
    made = [drafting.propose(context([[5, 7], [5, 9]])) for _ in range(3)]
    told = [(bool(each.asked), each.is_committed, each.is_learned) for each in made]
    draft, declined, waiting = (True, True, True), (False, False, True), (False, True, False)
    for _ in range(7):
        made.append(drafting.propose(context([[5, 7], [5, 9]])))
        drafting.learn_step(made[-1], nothing)
    told += [(bool(each.asked), each.is_committed, each.is_learned) for each in made[3:]]
    assert told == [draft, declined, waiting, draft, draft, draft, declined, declined, waiting, draft]
    assert controller.num_learned == 6


def test_a_draft_that_waits_is_bounded_anew_for_another_batch() -> None:
    drafter: Any = Proposer(lambda tree: tree)
    drafter.reads = TargetReads(is_last_enough=True)
    controller = Scripted("-dd")
    drafting = drafting_of([drafter], controller)
    assert not drafting.propose(context([[5, 7], [5, 9]])).is_committed
    assert drafting.propose(context([[5, 7]])).is_committed
    assert drafting.propose(context([[5, 7], [5, 9]])).asked
    with pytest.raises(StopIteration):
        controller.allot(1)


def test_a_draft_that_waits_is_its_own_controllers() -> None:
    """A request with a prediction hands over to another controller, which allots its own drafts."""
    drafters: list[Any] = [Proposer(lambda tree: tree), Proposer(lambda tree: tree)]
    for drafter in drafters:
        drafter.reads = TargetReads(is_last_enough=True)
        drafter.begin = drafter.release = mock.Mock()
    usual, predicting = Scripted("-d"), Scripted("d")
    drafting = drafting_of(drafters, usual, for_predictions=predicting)
    asked = context([[5, 7], [5, 9]])
    assert [drafting.propose(asked).is_committed for _ in range(2)] == [False, True]
    drafting.begin(1, replace(DraftRequest(request_id="r", prompt=[5], params=GREEDY), prediction=[1, 2]))
    assert [each.drafter for each in drafting.propose(asked).asked] == [0, 1]
    with pytest.raises(StopIteration):
        predicting.allot(2)


def test_drafters_hear_of_an_iteration_before_a_prediction_has_them_asked() -> None:
    """While drafting rests drafters miss iterations; a request with a prediction hands over to another controller."""
    drafters: list[Any] = [Proposer(lambda t: t), Proposer(lambda t: replace(t, tokens=t.tokens + 20 * (t.depths > 0)))]
    for drafter in drafters:
        drafter.reads = TargetReads(is_last_enough=True)
        drafter.begin = drafter.release = mock.Mock()
    drafting = drafting_of(drafters, Declining(max_nodes=16), for_predictions=Fixed(max_nodes=16))
    asked = context([[5, 7], [5, 9]])
    assert not drafting.propose(asked).is_committed
    drafting.begin(1, replace(DraftRequest(request_id="r", prompt=[5], params=GREEDY), prediction=[1, 2]))
    first, second = drafting.propose(asked), drafting.propose(asked)
    assert (first.asked, first.is_committed, num_verified(first)) == ((), True, [0, 0])
    assert [(each.drafter, each.depth) for each in second.asked] == [(0, 2), (1, 2)]
    assert num_verified(second) == [6, 2]
    assert drafting.are_merged
    drafting.release(1)
    third = drafting.propose(asked)
    assert (third.asked, third.is_committed, drafting.are_merged) == ((), False, False)


class Seen:
    """A drafter that draws one token of equal probabilities for each sequence, and nothing else."""

    name, reads, nodes_by_depth = "seen", TargetReads(), (1, 2)

    def propose(self, context: DraftContext) -> TokenTree:
        positions = torch.tensor([len(tokens) for tokens in context.tokens])
        self.drawn = context.sampling.noise.gumbel(positions, Purpose.DRAFT, VOCAB_SIZE).argmax(1).tolist()
        return TokenTree.roots(context.roots)


def drawn(num_drafters: int, seeds: range, *, is_coupled: bool) -> list[list[int]]:
    drafters = [Seen() for _ in range(num_drafters)]
    made = drafting_of(drafters, Fixed(64, [2] * num_drafters), max_nodes=64)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds]
    made.propose(context([[5, 6]] * len(params), params=params, is_coupled=[is_coupled] * len(params)))
    return [drafter.drawn for drafter in drafters]


def test_drafters_draw_independently_of_each_other() -> None:
    seeds = range(200)
    first, second, third = drawn(3, seeds, is_coupled=False)
    for one, other in ((first, second), (second, third), (first, third)):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 20, "about one in 67 agree by chance"
    assert drawn(1, seeds, is_coupled=False) == [first], "the first one has the request's own noise"


def test_coupled_requests_share_the_targets_noise() -> None:
    first, second = drawn(2, range(50), is_coupled=True)
    assert first == second

"""Whatever a drafter does, a legal tree over the right roots comes out, and the text is plain decoding's."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from end_to_end.request_mix import CONTEXT_LEN, plain_mix, request_mix
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_llms import llm
from tiny_models import VOCAB_SIZE

from foretoken import SamplingParams
from foretoken.core.token_tree import DraftDistributions, DrawKind, TokenTree, TreeRow
from foretoken.drafters.base import DraftContext, TargetReads
from foretoken.drafting.draft_guard import cut_invalid_nodes, find_fault

ROOTS = [7, 9]


def good_tree() -> TokenTree:
    """Two different trees over the roots, about which nothing is guaranteed."""
    tree = TokenTree.from_rows([TreeRow([7, 1, 2, 3], [-1, 0, 0, 1]), TreeRow([9, 4], [-1, 0])])
    return replace(tree, host_facts=None)


def good_distribution(**changes: Any) -> DraftDistributions:
    """A distribution under which `good_tree` may have been drawn."""
    fields: dict[str, Any] = {
        "kinds": torch.full((2, 4), int(DrawKind.WITHOUT_REPLACEMENT)),
        "rows": torch.full((2, 1, VOCAB_SIZE), 1 / VOCAB_SIZE),
        "row_of": torch.zeros(2, 4, dtype=torch.int64),
        "max_siblings": 2,
    }
    return DraftDistributions(**{**fields, **changes})


FAULTS: dict[str, Callable[[TokenTree], TokenTree]] = {
    "wrong root": lambda t: replace(t, tokens=t.tokens + 1),
    "num_nodes": lambda t: replace(t, num_nodes=t.num_nodes * 0),
    "num_nodes outside": lambda t: replace(t, num_nodes=t.num_nodes + 9),
    "num_nodes of shape": lambda t: replace(t, num_nodes=t.num_nodes[:1]),
    "parents that": lambda t: replace(t, parents=torch.tensor([[-1, 0, 3, 1], [-1, 0, -1, -1]])),
    "parents that do": lambda t: replace(t, parents=torch.tensor([[-1, 0, -2, 1], [-1, 0, -1, -1]])),
    "parents that do not": lambda t: replace(t, parents=torch.tensor([[-1, 0, 0, 1], [-1, 0, -1, 0]])),
    "parents of shape": lambda t: replace(t, parents=t.parents[:, :3]),
    "wrong depths": lambda t: replace(t, depths=t.depths + (t.depths > 0)),
    "depths of type": lambda t: replace(t, depths=t.depths.float()),
    "tokens of type": lambda t: replace(t, tokens=t.tokens.double()),
    "max_depth 1": lambda t: replace(t, tokens=t.tokens[:, :1], parents=t.parents[:, :1], depths=t.depths[:, :1],
                                     num_nodes=t.num_nodes * 0 + 1, max_depth=1),
    "max_depth too small": lambda t: replace(t, max_depth=1),
    "max_depth 2.0": lambda t: replace(t, max_depth=2.0),
    "max_depth True": lambda t: replace(t, max_depth=True),
    "max_depth of type Tensor": lambda t: replace(t, max_depth=torch.tensor(2)),
    "tokens [[7, 1, 2, 3], [9, 4, 0, 0]]; expected a tensor": lambda t: replace(t, tokens=t.tokens.tolist()),
    "num_nodes None; expected a tensor": lambda t: replace(t, num_nodes=None),
    "propose returned None": lambda t: None,
    "propose returned [of type TreeRow, of type TreeRow]": lambda t: t.rows(),
    "dense": lambda t: replace(t, tokens=t.tokens.to_sparse()),
    "max_depth 1000000000": lambda t: replace(t, max_depth=10**9),
    "at most 8": lambda t: TokenTree.from_rows([TreeRow([7] * 9, [-1, *range(8)]), TreeRow([9], [-1])]),
    "expected (2": lambda t: t.select(torch.tensor([0])),
    "tree of shape (4,)": lambda t: replace(t, tokens=t.tokens[0]),
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_faults_are_found_and_named(message: str) -> None:
    assert find_fault(good_tree(), ROOTS, 8).fault is None
    assert message in str(find_fault(FAULTS[message](good_tree()), ROOTS, 8).fault)


def test_trees_on_another_device_are_refused() -> None:
    assert "expected int64 on meta" in str(find_fault(good_tree(), ROOTS, 8, torch.device("meta")).fault)
    assert find_fault(good_tree(), ROOTS, 8, torch.device("cpu")).fault is None


def test_nodes_that_cannot_be_accepted_are_cut_with_their_subtree() -> None:
    tree = replace(good_tree(), tokens=torch.tensor([[7, VOCAB_SIZE, 2, 3], [9, -1, 0, 0]]))
    legal = cut_invalid_nodes(tree, VOCAB_SIZE, [2, 2])
    assert legal.parents.tolist() == [[-1, -1, 0, 1], [-1, -1, -1, -1]]  # node 3 hangs on a node that nothing reaches
    assert legal.tokens.min() >= 0
    assert legal.tokens.max() < VOCAB_SIZE
    shallow = cut_invalid_nodes(good_tree(), VOCAB_SIZE, [1, 0])
    assert shallow.parents.tolist() == [[-1, 0, 0, -1], [-1, -1, -1, -1]]


LIES: dict[str, dict[str, Any]] = {
    "NaN": {"rows": torch.full((2, 1, VOCAB_SIZE), float("nan"))},
    "negative": {"rows": torch.tensor([-1.0, 2.0] + [0.0] * (VOCAB_SIZE - 2)).expand(2, 1, -1)},
    "sum": {"rows": torch.full((2, 1, VOCAB_SIZE), 0.5)},
    "token was impossible": {"rows": torch.eye(VOCAB_SIZE)[:1].expand(2, 1, -1)},
    "vocabulary": {"rows": torch.full((2, 1, VOCAB_SIZE - 1), 1 / (VOCAB_SIZE - 1))},
    "no such row": {"row_of": torch.ones(2, 4, dtype=torch.int64)},
    "no row": {"row_of": torch.full((2, 4), -1)},
    "siblings": {"max_siblings": 1},
    "absurd siblings": {"max_siblings": 10**9},
    "kinds": {"kinds": torch.full((2, 4), 7)},
    "shape of kinds": {"kinds": torch.ones(2, 3, dtype=torch.int64)},
    "shape of row_of": {"row_of": torch.zeros(1, 4, dtype=torch.int64)},
    "batch of rows": {"rows": torch.full((1, 1, VOCAB_SIZE), 1 / VOCAB_SIZE)},
    "float siblings": {"max_siblings": 2.0},
    "true siblings": {"max_siblings": True},
    "no tensors": {"kinds": [[2] * 4] * 2},
    "float kinds": {"kinds": torch.full((2, 4), 2.0)},
    "float row_of": {"row_of": torch.zeros(2, 4)},
    "complex rows": {"rows": torch.full((2, 1, VOCAB_SIZE), 1 / VOCAB_SIZE, dtype=torch.complex64)},
    "flat rows": {"rows": torch.full((2, VOCAB_SIZE), 1 / VOCAB_SIZE)},
}


@pytest.mark.parametrize("lie", LIES)
def test_distributions_that_cannot_be_true_are_dropped(lie: str) -> None:
    """Without a distribution every node counts as one-hot, which is lossless for any token."""
    assert (
        cut_invalid_nodes(replace(good_tree(), distributions=good_distribution()), VOCAB_SIZE, [2, 2]).distributions
        is not None
    )
    legal = cut_invalid_nodes(replace(good_tree(), distributions=good_distribution(**LIES[lie])), VOCAB_SIZE, [2, 2])
    assert legal.distributions is None
    assert torch.equal(legal.tokens, good_tree().tokens)


def test_scores_of_another_shape_are_dropped() -> None:
    """They would break the selection of rows when requests of one batch follow different rules."""
    legal = cut_invalid_nodes(
        replace(good_tree(), scores=torch.zeros(3), source=good_tree().tokens), VOCAB_SIZE, [2, 2]
    )
    assert legal.scores is None
    assert legal.source is not None


class RubbishDrafter:
    """Every other proposal lies about a tree; the ones between are legal, so that it is never switched off."""

    name, reads, nodes_by_depth = "rubbish", TargetReads(), (1, 8)

    def __init__(self) -> None:
        self.calls = 0

    def attach(self, target: Any) -> None: ...

    def begin(self, slot: int, request: Any) -> None: ...

    def propose(self, context: DraftContext) -> TokenTree:
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        rows = [TreeRow([root, 3, 4, 5, 6, 7], [-1, 0, 0, 1, 2, 3]) for root in context.roots]
        tree = TokenTree.from_rows(rows)
        if self.calls % 2:
            return tree
        batch, distribution = len(rows), good_distribution()
        changes: list[dict[str, Any]] = [
            {"tokens": tree.tokens[0]},
            {"num_nodes": tree.num_nodes + 4},
            {"scores": torch.zeros(1)},
            {"max_depth": 7},
            {"distributions": distribution},
            {
                "distributions": replace(
                    distribution, kinds=tree.parents, row_of=tree.parents, rows=torch.rand(batch, 3, VOCAB_SIZE)
                )
            },
            {"distributions": replace(distribution, rows=torch.zeros(0))},
            {"tokens": torch.randint(-9, 99, tree.tokens.shape, generator=generator)},
            {"parents": torch.randint(-2, 7, tree.tokens.shape, generator=generator)},
            {"depths": torch.randint(-2, 7, tree.tokens.shape, generator=generator)},
            {"tokens": tree.tokens.to("meta")},
            {"num_nodes": None},
        ]
        return replace(tree, host_facts=None, **changes[self.calls // 2 % len(changes)])

    def commit(self, committed: object) -> None: ...

    def release(self, slot: int) -> None: ...


@pytest.mark.parametrize(("batch", "is_trusted", "every"), [(1, True, 4), (5, False, 1)])
def test_rubbish_costs_no_text(batch: int, is_trusted: bool, every: int) -> None:
    """Trees without a guarantee are checked wherever they come from; `every`: requests of the mix that are made."""
    mix, plain = request_mix()[::every], plain_mix()[::every]
    engine = llm(
        {"drafter": RubbishDrafter}, trust_drafter=is_trusted, max_num_seqs=batch,
        max_model_len=CONTEXT_LEN,
    )  # fmt: skip
    got = engine.generate([r.prompt for r in mix], [r.params for r in mix])
    assert_same_text(got, plain, [r.name for r in mix])
    assert sum(output.metrics.draft_errors for output in got) > 20 / every


@pytest.mark.parametrize("call", ["propose", "commit", "release"])
def test_a_drafter_that_keeps_failing_is_switched_off_once(call: str, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(RubbishDrafter):
        failures = 0

    def fail(self: Failing, _: object) -> None:
        self.failures += 1
        raise OSError("no weights left")

    setattr(Failing, call, fail)
    drafter = Failing()
    engine = llm({"drafter": lambda: drafter}, max_num_seqs=2)
    with caplog.at_level(logging.WARNING, "foretoken"):
        outputs = engine.generate([[5]] * 12, SamplingParams(temperature=0.0, max_tokens=8))
    assert drafter.failures == 5
    warnings = [r.getMessage() for r in caplog.records if "switched off" in r.getMessage()]
    assert len(warnings) == 1
    assert "rubbish" in warnings[0]
    assert "OSError: no weights left" in warnings[0]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert engine.generate([5], SamplingParams(temperature=0.0, max_tokens=8))[0].metrics.num_drafted == 0


def test_failures_with_successes_between_are_forgiven() -> None:
    """Only failures in a row say that a drafter is broken."""
    drafter = RubbishDrafter()
    engine = llm({"drafter": lambda: drafter})
    metrics = engine.generate([5], SamplingParams(temperature=0.0, max_tokens=80))[0].metrics
    assert metrics.draft_errors > 10
    assert drafter.calls > 60


class UnprintableError(Exception):
    """As bindings to other languages may raise."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize("call", ["propose", "commit", "release"])
def test_errors_without_a_text_cost_no_request(call: str, is_trusted: bool, caplog: pytest.LogCaptureFixture) -> None:
    def fail(self: RubbishDrafter, _: object) -> None:
        raise UnprintableError

    drafter = type("Failing", (RubbishDrafter,), {call: fail})()
    engine = llm({"drafter": lambda: drafter}, trust_drafter=is_trusted, max_num_seqs=2)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = engine.generate([[5]] * 12, params)
    assert [o.outputs[0] for o in outputs] == [llm({}).generate([5], params)[0].outputs[0]] * 12
    assert "UnprintableError: its text cannot be shown, str() raised RuntimeError" in caplog.text


def test_the_first_failure_of_each_kind_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Failures with successes between them never switch a drafter off: without a word it would be slow for ever."""
    errors = [ValueError("odd"), None, OSError("no file"), ValueError("odd again"), None, None, "no tree", None]

    class Failing(RubbishDrafter):
        def propose(self, context: DraftContext) -> Any:
            self.calls += 1
            error = errors[self.calls % len(errors)]
            if isinstance(error, Exception):
                raise error
            return TokenTree.roots(context.roots) if error is None else error

    engine = llm({"drafter": Failing})
    with caplog.at_level(logging.DEBUG, "foretoken"):
        output = engine.generate([5], SamplingParams(temperature=0.0, max_tokens=33))[0]
    said = [
        (r.levelname, r.getMessage().rpartition("goes on: ")[2]) for r in caplog.records if "failed in" in r.message
    ]
    assert len(said) == output.metrics.draft_errors > 12
    warnings = [text for level, text in said if level == "WARNING"]
    assert warnings == [
        "OSError: no file", "ValueError: odd again", "TreeError: propose returned 'no tree'; expected a TokenTree",
    ]  # fmt: skip
    assert {level for level, _ in said} == {"WARNING", "DEBUG"}

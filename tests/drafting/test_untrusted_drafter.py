"""A drafter of the caller's can cost speed and nothing else, whatever it does and whatever it returns."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from end_to_end.tiny_llms import drafters, llm
from tiny_models import VOCAB_SIZE

from foretoken import LLM, SamplingParams
from foretoken.core.records import StepRecord
from foretoken.core.token_tree import DraftDistributions, DrawKind, TokenTree, TreeRow
from foretoken.drafters.base import Committed, DraftContext, DraftRequest, TargetHandle, TargetReads

PROMPTS = [[5, 6, 5, 6], [7, 8, 9], [9], [4, 4, 4]]
LONG: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=1, repetition_penalty=1.1, **LONG),
    SamplingParams(temperature=0.8, seed=1, top_k=9, bad_words=[[3, 4]], min_tokens=3, **LONG),
    SamplingParams(temperature=0.9, top_p=0.9, min_p=0.01, presence_penalty=0.1, logit_bias={6: 2.0}, **LONG),
    SamplingParams(temperature=1.0, frequency_penalty=0.2, **LONG),
]  # the last two have no seed


def outcomes(engine: LLM) -> list[Any]:
    """Tokens, text, reasons and errors of the requests; those without a seed get the same noise in every engine."""
    engine.shared.requests._seeds = random.Random(11)
    outputs = [output.outputs[0] for output in engine.generate(PROMPTS, PARAMS)]
    assert not engine._engine.has_work
    return [(o.token_ids, o.text, o.finish_reason, o.error) for o in outputs]


@cache
def plain() -> list[Any]:
    """What plain decoding gives."""
    return outcomes(llm({}, max_num_seqs=3))


class Honest:
    """Drafts what plain decoding writes, so that drafts are accepted and every part of an iteration runs."""

    name, reads, nodes_by_depth = "honest", TargetReads(taps=("final",), top_k=2), (1, 8)

    def __init__(self) -> None:
        self.texts = [[*prompt, *want[0]] for prompt, want in zip(PROMPTS, plain(), strict=True)]

    def attach(self, target: TargetHandle) -> None: ...

    def begin(self, slot: int, request: DraftRequest) -> None: ...

    def row(self, tokens: list[int], depth: int) -> TreeRow:
        """A chain after some tokens."""
        text = next((text for text in self.texts if text[: len(tokens)] == list(tokens)), list(tokens))
        chain = text[len(tokens) - 1 : len(tokens) + min(depth, 4)]
        return TreeRow(chain, list(range(-1, len(chain) - 1)))

    def propose(self, context: DraftContext) -> TokenTree:
        return TokenTree.from_rows([self.row(t, d) for t, d in zip(context.tokens, context.max_depth, strict=True)])

    def commit(self, committed: Committed) -> None: ...

    def release(self, slot: int) -> None: ...


def made_with(drafter: Any, **more: Any) -> LLM:
    """An engine with a drafter of the caller's."""
    return llm({"drafter": lambda: drafter}, max_num_seqs=3, **more)


def vandalise(thing: Any) -> int:
    """Changes everything that can be reached from a value in place; how many values were changed."""
    if isinstance(thing, torch.Tensor):
        thing.fill_(1)
        return 1
    if isinstance(thing, list):
        count = sum(map(vandalise, thing))
        thing[:] = [1 if isinstance(value, int) else value for value in thing]
        thing.append(3)
        return count + 1
    if isinstance(thing, tuple):
        return sum(map(vandalise, thing))
    if is_dataclass(thing):
        count = sum(vandalise(getattr(thing, field.name)) for field in fields(thing))
        for field in fields(thing):
            object.__setattr__(thing, field.name, None)
        return count + 1
    return 0


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_drafter_is_handed_is_its_own(is_late: bool) -> None:
    """Tokens, slots, parameters, processors, noise and features, changed in the call or in a later one."""

    class Vandal(Honest):
        def __init__(self) -> None:
            super().__init__()
            self.given: list[Any] = []
            self.changed = 0

        def take(self, given: Any) -> None:
            self.given.append(given)
            for kept in self.given[-9:-1] if is_late else self.given[-1:]:
                self.changed += vandalise(kept)

        def propose(self, context: DraftContext) -> TokenTree:
            tree = super().propose(context)
            self.take(context)
            return tree

        def commit(self, committed: Committed) -> None:
            assert committed.features is not None
            self.take(committed)

    drafter = Vandal()
    assert outcomes(made_with(drafter)) == plain()
    assert drafter.changed > 100


def test_predictions_that_are_changed_are_copies() -> None:
    """Completions of one request share what it brought; each hears of it as it was."""
    heard: list[list[int]] = []

    class Vandal(Honest):
        def begin(self, slot: int, request: DraftRequest) -> None:
            heard.append(list(request.prediction or ()))
            assert vandalise(request) > len(request_fields)

    request_fields = fields(DraftRequest)
    prompt = {"prompt_token_ids": [5, 6], "prediction": [7, 8, 9], "cache_salt": "mine"}
    made_with(Vandal()).generate(prompt, SamplingParams(temperature=0.0, max_tokens=3, n=3))
    assert heard == [[7, 8, 9]] * 3


def test_tokens_are_accepted_from_such_a_drafter() -> None:
    """Without this the tests here would say nothing."""
    records: list[StepRecord] = []
    assert outcomes(made_with(Honest(), on_step=records.append)) == plain()
    steps = [step for record in records for step in record.sequences]
    assert sum(step.num_accepted for step in steps) > 2 * len(steps)
    assert all(record.draft_error is None for record in records)


class Panic(BaseException):
    """As Rust's, which are no `Exception`."""


ERRORS = [SystemExit, GeneratorExit, asyncio.CancelledError, StopIteration, Panic]


@pytest.mark.parametrize("method", ["begin", "propose", "commit", "release"])
def test_whatever_is_raised_ends_no_request(method: str) -> None:
    """Every call raises the next error; after one of each the drafter is switched off."""
    raised: list[type[BaseException]] = []

    class Raising(Honest): ...

    def fail(*_: Any) -> None:
        raised.append(ERRORS[len(raised)])
        raise raised[-1]("of its own")

    setattr(Raising, method, fail)
    engine = made_with(Raising())
    assert outcomes(engine) == plain()
    assert outcomes(engine) == plain()
    assert raised == ERRORS


@pytest.mark.parametrize("method", ["begin", "propose", "commit"])
def test_an_interrupt_passes(method: str) -> None:
    class Interrupted(Honest): ...

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    setattr(Interrupted, method, fail)
    with pytest.raises(KeyboardInterrupt):
        outcomes(made_with(Interrupted()))


def in_place(tree: TokenTree, name: str, row: int, node: int, value: int) -> TokenTree:
    """A tree of which one number was changed in place after the guarantee."""
    getattr(tree, name)[row, min(node, tree.width - 1)] = value
    return tree


class Sly(TokenTree):
    """A tree that says something else each time it is asked."""

    @property
    def width(self) -> int:
        return random.Random().randrange(9)


class Tensors(torch.Tensor):
    """A tensor that answers every operation itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            torch.ones(())
            if func.__name__ in ("any", "eq", "ne")
            else super().__torch_function__(func, types, args, kwargs)
        )


def lying_distribution(tree: TokenTree, kind: DrawKind = DrawKind.INDEPENDENT) -> TokenTree:
    """A tree whose chosen tokens are said to be drawn from an even distribution."""
    rows = torch.full((tree.batch_size, 1, VOCAB_SIZE), 1 / VOCAB_SIZE)
    kinds = torch.full_like(tree.tokens, kind.value)
    distribution = DraftDistributions(
        kinds=kinds, rows=rows, row_of=torch.zeros_like(kinds), max_siblings=max(1, tree.width - 1)
    )
    return replace(tree, distributions=distribution)


TREES: dict[str, Callable[[TokenTree], Any]] = {
    "tokens changed after the guarantee": lambda t: in_place(t, "tokens", 0, 1, 3),
    "token outside the vocabulary, guaranteed": lambda t: in_place(t, "tokens", 0, 1, 10**6),
    "negative token, guaranteed": lambda t: in_place(t, "tokens", 0, 2, -9),
    "root changed, guaranteed": lambda t: in_place(t, "tokens", 0, 0, 3),
    "cycle, guaranteed": lambda t: in_place(t, "parents", 0, 1, 1),
    "parent outside, guaranteed": lambda t: in_place(t, "parents", 0, 1, 77),
    "root with a parent, guaranteed": lambda t: in_place(t, "parents", 0, 0, 0),
    "wrong depth, guaranteed": lambda t: in_place(t, "depths", 0, 1, 5),
    "greater depth than there is, guaranteed": lambda t: replace(t, max_depth=10**9),
    "no depth, guaranteed": lambda t: replace(t, max_depth=0),
    "negative depth, guaranteed": lambda t: replace(t, max_depth=-1),
    "too many nodes, guaranteed": lambda t: replace(t, num_nodes=t.num_nodes + 7),
    "depths of a lie": lambda t: replace(t, host_facts=t.host_facts._replace(depths=[0] * t.batch_size, num_tokens=1)),
    "another batch, guaranteed": lambda t: replace(t, tokens=t.tokens[:, :1].expand(-1, t.width).contiguous()),
    "distribution of a lie": lying_distribution,
    "distribution of a lie, without replacement": lambda t: lying_distribution(t, DrawKind.WITHOUT_REPLACEMENT),
    "distribution of nonsense": lambda t: replace(t, distributions="uniform"),
    "float depth": lambda t: replace(t, max_depth=float(t.max_depth)),
    "depth that is a truth": lambda t: replace(t, max_depth=True),
    "depth as a tensor": lambda t: replace(t, max_depth=torch.tensor(t.max_depth)),
    "lists": lambda t: replace(t, tokens=t.tokens.tolist()),
    "numpy": lambda t: replace(t, parents=t.parents.numpy()),
    "nothing for a tensor": lambda t: replace(t, depths=None),
    "floats": lambda t: replace(t, tokens=t.tokens.float()),
    "sparse": lambda t: replace(t, tokens=t.tokens.to_sparse()),
    "meta": lambda t: replace(t, parents=t.parents.to("meta")),
    "a tensor of its own kind": lambda t: replace(t, tokens=t.tokens.as_subclass(Tensors)),
    "wider than memory": lambda t: replace(t, tokens=torch.zeros(1, dtype=torch.int64).expand(t.batch_size, 10**12)),
    "no dimension": lambda t: replace(t, tokens=torch.tensor(5)),
    "no nodes": lambda t: replace(t, tokens=t.tokens[:, :0], parents=t.parents[:, :0], depths=t.depths[:, :0]),
    "overlapping memory": lambda t: replace(t, depths=t.depths[:, :1].expand(-1, t.width)),
    "scores of nonsense": lambda t: replace(t, scores="high", source=7),
    "a sly tree": lambda t: Sly(tokens=t.tokens, parents=t.parents, depths=t.depths, num_nodes=t.num_nodes,
                                max_depth=t.max_depth),
    "None": lambda t: None,
    "a number": lambda t: 5,
    "a list": lambda t: [t],
    "a class": lambda t: TokenTree,
    "rows": lambda t: t.rows(),
}  # fmt: skip


@pytest.mark.parametrize("first", range(5))
def test_trees_cost_no_text(first: int) -> None:
    """Every other tree is bad, each in the next way, so that the drafter is never switched off."""
    mischiefs = list(TREES)[first::5]
    done: Counter[str] = Counter()

    class Twisted(Honest):
        name = "twisted"
        calls = 0

        def propose(self, context: DraftContext) -> Any:
            self.calls += 1
            tree = super().propose(context)
            if self.calls % 2 or tree.width < 3:
                return tree
            mischief = mischiefs[done.total() % len(mischiefs)]
            done[mischief] += 1
            return TREES[mischief](tree)

    engine = made_with(Twisted())
    while min(done[each] for each in mischiefs) < 4:
        assert outcomes(engine) == plain(), f"after one of {mischiefs}"


def test_a_tree_that_is_changed_while_it_is_verified() -> None:
    """As another thread would, before and after the pass."""

    class Keeper(Honest):
        tree: TokenTree | None = None

        def propose(self, context: DraftContext) -> TokenTree:
            self.tree = super().propose(context)
            return self.tree

    drafter = Keeper()
    engine = made_with(drafter)
    run, commit = engine.target.run, engine.target.commit

    def scribble() -> None:
        for part in (drafter.tree.tokens, drafter.tree.parents, drafter.tree.depths, drafter.tree.num_nodes):
            part.fill_(1)

    def scribbled_run(*arguments: Any) -> Any:
        if drafter.tree is None:  # the prompt
            return run(*arguments)
        scribble()
        output = run(*arguments)
        scribble()
        return output

    def scribbled_commit(*arguments: Any) -> None:
        scribble()
        commit(*arguments)

    engine.target.run, engine.target.commit = scribbled_run, scribbled_commit
    assert outcomes(engine) == plain()


def test_only_drafters_of_the_package_get_the_engines_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copies are made for them, and none are spared elsewhere."""
    seen: list[bool] = []

    class Looker(Honest):
        def propose(self, context: DraftContext) -> TokenTree:
            seen.append(any(context.tokens[0] is s.tokens for s in engine._engine._scheduler.running))
            return super().propose(context)

    for is_trusted in (False, True):
        engine = made_with(Looker(), trust_drafter=is_trusted)
        assert outcomes(engine) == plain()
        assert set(seen) == {is_trusted}
        seen.clear()
    for name in ("ngram", "oracle [2]", "medusa"):
        engine = llm(drafters()[name]([[1, 2, 3]]))
        assert type(engine._engine._drafting._guards[0]._drafter).__module__.startswith("foretoken.drafters.")
    engine = llm(drafters()["random"](None))
    assert type(engine._engine._drafting._guards[0]._drafter).__name__ == "UntrustedDrafter"


def test_what_a_drafter_says_of_itself_is_read_once() -> None:
    """Name, taps and width may be properties, and change their mind."""

    class Fickle(Honest):
        num_reads = 0

        def _read(self, value: Any) -> Any:
            self.num_reads += 1
            if self.num_reads > 3:
                raise RuntimeError("nobody's business")
            return value

        name = property(lambda self: self._read("fickle"))
        reads = property(lambda self: self._read(TargetReads()))
        nodes_by_depth = property(lambda self: self._read((1, 8)))

    drafter = Fickle()
    engine = made_with(drafter)
    assert outcomes(engine) == plain()
    assert drafter.num_reads == 3
    assert engine._engine._drafting.names == ["fickle", "prediction"]

"""How often an iteration waits for the device, counted where our own code asks a tensor for its values.

A greedy iteration asks once, for the packed outcome, where the drafter's tree has `host_facts`; the guard asks once
more where a drafter made a tree of its own. On a CPU the walk down the tree is plain Python, numpy finds the best
tokens, rows are moved one sequence after another and kinds of draws are looked up: there a look costs less than an
operation on tensors.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.tiny_llms import drafters, llm

import foretoken
from foretoken import SamplingParams
from foretoken.engine import acceptor
from foretoken.trees import dynamic

TRANSFERS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
PACKAGE = str(Path(foretoken.__file__).parent)
NATIVE = tuple(str(Path(PACKAGE) / room / "native") for room in ("decoder", "drafters"))  # modules for CPUs alone


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Functions of the package that asked a tensor for its values, by name, as on a device where they have to wait."""
    monkeypatch.setattr(acceptor, "reads_are_free", lambda _: False)
    counted: Counter[str] = Counter()

    def counting(original: Any) -> Any:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            file = frame.f_code.co_filename
            if file.startswith(PACKAGE) and not file.startswith(NATIVE):
                counted[frame.f_code.co_name] += 1
            return original(self, *args, **kwargs)

        return method

    for name in TRANSFERS:
        monkeypatch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
    return counted


@pytest.mark.parametrize(
    "drafter",
    ["none", "oracle [3, 0, 5]", "oracle tree", "ngram tree", "medusa", "random hydra++", "draft tree",
     "hydra dynamic", "draft dynamic", "eagle", "random eagle3", "eagle dynamic",
     *(pytest.param(name, marks=pytest.mark.slow) for name in ("hydra++", "eagle3", "eagle3 dynamic"))],
)  # fmt: skip
def test_a_greedy_iteration_waits_once(drafter: str, callers: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "reads_are_free", lambda _: False)
    params = SamplingParams(temperature=0.0, max_tokens=22)
    plain = llm({}).generate([[5], [6]], params)
    engine = llm(drafters()[drafter]([[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain]))
    callers.clear()
    records: list[Any] = []
    engine._engine._on_step = records.append
    engine.generate([[5], [6]], params)
    for free_on_cpu in ("walk_chosen", "accept_chosen", "argmax_everywhere", "build", "_on_host"):
        callers.pop(free_on_cpu, None)
    assert callers.pop("outcomes_on_host") == len(records)
    # What a draft model drafted before, when it drafts again: nothing is under way that would have to be waited for.
    looks = callers.pop("rows", 0)
    assert 0 < looks < len(records) if drafter.startswith("draft") else not looks
    assert not callers


def test_depths_of_trees_that_only_the_device_knows_are_told_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dynamic tree may be less deep than what was asked for; records say how deep it was."""
    params, depths = SamplingParams(temperature=0.0, max_tokens=22), []
    for is_free in (True, False):
        for module in (dynamic, acceptor):
            monkeypatch.setattr(module, "reads_are_free", lambda _, is_free=is_free: is_free)
        records: list[Any] = []
        llm(drafters()["draft dynamic"]([]), on_step=records.append).generate([[5], [6]], params)
        depths.append([step.tree_depth for record in records for step in record.sequences])
    assert depths[0] == depths[1]
    assert 0 < min(filter(None, depths[0])) < max(depths[0])


def test_foreign_trees_cost_one_look_more(callers: Counter[str]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=22)
    engine = llm(drafters()["random"]([]))
    callers.clear()
    records: list[Any] = []
    engine._engine._on_step = records.append
    engine.generate([[5], [6]], params)
    # The last pass, where there is room for one token only, is not drafted for.
    assert len(records) - 1 <= callers["find_fault"] <= len(records)

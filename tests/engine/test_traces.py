"""Traces against plain decoding, which computes every node's prefix anew, and against the transformers model itself.

What is checked of every node of every tree: the text leads to its root, the target's own token is what plain decoding
writes after its path, probabilities are those of a full forward, and its outcome follows from these.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from end_to_end.request_mix import plain_outputs, references, request_mix
from end_to_end.tiny_llms import RUNNERS, drafters, llm, target

from foretoken import SamplingParams
from foretoken.acceptance.select import AcceptancePolicy
from foretoken.core.errors import ConfigError
from foretoken.core.records import NodeOutcome, SequenceStep, TreeTrace
from foretoken.core.token_tree import PROBE, TokenTree, TreeRow
from foretoken.drafters.base import TargetReads
from foretoken.engine import acceptor

NAMES = ["greedy", "greedy, 5 tokens", "sampled", "top-k", "all truncations", "ends at eos", "logit bias", "stop id"]
MIX = [request for request in request_mix() if request.name in NAMES]
SEEDLESS = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True)


def steps_of(
    arguments: dict[str, Any],
    prompts: list[list[int]],
    params: list[SamplingParams],
    policy: AcceptancePolicy | None = None,
    **more: Any,
) -> tuple[list[Any], list[list[SequenceStep]]]:
    """Outputs, and the steps of each request."""
    steps: defaultdict[str, list[SequenceStep]] = defaultdict(list)

    def add(record: Any) -> None:
        for step in record.sequences:
            steps[step.request_id].append(step)

    engine = llm(arguments, trace=True, on_step=add, **more)
    if policy is not None:
        engine._engine.acceptor.policy = policy
    outputs = engine.generate(prompts, params)
    return outputs, [steps[output.request_id] for output in outputs]


def path_to(trace: TreeTrace, node: int) -> list[int]:
    """Tokens from below the root down to a node."""
    tokens: list[int] = []
    while node > 0:
        tokens.insert(0, trace.tokens[node])
        node = trace.parents[node]
    return tokens


def assert_accounts_for_text(output: Any, steps: list[SequenceStep]) -> list[tuple[list[int], TreeTrace]]:
    """The traces' roots and paths are the text; gives each trace with the tokens before its root."""
    text = list(output.prompt_token_ids)
    traced = []
    for step in steps:
        trace = step.trace
        assert trace is not None
        assert trace.position == len(text) - 1
        assert trace.tokens[0] == text[-1]
        end = [] if trace.next_token is None else [trace.next_token]
        assert [*(trace.tokens[node] for node in trace.path), *end] == list(step.tokens)
        assert len(trace.path) == step.num_accepted
        assert [trace.drafters[node] for node in trace.path] == list(step.accepted_from)
        assert all(trace.drafters[node] for node in range(1, len(trace.tokens)))
        assert (
            sum(outcome not in (NodeOutcome.ROOT, NodeOutcome.PROBE) for outcome in trace.outcomes())
            == step.num_drafted
        )
        traced.append((text[:-1], trace))
        text += step.tokens
    assert text == [*output.prompt_token_ids, *output.outputs[0].token_ids]
    return traced


def target_probs(prefix: list[int], params: SamplingParams) -> torch.Tensor:
    """(V,) the target's distribution after a prefix, from the transformers model, truncated by hand."""
    with torch.inference_mode():
        logits = target()(torch.tensor([prefix])).logits[0, -1]
    for token, bias in params.logit_bias.items():
        logits = logits.index_add(0, torch.tensor([token]), torch.tensor([bias], dtype=logits.dtype))
    probs = (logits / (params.temperature or 1)).softmax(0)
    if params.top_k > 0:
        probs = torch.where(probs < probs.topk(params.top_k).values[-1], 0, probs)
        probs = probs / probs.sum()
    if params.top_p < 1:
        ranked, order = probs.sort(descending=True)
        probs[order[ranked.cumsum(0) - ranked >= params.top_p]] = 0
        probs = probs / probs.sum()
    if params.min_p > 0:
        probs = torch.where(probs < params.min_p * probs.max(), 0, probs)
    return probs / probs.sum()


@pytest.mark.parametrize(
    ("drafter", "runner"),
    [
        ("none", "generic"), ("draft tree", "generic"), pytest.param("heads", "generic", marks=pytest.mark.slow),
        ("two lookups", "generic"), ("draft itself dynamic", "generic"), ("draft tree", "lean-native"),
        ("oracle [2]", "lean-native"),
    ],
)  # fmt: skip
def test_traces_say_what_plain_decoding_says(drafter: str, runner: str) -> None:
    plain = plain_outputs(tuple(MIX), runner)
    arguments = drafters(dtype=RUNNERS[runner])[drafter](references(tuple(plain)))
    prompts, wishes = [r.prompt for r in MIX], [r.params for r in MIX]
    outputs, steps = steps_of(arguments, prompts, wishes, max_num_seqs=3, runner=runner)
    nodes = []  # (tokens from the beginning to the node, parameters, trace, node)
    for request, output, each in zip(MIX, outputs, steps, strict=True):
        for before, trace in assert_accounts_for_text(output, each):
            assert trace.rule == ("greedy" if request.params.is_greedy else "coupled")
            for node in range(len(trace.tokens)):
                nodes.append(([*before, trace.tokens[0], *path_to(trace, node)], request.params, trace, node))
    assert len(nodes) > (60 if drafter == "none" else 100)
    again = llm({}, runner=runner).generate(
        [prefix for prefix, *_ in nodes], [replace(params, max_tokens=1, stop=None) for _, params, _, _ in nodes]
    )
    written = [output.outputs[0].token_ids[0] for output in again]
    assert [trace.target_tokens[node] for _, _, trace, node in nodes] == written
    for _, _, trace, node in nodes:  # a node is accepted exactly where the target's own tokens lead
        if node and trace.parents[node] in (0, *trace.path) and trace.next_token is not None:
            is_next = trace.target_tokens[trace.parents[node]] == trace.tokens[node]
            assert (trace.outcomes()[node] is NodeOutcome.ACCEPTED) == is_next
    if runner == "generic":
        for prefix, params, trace, node in nodes[::4]:
            assert_probabilities(target_probs(prefix, params), trace, node)


def assert_probabilities(probs: torch.Tensor, trace: TreeTrace, node: int) -> None:
    """The probabilities of the target's token after a node and of the node's children are those of (V,) `probs`."""
    assert trace.target_probs[node] == pytest.approx(float(probs[trace.target_tokens[node]]), rel=1e-4, abs=1e-6)
    for child, parent in enumerate(trace.parents):
        if parent == node:
            assert trace.token_probs[child] == pytest.approx(float(probs[trace.tokens[child]]), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("drafter", "rule", "expected"),
    [
        ("draft itself", "auto", "block"), ("draft itself", "sequential", "sequential"),
        ("draft tree", "traversal", "traversal"), ("draft tree", "auto", "sequential"),
        ("two lookups", "auto", "coupled"), ("two lookups", "typical", "typical"),
    ],
)  # fmt: skip
def test_rules_that_test_nodes_by_chance(drafter: str, rule: str, expected: str) -> None:
    prompts, policy = [[5, 9, 5, 9, 5], [30, 4], [8, 8, 8, 8]], AcceptancePolicy(rule=rule)
    outputs, steps = steps_of(drafters()[drafter]([]), prompts, [SEEDLESS] * 3, policy=policy)
    traced = [each for o, s in zip(outputs, steps, strict=True) for each in assert_accounts_for_text(o, s)]
    # A tree may be cut to a chain, or to its root.
    assert {trace.rule for _, trace in traced} <= {
        expected,
        *(("block", "coupled") if rule == "auto" else ["sequential"]),
    }
    assert expected in {trace.rule for _, trace in traced}
    for before, trace in traced:
        probs = target_probs([*before, trace.tokens[0]], SEEDLESS)
        assert_probabilities(probs, trace, 0)
        if trace.rule != "coupled":
            assert trace.target_tokens[0] == int(probs.argmax())
        for node, drawn in enumerate(trace.draft_probs or []):
            assert (drawn is None) == (node == 0)
            if drawn is not None and drafter == "draft itself":  # which draws from the target's own distribution
                assert drawn == pytest.approx(trace.token_probs[node], rel=1e-3)


class Probing:
    """Drafts the root's token twice: once as a draft, once as a probe with a node below it."""

    name, reads, nodes_by_depth = "probing", TargetReads(), [1, 3, 4]
    attach = begin = commit = release = lambda self, *arguments: None

    def propose(self, context: Any) -> TokenTree:
        rows = [TreeRow([tokens[-1], 4, 7, 8], [-1, 0, 0, 2]) for tokens in context.tokens]
        tree = TokenTree.from_rows(rows)
        return replace(tree, source=torch.tensor([[0, 0, PROBE, 0]] * len(rows)))


def test_probes_are_told_apart() -> None:
    first, step, *_ = steps_of({"drafter": Probing}, [[5, 9]], [SamplingParams(temperature=0.0, max_tokens=6)])[1][0]
    assert first.trace is not None
    assert first.trace.tokens == [9], "the prompt's pass has no draft"
    assert step.trace is not None
    assert [outcome is NodeOutcome.PROBE for outcome in step.trace.outcomes()] == [False, False, True, True]
    assert step.trace.parents == [-1, 0, 0, 2]
    assert step.trace.drafters[1:] == [("probing",)] * 3


def test_a_trace_that_fails_ends_no_request(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("too large")

    params = [SamplingParams(temperature=0.0, max_tokens=6)]
    want = llm({}).generate([[5, 9]], params)[0].outputs[0]
    monkeypatch.setattr(acceptor, "traced", fail)
    outputs, steps = steps_of({}, [[5, 9]], params)
    assert outputs[0].outputs[0] == want
    assert [step.trace for step in steps[0]] == [None] * len(steps[0])
    assert "an iteration could not be traced: ValueError: too large" in caplog.text


def test_nothing_is_traced_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[Any] = []
    monkeypatch.setattr(acceptor, "traced", None)
    llm({}, on_step=records.append).generate([[5, 9]], SamplingParams(temperature=0.0, max_tokens=3))
    assert [step.trace for record in records for step in record.sequences] == [None] * 3


def test_a_trace_comes_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    original, transfer = acceptor.traced, torch.Tensor.tolist

    def counted(*arguments: Any) -> Any:
        counts.append(0)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", counting)
            return original(*arguments)

    def counting(tensor: torch.Tensor) -> Any:
        counts[-1] += 1
        return transfer(tensor)

    monkeypatch.setattr(acceptor, "traced", counted)
    steps_of(drafters()["draft tree"]([]), [[5, 9], [6]], [SEEDLESS] * 2)
    assert counts
    assert set(counts) == {1}


def test_traces_need_a_receiver() -> None:
    with pytest.raises(ConfigError, match="no on_step to get the traces"):
        llm({}, trace=True)

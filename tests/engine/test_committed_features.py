"""What a drafter is told of the target: features of exactly the committed positions, in order."""

from typing import Any

import pytest
import torch
from end_to_end.tiny_llms import drafters, llm, target
from torch import Tensor

from foretoken import SamplingParams
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle, TargetReads
from foretoken.drafters.oracle import Options, OracleDrafter
from foretoken.models.generic import run_plain

TAPS = (1, "final", 0)
PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13], [3, 4] * 5, [20, 21, 22]]


class ListeningOracle:
    """An oracle that keeps what it is told, by slot, and checks that positions come in order."""

    name, reads = "listening", TargetReads(taps=TAPS)

    def __init__(self, inner: Drafter) -> None:
        self._inner, self.nodes_by_depth = inner, inner.nodes_by_depth
        self._tokens: dict[int, list[int]] = {}
        self._features: dict[int, list[Tensor]] = {}
        self._cached: dict[int, list[int]] = {}
        self.over: list[tuple[list[int], Tensor]] = []

    def attach(self, target: TargetHandle) -> None:
        self._inner.attach(target)

    def begin(self, slot: int, request: DraftRequest) -> None:
        self._inner.begin(slot, request)

    def propose(self, context: DraftContext) -> TokenTree:
        for slot, tokens in zip(context.slots, context.tokens, strict=True):
            self._tokens[slot] = list(tokens)
            known = sum(part.shape[0] for part in self._features.get(slot, []))
            assert known == len(tokens) - 1, "features exist for every position before the root"
            assert self._cached.get(slot, []) == list(tokens[:-1]), "and tokens"
        return self._inner.propose(context)

    def commit(self, committed: Committed) -> None:
        self._inner.commit(committed)
        assert committed.features is not None
        features = committed.features.split(committed.lengths)
        for slot, start, tokens, own in zip(committed.slots, committed.starts, committed.tokens, features, strict=True):
            parts = self._features.setdefault(slot, [])
            assert start == sum(part.shape[0] for part in parts)
            parts.append(own.clone())
            self._cached.setdefault(slot, []).extend(tokens)

    def release(self, slot: int) -> None:
        self._inner.release(slot)
        self._cached.pop(slot)
        self.over.append((self._tokens.pop(slot), torch.cat(self._features.pop(slot))))


@pytest.mark.parametrize("chunk", [512, 3])
@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_features_are_those_of_a_plain_forward(tree: str, chunk: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=17)
    plain = llm({}).generate(PROMPTS, params)
    known = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain]
    made: list[ListeningOracle] = []

    def make() -> Drafter:
        options = Options(method="oracle", references=known, pattern=(3, 0, 5), tree=tree)
        made.append(ListeningOracle(OracleDrafter(options)))
        return made[0]

    engine = llm({"drafter": make}, max_num_seqs=2)
    engine.target.prefill_chunk = chunk
    outputs = engine.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert all(o.metrics.mean_acceptance_length > 2 for o in outputs)
    assert all(o.metrics.draft_errors == 0 for o in outputs), "the checks inside the drafter held"
    assert len(made[0].over) == len(PROMPTS)
    for tokens, features in made[0].over:
        states: Any = run_plain(target(), torch.tensor([tokens]), output_hidden_states=True).hidden_states
        expected = torch.stack([states[1][0], states[-1][0], states[0][0]], dim=1)
        seen = len(tokens) - 1
        assert features.shape[0] > seen
        # Eager attention rounds its softmax to float32, also in a float64 model; another position would differ by 1.
        torch.testing.assert_close(features[:seen], expected[:seen], rtol=1e-4, atol=1e-5)


def test_without_taps_there_are_no_features() -> None:
    seen: list[Committed] = []

    def make() -> Drafter:
        drafter = OracleDrafter(Options(method="oracle", references=[[5]]))
        drafter.commit = seen.append  # type: ignore[method-assign]
        return drafter

    llm({"drafter": make}).generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=3))
    assert seen
    assert all(committed.features is None for committed in seen)
    assert [(c.starts, c.lengths) for c in seen] == [([0], [3]), ([3], [1]), ([4], [1])]


def test_drafters_without_state_forget_slots() -> None:
    """A second use of the same slots starts from nothing."""
    for name in ("ngram tree", "draft itself tree", "oracle [2]"):
        engine = llm(drafters()[name]([[5, 6]]), max_num_seqs=1)
        engine.generate([[5] * 9, [6, 7] * 4], SamplingParams(temperature=0.0, max_tokens=9))
        drafter = engine._engine._drafting._guards[0]._drafter
        state = [value for value in vars(drafter).values() if isinstance(value, dict)]
        assert state
        assert not any(state)

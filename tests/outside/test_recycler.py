"""A drafter that is not part of the package, found by its import path, works as a bundled one does."""

from typing import Any

import pytest
import torch
from end_to_end.tiny_llms import RUNNERS, llm
from outside.recycler import Recycler
from pairwise import slow_products

from foretoken import SamplingParams
from foretoken.core.records import StepRecord
from foretoken.core.token_tree import PROBE

ADAPTIVE = {"method": "outside.recycler", "num_guesses": 3}
OUTSIDE = {**ADAPTIVE, "num_speculative_tokens": 2}  # drafts whatever passes cost
LOOKUP = {"method": "ngram", "prompt_lookup_min": 1}
PROMPTS = [[5, 6, 7, 5, 6], [9], [3, 4, 3, 4, 3], [11, 12, 13]]
PARAMS = [SamplingParams(temperature=t, seed=3, max_tokens=40, ignore_eos=True) for t in (0.0, 0.7, 0.0, 1.0)]
CONFIGS: dict[str, dict[str, Any]] = {
    "alone": OUTSIDE,
    "fixed, with prompt lookup": {"drafters": [{**LOOKUP, "num_speculative_tokens": 4}, OUTSIDE]},
    "selected, with prompt lookup": {"drafters": [LOOKUP, ADAPTIVE]},
}


@pytest.mark.parametrize(("config", "trusted", "runner"), slow_products(list(CONFIGS), [False, True], list(RUNNERS)))
def test_it_is_lossless_and_gets_credit(config: str, trusted: bool, runner: str) -> None:
    plain = llm({}, runner=runner, max_num_seqs=3).generate(PROMPTS, PARAMS)
    records: list[StepRecord] = []
    engine = llm(
        {"speculative_config": CONFIGS[config]}, runner=runner, trust_drafter=trusted, max_num_seqs=3,
        on_step=records.append,
    )  # fmt: skip
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert all(record.draft_error is None for record in records)
    steps = [step for record in records for step in record.sequences]
    credit = {name for step in steps for name in step.accepted_by}
    assert credit <= ({"recycler"} if config == "alone" else {"recycler", "ngram"})
    if "selected" not in config:  # which follows the clock
        assert "recycler" in credit
        assert sum(step.num_accepted for step in steps) > 5


def test_probes_are_read_and_never_accepted() -> None:
    """Greedy text repeats itself, so that a walk which took probes for drafts would accept some."""
    engine = llm({"speculative_config": OUTSIDE}, trust_drafter=True, max_num_seqs=1)
    drafter = engine._engine._drafting._guards[0]._drafter
    assert isinstance(drafter, Recycler)
    commit, probed, wrong = drafter.commit, [], []

    def watch(committed: Any) -> None:
        if committed.verified is not None and committed.verified.tree.source is not None:
            tree, (path,) = committed.verified.tree, committed.verified.paths
            is_probe = (tree.source[0] & PROBE) != 0
            probed.append(int(is_probe.sum()))
            wrong.extend(node for node in path if is_probe[node])
            logits_rows = committed.verified.top_ids
            assert logits_rows.shape == (int(tree.num_nodes[0]), 3)
        commit(committed)

    drafter.commit = watch
    engine.generate(PROMPTS, PARAMS)
    assert sum(probed) > 1
    assert not wrong


def test_its_own_cache_holds_what_was_committed() -> None:
    """Whatever was drafted, verified and thrown away: the last state is that of the whole text in one pass."""
    engine = llm({"speculative_config": {"drafters": [LOOKUP, OUTSIDE]}}, trust_drafter=True, max_num_seqs=1)
    drafter = engine._engine._drafting._guards[1]._drafter
    fed: list[Any] = []
    commit = drafter.commit

    def keep(committed: Any) -> None:
        fed.append((committed.features, committed.tokens))
        commit(committed)

    drafter.commit, state = keep, {}
    drafter.release = lambda slot: state.update(last=drafter.states[slot].clone())
    engine.generate(PROMPTS[0], PARAMS[0])
    features = torch.cat([part for part, _ in fed])
    drafter.begin(0, None)
    commit(
        type(
            "All", (), {
                "slots": [0], "tokens": [[t for _, tokens in fed for t in tokens[0]]], "features": features,
                "lengths": [len(features)], "offsets": [0, len(features)], "verified": None,
            },
        )
    )  # fmt: skip
    torch.testing.assert_close(drafter.states[0], state["last"], rtol=1e-4, atol=1e-5)

"""What a slot still holds is not read again: the text stays that of plain decoding, and drafters lose nothing."""

from __future__ import annotations

from typing import Any

import pytest
from end_to_end.prefix_mix import CONTEXT_LEN, plain_prefix_mix, prefix_mix
from end_to_end.request_mix import references
from end_to_end.same_text import assert_same_text
from end_to_end.test_poison import poison_caches
from end_to_end.tiny_llms import RUNNERS, drafters, llm

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.core.results import GenerationMetrics

DRAFTERS = {runner: drafters(dtype=dtype) for runner, dtype in RUNNERS.items()}
# One of every kind of state that a drafter keeps by slot: rows of a draft model, of a head's block, of an LSTM; the
# last feature alone; tables of its own; none at all; several together.
KINDS = [
    "none", "draft itself", "draft itself tree", "draft dynamic", "draft intersection", "draft text", "hydra++",
    "eagle", "eagle dynamic", "eagle3", "falcon", "medusa", "mlp_speculator", "early exit", "ngram", "suffix",
    "prediction", "rest", "lookahead", "recycling", "oracle tree", "heads", "draft, suffix and recycling", "raises",
]  # fmt: skip
# Those whose drafts do not depend on what was written before, and not on the clock.
STEADY = {
    "draft itself", "draft itself tree", "draft dynamic", "draft intersection", "draft text", "hydra++", "eagle",
    "eagle dynamic", "eagle3", "falcon", "medusa", "mlp_speculator", "oracle tree",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def engine_with(drafter: str, runner: str, **more: Any) -> LLM:
    """An engine over fewer slots than there are requests."""
    known = references(plain_prefix_mix())
    arguments = {"max_num_seqs": 3, "max_model_len": CONTEXT_LEN, "runner": runner, **more}
    return llm(DRAFTERS[runner][drafter](known), **arguments)


def generated(engine: LLM) -> list[RequestOutput]:
    """The mix."""
    return engine.generate([r.salted for r in prefix_mix()], [r.params for r in prefix_mix()])


def num_cached(outputs: list[RequestOutput]) -> int:
    """Prompt tokens that were not read."""
    return sum(output.metrics.num_cached_tokens for output in outputs)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("drafter", KINDS)
def test_text_is_plain_decodings(drafter: str, runner: str) -> None:
    engine = engine_with(drafter, runner)
    poison_caches(engine)
    got = generated(engine)
    assert_same_text(got, plain_prefix_mix(runner), [r.name for r in prefix_mix()])
    # An LSTM's state is that of its last position, so that only whole texts can be gone on from.
    assert num_cached(got) > (0 if drafter == "falcon" else 300)
    if drafter in STEADY and runner != "lean-native":  # whose draft models and heads are quantised
        read = generated(engine_with(drafter, runner, enable_prefix_caching=False))
        assert num_cached(read) == 0
        lengths = [GenerationMetrics.total(o.metrics for o in each).mean_acceptance_length for each in (got, read)]
        assert lengths[0] > 0.93 * lengths[1]  # behind a prefix that is the whole prompt, heads draft a pass later

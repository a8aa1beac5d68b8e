"""A pool of earlier outputs makes repeated requests fast, salts keep it apart, and the text stays plain decoding's."""

from dataclasses import replace
from typing import Any

import pytest
from end_to_end.tiny_llms import llm

from foretoken import SamplingParams
from foretoken.drafters.base import DraftRequest
from foretoken.drafters.suffix import Options, SuffixDrafter

PROMPTS = [[5, 9, 31], [17, 4]]


class SaltedBySeed(SuffixDrafter):
    """Requests have their seed for a salt."""

    def begin(self, slot: int, request: DraftRequest) -> None:
        """As the engine would hand the salt on."""
        super().begin(slot, replace(request, cache_salt=str(request.params.seed)))


def made(**options: Any) -> Any:
    """An engine with a pool whose salts are seeds."""
    checked = Options(method="suffix", num_speculative_tokens=8, suffix_decoding_max_spec_factor=4.0, **options)
    return llm({"drafter": lambda: SaltedBySeed(checked), "trust_drafter": True}, max_num_seqs=2)


def params(salt: int, temperature: float = 0.0) -> SamplingParams:
    """A request with a salt."""
    return SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=salt)


@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_what_was_written_before_is_drafted(tree: str) -> None:
    """Acceptance shows it for the salt that wrote the text, and no other's drafts change by it."""
    plain = llm({}).generate(PROMPTS, params(0))
    engine = made(tree=tree)
    passes = {}
    for name, salt in (("first", 1), ("again", 1), ("other salt", 2)):
        outputs = engine.generate(PROMPTS, params(salt))
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
        passes[name] = [o.metrics.steps for o in outputs]
    assert all(again <= 12 for again in passes["again"]), "forty tokens, eight drafted at a time"
    assert all(first > 2 * again for first, again in zip(passes["first"], passes["again"], strict=True))
    assert passes["other salt"] == passes["first"]


def test_without_a_pool_nothing_is_remembered() -> None:
    engine = made(suffix_decoding_max_cached_requests=0)
    first, again = (engine.generate(PROMPTS, params(1)) for _ in range(2))
    assert [o.metrics.steps for o in first] == [o.metrics.steps for o in again]


def test_sampled_text_does_not_depend_on_the_pool() -> None:
    """The same seed writes the same text before and after others have filled the pool."""
    engine = llm({"speculative_config": {"method": "suffix", "num_speculative_tokens": 6}}, max_num_seqs=2)
    plain = llm({}).generate(PROMPTS, params(7, temperature=0.8))
    for seed in (7, 3, 7):
        outputs = engine.generate(PROMPTS, params(seed, temperature=0.8))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert all(o.metrics.num_accepted >= 20 for o in outputs)

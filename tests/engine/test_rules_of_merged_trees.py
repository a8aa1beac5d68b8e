"""A rule that depends on what was drawn would bias what is generated."""

from pathlib import Path
from typing import Any

import pytest

import foretoken.engine.acceptor
from foretoken import LLM, SamplingParams

MODEL = Path(__file__).parents[2] / "models" / "tinycode"
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("config", "rule"), [(DRAFT_MODEL, "block"), ({"drafters": [{"method": "ngram"}, DRAFT_MODEL]}, "sequential")]
)
def test_merged_trees_are_verified_by_one_rule(
    config: dict[str, Any], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup's token that equals the drawn one leaves a chain, for the block rule, and others a tree."""
    rules: set[str] = set()
    accept = foretoken.engine.acceptor.accept

    def spied(scores: Any, each: Any, *others: Any) -> Any:
        if scores.tree.max_depth:
            rules.update(each)
        return accept(scores, each, *others)

    monkeypatch.setattr(foretoken.engine.acceptor, "accept", spied)
    llm = LLM(MODEL, speculative_config=config)
    llm.generate("for i in range(10):\n    for i in range(10):\n", SamplingParams(temperature=0.8, max_tokens=24))
    assert rules == {rule}

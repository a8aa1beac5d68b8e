"""Setups of the command line: one drafter, several in one tree, JSON."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.bench.setups import parse_setup

LOOKUP, HEAD = {"method": "ngram"}, {"method": "medusa", "tree": "chain"}


@pytest.mark.parametrize(
    ("text", "name", "config"),
    [
        ("ngram", "ngram", LOOKUP),
        ("ngram+medusa:chain", "ngram+medusa:chain", {"drafters": [LOOKUP, HEAD]}),
        ("ngram:tree+ngram:prompt_lookup_max=2", "ngram:tree+ngram prompt_lookup_max=2",
         {"drafters": [{**LOOKUP, "tree": "tree"}, {**LOOKUP, "prompt_lookup_max": 2}]}),
        ('{"drafters": [{"method": "ngram"}, {"method": "a.b"}], "acceptance": "coupled"}', "ngram+a.b",
         {"drafters": [LOOKUP, {"method": "a.b"}], "acceptance": "coupled"}),
        ("oracle:key=a+b", "oracle key=a+b", {"method": "oracle", "key": "a+b"}),
        ("hydra:dynamic:max_nodes=32", "hydra:dynamic max_nodes=32",
         {"method": "hydra", "tree": "dynamic", "max_nodes": 32}),
        ("plain", "plain", None),
    ],
)  # fmt: skip
def test_what_is_read(text: str, name: str, config: Any) -> None:
    setup = parse_setup(text)
    assert (setup.name, setup.config) == (name, config)

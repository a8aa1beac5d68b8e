"""Setups of the command line: one drafter, several in one tree, JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafters.autoregressive_heads import directory, target
from end_to_end.tiny_llms import tokenizer

from foretoken.bench.setup_engines import SetupEngines
from foretoken.bench.setups import parse_setup
from foretoken.bench.workload import Workload
from foretoken.core.errors import ConfigError
from foretoken.formats import native
from foretoken.formats.registry import read_head
from foretoken.hf.loading import load_model

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
        ('{"drafters": ["ngram", {"method": "a.b"}]}', "ngram+a.b", {"drafters": ["ngram", {"method": "a.b"}]}),
        ("oracle:key=a+b", "oracle key=a+b", {"method": "oracle", "key": "a+b"}),
        ("hydra:dynamic:max_nodes=32", "hydra:dynamic max_nodes=32",
         {"method": "hydra", "tree": "dynamic", "max_nodes": 32}),
        ("eagle:mc_sim_7b_63", "eagle:mc_sim_7b_63", {"method": "eagle", "tree": "mc_sim_7b_63"}),
        ("eagle3:dynamic+ngram", "eagle3:dynamic+ngram",
         {"drafters": [{"method": "eagle3", "tree": "dynamic"}, LOOKUP]}),
        ("plain", "plain", None),
    ],
)  # fmt: skip
def test_what_is_read(text: str, name: str, config: Any) -> None:
    setup = parse_setup(text)
    assert (setup.name, setup.config) == (name, config)


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A target with EAGLE heads beside it, one of them under the name of how it was trained."""
    place = tmp_path / "small"
    target().module.save_pretrained(place)
    for kind, name in (("eagle", "eagle"), ("eagle3", "eagle3"), ("eagle", "hass")):
        native.write(read_head(directory(kind))[1], tmp_path / f"small-{name}")
    return place


def test_eagle_heads_beside_the_target_are_measured_like_others(beside: Path) -> None:
    texts = ["eagle", "eagle3", "eagle:dynamic", "hass:chain:num_speculative_tokens=3", "ngram+hass:chain"]
    setups = [parse_setup(text, target=str(beside)) for text in texts]
    workload = Workload(prompts=["the thing"], temperatures=(0.0,), max_tokens=12, seed=0)
    engines = SetupEngines(load_model(beside, dtype="float32", device="cpu"), tokenizer(), setups, workload)
    assert engines.names[1:] == ["eagle", "eagle3", "eagle:dynamic", "hass:chain num_speculative_tokens=3",
                                 "ngram+hass:chain"]  # fmt: skip
    rows = [engines.measure(name, 0.0, [0]) for name in engines.names]
    assert all(row.texts == rows[0].texts for row in rows)
    assert rows[4].metrics.num_drafted > 0
    assert not any(row.metrics.draft_errors for row in rows)


def test_what_does_not_lie_beside_the_target(beside: Path) -> None:
    with pytest.raises(ConfigError, match=r"-s eagle needs a trained head, and there is no '.*other-eagle'"):
        parse_setup("eagle", target=str(beside.with_name("other")))
    place = f"{beside}-eagle3"
    with pytest.raises(
        ConfigError, match=r"is an eagle3 head, and method 'eagle' needs an eagle head\. Write -s eagle3:"
    ):
        parse_setup(f"eagle:model={place}", target=str(beside))

"""Acceptance curves: files of other projects, the library, and shallow drafts replayed from deep ones."""

import json
import random
from itertools import pairwise, product
from math import prod
from pathlib import Path

import pytest
import yaml

from foretoken.core.errors import ConfigError
from foretoken.planning.acceptance import (
    Curve,
    expected_tokens,
    filled,
    golden_yaml,
    library,
    nearest,
    read_curves,
    survivals,
)
from foretoken.planning.measure import ReplayedStep, curve_of, replayed

GOLDEN = """
# key = num_speculative_tokens (EAGLE3 level); value = golden AL
_metadata:
  draft-model: some/EAGLE3
minimax-m3:
  thinking_on: {1: 1.79, 2: 2.39, 3: 2.78}
  thinking_off: {1: 1.83, 2: 2.46, 3: 2.97}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "lengths.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("rates", [[], [0.0], [0.62] * 5, [0.99] * 2, [1.0] * 3, [0.9, 0.4, 0.75, 0.1]])
def test_tokens_of_a_chain_by_enumeration(rates: list[float]) -> None:
    """Over all outcomes of the tests of a chain's tokens, whether they are looked at or not."""
    counted = 0.0
    for tests in product((True, False), repeat=len(rates)):
        accepted = tests.index(False) if False in tests else len(tests)
        counted += (1 + accepted) * prod(r if passed else 1 - r for passed, r in zip(tests, rates, strict=True))
    assert expected_tokens(survivals(rates)) == pytest.approx(counted, abs=1e-12)


def test_golden_lengths_are_read_by_model_and_mode(tmp_path: Path) -> None:
    curves = read_curves(written(tmp_path, GOLDEN), "eagle3:chain")
    assert [list(curve.lengths) for curve in curves] == [[1.79, 2.39, 2.78], [1.83, 2.46, 2.97]]
    assert [curve.source.rpartition(", ")[2] for curve in curves] == [
        "minimax-m3 thinking_on",
        "minimax-m3 thinking_off",
    ]
    assert list(curves[0].nodes) == [1, 2, 3]
    assert curves[0].nextn(2) == {"nextn": 2, "nextn_accepted": 1.39}


def test_lengths_that_are_written_are_read_again(tmp_path: Path) -> None:
    """Also lengths of prompt lookup, which deeper drafts may raise by more than conditional rates allow."""
    curve = Curve.of_lengths("ngram:chain", 0.8, [1.3, 1.7, 2.25], error=0.1, source="measured")
    text = golden_yaml([curve], "tinycode", "first: 1\nsecond: 2")
    assert text.splitlines()[1:3] == ["# first: 1", "# second: 2"]
    (again,) = read_curves(written(tmp_path, text), "ngram:chain")
    assert list(again.lengths) == list(curve.lengths)
    assert list(yaml.safe_load(text)) == ["tinycode-ngram-t0.8"]


def test_trees_are_not_written() -> None:
    tree = Curve.of_lengths("eagle:dynamic", 0.0, [2.0, 3.0], tree_nodes=59, error=0.1, source="")
    assert yaml.safe_load(golden_yaml([tree], "x", "")) == {}
    assert list(tree.depths) == [2]


def test_aiconfigurators_keys_are_read(tmp_path: Path) -> None:
    rates = read_curves(written(tmp_path, "nextn: 2\nnextn_accept_rates: [0.85, 0.3, 0, 0, 0]\n"), "eagle:chain")[0]
    assert list(rates.lengths) == pytest.approx([1.85, 1.85 + 0.85 * 0.3])
    mean = read_curves(written(tmp_path, json.dumps({"nextn": 3, "nextn_accepted": 1.52})), "eagle:chain")[0]
    assert mean.lengths[-1] == pytest.approx(2.52)
    rate = mean.lengths[0] - 1
    assert rate + rate**2 + rate**3 == pytest.approx(1.52, abs=1e-9)  # one rate at every position


@pytest.mark.parametrize(
    "text",
    [
        "", "[1, 2]", "a: b", "nextn: 2", "nextn: 0\nnextn_accepted: 0", "nextn: 2\nnextn_accepted: 2.5",
        "nextn: 2\nnextn_accept_rates: [0.5]", "nextn: 2\nnextn_accept_rates: [0.5, 1.5]", "m: {on: {1: 2.5}}",
        "m: {on: {0: 1.5}}", "m: {on: {1: .nan}}", "m: {on: {one: 1.5}}", "m: {on: {1: true}}", "{[", "a: &x [*x]",
        "\x00", "!!python/object/apply:os.getcwd []",
    ],
)  # fmt: skip
def test_other_files_are_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="Expected"):
        read_curves(written(tmp_path, text), "eagle:chain")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml.*cannot be read"):
        read_curves(tmp_path / "nothing.yaml", "eagle:chain")


def test_depths_between_known_ones_have_one_rate() -> None:
    lengths = filled({1: 1.8, 4: 2.9})
    gains = [after - before for before, after in pairwise(lengths)]
    rate = gains[0] / 0.8
    assert gains == pytest.approx([0.8 * rate, 0.8 * rate**2, 0.8 * rate**3])
    assert lengths[3] == 2.9
    assert filled({2: 1.0}) == pytest.approx([1.0, 1.0])  # nothing is ever accepted


def test_the_library_is_possible_and_says_where_it_is_from() -> None:
    for curve in library():
        assert all(1 <= length <= depth + 1 for depth, length in enumerate(curve.lengths, start=1))
        assert list(curve.lengths) == sorted(curve.lengths)
        assert len(curve.nodes) == len(curve.asks) == len(curve.lengths)
        assert curve.error >= 0.15
        assert curve.source
    eagle = next(curve for curve in library() if (curve.name, curve.temperature) == ("eagle:dynamic", 0))
    assert eagle.lengths[-1] == pytest.approx((4.65 + 4.68 + 4.68 + 4.64 + 4.11 + 3.78) / 6)


def test_small_targets_have_curves_of_their_own() -> None:
    def length(num_weights: float) -> float:
        found = {(curve.name, curve.temperature): curve for curve in library(num_weights)}
        return found["hass:dynamic", 0].lengths[5]

    assert length(7e9) == length(float("inf")) > 5
    assert length(5e8) < 3
    large, small = ({(each.name, each.temperature) for each in library(size)} for size in (7e9, 5e8))
    assert large <= small, "what was measured for large targets alone is used for small ones too"


def test_greedy_acceptance_says_nothing_of_sampled_text() -> None:
    def at(temperature: float | None, length: float) -> Curve:
        return Curve.of_lengths("hass:chain", temperature, [length], error=0.1, source="")

    curves = [at(0.0, 1.9), at(1.0, 1.5), at(0.7, 1.6)]
    assert [curve.lengths[0] for curve in nearest(curves, 0.0)] == [1.9]
    assert [curve.lengths[0] for curve in nearest(curves, 0.8)] == [1.6]
    assert nearest(curves[:1], 0.8) == []
    assert nearest([at(None, 1.4)], 0.8)[0].lengths == [1.4]


def decoded(right: list[bool], depth: int) -> list[ReplayedStep]:
    """The passes of chains over a text where it is known which tokens a drafter gets right, wherever it begins."""
    steps, position = [], 0
    while position < len(right):
        accepted = next((i for i, each in enumerate(right[position : position + depth]) if not each), depth)
        accepted = min(accepted, len(right) - position - 1)
        steps.append(ReplayedStep(depth, depth, accepted))
        position += accepted + 1
    return steps


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9, 1.0])
def test_shallow_chains_are_replayed_from_deep_ones(share: float) -> None:
    """Against decoding the same text again.

    The replay takes the target's own token after a whole draft for one that the drafter knows: 2 % at most here.
    """
    generator = random.Random(1)
    right = [generator.random() < share for _ in range(20_000)]
    deep = decoded(right, 8)
    for depth in (1, 2, 3, 5, 8):
        tokens, passes, asked, nodes = replayed(deep, depth)
        again = decoded(right, depth)
        assert tokens == len(right)
        assert passes == pytest.approx(len(again), rel=0.02)
        assert asked == passes
        assert nodes == passes * depth


def test_passes_without_a_draft_stay() -> None:
    text = [
        ReplayedStep(0, 0, 0),
        ReplayedStep(4, 4, 4),
        ReplayedStep(4, 4, 1),
        ReplayedStep(0, 0, 0),
        ReplayedStep(2, 2, 0),
    ]
    # Two tokens a pass: the run of 5 + 2 tokens takes four, the last draft one.
    assert replayed(text, 1) == (1 + 7 + 1 + 1, 1 + 4 + 1 + 1, 5, 5)
    assert replayed(text, 4) == (10, 1 + 2 + 1 + 1, 3, 4 + 4 + 2)


def test_a_curve_of_texts() -> None:
    texts = [[ReplayedStep(3, 3, 3), ReplayedStep(3, 3, 0)], [ReplayedStep(3, 3, 1), ReplayedStep(0, 0, 0)]]
    curve = curve_of("ngram:chain", 0.0, texts, "here")
    assert list(curve.depths) == [1, 2, 3]
    assert curve.lengths[2] == pytest.approx((4 + 1 + 2 + 1) / 4)
    assert curve.asks[2] == pytest.approx(3 / 4)
    tree = curve_of("hass:dynamic", 0.0, [[ReplayedStep(3, 12, 2)], [ReplayedStep(3, 10, 1)]], "here")
    assert list(tree.depths) == [3]
    assert (tree.lengths[2], tree.nodes[2]) == (2.5, 11)

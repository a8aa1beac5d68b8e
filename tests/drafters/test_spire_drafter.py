"""SPiRe as a drafter: what a path scores, which rows count, batches, prefixes and refusals."""

import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from drafters.autoregressive_heads import SHAPES, SPIRES, Texts, directory, target
from drafters.drafting_contexts import attached, context
from drafters.test_autoregressive import GREEDY, assert_scores, live_through, paths, words

from foretoken.core.errors import ModelError
from foretoken.drafters import heads
from foretoken.drafters.base import DraftRequest, Prefix
from foretoken.drafters.heads import SpireDrafter
from foretoken.drafters.registry import create_drafter, drafter_options
from foretoken.formats import native
from foretoken.formats.registry import read_head


def drafter(kind: str, **options: Any) -> SpireDrafter:
    """With the weights as they are stored."""
    options = {"method": "spire", "model": str(directory(kind)), "quantization": "none", **options}
    made = create_drafter(drafter_options(options), target())
    assert isinstance(made, SpireDrafter)
    attached(made, model=target(), vocab_size=target().vocab_size)
    return made


def poison(made: SpireDrafter) -> None:
    """NaN in all rows that are not of committed tokens."""
    for slot, fed in enumerate(made._rows._fed):
        made._rows.cache.poison(slot, fed)


# Every kind and every shape once; their other pairs are slow.
HISTORIES = [
    pytest.param(
        kind,
        shape,
        ("some", "everything", "nothing")[(i + j) % 3],
        marks=() if i == j % len(SPIRES) else pytest.mark.slow,
    )
    for i, kind in enumerate(SPIRES)
    for j, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(("kind", "shape", "how"), HISTORIES)
def test_after_any_history_drafts_are_those_of_training(kind: str, shape: str, how: str) -> None:
    """Texts are longer than what a token sees, so that the committed rows change from draft to draft."""
    made, texts, draw = drafter(kind, **SHAPES[shape]), Texts(kind), random.Random(f"{kind} {shape} {how}")
    with mock.patch.object(heads, "CHUNK", 16):
        assert list(live_through(made, texts, how, draw, poison))


def drafted(kind: str, length: int) -> tuple[SpireDrafter, Texts]:
    made, texts = drafter(kind, **SHAPES["chain"]), Texts(kind)
    texts.begin([made], 0, words(random.Random(3), length))
    texts.commit([made], [0])
    made.propose(context([texts.texts[0]]))
    return made, texts


@pytest.mark.parametrize("kind", ["spire", "spire, no feedback"])
@pytest.mark.parametrize(("row", "is_seen"), [(0, True), (1, True), (2, False), (23, False), (24, True), (28, True)])
def test_rows_in_sight_alone_are_read(kind: str, row: int, is_seen: bool) -> None:
    """The root at position 29 sees positions 0, 1 and 24 to 28, and itself without feedback."""
    made, texts = drafted(kind, 30)
    for stores in (made._rows.cache.keys, made._rows.cache.values):
        for store in stores:
            store[0, :, row] = float("nan")
    tree = made.propose(context([texts.texts[0]]))
    assert tree.scores is not None
    assert bool(tree.scores.isnan().any()) == is_seen


@pytest.mark.parametrize("kind", ["spire", "spire, no feedback"])
def test_a_batch_drafts_what_each_sequence_drafts_alone(kind: str) -> None:
    made, texts, draw = drafter(kind, **SHAPES["dynamic"]), Texts(kind), random.Random(5)
    for slot, length in enumerate((2, 9, 33)):
        texts.begin([made], slot, words(draw, length))
    texts.commit([made], [0, 1, 2])
    together = made.propose(context([texts.texts[slot] for slot in (0, 1, 2)]))
    for slot in (0, 1, 2):
        alone = made.propose(context([texts.texts[slot]], slots=[slot]))
        assert alone.rows()[0].tokens == together.rows()[slot].tokens
        assert alone.rows()[0].parents == together.rows()[slot].parents


@pytest.mark.parametrize("kind", ["spire", "spire, no feedback"])
@pytest.mark.parametrize("is_fed", [False, True])
def test_a_copied_prefix_drafts_like_its_own(kind: str, is_fed: bool) -> None:
    """Whether its features were drafted from or still wait."""
    made, texts, draw = drafter(kind, **SHAPES["static"]), Texts(kind), random.Random(7)
    prompt = words(draw, 20)
    texts.begin([made], 0, prompt)
    texts.commit([made], [0])
    if is_fed:
        made.propose(context([prompt]))
    assert made.reusable(0, 15) == 15
    texts.begin([made], 1, [*prompt[:16], *words(draw, 9)])
    request = DraftRequest(request_id="1", prompt=texts.texts[1], params=GREEDY, prefix=Prefix(0, 15))
    made.begin(1, request)
    texts._told[1] = 15
    texts.commit([made], [1])
    tree = made.propose(context([texts.texts[1]], slots=[1]))
    assert_scores(tree, 0, texts, 1, 1.0)


def test_no_draft_without_a_committed_row() -> None:
    """A prompt of one token: the root has no row to see."""
    made, texts = drafter("spire", **SHAPES["chain"]), Texts("spire")
    texts.begin([made], 0, [5])
    assert made.propose(context([texts.texts[0]])).num_nodes.tolist() == [1]


@pytest.mark.parametrize("kind", SPIRES)
def test_a_checkpoint_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    """The file names the kept blocks; a file that names a block too many is refused."""
    _, first = read_head(directory(kind))
    native.write_checkpoint(first, tmp_path / "again")
    _, again = read_head(tmp_path / "again")
    assert again.config == first.config
    assert again.weights.keys() == first.weights.keys()
    assert all(torch.equal(again.weights[key], each) for key, each in first.weights.items())
    config = json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8"))
    assert config["config"]["kept_layers"] == list(first.config.kept_layers)  # type: ignore[attr-defined]
    config["config"]["kept_layers"] = [3]
    (tmp_path / "again" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="ascending numbers from 0 to 2"):
        read_head(tmp_path / "again")


@pytest.mark.parametrize("kind", ["spire", "spire, no feedback"])
def test_int8_drafts_are_near(kind: str) -> None:
    made, texts = drafter(kind, tree="chain", num_speculative_tokens=3, quantization="int8"), Texts(kind)
    texts.begin([made], 0, words(random.Random(2), 20))
    texts.commit([made], [0])
    tree = made.propose(context([texts.texts[0]]))
    (path,) = paths(tree.rows()[0])
    tokens = [tree.rows()[0].tokens[node] for node in path]
    assert tree.scores is not None
    expected = texts.log_probs(0, tokens, 1.0)[range(3), tokens].cumsum(0)
    assert not torch.equal(tree.scores[0, path], expected)
    torch.testing.assert_close(
        tree.scores[0, path], expected, rtol=0.1, atol=0.1
    )  # a hundredth a weight, over 2 blocks

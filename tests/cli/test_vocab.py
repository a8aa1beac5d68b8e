"""`foretoken data vocab`, and heads that are trained on what it chose."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import assert_refused, done, output_of, report_of
from packed_data import write_packed
from tiny_models import VOCAB_SIZE

sys.path.append(str(Path(__file__).parents[1] / "training"))
from trained_heads import PROMPTS, texts, tokenizer, write_target

from foretoken import LLM, SamplingParams
from foretoken.formats.registry import read_head
from foretoken.training.data.packed import Document, PackedTokens

QUICK = ("--batch-size", "4", "--length", "24", "--num-prompts", "0", "--lr", "1e-2", "--warmup-steps", "2")
SIZE = 40


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and packed texts of its own."""
    directory = tmp_path_factory.mktemp("vocab")
    write_target(directory / "target")
    documents = [Document(list(text)) for text in texts().texts]
    write_packed(directory / "data" / "train", documents, tokenizer=tokenizer())
    output_of(*vocab(directory, SIZE))
    return directory


def vocab(place: Path, size: int) -> tuple[str, ...]:
    return ("data", "vocab", str(place / "data"), "--size", str(size), "--out", str(place / f"vocab-{size}.json"))


@pytest.fixture
def train(place: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The words of a command that trains a head."""
    where = ("--data", str(place / "data"), "--out", str(tmp_path / "head"))
    return lambda method, *more: ["train", method, str(place / "target"), *where, *QUICK, *more]


def test_what_it_chooses_and_says(place: Path) -> None:
    chosen = json.loads((place / f"vocab-{SIZE}.json").read_text())
    packed = PackedTokens.open(place / "data")
    assert len(chosen["token_ids"]) == SIZE
    assert chosen["tokenizer_sha"] == packed.meta["tokenizer_sha"]
    hits = sum(token in chosen["token_ids"] for token in packed.tokens.tolist())
    assert chosen["coverage"] == pytest.approx(hits / len(packed.tokens))
    result, out = done(*vocab(place, VOCAB_SIZE)), place / f"vocab-{VOCAB_SIZE}.json"
    assert f"{out}: {VOCAB_SIZE} tokens, coverage 100.00% of {len(packed.tokens)} labels" in result.stdout
    unseen = VOCAB_SIZE - len(set(packed.tokens.tolist()))
    assert f"{unseen} of {VOCAB_SIZE} tokens are not labels" in result.stderr
    out.unlink()
    facts = report_of(*vocab(place, VOCAB_SIZE))
    assert (facts["coverage"], facts["filled"]) == (1.0, unseen)


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("eagle3", ("--set", "boundaries=[1, 2, 3]", "--set", "num_steps=3")),
        ("medusa", ("--set", "own_lm_head=true", "--set", "num_heads=2")),
    ],
)
def test_from_data_to_lossless_drafts(
    place: Path, tmp_path: Path, train: Callable[..., list[str]], method: str, sizes: tuple[str, ...]
) -> None:
    file = place / f"vocab-{SIZE}.json"
    output_of(*train(method, *sizes, "--draft-vocab", str(file), "--steps", "40"))
    head = read_head(tmp_path / "head")[1]
    sizes_of: Any = head.config
    assert sizes_of.draft_vocab_size == SIZE
    assert head.weights["token_map"].tolist() == json.loads(file.read_text())["token_ids"]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    config = {"method": method, "model": str(tmp_path / "head"), "num_speculative_tokens": 2}
    plain, drafted = (
        LLM(str(place / "target"), speculative_config=each).generate(PROMPTS[:4], params) for each in (None, config)
    )
    assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in drafted]
    assert sum(o.metrics.num_accepted for o in drafted) > 0


def test_bad_requests(place: Path, tmp_path: Path) -> None:
    data, out = str(place / "data"), str(tmp_path / "vocab.json")
    for arguments, sentence in (
        ((data, "--size", str(VOCAB_SIZE + 1), "--out", out), f"Expected 1 to {VOCAB_SIZE}"),
        ((data, "--size", "0", "--out", out), "Invalid value for '--size'"),
        ((data, "--out", out), "Missing option '--size'"),
        ((str(tmp_path), "--size", "4", "--out", out), "holds no packed tokens"),
        ((data, "--size", "4", "--out", str(place / f"vocab-{SIZE}.json")), "exists already"),
    ):
        assert_refused(sentence, "data", "vocab", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit(place: Path, tmp_path: Path, train: Callable[..., list[str]]) -> None:
    file = place / f"vocab-{SIZE}.json"
    foreign = tmp_path / "foreign.json"
    foreign.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_sha": "another"}))
    given = ("--draft-vocab", str(file))
    output_of(*train("eagle3", *given, "--steps", "1"))
    head = ("--init", str((tmp_path / "head").rename(tmp_path / "other")))
    shutil.rmtree(tmp_path / "head-run")
    for method, arguments, sentence in (
        ("eagle3", ("--draft-vocab", str(foreign)), "is of another tokenizer than the data"),
        ("eagle3", ("--draft-vocab", str(tmp_path / "none")), "there is no file"),
        ("eagle3", ("--draft-vocab", str(place / "target" / "config.json")), "holds no draft vocabulary"),
        ("eagle3", ("--set", "draft_vocab_size=30"), "30 tokens of the vocabulary, and 0 are named"),
        ("eagle3", (*given, "--set", "draft_vocab_size=30"), f"which names {SIZE} tokens"),
        ("eagle3", (*given, *head), "--init brings a vocabulary of its own"),
        ("mlp_speculator", given, "not for mlp_speculator heads, which draft all tokens"),
        ("medusa", (*given, "--joint", "backbone=lora", "--target-out", str(tmp_path / "new")), "--joint trains"),
    ):
        assert_refused(sentence, *train(method, *arguments, "--steps", "2"))
        assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("method", ["hass", "medusa"])
def test_a_shared_lm_head_teaches_these_tokens_alone(
    place: Path, tmp_path: Path, train: Callable[..., list[str]], method: str
) -> None:
    file = place / f"vocab-{SIZE}.json"
    heads = []
    for begun in ((), ("--init", str(tmp_path / "first"))):  # the vocabulary is of the training, not of the head
        output_of(*train(method, *begun, "--draft-vocab", str(file), "--steps", "3", "--num-prompts", "0"))
        heads.append(read_head(tmp_path / "head")[1])
        (tmp_path / "head").rename(tmp_path / "first") if not begun else None
        shutil.rmtree(tmp_path / "head-run")
    assert all("token_map" not in head.weights for head in heads)
    (tmp_path / "head").rename(tmp_path / "second")
    output_of(*train(method, "--init", str(tmp_path / "second"), "--steps", "1", "--num-prompts", "0"))
    heads.append(read_head(tmp_path / "head")[1])  # which goes on with the vocabulary of the head
    assert all(head.draft_vocab == json.loads(file.read_text())["token_ids"] for head in heads)
    assert heads[0].notes["settings"]["draft_vocab"] is not None
    assert any(not torch.equal(heads[0].weights[name], heads[1].weights[name]) for name in heads[0].weights)

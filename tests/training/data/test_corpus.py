"""Which record goes where, limits, and that both parts appear or neither."""

import json
from pathlib import Path
from typing import Any

import pytest
from data_tokenizers import BOS, EOS, letter_tokenizer, letters

from foretoken.core.errors import ConfigError, RequestError
from foretoken.training.data.corpus import Corpus, CorpusPlan, DataProgress, Source, build_corpus, json_source
from foretoken.training.data.documents import Encoder
from foretoken.training.data.packed import PackedTokens

WORDS = [f"{first}{second}" for first in "abcdefgh" for second in "klmnopqrst"]


def source(path: Path, texts: list[str]) -> Source:
    """A file of JSON lines with texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return json_source(str(path))


def build(out: Path, plan: CorpusPlan, **more: Any) -> Corpus:
    tokenizer = letter_tokenizer()
    return build_corpus(out, plan, tokenizer, lambda part: Encoder(tokenizer), **more)


def texts_of(packed: PackedTokens) -> list[str]:
    """The documents again."""
    whole = "".join("^" if token == BOS else "$" if token == EOS else chr(token + 87) for token in packed.tokens)
    return whole.replace("^", "").split("$")[:-1]


def test_the_split_depends_on_content_alone(tmp_path: Path) -> None:
    plans = {
        "forwards": CorpusPlan(sources=[source(tmp_path / "f.jsonl", WORDS)], held_out_fraction=0.25),
        "backwards": CorpusPlan(
            sources=[source(tmp_path / "a.jsonl", WORDS[::-1][:30]), source(tmp_path / "b.jsonl", WORDS[::-1][30:])],
            held_out_fraction=0.25,
        ),
    }
    parts = {}
    for name, plan in plans.items():
        corpus = build(tmp_path / name, plan)
        parts[name] = {part: texts_of(packed) for part, packed in corpus.parts.items()}
        assert sorted(parts[name]["train"] + parts[name]["held_out"]) == sorted(WORDS)
    held_out = parts["forwards"]["held_out"]
    assert 8 <= len(held_out) <= 32  # 20 expected; 3 standard deviations are 12
    assert sorted(parts["backwards"]["held_out"]) == sorted(held_out)
    assert parts["forwards"]["train"] == [word for word in WORDS if word not in held_out]  # in their order


def test_held_out_sources_and_limits(tmp_path: Path) -> None:
    plan = CorpusPlan(
        sources=[source(tmp_path / "a.jsonl", WORDS)],
        held_out_sources=[source(tmp_path / "b.jsonl", ["zz", "yy", "xx"])],
        num_documents=2,
    )
    corpus = build(tmp_path / "out", plan, meta={"target": "letters"})
    assert {part: texts_of(packed) for part, packed in corpus.parts.items()} == {
        "train": WORDS[:2], "held_out": ["zz", "yy"],
    }  # fmt: skip
    assert corpus.parts["held_out"].meta["sources"] == [str(tmp_path / "b.jsonl")]
    assert corpus.parts["train"].meta["target"] == "letters"
    assert PackedTokens.open(tmp_path / "out").meta == corpus.parts["train"].meta  # the parent means its train/
    short = build(tmp_path / "short", CorpusPlan(sources=plan.sources, max_tokens=9))
    assert texts_of(short.parts["train"]) == WORDS[:3]  # 4 tokens each: the third reaches 9
    assert short.parts["train"].meta["num_tokens"] == 12


def test_progress_knows_the_time_left(tmp_path: Path) -> None:
    seen: list[DataProgress] = []
    build(tmp_path / "out", CorpusPlan(sources=[source(tmp_path / "a.jsonl", WORDS)]), on_progress=seen.append)
    assert [progress.documents for progress in seen] == list(range(1, 81))
    assert [progress.tokens for progress in seen] == list(range(4, 321, 4))
    left = [progress.seconds_left for progress in seen]
    assert all(each is not None and each >= 0 for each in left)
    assert left[-1] == 0.0
    unknown = Source(name="unknown", records=json_source(str(tmp_path / "a.jsonl")).records)
    build(tmp_path / "out", CorpusPlan(sources=[unknown]), on_progress=seen.append, force=True)
    assert seen[-1].seconds_left is None


def test_a_failing_part_leaves_neither(tmp_path: Path) -> None:
    good, broken = source(tmp_path / "good.jsonl", WORDS), source(tmp_path / "broken.jsonl", WORDS)
    with (tmp_path / "broken.jsonl").open("a") as file:
        file.write("{broken\n")
    old = texts_of(build(tmp_path / "out", CorpusPlan(sources=[good])).parts["train"])
    before = sorted(path.name for path in tmp_path.iterdir())
    for plan, message in (
        (CorpusPlan(sources=[broken], held_out_fraction=0.2), r"broken.jsonl:81 is not valid JSON"),
        (CorpusPlan(sources=[good], held_out_sources=[broken]), r"broken.jsonl:81 is not valid JSON"),
        (CorpusPlan(sources=[good], held_out_fraction=1e-9), r"held_out data of .*1e-09: there is no document"),
    ):
        with pytest.raises(RequestError, match=message):
            build(tmp_path / "out", plan, force=True)
        assert texts_of(PackedTokens.open(tmp_path / "out")) == old
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_plans_that_make_no_sense(tmp_path: Path) -> None:
    one = source(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(ConfigError, match="there is no source"):
        CorpusPlan(sources=[])
    with pytest.raises(ConfigError, match=r"held_out_fraction is 1.0"):
        CorpusPlan(sources=[one], held_out_fraction=1.0)
    with pytest.raises(ConfigError, match="exclude each other"):
        CorpusPlan(sources=[one], held_out_fraction=0.5, held_out_sources=[one])
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        CorpusPlan(sources=[one], max_tokens=0)


def test_skipped_records_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "alone"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = build(tmp_path / "out", CorpusPlan(sources=[json_source(str(tmp_path / "a.jsonl"))]))
    assert dict(corpus.skipped) == {"prompts without a completion": 1}
    packed = corpus.parts["train"]
    assert packed.tokens.tolist() == [BOS, *letters("abcd"), EOS]
    assert packed.supervised is not None
    assert packed.supervised.tolist() == [False, False, False, True, True, True]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[1]))
    with pytest.raises(RequestError, match="there is no document"):
        build(tmp_path / "none", CorpusPlan(sources=[json_source(str(tmp_path / "a.jsonl"))]))

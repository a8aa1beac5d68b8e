"""Responses are what `LLM.generate` writes, and a run that was broken off ends in the identical file."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from data_tokenizers import BOS, EOS, PREFIX_TEMPLATE, letter_tokenizer, letters
from tiny_models import tiny_model

from foretoken import LLM
from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.sampling_params import SamplingParams
from foretoken.training.data.corpus import Record, read_row
from foretoken.training.data.documents import DistillSettings, SelfDistiller
from foretoken.training.data.packed import Document

SETTINGS = DistillSettings(prompt_tokens=4, max_new_tokens=6, temperature=1.0, seed=11)
RECORDS = [Record(where=f"{i}", text="".join(chr(97 + (i * 7 + j * 3) % 26) for j in range(2 + i % 6)))
           for i in range(21)]  # fmt: skip


@cache
def llm() -> LLM:
    """A tiny target: two sequences at once, so calls of eight prompts. Some responses end with its EOS."""
    module = tiny_model("llama", dtype=torch.float64)
    return LLM(module, tokenizer=letter_tokenizer(PREFIX_TEMPLATE), max_num_seqs=2, runner="generic")


def distiller(path: Path, settings: DistillSettings = SETTINGS, **more: Any) -> SelfDistiller:
    return SelfDistiller(llm(), settings, path, max_num_seqs=2, **more)


def made(path: Path, records: list[Record], **more: Any) -> list[Document]:
    return [document for _, document in distiller(path, **more).documents(records)]


def prompt_of(record: Record) -> list[int]:
    return [BOS, *letters(record.text)][:4]


def test_responses_are_those_of_generate(tmp_path: Path) -> None:
    documents = made(tmp_path / "file.jsonl", RECORDS)
    ended = cut = 0
    for index, (record, document) in enumerate(zip(RECORDS, documents, strict=True)):
        prompt = prompt_of(record)
        params = SamplingParams(temperature=1.0, seed=11 + index, max_tokens=6)
        response = llm().generate([prompt], params)[0].outputs[0].token_ids
        is_ended = response[-1] == EOS
        ended, cut = ended + is_ended, cut + (not is_ended)
        # An EOS that the target did not write is no label.
        assert document.tokens == [*prompt, *response, *([] if is_ended else [EOS])]
        assert document.supervised == [
            *([False] * len(prompt)), *([True] * len(response)), *([] if is_ended else [False]),
        ]  # fmt: skip
    assert cut > 0
    assert ended > 0


def test_documents_of_one_call_wait_together(tmp_path: Path) -> None:
    """So that progress is told where the time of a call has brought all of its documents."""
    maker = distiller(tmp_path / "file.jsonl")
    waiting = [maker.num_waiting for _ in maker.documents(RECORDS)]
    assert waiting == [*range(7, -1, -1), *range(7, -1, -1), *range(4, -1, -1)]
    again = distiller(tmp_path / "file.jsonl")
    assert {again.num_waiting for _ in again.documents(RECORDS)} == {0}


def test_responses_are_told_of_before_a_call_has_ended(tmp_path: Path) -> None:
    told = list[tuple[int, int]]()
    documents = distiller(tmp_path / "file.jsonl", on_responses=lambda *each: told.append(each)).documents(RECORDS)
    next(documents)
    assert (told[0][0] < 8, told[-1]) == (True, (8, 8))
    assert len(list(documents)) == len(RECORDS) - 1
    assert told[-1] == (5, 5)


def test_supervising_prompts_too(tmp_path: Path) -> None:
    (document,) = made(tmp_path / "file.jsonl", RECORDS[:1], supervise_all=True)
    assert document.supervised is not None
    assert all(document.supervised[:5])


@pytest.mark.parametrize("cut_bytes", [0, 1, 40])
def test_resuming_ends_in_the_identical_file(tmp_path: Path, cut_bytes: int) -> None:
    whole, parted = tmp_path / "whole.jsonl", tmp_path / "parted.jsonl"
    documents = made(whole, RECORDS)
    first = distiller(parted).documents(RECORDS)
    for _ in range(9):  # the ninth document needs the second call: sixteen are stored
        next(first)
    first.close()  # as an interruption does
    data = parted.read_bytes()
    assert data.count(b"\n") == 1 + 16
    parted.write_bytes(data[: len(data) - cut_bytes])  # as a machine that lost power may leave it
    again = distiller(parted)
    assert [document for _, document in again.documents(RECORDS)] == documents
    assert again.num_resumed == (16 if cut_bytes == 0 else 15)
    assert parted.read_bytes() == whole.read_bytes()
    before = whole.stat().st_mtime_ns
    assert made(whole, RECORDS) == documents  # all of it is there: nothing is generated or written
    assert whole.stat().st_mtime_ns == before


def test_an_interruption_inside_a_call_leaves_a_valid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.jsonl"
    generate, calls = LLM.generate, []

    def interrupted(self: LLM, *arguments: Any, **_: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "generate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made(path, RECORDS)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["index"] for line in lines[1:]] == list(range(8))
    made(path, RECORDS)
    made(tmp_path / "whole.jsonl", RECORDS)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_more_documents_go_on_where_fewer_ended(tmp_path: Path) -> None:
    made(tmp_path / "grown.jsonl", RECORDS[:8])
    made(tmp_path / "grown.jsonl", RECORDS)
    made(tmp_path / "whole.jsonl", RECORDS)
    assert (tmp_path / "grown.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_other_settings_or_data_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    made(path, RECORDS[:3])
    data = path.read_bytes()
    other = DistillSettings(prompt_tokens=4, max_new_tokens=6, temperature=0.5, seed=11)
    with pytest.raises(RequestError, match=r"was made with temperature 1.0 instead of 0.5"):
        made(path, RECORDS[:3], settings=other)
    with pytest.raises(RequestError, match="document 1 has another prompt than 2"):
        made(path, [RECORDS[0], RECORDS[2]])
    assert path.read_bytes() == data
    path.write_bytes(data.replace(b'"index": 1', b'"index": 7'))
    with pytest.raises(RequestError, match="its lines are not in order"):
        made(path, RECORDS[:3])
    path.write_text("{}\nnot json\n")
    with pytest.raises(RequestError, match="is damaged"):
        made(path, RECORDS[:3])


def test_prompts_of_chats_and_completions(tmp_path: Path) -> None:
    turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "old"})
    records = [
        Record(where="0", messages=turns),
        Record(where="1", prompt="abcdefgh", text="old"),
        Record(where="2", messages=turns[1:]),
        Record(where="3", prompt="a" * 96, text="old"),
    ]
    maker = distiller(tmp_path / "file.jsonl")
    found = {record.where: document for record, document in maker.documents(records)}
    assert list(found) == ["0", "1"]
    assert found["0"].tokens[:6] == [BOS, 3, 10, 6, 37, 4]  # up to the start of the answer; the old one is gone
    assert found["1"].tokens[:9] == [BOS, *letters("abcdefgh")]  # whole, whatever prompt_tokens is
    assert found["1"].supervised is not None
    assert found["1"].supervised[:10] == [False] * 9 + [True]
    assert dict(maker.skipped) == {"conversations without a user turn": 1, "prompts too long for the context": 1}


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exceed the context length 96"):
        distiller(tmp_path / "file.jsonl", DistillSettings(prompt_tokens=50, max_new_tokens=50))
    with pytest.raises(ConfigError, match="prompt_tokens is 0"):
        DistillSettings(prompt_tokens=0)
    with pytest.raises(RequestError, match="temperature is -1"):
        DistillSettings(temperature=-1.0)


def test_later_turns_follow_the_targets_own_answers(tmp_path: Path) -> None:
    """Resumed at any line the file is the same; the turns of a conversation share the key that splits go by."""
    rows = [{"turns": ["a", "bc", "d"]}, {"turns": ["e"]}, {"turns": ["f", "g"]}]
    records = [read_row(row, str(index)) for index, row in enumerate(rows)]
    assert all(records)
    whole = tmp_path / "whole.jsonl"
    found = list(distiller(whole).documents(filter(None, records)))
    assert [record.where for record, _ in found] == ["0", "1", "2", "0", "2", "0"]
    assert len({record.key for record, _ in found}) == 3
    tokenizer: Any = llm().tokenizer
    lines = [json.loads(line) for line in whole.read_text().splitlines()[1:]]
    said = [{"role": "user", "content": "a"}]
    for line, asked in ((lines[0], "bc"), (lines[3], "d")):
        answer = tokenizer.decode(line["response"], skip_special_tokens=True).strip()
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": asked}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert lines[5]["prompt"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    for kept in (2, 4):
        parted = tmp_path / f"{kept}.jsonl"
        parted.write_text("".join(f"{line}\n" for line in whole.read_text().splitlines()[: 1 + kept]))
        assert made(parted, [each for each in records if each]) == [document for _, document in found]
        assert parted.read_bytes() == whole.read_bytes()

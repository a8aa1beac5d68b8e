"""Files become records; whatever cannot be read is one sentence that says where."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.core.errors import RequestError
from foretoken.training.data.corpus import Record, file_source, json_source, read_row, text_source


def written(path: Path, *rows: Any) -> str:
    """A file of JSON lines; strings are written as they are."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def contents(records: list[Record]) -> list[Any]:
    return [record.messages or (record.text if record.prompt is None else (record.prompt, record.text))
            for record in records]  # fmt: skip


def test_text_files_directories_and_globs(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "a.txt").write_text("\ufeffay", encoding="utf-8")  # a byte order mark is not text
    (tmp_path / "sub" / "c.md").write_text("sea")
    (tmp_path / "sub" / ".hidden").write_bytes(b"\xff")
    (tmp_path / "empty.txt").write_text(" \n")
    assert contents(list(text_source(str(tmp_path / "b.txt")).records())) == ["bee"]
    everything = text_source(str(tmp_path))
    assert contents(list(everything.records())) == ["ay", "bee", "sea"]
    assert contents(list(everything.records())) == ["ay", "bee", "sea"]  # as often as wanted
    assert everything.total == 5 + 3 + 3 + 2
    assert contents(list(text_source(str(tmp_path / "**" / "*.md")).records())) == ["sea"]
    with pytest.raises(RequestError, match="there is no file"):
        text_source(str(tmp_path / "*.rst"))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\xff")
    with pytest.raises(RequestError, match=r"image.txt' is not UTF-8 text"):
        list(text_source(str(tmp_path)).records())


def test_forms_of_rows(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    path = written(
        tmp_path / "rows.jsonl",
        {"text": "plain", "id": 3},
        "",
        {"prompt": "p", "completion": "c"},
        {"prompt": "p", "response": "r"},
        {"prompt": "alone"},
        {"messages": chat, "prompt": "ignored"},  # as in UltraChat
        {"text": " \n"},
        {"text": None},
    )
    source = json_source(path)
    assert contents(list(source.records())) == ["plain", ("p", "c"), ("p", "r"), ("alone", ""), tuple(chat)]
    assert source.total == Path(path).stat().st_size


def test_share_gpt(tmp_path: Path) -> None:
    turns = [
        {"from": "gpt", "value": "nobody asked"},
        {"from": "system", "value": "s"},
        {"from": "human", "value": "u"},
        {"from": "gpt", "value": "a"},
    ]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"id": "x", "conversations": turns}, {"conversations": []}]))
    (record,) = json_source(str(file)).records()
    assert record.where == f"{file}: row 0"
    assert record.messages == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    )


def test_compressed_lines_and_columns_of_other_names(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"content": "one", "text": "two"}\n'))
    assert contents(list(file_source(str(path)).records())) == ["two"]
    assert contents(list(file_source(str(path), text_column="content").records())) == ["one"]
    assert file_source(str(path)).total is None
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(RequestError, match=r"rows.jsonl.gz' cannot be read after line"):
        list(file_source(str(path)).records())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', r"rows.jsonl:2 is not valid JSON"),
        ("[1, 2]", r"rows.jsonl:2 is list. Expected an object"),
        ('{"txt": "x"}', r"rows.jsonl:2 has the columns \['txt'\].*Did you mean 'text'\?"),
        ('{"text": 5}', r"rows.jsonl:2: 'text' is 5. Expected text"),
        ('{"messages": "hello"}', r"rows.jsonl:2: 'messages' is str. Expected a list"),
        (
            '{"messages": [{"role": "assistants", "content": "x"}]}',
            r"rows.jsonl:2: turn 0 of 'messages' has the role 'assistants'. Did you mean 'assistant'\?",
        ),
        ('{"messages": [{"role": "user"}]}', r"rows.jsonl:2: turn 0 .* has the keys \['role'\]"),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', r"'content' is \['x'\]. Expected text"),
        (r'{"text": "half \ud83d of it"}', r"rows.jsonl:2: 'text' holds a lone surrogate, '\\ud83d', at character 5"),
        (r'{"messages": [{"role": "user", "content": "\udfff"}]}', "turn 0 of 'messages': 'content' holds a lone"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', r"has the role \['user'\]. "),
        ('{"messages": [{"role": null, "content": "x"}]}', "has the role None. "),
        ('{"conversations": [{"from": "alien", "value": "x"}]}', "has the role 'alien'"),
    ],
)
def test_bad_lines_say_where(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "rows.jsonl", {"text": "good"}, line)
    with pytest.raises(RequestError, match=message):
        list(json_source(path).records())


def test_bad_arrays(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"text": "x"}')
    with pytest.raises(RequestError, match=r"holds dict\. Expected an array"):
        list(json_source(str(tmp_path / "rows.json")).records())
    (tmp_path / "rows.json").write_text('{"text": "x"}\n{"text": "y"}\n')
    with pytest.raises(RequestError, match=r"is not valid JSON.*\.jsonl"):
        list(json_source(str(tmp_path / "rows.json")).records())


def test_the_hash_knows_content_alone() -> None:
    one, other = (read_row({"text": "same"}, where) for where in ("a:1", "b:7"))
    assert one is not None
    assert other is not None
    assert one.key == other.key
    assert one.share == other.share
    forms = [{"text": "x"}, {"prompt": "x"}, {"prompt": "", "completion": "x"}]
    assert len({record.key for row in forms if (record := read_row(row, "")) is not None}) == 3
    shares = [record.share for i in range(2000) if (record := read_row({"text": str(i)}, "")) is not None]
    assert 0.08 < sum(share < 0.1 for share in shares) / 2000 < 0.12  # 3 standard deviations

"""Data sets on local disk, streamed without network: parquet, JSON, saved ones, and articles cut into rows."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from foretoken.core.errors import ConfigError, RequestError
from foretoken.training.data.corpus import dataset_source


@pytest.fixture
def arrow() -> Any:
    return pytest.importorskip("datasets", reason="the extra [datasets] is not installed")


def parquet(directory: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """A parquet file."""
    import datasets

    directory.mkdir(exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(directory / name)


def test_parquet_file_and_directory(arrow: Any, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    parquet(tmp_path / "chats", "train-00000.parquet", [{"messages": turns}])
    parquet(tmp_path / "chats", "test-00000.parquet", [{"messages": turns}, {"messages": turns}])
    for name in (str(tmp_path / "chats"), str(tmp_path / "chats" / "train-00000.parquet")):
        (record,) = dataset_source(name).records()
        assert record.messages == tuple(turns)
    assert len(list(dataset_source(str(tmp_path / "chats"), split="test").records())) == 2


def test_json_file_and_saved_data_set(arrow: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "p", "completion": "c"}, {"prompt": "q", "completion": "d"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arrow.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    arrow.DatasetDict({"held": arrow.Dataset.from_list(rows)}).save_to_disk(tmp_path / "dict")
    saved = dataset_source(str(tmp_path / "saved"))
    assert saved.total == 2
    assert saved.unit == "rows"
    for source in (dataset_source(str(file)), saved, dataset_source(str(tmp_path / "dict"), split="held")):
        assert [(record.prompt, record.text, record.size) for record in source.records()] == [
            ("p", "c", 1), ("q", "d", 1),
        ]  # fmt: skip


def test_articles_are_joined_at_headings(arrow: Any, tmp_path: Path) -> None:
    rows = ["", " = One = \n", "", " first \n", " = = Part = = \n", " more \n", "", " = Two words = \n", " last \n"]
    parquet(tmp_path / "wiki", "train.parquet", [{"text": row} for row in rows])
    source = dataset_source(str(tmp_path / "wiki"))
    articles = [record.text for record in source.records()]
    assert articles == [" = One = \n first \n = = Part = = \n more \n", " = Two words = \n last \n"]
    parquet(tmp_path / "plain", "train.parquet", [{"text": row} for row in ("a", "", " = b = ", "c")])
    assert [record.text for record in dataset_source(str(tmp_path / "plain")).records()] == ["a", " = b = ", "c"]


def test_errors_are_one_sentence(arrow: Any, tmp_path: Path) -> None:
    parquet(tmp_path / "set", "train.parquet", [{"txt": "x"}])
    with pytest.raises(RequestError, match=r"\[train\] row 0 has the columns \['txt'\]"):
        list(dataset_source(str(tmp_path / "set")).records())
    with pytest.raises(RequestError, match=r"split 'tets' of data set .* cannot be opened"):
        dataset_source(str(tmp_path / "set"), split="tets")
    (tmp_path / "file.docx").write_text("x")
    with pytest.raises(RequestError, match=r"suffix is none of \.parquet"):
        dataset_source(str(tmp_path / "file.docx"))
    (tmp_path / "broken.parquet").write_text("not parquet")
    with pytest.raises(RequestError, match="cannot be"):
        list(dataset_source(str(tmp_path / "broken.parquet")).records())


def test_missing_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[datasets\]'"):
        dataset_source("wikitext")

"""Heads by hub id, from a cache made by hand: no network."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from tiny_heads import medusa, random_head, round_trip

from foretoken.core.errors import ModelError
from foretoken.formats import files
from foretoken.formats.files import local_head
from foretoken.formats.registry import read_head, write_head

HEAD = medusa()
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
LOOK = """
import json, sys
from foretoken.core.errors import ForetokenError
from foretoken.formats.files import local_head
from foretoken.formats.registry import read_head
said = []
for name, revision in json.loads(sys.argv[1]):
    try:
        path = local_head(name, revision)
        said.append([str(path), read_head(path)[1].config.num_heads])
    except ForetokenError as err:
        said.append(str(err))
print(json.dumps(said))
"""


def cached(home: Path, name: str, revision: str, write: str, num_heads: int) -> Path:
    """A snapshot as huggingface_hub keeps it; write: the format of its head."""
    place = home / "hub" / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / revision).write_text(COMMITS[revision])
    snapshot = place / "snapshots" / COMMITS[revision]
    write_head(write, random_head(HEAD.model_copy(update={"num_heads": num_heads})), snapshot)
    return snapshot


def offline(home: Path, *asked: tuple[str, str | None]) -> list[list[object] | str]:
    """What a process without network finds, which reads its environment when it starts."""
    paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path)
    result = subprocess.run(
        [sys.executable, "-c", LOOK, json.dumps(asked)], capture_output=True, text=True, check=True, cwd=home,
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths},
    )  # fmt: skip
    found: list[list[object] | str] = json.loads(result.stdout)
    return found


@pytest.mark.slow
def test_offline(tmp_path: Path) -> None:
    main = cached(tmp_path, "some/head", "main", "vllm_medusa", 1)
    tagged = cached(tmp_path, "some/head", "v1", "vllm_medusa", 3)
    pickled = cached(tmp_path, "some/pickled", "main", "medusa", 2)
    known = [("some/head", None), ("some/head", "v1"), ("some/head", COMMITS["v1"]), ("some/pickled", None)]
    unknown = [("some/head", "v2"), ("nobody/nothing", None)]
    *found, first, second = offline(tmp_path, *known, *unknown)
    assert found == [[str(main), 1], [str(tagged), 3], [str(tagged), 3], [str(pickled), 2]]
    assert isinstance(first, str)
    assert first.startswith("head 'some/head' at revision 'v2' cannot be fetched from the hub: ")
    assert isinstance(second, str)
    assert second.startswith("head 'nobody/nothing' cannot be fetched from the hub: ")
    assert all(message.count("\n") == 0 and message.endswith("or pass a directory.") for message in (first, second))


def asked_for(tmp_path: Path, write: str, **options: object) -> list[list[str]]:
    """Which patterns are downloaded for a repository with a head of some format."""
    write_head(write, random_head(HEAD), tmp_path, **options)  # type: ignore[arg-type]
    with mock.patch.object(files, "snapshot_download", return_value=str(tmp_path)) as download:
        assert read_head(local_head("some/head", "v1"))[1].config == HEAD
    assert all(call.kwargs["revision"] == "v1" for call in download.call_args_list)
    assert all(call.kwargs["ignore_patterns"] == ["*/*"] for call in download.call_args_list)
    return [call.kwargs["allow_patterns"] for call in download.call_args_list]


def test_pickles_are_fetched_only_where_there_is_nothing_else(tmp_path: Path) -> None:
    plain = asked_for(tmp_path / "plain", "medusa", as_safetensors=True)
    assert plain == [["*.json", "*.safetensors"]]
    pickled = asked_for(tmp_path / "pickled", "medusa")
    assert pickled[0] == plain[0]
    assert len(pickled) == 2
    assert "medusa_lm_head.pt" in pickled[1]
    assert not {"*", "*.pt", "*.bin", "*.py"} & set(pickled[1]), "nothing but known names"


def test_what_is_here_is_never_looked_for_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    round_trip("native", random_head(HEAD), tmp_path / "some")
    monkeypatch.chdir(tmp_path)
    with mock.patch.object(files, "snapshot_download") as download:
        assert local_head("some/one") == Path("some/one")
        assert local_head(str(tmp_path / "some" / "one")) == tmp_path / "some" / "one"
        for misspelt in ("some/on", "/nowhere/at/all", "one", "../one", "a/b/c", "", "owner/", "o wner/name"):
            with pytest.raises(ModelError, match=rf"there is no head '{misspelt}'. Expected a directory"):
                local_head(misspelt)
        with pytest.raises(ModelError, match="revision 'v1' is of a hub repository, and 'some/one' is none"):
            local_head("some/one", "v1")
        download.assert_not_called()

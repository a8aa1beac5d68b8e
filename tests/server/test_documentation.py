"""The OpenAPI document and docs/server.md: routes with their answers, every field of requests, an example that runs."""

import re
from pathlib import Path
from typing import Any

import pytest
from server.live_server import LiveServer

from foretoken.server import request_fields, responses

TEXT = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def test_every_field_is_documented() -> None:
    known = request_fields._SAMPLING | request_fields._SHARED | request_fields._IGNORED | request_fields._REFUSED.keys()
    missing = [name for name in sorted({*known, *request_fields._FORM}) if f"`{name}`" not in TEXT]
    assert missing == []


def test_every_field_of_responses_is_documented() -> None:
    (section,) = re.findall(r"## Responses\n(.*?)\n## ", TEXT, flags=re.DOTALL)
    known = responses._OWN | responses._IGNORED | responses._REFUSED.keys()
    assert [name for name in sorted(known) if f"`{name}`" not in section] == []


def test_the_example_runs(plain: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    code = code.replace("http://127.0.0.1:8000", plain.url).replace("models/tinycode", "tinycode")
    names: dict[str, Any] = {}
    exec(compile(code, "docs/server.md", "exec"), names)
    names["client"].close()
    assert len(capsys.readouterr().out) > 20


def test_every_route_tells_its_answers_errors_and_parameters(plain: LiveServer) -> None:
    """Clients are generated from the document, and fuzzers hold answers against it."""
    document, page, metrics = plain.get("/openapi.json").json(), plain.get("/"), plain.get("/metrics")
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert {"200", "4XX", "5XX"} <= operation["responses"].keys(), path
            names = {parameter["name"] for parameter in operation.get("parameters", ())}
            assert names == ({"name"} if "{" in path else set()), path
    for path, answer in (("/", page), ("/metrics", metrics)):
        (kind,) = document["paths"][path]["get"]["responses"]["200"]["content"]
        assert answer.headers["content-type"].startswith(kind)

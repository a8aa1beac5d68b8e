"""The OpenAPI document: what clients are generated from, and what fuzzers hold answers against."""

from server.live_server import live_server

from foretoken import LLM


def test_every_route_tells_its_answers_errors_and_parameters() -> None:
    with live_server(LLM("models/tinycode", max_num_seqs=1)) as server:
        document = server.get("/openapi.json").json()
        page, metrics = server.get("/"), server.get("/metrics")
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert {"200", "4XX", "5XX"} <= operation["responses"].keys(), path
            names = {parameter["name"] for parameter in operation.get("parameters", ())}
            assert names == ({"name"} if "{" in path else set()), path
    for path, answer in (("/", page), ("/metrics", metrics)):
        (kind,) = document["paths"][path]["get"]["responses"]["200"]["content"]
        assert answer.headers["content-type"].startswith(kind)

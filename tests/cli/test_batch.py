"""`foretoken batch`: answers in OpenAI's format, errors as lines, and runs that were killed going on."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import MODEL, assert_refused, output_of, refused
from forked import ForkedCommand
from limits import full_disk

from foretoken import LLM
from foretoken.cli.serve import _Progress
from foretoken.core.errors import ConfigError
from foretoken.server.batch import AnswerFile, BatchCounts, OpenLines, count_lines, held

TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"


def request(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    fields = {"max_tokens": 8, "temperature": 0, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": fields}


def respond(name: str, **body: Any) -> dict[str, Any]:
    fields = {"max_output_tokens": 8, "temperature": 0, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": fields}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def text(answer: dict[str, Any]) -> str:
    (choice,) = answer["response"]["body"]["choices"]
    return str(choice["text"])


def contents(body: dict[str, Any]) -> list[dict[str, Any]]:
    """What the messages of a response hold."""
    return [part for message in body.get("output", ()) for part in message["content"]]


def test_a_byte_order_mark_belongs_to_no_line(tmp_path: Path) -> None:
    """Files of Windows begin with one, and files that are put together have one in the middle."""
    mark, (first, second) = b"\xef\xbb\xbf", [json.dumps(request(name, prompt="x")).encode() for name in "ab"]
    source, answers = tmp_path / "in.jsonl", AnswerFile(tmp_path / "out.jsonl", MODEL)
    source.write_bytes(mark + first + b"\r\n" + mark + second + b"\r\n" + mark + b"\r\n" + mark)
    asked = [given for _, given in OpenLines(source, answers)]
    assert asked == [json.loads(first), json.loads(second)]
    assert count_lines(source) == 2
    answers.close()


def test_every_line_is_answered_and_bad_ones_end_nothing(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "A queue."}]
    source = write(tmp_path / "in.jsonl", [
        request("a", prompt="class Queue:"), "no json", "", request("chat", "/v1/chat/completions", messages=talk),
        {"custom_id": "no body", "method": "POST", "url": "/v1/completions"}, request("a", prompt="again"),
        request("url", "/v1/embeddings", input="x"), request("other", prompt="x", model="gpt"),
        request("stream", prompt="x", stream=True), request("hot", prompt="x", temperature=-1),
        request("seeded", prompt=["import os", "import sys"], temperature=0.8, seed=3),
        json.dumps(request("long", prompt="x" * (9 << 20))),
        respond("response", input="A queue."), respond("events", input="A queue.", stream=True),
        respond("stored", input="A queue.", previous_response_id="resp_1"),
        json.dumps(respond("beyond", input="A queue.", metadata={"a": 0.5})).replace("0.5", "1e999"),
    ])  # fmt: skip
    (tmp_path / "template").write_text(TEMPLATE)
    out, plain = tmp_path / "out.jsonl", tmp_path / "plain.jsonl"
    template = ("--chat-template", str(tmp_path / "template"))
    for place, drafter in ((out, ("-s", "ngram:num_speculative_tokens=4")), (plain, ())):
        told = output_of("batch", str(source), str(place), "--model", MODEL, *template, *drafter)
        assert "15 lines answered, 11 of them with errors" in told
    answers = {answer["custom_id"] or answer["id"]: answer for answer in read(out)}
    statuses = {name: answer["response"]["status_code"] for name, answer in answers.items()}
    assert statuses == {
        "a": 200, "chat": 200, "seeded": 200, "batch_req_2": 400, "no body": 400, "batch_req_6": 400, "url": 404,
        "other": 404, "stream": 400, "hot": 400, "batch_req_12": 413, "response": 200, "events": 400,
        "stored": 400, "batch_req_16": 400,
    }  # fmt: skip
    assert all(answer["error"] is None and answer["response"]["request_id"] for answer in answers.values())
    assert "error" in answers["hot"]["response"]["body"]
    bodies = {name: answer["response"]["body"] for name, answer in answers.items()}
    for other in read(plain):  # drafts change no text
        theirs, ours = other["response"]["body"], bodies[other["custom_id"] or other["id"]]
        assert theirs.get("choices") == ours.get("choices")
        assert contents(theirs) == contents(ours)
    (content,) = contents(bodies["response"])
    assert content["text"] == bodies["chat"]["choices"][0]["message"]["content"], "they ask for the same"
    assert_refused("exists", "batch", str(source), str(out), "--model", MODEL)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "template", "out.jsonl", "plain.jsonl"}


def numbered_requests(path: Path, number: int, max_tokens: int) -> Path:
    """A file of as many requests."""
    names = [f"request {each}" for each in range(number)]
    return write(path, [request(name, prompt=f"def f_{name[8:]}(", max_tokens=max_tokens) for name in names])


def assert_goes_on(source: Path, out: Path, whole: bytes) -> None:
    """A run whose answers end in the middle of a line keeps the whole ones; all texts are those of another run."""
    part, kept = out.with_name(f"{out.name}.part"), whole.splitlines()
    part.write_bytes(whole + kept[0][: len(kept[0]) // 2])
    names = [json.loads(line)["custom_id"] for line in source.read_text().splitlines()]
    command = ("batch", str(source), str(out), "--model", MODEL)
    assert_refused("holds answers of the model", *command, "--served-model-name", "other")
    told = f"{len(names) - len(kept)} lines answered, 0 of them with errors, {len(kept)} of an earlier"
    assert told in output_of(*command)
    assert out.read_bytes().startswith(whole)
    assert not part.exists()
    answers = {answer["custom_id"]: text(answer) for answer in read(out)}
    assert (len(read(out)), sorted(answers)) == (len(names), sorted(names))
    again = out.with_name("again.jsonl")
    output_of("batch", str(source), str(again), "--model", MODEL)
    assert answers == {answer["custom_id"]: text(answer) for answer in read(again)}


def test_a_run_that_broke_off_goes_on(tmp_path: Path) -> None:
    source, first = numbered_requests(tmp_path / "in.jsonl", 6, 4), tmp_path / "first.jsonl"
    output_of("batch", str(source), str(first), "--model", MODEL)
    assert_goes_on(source, tmp_path / "out.jsonl", b"".join(first.read_bytes().splitlines(keepends=True)[:3]))


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    source = numbered_requests(tmp_path / "in.jsonl", 40, 64)
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    with ForkedCommand("batch", str(source), str(out), "--model", MODEL) as process:
        while not part.exists() or part.read_bytes().count(b"\n") < 3:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not out.exists()
    whole = part.read_bytes()[: part.read_bytes().rfind(b"\n") + 1]
    assert 3 <= whole.count(b"\n") < 40
    assert_goes_on(source, out, whole)


def test_one_run_at_a_time_and_no_lock_is_left(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [request("a", prompt="x")]), tmp_path / "out.jsonl"
    with held(out):
        for _ in range(2):  # what one that was refused leaves keeps out the next
            assert_refused("another run writes", "batch", str(source), str(out), "--model", MODEL)
        assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl.lock"}
    output_of("batch", str(source), str(out), "--model", MODEL)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_a_full_disk_says_what_to_do_and_loses_nothing(tmp_path: Path) -> None:
    answer: dict[str, Any] = {"id": "batch_req_1", "custom_id": "a", "response": {"body": {"model": "m"}}}
    answers = AnswerFile(tmp_path / "out.jsonl", "m")
    answers.add(answer)
    with full_disk(400):
        with pytest.raises(ConfigError, match="run the command again: it continues"):
            answers.add({**answer, "custom_id": "b", "more": "x" * 1000})
        answers.close()  # raises nothing that would replace the sentence
    again = AnswerFile(tmp_path / "out.jsonl", "m")
    assert again.answered == {"=a"}
    again.add({**answer, "custom_id": "b"})
    again.finish()
    assert [each["custom_id"] for each in read(tmp_path / "out.jsonl")] == ["a", "b"]


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [request("a", prompt="x")]), str(tmp_path / "out.jsonl")
    (tmp_path / "foreign.jsonl.part").write_text('{"x": 1}\n')
    empty = write(tmp_path / "empty.jsonl", [])
    for arguments, sentence in (
        ((str(tmp_path / "none"), out), "cannot be read"),
        ((str(tmp_path), out), "a directory"),
        ((str(empty), out), "has no lines"),
        ((str(source), str(tmp_path)), "a directory"),
        ((str(source), str(tmp_path / "foreign.jsonl")), "data other than answers"),
        ((str(source), out, "-s", "oracle"), "must know the text"),
    ):
        assert_refused(sentence, "batch", *arguments, "--model", MODEL)
    assert not Path(out).exists()


def test_the_time_left_is_that_of_lines_that_were_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred seconds of starting and the first lines to be answered say nothing of the others."""
    said: list[str] = []
    now = 0.0
    monkeypatch.setattr("foretoken.cli.serve.time.perf_counter", lambda: now)
    shown = _Progress(24, 8, said.append, 0.0)
    shown.starting(0, 2)
    shown.show(BatchCounts(answered=3, failed=3))  # lines that no worker has to see
    now = 100.0
    shown.starting(1, 2)
    now = 150.0
    shown.starting(2, 2)
    assert said == [f"starting 2 workers, {ready} ready" for ready in range(3)]
    for answered, second in ((4, 190.0), (10, 200.0), (11, 210.0)):
        now = second
        shown.show(BatchCounts(kept=1, answered=answered, failed=3, tokens=330))
    assert said[3:5] == ["5 of 24 lines, 3 with errors", "11 of 24 lines, 3 with errors"]
    assert said[5] == "12 of 24 lines, 3 with errors, 0.1 lines/s, 3 tokens/s, 0:02:45 left"
    assert shown.took() == "; 100.0 s to start, 110.0 s to answer"


@pytest.mark.parametrize("share", ["0", "1.5"])
def test_the_share_of_memory_is_that_of_llm(share: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request("a", prompt="x")])
    with pytest.raises(ConfigError, match="Expected above 0 and at most 1") as caught:
        LLM(MODEL, gpu_memory_utilization=float(share))
    more = ("--model", MODEL, "--gpu-memory-utilization")
    said = refused("batch", str(source), str(tmp_path / "out"), *more, share)
    assert (str(caught.value) if share == "0" else f"--gpu-memory-utilization is {share}. Expected") in said
    output_of("batch", str(source), str(tmp_path / "out"), *more, "0.3")

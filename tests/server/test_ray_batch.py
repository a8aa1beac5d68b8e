"""A batch on two Ray workers: the answers of one engine, each line once, also when a worker is killed."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra [ray]")

from server.ray_cluster import kill_one, ray_cluster

from foretoken import LLM, AsyncLLM, SamplingParams
from foretoken.cli.options import DrafterChoice, LoadOptions
from foretoken.cli.serve import batch
from foretoken.core.errors import ForetokenError
from foretoken.server.batch import AnswerFile, RayWorkers, run_ray_batch

MODEL = "models/tinycode"
TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_cluster(num_cpus=2):
        yield


def request(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"temperature": 0, **body}}


def earlier(number: int, name: str) -> dict[str, Any]:
    """The answer of an earlier run to a line."""
    return {"id": f"batch_req_{number}", "custom_id": name, "response": {"body": {"model": MODEL}}}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_killed_worker_costs_no_line_and_changes_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = {f"request {number}": f"def f_{number}(" for number in range(40)}
    lines = [request(name, prompt=prompt, max_tokens=64) for name, prompt in prompts.items()]
    lines[3]["body"] |= {"temperature": 0.8, "seed": 3}
    bad = [request("hot", prompt="x", temperature=-1), request("request 1", prompt="again")]
    source, out, part = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "out.jsonl.part"))
    body = {"input": "A queue.", "max_output_tokens": 8, "temperature": 0}
    respond = {"custom_id": "response", "url": "/v1/responses", "body": body}
    source.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *bad, respond, request("kept", prompt="x")]))
    part.write_text(json.dumps(earlier(44, "kept")) + "\n")
    (tmp_path / "template").write_text(TEMPLATE)
    answered_before: list[bytes] = []

    def kill() -> None:
        end = time.monotonic() + 120
        while not part.exists() or part.read_bytes().count(b"\n") < 5:
            assert time.monotonic() < end
            time.sleep(0.01)
        answered_before.extend(part.read_bytes().splitlines())
        kill_one("ray::_Worker")

    killer = threading.Thread(target=kill)
    killer.start()
    template = tmp_path / "template"
    batch(
        source, out, MODEL, drafter=DrafterChoice(speculative_config=["ngram"]), loading=LoadOptions(), num_workers=2,
        max_num_seqs=4, max_in_flight=8, chat_template=template,
    )  # fmt: skip
    killer.join()
    said, told = capsys.readouterr()
    assert next(line for line in told.splitlines() if line.startswith("starting ")) == "starting 2 workers, 0 ready"
    assert "43 lines answered, 2 of them with errors" in said
    assert "1 of an earlier run" in said
    assert 5 <= len(answered_before) < 40, "the worker was killed in the middle"
    answers = read(out)
    assert sorted(answer["id"] for answer in answers) == sorted(f"batch_req_{number + 1}" for number in range(44))
    bodies = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
    response = bodies.pop("response")
    assert bodies.pop("kept") == earlier(44, "kept")["response"]["body"]
    texts = {name: body.get("choices", [{}])[0].get("text") for name, body in bodies.items()}
    assert texts.pop("hot") is None
    assert texts.pop(None) is None
    plain = LLM(MODEL, max_num_seqs=8)
    (chat,) = plain.chat(
        [{"role": "user", "content": "A queue."}], SamplingParams(temperature=0, max_tokens=8), chat_template=TEMPLATE
    )
    assert response["output"][0]["content"][0]["text"] == chat.outputs[0].text
    greedy, seeded = (
        SamplingParams(temperature=0, max_tokens=64),
        SamplingParams(temperature=0.8, seed=3, max_tokens=64),
    )
    params = [seeded if name == "request 3" else greedy for name in prompts]
    outputs = plain.generate(list(prompts.values()), params)
    assert texts == {name: output.outputs[0].text for name, output in zip(prompts, outputs, strict=True)}


def test_workers_start_once_and_together(tmp_path: Path) -> None:
    """No more workers start than there are lines without an answer; the start is told before any answer."""
    names = ["request 0", "request 1", "request 2"]
    source, engines = tmp_path / "in.jsonl", tmp_path / "engines"
    source.write_text("".join(json.dumps(request(name, prompt="x", max_tokens=2)) + "\n" for name in names))
    engines.mkdir()
    events: list[Any] = []

    def make_engine() -> AsyncLLM:
        (engines / f"of process {os.getpid()}").touch(exist_ok=False)
        return AsyncLLM(LLM(MODEL, max_num_seqs=2))

    answers = AnswerFile(tmp_path / "out.jsonl", MODEL)
    answers.add(earlier(1, names[0]))
    workers = RayWorkers(
        number=8, make_engine=make_engine, max_in_flight=1, num_cpus=1, uses_gpu=False,
        on_start=lambda ready, of: events.append((ready, of)),
    )  # fmt: skip
    kept = []
    for _ in range(2):  # the second time nothing is left to do, and no worker starts
        counts = run_ray_batch(
            workers, source, answers, model=MODEL, on_answer=lambda counts: events.append(counts.answered)
        )
        kept.append((counts.kept, counts.answered))
    answers.close()
    assert kept == [(1, 2), (3, 0)]
    assert events[:3] == [(0, 2), (1, 2), events[2]]
    assert [each for each in events if isinstance(each, int)] == [1, 2]
    assert 1 <= len(list(engines.iterdir())) <= 2


def test_a_worker_that_cannot_start_is_one_sentence(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(request("a", prompt="x")))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ForetokenError, match=r"workers failed: .*model.safetensors is damaged.* Run the"):
        batch(
            source, tmp_path / "out.jsonl", str(tmp_path), drafter=DrafterChoice(), loading=LoadOptions(), num_workers=1
        )

"""A draft model that learns beside the server: texts stay, memory and disk are bounded, and faults cost no request."""

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.command_line import run
from safetensors.torch import load_file, save_file
from served_app import served, wait_until
from server.live_server import LiveServer

from foretoken import LLM, AsyncLLM
from foretoken.core.errors import ConfigError
from foretoken.files.processes import run_lock
from foretoken.server import distillation
from foretoken.server.app import ServerConfig, make_app
from foretoken.server.distillation import OnlineDistillation
from foretoken.training import online
from foretoken.training.data.packed import PackedWriter

MODEL, DRAFT = "models/tinycode", "models/tinycode-draft"
CONFIG = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 4}


class Learning(LiveServer):
    """A server that learns; `llm` is the one that it serves."""

    distillation: OnlineDistillation
    llm: LLM
    directory: Path
    published = 0

    def complete(self, **fields: Any) -> str:
        """The text of a short completion."""
        return super().complete(**{"prompt": "def main(argv):\n", "max_tokens": 12, "temperature": 0.0, **fields})

    def figures(self) -> dict[str, float]:
        """The figures of the distillation by their short names."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith("foretoken:distill_")]
        return {line.split("{")[0].removeprefix("foretoken:distill_"): float(line.split()[-1]) for line in lines}


@contextmanager
def learning_server(directory: Path, *, most_tokens: int = 100_000) -> Iterator[Learning]:
    """A server over the draft model with a real training process; it looks for published weights all the time."""
    llm = LLM(MODEL, speculative_config=CONFIG, max_num_seqs=4)
    engine = AsyncLLM(llm)
    distilled = OnlineDistillation(engine, directory, draft=DRAFT, most_tokens=most_tokens)
    with served(make_app(engine, ServerConfig(names=["tinycode"]), distilled)) as url:
        server = Learning(url, engine)
        server.distillation, server.llm, server.directory = distilled, llm, directory
        yield server
    assert not any(thread.is_alive() for thread in distilled._threads)
    assert distilled._process.returncode is not None


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distillation, "_LOOK_S", 0.02)
        yield


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learning]:
    """One of them, for all tests that only publish weights: its training has ended, and its warning is told."""
    with learning_server(tmp_path_factory.mktemp("learning")) as server:
        server.distillation._process.kill()
        for thread in server.distillation._threads:
            if thread.name == "foretoken-distill-read":
                thread.join()
        yield server


def publish(directory: Path, number: int, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Publishes changed weights of the draft model as the training process does: whole or not at all."""
    weights = load_file(f"{DRAFT}/model.safetensors")
    change(weights)
    place = directory / online.DRAFTS / f"{number:08d}"
    hidden = place.with_name(f".{place.name}")
    hidden.mkdir(parents=True)
    save_file(weights, hidden / "model.safetensors")
    hidden.rename(place)
    return place


def publish_next(server: Learning, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Publishes changed weights under the next number of a server."""
    server.published += 1
    return publish(server.directory, server.published, change)


def swap(server: Learning, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Publishes changed weights and waits until they draft."""
    swaps = server.figures()["swaps_total"]
    place = publish_next(server, change)
    wait_until(lambda: server.figures()["swaps_total"] == swaps + 1)
    return place


def noisy(seed: int) -> Callable[[dict[str, torch.Tensor]], None]:
    """A change of all weights."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(seed)
        for weight in weights.values():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator).to(weight.dtype))

    return change


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name == distillation.__name__
    ]


@pytest.mark.parametrize("num_swaps", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_texts_stay_while_weights_are_swapped(
    num_swaps: int, plain: LiveServer, learning: Learning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded requests, four at once, across swaps in the middle of them."""
    monkeypatch.setattr(distillation, "_MOST_WAIT_S", 0.0)
    prompts = ["def main(argv):\n", "class Queue:\n    def", "import os\n", "for line in"]
    bodies = [
        {"prompt": prompt, "max_tokens": 100, "temperature": temperature, "seed": seed, "ignore_eos": True}
        for seed, prompt in enumerate(prompts)
        for temperature in (0.0, 0.8)
    ]
    want = [plain.complete(**body) for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        drafted_during = []
        for seed in range(num_swaps):
            texts = [pool.submit(learning.complete, **body) for body in bodies]
            wait_until(lambda: bool(learning.engine.num_running))
            place = swap(learning, noisy(seed))
            drafted_during.append(bool(learning.engine.num_running))
            assert [text.result() for text in texts] == want
        assert any(drafted_during), "no swap came while requests ran"
        last = load_file(place / "model.safetensors")
        (drafter,) = learning.llm.drafters
        for name, parameter in drafter.model.module.named_parameters():  # type: ignore[attr-defined]
            assert torch.equal(parameter, last[name].to(parameter.dtype)), name


def test_drafts_come_from_the_swapped_weights(learning: Learning) -> None:
    """The published model never drafts what the target writes, so nothing is accepted any more."""

    def accepted() -> float:
        return learning.figure("foretoken:spec_decode_num_accepted_tokens_total")

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"].neg_()

    swap(learning, lambda weights: None)  # the weights that the draft model has
    begin = accepted()
    text = learning.complete(max_tokens=40)
    before = accepted()
    assert before > begin + 5
    swap(learning, change)
    assert learning.complete(max_tokens=40) == text
    assert accepted() <= before + 2


@pytest.mark.slow
def test_a_server_begins_with_the_last_published_draft_model_that_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(tmp_path, 2, noisy(2))
    publish(tmp_path, 3, noisy(3))
    publish(tmp_path, 4, _spoil)
    (tmp_path / online.DRAFTS / "00000005").mkdir()
    with learning_server(tmp_path) as server:
        assert server.figures()["swaps_total"] == 1
        (drafter,) = server.llm.drafters
        last = load_file(tmp_path / online.DRAFTS / "00000003" / "model.safetensors")
        for name, parameter in drafter.model.module.named_parameters():  # type: ignore[attr-defined]
            assert torch.equal(parameter, last[name].to(parameter.dtype)), name
        text = server.complete()
        assert server.complete() == text
    assert [told.split("'")[1][-1] for told in warnings_of(caplog)] == ["5", "4"]


def test_what_is_collected(tmp_path: Path) -> None:
    """Prompts and answers of ordinary requests; not those with `store` false or a salt, nor aborted ones."""
    with learning_server(tmp_path) as server:
        encode, kept = server.llm.encode, []
        for number in range(24):
            kept.append(encode(f"# kept {number}\n") + encode(server.complete(prompt=f"# kept {number}\n")))
        server.complete(prompt="# secret\n", store=False)
        server.complete(prompt="# secret\n", cache_salt="mine")
        server.post("/v1/responses", {"input": "# secret\n", "max_output_tokens": 4})
        asked: dict[str, Any] = {"prompt": "# secret\n", "max_tokens": 600, "temperature": 0, "stream": True}
        with server.client().completions.create(model="tinycode", **asked) as stream:
            next(iter(stream))
        server.wait_until_idle()
        server.complete(prompt="# kept 0\n", store=True)
    texts = [online.read_traffic(tmp_path / online.TRAFFIC / part) for part in ("train", "held_out")]
    tokens = [token for text in texts if text is not None for token in text.tokens.tolist()]
    told = server.llm.decode(tokens)
    assert "secret" not in told
    assert told.count("# kept 0\n") >= 2
    assert all(f"# kept {number}\n" in told for number in range(24))


@pytest.mark.slow
def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "_MOST_QUEUED", 2)
    go_on, add = threading.Event(), online.Traffic.add
    monkeypatch.setattr(online.Traffic, "add", lambda *given: go_on.wait(60) and add(*given))
    with learning_server(tmp_path) as server:
        texts = [server.complete(prompt=[5, 6, 7], max_tokens=4) for _ in range(6)]
        assert len(set(texts)) == 1
        assert server.figures()["tokens_dropped_total"] in (3 * 7, 4 * 7), "the thread may have taken one"
        go_on.set()
        wait_until(lambda: sum(server.figures()[f"tokens_{each}_total"] for each in ("dropped", "collected")) == 6 * 7)


@pytest.mark.slow
def test_a_full_disk_ends_the_collection_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PackedWriter, "add", full)
    with learning_server(tmp_path, most_tokens=128) as server:
        text = server.complete()
        wait_until(lambda: len(warnings_of(caplog)) == 1)
        dropped = server.figures()["tokens_dropped_total"]
        assert server.complete() == text
        assert server.figures()["tokens_dropped_total"] > dropped
    (told,) = warnings_of(caplog)
    assert "collects no more text" in told
    assert "No space left on device" in told
    assert online.numbered(tmp_path / online.TRAFFIC / "train") == []


@pytest.mark.slow
def test_training_that_dies_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with learning_server(tmp_path) as server:
        text = server.complete()
        server.distillation._process.kill()
        wait_until(lambda: bool(warnings_of(caplog)))
        assert server.complete() == text
    assert [told for told in warnings_of(caplog) if "exit status -9" in told] == warnings_of(caplog)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.slow
def test_training_that_cannot_begin_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its draft model is gone: the process loads nothing, and the server goes on."""
    llm = LLM(MODEL, speculative_config=CONFIG)
    engine = AsyncLLM(llm)
    distilled = OnlineDistillation(engine, tmp_path, draft="models/gone", most_tokens=1 << 20)
    wait_until(lambda: bool(warnings_of(caplog)))
    distilled.close()
    engine.close()
    (told,) = warnings_of(caplog)
    assert "models/gone" in told


def _cut(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()


def _drop(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.norm.weight"]


def _spoil(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"][3] = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_cut, "model.norm.weight in '{}' is [159], and [160] in the server"),
        (_drop, "model.norm.weight in '{}' is missing, and [160] in the server"),
        (_spoil, "model.norm.weight in '{}' has values that are not finite"),
        (None, "'{}' has no readable model.safetensors"),
    ],
)
def test_a_published_model_that_does_not_fit_costs_one_warning(
    change: Any, message: str, learning: Learning, caplog: pytest.LogCaptureFixture
) -> None:
    text = learning.complete()
    (drafter,) = learning.llm.drafters
    before = [parameter.clone() for parameter in drafter.model.module.parameters()]  # type: ignore[attr-defined]
    if change is None:
        learning.published += 1
        place = learning.directory / online.DRAFTS / f"{learning.published:08d}"
        place.mkdir(parents=True)
        (place / "model.safetensors").write_bytes(b"damaged")
    else:
        place = publish_next(learning, change)
    wait_until(lambda: bool(warnings_of(caplog)))
    assert learning.complete() == text
    (told,) = warnings_of(caplog)
    assert message.format(place) in told
    after = drafter.model.module.parameters()  # type: ignore[attr-defined]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    swap(learning, noisy(2))
    assert learning.complete() == text


def test_without_the_option_there_is_nothing(plain: LiveServer, speculative: LiveServer) -> None:
    before = threading.enumerate()
    for server in (plain, speculative):
        server.post("/v1/completions", {"prompt": "def main():", "max_tokens": 4, "store": True})
        assert "distill" not in server.get("/metrics").text
    begun = [thread for thread in threading.enumerate() if thread not in before]
    assert not any(thread.name.startswith("foretoken-distill") for thread in begun)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-s", "ngram"], "--distill-to trains the draft model of the server, and there are 0. Expected one."),
        ([], "--distill-to trains the draft model of the server, and there are 0. Expected one."),
        (["-s", "draft_model:revision=v1"], "'revision' names one on the hub"),
        (["-s", "draft_model", "--synthetic-acceptance", "0.8"], "synthetic acceptance writes others"),
    ],
)
def test_what_cannot_learn_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    finished = run("serve", MODEL, *options, "--distill-to", str(tmp_path / "new"))
    assert finished.returncode == 2
    assert message in finished.stderr
    assert not (tmp_path / "new").exists()


def test_a_directory_with_other_files_is_unsuitable(tmp_path: Path) -> None:
    for name in (online.TRAFFIC, online.DRAFTS):
        (tmp_path / "own" / name).mkdir(parents=True)
    distillation.check_directory(tmp_path / "own")
    with pytest.raises(ConfigError, match=r"--distill-to '.*' holds other files \(own\)\."):
        distillation.check_directory(tmp_path)


def test_a_second_server_is_told_before_its_model_is_loaded(tmp_path: Path) -> None:
    with run_lock(tmp_path, option="--distill-to"):
        finished = run("serve", MODEL, "-s", f"draft_model:model={DRAFT}", "--distill-to", str(tmp_path))
    assert finished.returncode == 2
    assert f"another run is at work in '{tmp_path}'. Expected one at a time." in finished.stderr


@pytest.mark.slow
def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("text", encoding="utf-8")
    finished = run("serve", MODEL, "-s", "draft_model", "--distill-to", str(tmp_path))
    assert finished.returncode == 2
    assert f"--distill-to '{tmp_path}' holds other files (thesis.tex)." in finished.stderr


@pytest.mark.slow
def test_a_server_learns_from_its_requests(tmp_path: Path) -> None:
    """The whole way: requests, a round in the real process, published weights, a swap, the same text."""
    with learning_server(tmp_path, most_tokens=4096) as server:
        text = server.complete()
        for number in range(60):
            server.complete(prompt=f"# step {number}\nfor index in range(", max_tokens=60)
        wait_until(lambda: server.figures()["rounds_total"] >= 1)
        figures = server.figures()
        if figures["alpha_after"] > figures["alpha_before"]:
            wait_until(lambda: server.figures()["swaps_total"] >= 1)
        assert server.complete() == text

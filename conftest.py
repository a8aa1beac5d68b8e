"""Settings of every test: one thread, the same examples in every run, Triton's interpreter, and which tests run."""

import gc
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

# Read when a kernel is defined, and some libraries bring triton in: so before anything else is imported.
if os.environ.get("FORETOKEN_TEST_DEVICE") != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import settings
from made_once import shared_folder
from proven_once import proven_once
from selection import add_option, select, summarize

from foretoken.decoder.library import native_library
from foretoken.runner import decoders
from foretoken.runner.costs import CostCurve, PassCosts

# The tensors here are tiny, and two threads that share a busy machine take ten times as long as one.
torch.set_num_threads(1)

# A run that finds another failure than the last one helps nobody; a deadline measures the machine's other users.
settings.register_profile("foretoken", derandomize=True, deadline=None, database=None)
settings.load_profile("foretoken")

# xdist's processes get the folder from the environment, so the folder is made before they start.
folder = shared_folder()

# Every client of httpx reads the certificates of the machine, 20 ms each. No test uses TLS: the folder has none.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(folder)

# Modules and collected tests stay until the end, so no garbage collection has to walk them.
gc.disable()


# Directories whose tests are about decoders and the models that they may not run.
PROVES_ALWAYS = {"runner", "decoder", "models", "hf", "kernels"}
# Files there that build many runners over equal weights.
PROVES_ONCE = {"test_captured_passes", "test_lean", "test_native_recurrent", "test_recurrent", "test_tree_passes"}


@pytest.fixture(scope="module", autouse=True)
def _proves_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """See `proven_once`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name not in PROVES_ALWAYS or request.path.stem in PROVES_ONCE:
            patch.setattr(decoders, "check_tree_attention", _proven_once)
        yield


_proven_once = proven_once(decoders.check_tree_attention)


@pytest.fixture
def even_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every stage of an iteration takes one second, whatever else the machine does. No acceptance is known before."""
    native_library()  # not to be compiled anew for an empty cache
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setattr("foretoken.core.backend.time", SimpleNamespace(perf_counter=map(float, count()).__next__))
    curve = CostCurve((1, 128), (1.0, 2.0))
    monkeypatch.setattr("foretoken.entrypoints.llm.pass_costs", lambda *_: PassCosts(curve, curve, curve))
    monkeypatch.setattr("foretoken.drafting.choice.time_drafts", lambda *_: [(1, 0.25), (4, 1.0)])


def pytest_runtest_teardown() -> None:
    """Takes back what a command with `--threads 2` left: all later tests of the process would run on two threads."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Collects garbage from here on, of objects that tests make."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """See `selection`."""
    add_option(parser)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """See `selection`."""
    select(config, items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Under xdist only the process that prints has all reports."""
    summarize(terminalreporter, config.rootpath)

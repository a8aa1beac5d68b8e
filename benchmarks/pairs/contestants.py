"""Contestants: processes that hold a target and answer requests in turn, each with two threads."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from foretoken.files.user_cache import cache_directory

_LEARNED = "foretoken-acceptance.json"
_WORKERS = Path(__file__).parent / "workers"


class Contestant:
    """A process that answers requests; `base` names the contestant that it is compared with."""

    def __init__(
        self, name: str, base: str, python: str, worker: str, *, is_fresh: bool = False,
        variables: Mapping[str, str] = MappingProxyType({}), **given: Any,
    ) -> None:  # fmt: skip
        """`worker`: a file of `workers`, which gets `given`; `is_fresh`: whether every request is a process's first."""
        self.name, self.base, self._is_fresh, self._variables = name, base, is_fresh, variables
        self._place = tempfile.TemporaryDirectory(prefix="foretoken-pairs-")
        self._cache, self._log = f"{self._place.name}/cache", f"{self._place.name}/log"
        Path(self._cache).mkdir()
        self._command = [python, str(_WORKERS / f"{worker}.py"), json.dumps(given | {"log": self._log})]
        self._process: subprocess.Popen[str] | None = None

    def answer(self, **request: Any) -> dict[str, Any]:
        """Sends a request and returns the answer."""
        if self._process is None:
            (Path(self._cache) / _LEARNED).unlink(missing_ok=True)
            paths = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "FORETOKEN_CACHE": self._cache, "PYTHONPATH": paths, **self._variables},
            )  # fmt: skip
            assert self._process.stdout is not None
            if self._process.stdout.readline() != "ready\n":
                self._fail("could not start")
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            self._fail("ended in a request")
        found: dict[str, Any] = json.loads(line)
        if self._is_fresh:
            self._end_process()
        return found

    def _fail(self, what: str) -> NoReturn:
        log = Path(self._log)
        sys.exit(f"{self.name} {what}: {' '.join(self._command)}\n{log.read_text()[-2000:] if log.exists() else ''}")

    def share_kept(self) -> None:
        """Copies what the machine keeps of its passes, so that no contestant times them."""
        cache_directory().mkdir(parents=True, exist_ok=True)  # a machine's first run finds none
        shutil.copytree(cache_directory(), self._cache, dirs_exist_ok=True, ignore=shutil.ignore_patterns(_LEARNED))

    def end(self) -> None:
        """Ends the process, and removes its files."""
        self._end_process()
        self._place.cleanup()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.communicate()
        self._process = None


class Sharing(Contestant):
    """Another setting of a contestant's process."""

    def __init__(self, name: str, other: Contestant, **more: Any) -> None:
        self.name, self.base, self._other, self._settings = name, other.base, other, more

    def answer(self, **request: Any) -> dict[str, Any]:
        """Sends a request with the setting."""
        return self._other.answer(**request, **self._settings)

    def end(self) -> None:
        """Leaves the process to its owner."""


def ours(target: str, options: dict[str, dict[str, Any]], fresh: tuple[str, ...] = ()) -> list[Contestant]:
    """Foretoken with options of `LLM` by name; those on one engine share what it keeps of passes, not what it learns.

    Each is compared with the first one without drafts that has the same other options.
    """
    found, bases = [], dict[str, str]()
    for name, config in options.items():
        others = json.dumps({key: config[key] for key in sorted(config) if key != "speculative_config"})
        if "speculative_config" not in config:
            bases.setdefault(others, name)
        base = bases.get(others, "plain")
        found.append(
            Contestant(name, base, sys.executable, "ours", is_fresh=name in fresh, target=target, options=config)
        )
        found[-1].share_kept()
    return found


def theirs(
    name: str, python: str, target: str, draft: str | None, lengths: list[int], *, ngrams: bool = False
) -> list[Contestant]:
    """llama.cpp or its fork: plain, with drafts of fixed lengths, and with drafts that end below 0.75, as in llama.cpp.

    `ngrams`: also with the eight tokens after the last place that has the same three tokens.
    """
    plain = f"{name} plain"
    base = Contestant(plain, plain, python, "llama", target=target, draft=draft)
    found = [base]
    if draft:
        found += [Sharing(f"{name} {k}", base, length=k) for k in lengths]
        found.append(Sharing(f"{name} to 0.75", base, length=16, floor=0.75))
    if ngrams:
        found.append(Sharing(f"{name} lookup", base, length=8, ngram=3))
    return found


def assisted(target: str, draft: str | None) -> list[Contestant]:
    """Transformers on the unpacked weights: plain, prompt lookup, and assisted by a draft model."""
    kinds: dict[str, tuple[str | None, dict[str, Any]]] = {
        "transformers plain": (None, {}),
        "transformers lookup": (None, {"prompt_lookup_num_tokens": 10}),
    } | ({"transformers assisted": (draft, {})} if draft else {})
    return [
        Contestant(name, "transformers plain", sys.executable, "assisted", target=target, draft=other, options=options)
        for name, (other, options) in kinds.items()
    ]


def vllm(
    python: str, directory: str, draft: str | None = None, *, more: Mapping[str, dict[str, Any]] = MappingProxyType({})
) -> list[Contestant]:
    """Engines of vLLM on a directory: plain, its n-gram drafter, a draft model, and `more` options of its `LLM`."""
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "lookup": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_max": 3}},
    }
    if draft:
        settings["draft model"] = {
            "speculative_config": {"method": "draft_model", "model": draft, "num_speculative_tokens": 5}
        }
    preload = [str(library) for library in Path(python).parents[1].glob("lib/libiomp5.so")]  # as its documentation asks
    variables = {"LD_PRELOAD": preload[0]} if preload else {}
    variables |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    return [
        Contestant(
            f"vLLM {name}", "vLLM plain", python, "vllm_engine", variables=variables, target=directory, options=options
        )
        for name, options in (settings | dict(more)).items()
    ]


def openvino(python: str, directory: str, draft: str | None = None) -> list[Contestant]:
    """OpenVINO GenAI on an exported directory: plain, prompt lookup, and a draft model of another one."""
    kinds: Sequence[tuple[str, str | None, bool]] = [("plain", None, False), ("lookup", None, True)]
    kinds = [*kinds, ("draft model", draft, False)] if draft else kinds
    return [
        Contestant(
            f"OpenVINO {name}", "OpenVINO plain", python, "openvino_pipeline", target=directory, draft=other,
            lookup=looks_up, options={},
        )
        for name, other, looks_up in kinds
    ]  # fmt: skip

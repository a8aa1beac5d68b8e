"""Caches: whatever lies in the cache directory, a start never fails and the text is the same."""

import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from end_to_end.tiny_llms import llm, target
from made_once import shared_folder

from foretoken import SamplingParams
from foretoken.decoder import library
from foretoken.files.user_cache import cache_directory
from foretoken.models.loading import wrap_model
from foretoken.runner import costs
from fuzz import engines
from fuzz.worker import Case

_PROMPT = [5, 6, 7, 5, 6]
_PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
_NUMBERS: tuple[Any, ...] = (0, -1, 1, 2, 1.5, 1e-9, 1e308, float("nan"), float("inf"), -float("inf"), None, "x", True,
                             10**30, 10**400, [], {}, "1", "nan")  # fmt: skip
_TEXTS = (
    "",
    "{",
    "[]",
    "3",
    "null",
    '"x"',
    "[" * 100_000,
    '{"a":' * 20_000,
    "\x00",
    "{}",
    '{"a": 1}',
    '{"": [[], []]}',
)


def run(case: Case) -> None:
    """One cache directory with nonsense in it."""
    rng, settings = case.rng, case.settings
    want = engines.alone(engines.Target.of(settings), None, _PROMPT, _PARAMS).outputs[0]
    kernels = _kernels()
    module = target("llama", getattr(torch, settings.dtype))
    key = costs._key(wrap_model(module, name="tiny"), settings.runner)
    with tempfile.TemporaryDirectory(dir=shared_folder()) as folder:
        cache = Path(folder) / "cache"
        with mock.patch.dict(os.environ, {"FORETOKEN_CACHE": str(cache)}):
            library.native_library.cache_clear()
            case.note(f"cache: {_fill(rng, cache, key, kernels)}")
            config = {"method": "ngram", "prompt_lookup_min": 1, "tree": rng.choice(["chain", "tree"])}
            engine = llm({"speculative_config": config}, module=module, runner=settings.runner)
            engines.check_same(engine.generate([_PROMPT], _PARAMS)[0].outputs[0], want, engines.Target.of(settings))
            cache.chmod(0o700)
        library.native_library.cache_clear()


def _kernels() -> Path | None:
    """The compiled kernels in this machine's own cache, where it has some."""
    library.native_library.cache_clear()
    path = cache_directory() / Path(library.native_library()._name).name
    return path if path.is_file() else None


def _fill(rng: random.Random, cache: Path, key: str, kernels: Path | None) -> str:
    """Puts something into a cache; says what."""
    cache.mkdir()
    said = []
    if kernels is not None:
        content = kernels.read_bytes()
        kind = rng.choice(["whole"] * 12 + ["cut", "text", "empty"])
        cut = {"cut": content[: rng.choice([1, 64, len(content) // 2, len(content) - 1])], "text": b"#!/bin/sh\n"}
        for beside in kernels.parent.glob(f"{kernels.stem}.*"):  # whatever is kept with them
            (cache / beside.name).write_bytes(beside.read_bytes())
        (cache / kernels.name).write_bytes(content if kind == "whole" else cut.get(kind, b""))
        said.append(f"kernels: {kind}, {(cache / kernels.name).stat().st_size} of {len(content)} bytes")
    path = cache / costs.FILE
    kind = rng.choice(["text", "points", "points", "points", "folder", "bytes", "other keys", "missing"])
    text = {
        "text": rng.choice(["", '{"foretoken_costs": 1, "curves": ']) + rng.choice(_TEXTS),
        "points": json.dumps({"foretoken_costs": 1, "curves": {key: _points(rng)}}),
        "other keys": json.dumps(
            {
                "foretoken_costs": rng.choice(_NUMBERS),
                "curves": {"": 3, "x": None, key + "x": [[1], [2]], key: _points(rng)},
            }
        ),
    }.get(kind)
    if text is not None:
        path.write_text(text)
    elif kind == "folder":
        path.mkdir()
    elif kind == "bytes":
        path.write_bytes(rng.randbytes(200))
    said.append(f"costs: {kind} {(text or '')[:300]}")
    if rng.random() < 0.15:
        mode = rng.choice([0o500, 0o555])
        cache.chmod(mode)
        said.append(f"mode {mode:o}")
    return "; ".join(said)


def _points(rng: random.Random) -> Any:
    """A cost curve that is none, or a strange one."""
    count = rng.choice([0, 1, 2, 3, 17])

    def row(usual: list[Any]) -> Any:
        return [rng.choice([*_NUMBERS, *usual]) if rng.random() < 0.5 else value for value in usual]

    widths: Any = row(sorted(rng.sample(costs.WIDTHS, count)))
    seconds: Any = row([0.001 * (i + 1) for i in range(count)])
    usual: list[Any] = [widths, seconds]
    measured = rng.choice([time.time(), time.time(), *_NUMBERS])
    curve = {"widths": widths, "seconds": seconds}
    named: dict[str, Any] = {"measured": measured, "tree": curve}
    for name, allowed in (("step", costs._STEP_WIDTHS), ("prompt", costs._PROMPT_WIDTHS)):
        named[name] = rng.choice([{"widths": allowed, "seconds": [0.001] * len(allowed)}] * 3 + [curve, None])
    others = [
        usual[:1],
        [seconds, widths, 3],
        rng.choice(_NUMBERS),
        {"a": widths},
        "ab",
        named | {"tree": {**curve, "widths": 3}},
    ]
    return rng.choice([usual, usual, named, named, rng.choice(others)])

"""Faults that are planted in the kernels of recurrent layers show: at load, or in the logits of trees."""

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from plain_model import PlainModel, relative_error
from tiny_models import tiny_model
from tree_decoding import decode, grow, path_error, tiny_runner

from foretoken.core.errors import ModelError
from foretoken.decoder import library

# slow: every mutant compiles the kernels, half a minute of a processor
pytestmark = pytest.mark.slow

MUTANTS = {  # (what the source says, what a mutant says)
    "the delta rule reads a state before its decay": (
        "sums[u] = multiply_add(in_all_lanes(key[d + u]), decayed, sums[u]);",
        "sums[u] = multiply_add(in_all_lanes(key[d + u]), decayed / decay, sums[u]);",
    ),
    "what a token adds decays at once": (
        "multiply_add(in_all_lanes(key[d + u]), added, decayed)",
        "multiply_add(in_all_lanes(key[d + u]), added * decay, decayed)",
    ),
    "a token reads the state before it": (
        "multiply_add(in_all_lanes(query[d + u]), state, sums[u])",
        "multiply_add(in_all_lanes(query[d + u]), decayed, sums[u])",
    ),
    "the gate and the norm change places": ("layer.gates_first", "!layer.gates_first"),
    "the window has a sibling's row": ("replayed + pass_.parents[pass_.node_starts[s] + item - replayed]", "item - 1"),
    "a sibling has overwritten the parent's state": ("{each, place, place + 1}", "{each, place, place}"),
    "an accepted token is not folded": (
        "int64_t item = 0; item < folded;",
        "int64_t item = folded > 1; item < folded;",
    ),
    "the stored window is one row too old": ("num_folded(s) - window + row", "num_folded(s) - window + row - 1"),
    "heads share keys in turns": ("head / (layer.heads / layer.key_heads)", "head % layer.key_heads"),
    "lengths of keys have another epsilon": ("sum + 1e-6f", "sum + 1e-2f"),
    "an accepted token is folded in place of the next": (
        "pass_.known[pass_.known_starts[s] + item]",
        "pass_.known[pass_.known_starts[s] + std::max<int64_t>(item - 1, 0)]",
    ),
    "the nodes of a level begin behind the prefix": (
        "parents[n] < settled ?",
        "parents[n] < std::max(settled, earlier) ?",
    ),
}


@pytest.fixture
def mutated(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Kernels with a fault, compiled in a directory of their own."""
    known, wrong = MUTANTS[request.param]
    sources = tmp_path / "kernels"
    shutil.copytree(library._KERNELS, sources, ignore=shutil.ignore_patterns("*.so"))
    path = sources / "recurrent.h"
    text = path.read_text()
    assert known in text
    path.write_text(text.replace(known, wrong))
    monkeypatch.setattr(library, "_KERNELS", sources)
    monkeypatch.setattr(library, "_FLAGS", tuple("-O0" if flag == "-O2" else flag for flag in library._FLAGS))
    monkeypatch.setattr(library, "open_cache", lambda: tmp_path)
    library.native_library.cache_clear()
    yield request.param
    library.native_library.cache_clear()


@pytest.mark.parametrize("mutated", MUTANTS, indirect=True)
def test_mutants_are_caught(mutated: str) -> None:
    plain, rng = PlainModel(tiny_model("qwen3_5")), random.Random(mutated)
    try:
        runner = tiny_runner("qwen3_5", runner="lean-native", prefill_chunk=5)
    except ModelError as err:
        wrong = "gives (wrong logits for a token tree|logits that are not numbers)"
        assert re.search(wrong, str(err))  # noqa: PT017 - either of two ways
        return
    worst = path_error(plain, decode(runner, seed=rng.randrange(100), rounds=6))
    grown = max(relative_error(logits, plain(text)[-1]) for text, logits in grow(runner, rounds=2))
    assert max(worst, grown) > 1e-3

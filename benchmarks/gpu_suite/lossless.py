"""Compares every drafter with plain decoding of the same target: the same text, a near-tie of rounding, or a bug."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.bench.verify import verify_setups
from foretoken.bench.workload import Workload, load_prompts
from foretoken.entrypoints.config import PLAIN, Setup, parse_setup
from foretoken.models.loading import load_model, load_tokenizer
from tests.drafters.adversarial import BEHAVIOURS

if TYPE_CHECKING:
    from benchmarks.gpu_suite.work import Work
    from foretoken.models.loaded import LoadedModel

_TARGET = Path(__file__).resolve().parents[2] / "models" / "tinycode"
_HEADS = ("hass", "hydra", "medusa", "mlp_speculator")
_PROMPTS = {1: 2, 3: 5, 8: 8}  # by batch size; of three and of eight some wait for a slot, or none does
_TEMPERATURES = (0.0, 0.8)


def run(work: Work) -> None:
    """Emits `setups`, one row a drafter, batch size and temperature, and `broken`, what stopped the engine."""
    model = load_model(str(_TARGET), dtype="float32", device=work.device.type)
    tokenizer = load_tokenizer(str(_TARGET))
    drafting = drafting_setups()
    bad = [parse_setup(f'{{"method": "tests.drafters.adversarial", "behaviour": "{name}"}}') for name in BEHAVIOURS]
    jobs = [(batch, setup) for batch in (8, 1, 3) for setup in drafting] + [(3, setup) for setup in bad]
    max_tokens = 48
    if work.is_rehearsal:
        jobs = [(2, setup) for setup in (drafting[0], drafting[6], bad[0])]
        max_tokens = 6
    own = jobs[work.shard :: work.num_shards]
    # Setups of one batch size share plain decoding, a few at a time so that little is lost when time is up.
    for batch in dict.fromkeys(batch for batch, _ in own):
        setups = [setup for size, setup in own if size == batch]
        for start in range(0, len(setups), 4):
            group = setups[start : start + 4]
            if not work.deadline.allows(2.0 if work.is_rehearsal else 12.0):
                for setup in group:
                    work.left_out(f"{setup.name}, batch {batch}", "time")
                continue
            _check(work, model, tokenizer, group, batch, max_tokens)


def drafting_setups() -> list[Setup]:
    """Plain decoding in batches, and every drafter that is there, as chain and as tree.

    Lengths are fixed: on a small model drafts do not pay on a GPU, and a controller would check plain decoding.
    """
    names = [
        "ngram:control=fixed", "ngram:tree:control=fixed", "draft_model:control=fixed",
        "draft_model:tree:control=fixed",
        '{"method": "oracle", "pattern": [2]}', '{"method": "oracle", "pattern": [3, 0, 5], "tree": "tree"}',
    ]  # fmt: skip
    for method in _HEADS:
        if _TARGET.with_name(f"{_TARGET.name}-{method}").is_dir():
            names += [f"{method}:tree:control=fixed", f"{method}:chain:control=fixed"]
    if _TARGET.with_name(f"{_TARGET.name}-hass").is_dir():
        names.append("hass:tree=dynamic:control=fixed")
    return [Setup(PLAIN, None), *(parse_setup(name) for name in names)]


def _check(
    work: Work, model: LoadedModel, tokenizer: Any, setups: Sequence[Setup], batch: int, max_tokens: int
) -> None:
    """Checks some setups at one batch size; where one of them stops the engine, each by itself."""
    workload = Workload(
        prompts=load_prompts(limit=_PROMPTS.get(batch, 2)), temperatures=_TEMPERATURES, max_tokens=max_tokens,
        seed=work.seed,
    )  # fmt: skip
    begin = time.monotonic()
    try:
        groups = verify_setups(model, tokenizer, setups, workload, batch_sizes=[batch])
        checks = [check for group in groups for check in group]
    except Exception as err:
        if "CUDA error" in str(err):  # nothing runs in this process any more
            raise
        if len(setups) == 1:
            lines = [line for line in str(err).splitlines() if line.strip()] or [""]
            failure = f"{type(err).__name__}: {lines[0][:300]}"
            work.emit("broken", {"setup": setups[0].name, "batch": batch, "failure": failure})
            return
        for setup in setups:
            _check(work, model, tokenizer, [setup], batch, max_tokens)
        return
    seconds = (time.monotonic() - begin) / len(setups)
    for setup in setups:
        for temperature in _TEMPERATURES:
            own = [check for check in checks if check.setup == setup.name and check.temperature == temperature]
            counts = Counter(check.verdict for check in own)
            work.emit(
                "setups",
                {
                    "setup": setup.name, "batch": batch, "temperature": temperature, "runner": own[0].runner,
                    "dtype": str(model.dtype)[6:], "prompts": len(own), "tokens": sum(c.num_tokens for c in own),
                    "tau": sum(c.mean_acceptance_length for c in own) / len(own), "identical": counts["identical"],
                    "near_ties": counts["near-tie"], "bugs": counts["bug"], "seconds": round(seconds, 2),
                    "differences": [
                        {"prompt": c.prompt, "at": c.divergence, "gap": c.gap, "verdict": c.verdict}
                        for c in own if c.verdict != "identical"
                    ],
                },
            )  # fmt: skip

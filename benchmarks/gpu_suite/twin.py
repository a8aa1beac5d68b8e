"""Decodes held-out prompts with every method on a cost twin of the bundled model: speed-ups of trained drafters.

The twin has 32 layers of 4096 and the text, drafts and acceptance of the small trained model; see
`foretoken.bench.cost_twin`. Its dead weights are random, as zeros would take less power. Measured by what
`foretoken bench` measures with.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.gpu_suite.scripted import read_bytes
from benchmarks.speedup.sizes import methods_of
from foretoken.bench.compare import Measurement, SetupEngines, measure_rounds
from foretoken.bench.cost_twin import TwinPlan, make_twin_in_memory
from foretoken.bench.plots import in_order
from foretoken.bench.verify import Judge
from foretoken.bench.workload import Workload, load_prompts
from foretoken.entrypoints.config import Setup, parse_setup
from foretoken.models.loading import load_tokenizer

if TYPE_CHECKING:
    from benchmarks.gpu_suite.work import Work
    from foretoken.models.loaded import LoadedModel

_TARGET = Path(__file__).resolve().parents[2] / "models" / "tinycode"
_TEMPERATURES = (0.0, 0.8)


class Sizes(NamedTuple):
    """How large everything is."""

    layers: int
    hidden: int
    dtype: torch.dtype
    runner: str
    prompts: int
    tokens: int
    seconds: float  # to make everything and to measure one prompt; without that much time nothing is begun


# 6.47e9 weights are 12.9 GB, and the drafters' 1.58e9 3.2 GB; with KV caches and graphs 36 GB of the device.
FULL = Sizes(32, 4096, torch.bfloat16, "auto", 6, 96, seconds=35.0)
# One layer more than the bundled model has.
TOY = Sizes(13, 256, torch.float32, "lean-stock", 1, 16, seconds=1.0)


def run(work: Work) -> None:
    """Emits `model`, and `methods` with one row a method and temperature."""
    sizes = TOY if work.is_rehearsal else FULL
    if not work.deadline.allows(sizes.seconds):
        work.left_out(f"the {sizes.layers} x {sizes.hidden} cost twin", "time")
        return
    with tempfile.TemporaryDirectory(prefix="twin") as folder:
        place = Path(folder) / "twin"
        begin = time.perf_counter()
        plan = TwinPlan(
            model=_TARGET, out=place, num_layers=sizes.layers, hidden_size=sizes.hidden, fill="random",
            dtype=sizes.dtype, seed=work.seed, device=str(work.device),
        )  # fmt: skip
        model, tokenizer = make_twin_in_memory(plan), load_tokenizer(str(place))
        on_disk = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        work.emit(
            "model",
            {
                "twin": str(model.cost_twin), "layers": sizes.layers, "hidden": sizes.hidden,
                "heads": model.config.num_attention_heads, "kv_heads": model.config.num_key_value_heads,
                "intermediate": model.config.intermediate_size, "vocabulary": model.vocab_size,
                "dtype": str(model.dtype)[6:], "weight_bytes": _read_bytes(model), "drafter_file_bytes": on_disk,
                "made_in_s": round(time.perf_counter() - begin, 2),
            },
        )  # fmt: skip
        setups = [parse_setup(method, target=str(place)) for method in in_order(methods_of(place))]
        workload = Workload(
            prompts=load_prompts(limit=sizes.prompts), temperatures=_TEMPERATURES, max_tokens=sizes.tokens,
            seed=work.seed,
        )  # fmt: skip
        measure(work, model, tokenizer, setups, workload, sizes.runner)


def measure(
    work: Work, model: LoadedModel, tokenizer: Any, setups: Sequence[Setup], workload: Workload, runner: str
) -> None:
    """Measures setups beside plain decoding; each temperature gets the same time, and at least one prompt."""
    engines = SetupEngines(model, tokenizer, setups, workload, runner=runner)
    measure_rounds(engines, workload.temperatures[0], [[0]])  # not counted: CUDA graphs are captured
    batches = [[prompt] for prompt in range(len(workload.prompts))]
    for later, temperature in zip(reversed(range(len(workload.temperatures))), workload.temperatures, strict=True):
        kept = work.deadline.left * later / (later + 1)
        rows = measure_rounds(
            engines,
            temperature,
            batches,
            goes_on=lambda kept=kept: work.deadline.allows(kept),  # type: ignore[misc]
        )
        if len(rows[0].texts) < len(batches):
            left = len(batches) - len(rows[0].texts)
            work.left_out(f"T={temperature:g}: {left} of {len(batches)} prompts", "time")
        for measured in rows:
            work.emit("methods", _row(model, tokenizer, workload, rows[0], measured))


def _row(
    model: LoadedModel, tokenizer: Any, workload: Workload, plain: Measurement, measured: Measurement
) -> dict[str, Any]:
    """One method at one temperature, its texts judged against plain decoding's."""
    checks = []
    params = workload.params(measured.temperature)
    for prompt, (text, reference) in enumerate(zip(measured.texts, plain.texts, strict=True)):
        judge = Judge(model, measured.setup, measured.runner, measured.runner_choice, 1, params[prompt])
        prompt_ids = list(tokenizer(workload.prompts[prompt])["input_ids"])
        checks.append(judge.compare(prompt, prompt_ids, reference, text, measured.tau))
    counts = Counter(check.verdict for check in checks)
    return {
        **measured.as_dict(), "prompts": len(checks), "tokens": sum(measured.tokens), "max_tokens": workload.max_tokens,
        "identical": counts["identical"], "near_ties": counts["near-tie"], "bugs": counts["bug"],
        "declined": measured.metrics.num_declined / max(measured.metrics.steps, 1),
        "differences": [
            {"prompt": check.prompt, "at": check.divergence, "gap": check.gap, "verdict": check.verdict}
            for check in checks if check.verdict != "identical"
        ],
    }  # fmt: skip


def _read_bytes(model: LoadedModel) -> int:
    """Bytes of weights that a pass reads; an embedding that is the LM head too is read whole."""
    module: Any = model.module
    is_tied = module.get_input_embeddings().weight is module.get_output_embeddings().weight
    embedding = module.get_input_embeddings().weight
    return read_bytes(module) + (embedding.numel() * embedding.element_size() if is_tied else 0)

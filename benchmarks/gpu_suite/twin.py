"""Decodes held-out prompts with every method on a cost twin of the bundled model: speed-ups of trained drafters.

The twin has 32 layers of 4096 and the text, drafts and acceptance of the small trained model; see
`foretoken.bench.cost_twin`. Its dead weights are random, as zeros would take less power. Measured by what
`foretoken bench` measures with.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.gpu_suite.successor_model import read_bytes
from benchmarks.speedup.sizes import methods_of
from foretoken.bench.compare import measure_rounds
from foretoken.bench.cost_twin.make import TwinPlan, make_twin_in_memory
from foretoken.bench.plots import in_order
from foretoken.bench.verify import Judge
from foretoken.bench.workload import SetupEngines, Workload, load_prompts
from foretoken.core.backend import has_cuda_runtime
from foretoken.entrypoints.config import Setup, parse_setup
from foretoken.models.loading import LoadedModel, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.gpu_suite.work import Work
    from foretoken.bench.measurement import Measurement

_TARGET = Path(__file__).resolve().parents[2] / "models" / "tinycode"
_TEMPERATURES = (0.0, 0.8)


class Sizes(NamedTuple):
    """How large everything is.

    Attributes:
        layers: Of the twin.
        hidden: Its hidden size.
        dtype: Of all weights.
        runner: See `LLM`.
        prompts: Held-out prompts.
        tokens: Output tokens of each.
        memory_bytes: Free memory of the device without which nothing is begun: weights, KV caches, CUDA graphs.
        disk_bytes: Free disk likewise: the drafters are files.
        seconds: To make everything and to measure one prompt; without that much nothing is begun.
    """

    layers: int
    hidden: int
    dtype: torch.dtype
    runner: str
    prompts: int
    tokens: int
    memory_bytes: float
    disk_bytes: float
    seconds: float


# 6.47e9 weights are 12.9 GB, and the drafters' 1.58e9 3.2 GB.
FULL = Sizes(32, 4096, torch.bfloat16, "auto", 6, 96, memory_bytes=36e9, disk_bytes=5e9, seconds=35.0)
# One layer more than the bundled model has.
TOY = Sizes(13, 256, torch.float32, "lean-stock", 1, 16, memory_bytes=0.0, disk_bytes=2e8, seconds=1.0)


def run(work: Work) -> None:
    """Emits `model`, `methods` with one row a method and temperature, and `broken`, what stopped the engine."""
    sizes = TOY if work.is_rehearsal else FULL
    with tempfile.TemporaryDirectory(prefix="twin") as folder:
        missing = what_is_missing(work, sizes, folder)
        if missing is not None:
            work.left_out(f"the {sizes.layers} x {sizes.hidden} cost twin", missing)
            return
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
        if has_cuda_runtime(work.device):
            work.emit("memory", {"peak_gib": torch.cuda.max_memory_allocated() / 2**30})


def what_is_missing(work: Work, sizes: Sizes, folder: str) -> str | None:
    """Why the twin is not begun, in a sentence; None where there is room and time for it."""
    if not work.deadline.allows(sizes.seconds):
        return f"time: {work.deadline.left:.1f} s are left, and it takes some {sizes.seconds:g} s"
    disk = shutil.disk_usage(folder).free
    if disk < sizes.disk_bytes:
        return f"disk: {disk / 1e9:.1f} GB are free, and its drafters take up to {sizes.disk_bytes / 1e9:.1f} GB"
    if has_cuda_runtime(work.device):
        memory, _ = torch.cuda.mem_get_info(work.device)
        if memory < sizes.memory_bytes:
            return f"memory: {memory / 1e9:.1f} GB are free, and it takes up to {sizes.memory_bytes / 1e9:.1f} GB"
    return None


def measure(
    work: Work, model: LoadedModel, tokenizer: Any, setups: Sequence[Setup], workload: Workload, runner: str
) -> None:
    """Measures setups beside plain decoding; where one of them stops the engine, each by itself."""
    try:
        engines = SetupEngines(model, tokenizer, setups, workload, runner=runner)
        measure_rounds(engines, workload.temperatures[0], [[0]])  # not counted: CUDA graphs are captured
        for temperature in workload.temperatures:
            rows = _measured(work, engines, temperature)
            for measured in rows:
                work.emit("methods", _row(model, tokenizer, workload, rows[0], measured))
        return
    except Exception as err:
        if "CUDA error" in str(err):  # nothing runs in this process any more
            raise
        lines = [line for line in str(err).splitlines() if line.strip()] or [""]
        failure = f"{type(err).__name__}: {lines[0][:300]}"
    # Here, where the error and with it the engines are gone.
    if len(setups) == 1:
        work.emit("broken", {"setup": setups[0].name, "failure": failure})
        return
    for setup in setups:
        if work.deadline.left > 0:
            measure(work, model, tokenizer, [setup], workload, runner)
        else:
            work.left_out(f"{setup.name}, cost twin", f"time, after {failure}")


def _measured(work: Work, engines: SetupEngines, temperature: float) -> list[Measurement]:
    """As many prompts at one temperature as there is time for."""
    temperatures, num_prompts = engines.workload.temperatures, len(engines.workload.prompts)
    num_later = len(temperatures) - temperatures.index(temperature) - 1
    kept = work.deadline.left * num_later / (num_later + 1)  # each temperature gets the same time
    ends: list[float] = []

    def goes_on() -> bool:
        round_s = (ends[-1] - ends[0]) / (len(ends) - 1) * len(engines.names)  # the warm-up left out
        if work.deadline.left - kept > 1.5 * round_s:
            return True
        done = len(ends) // len(engines.names)
        work.left_out(f"T={temperature:g}: {num_prompts - done} of {num_prompts} prompts", "time")
        return False

    batches = [[prompt] for prompt in range(num_prompts)]
    return measure_rounds(
        engines, temperature, batches, on_measured=lambda: ends.append(time.monotonic()), goes_on=goes_on
    )


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

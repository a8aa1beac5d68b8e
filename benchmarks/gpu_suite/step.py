"""Measures whole passes and iterations of an 8B-shaped target: distance to memory bandwidth, free width, host time.

The target is `successor_model`: random weights, known text. Drafts are scripted and cost nothing, so efficiency here is
the engine's alone: what a head's own weights cost comes on top.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.gpu_suite.scripted import (
    eight_billion,
    prompt_ids,
    read_bytes,
    scripted,
    successor_model,
    text_after,
    toy,
)
from benchmarks.gpu_suite.timing import Times, queued_seconds, waited_seconds
from foretoken import LLM, SamplingParams
from foretoken.core.backend import has_cuda_runtime
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner
from foretoken.trees.choices import PUBLISHED, TreeShape

if TYPE_CHECKING:
    from benchmarks.gpu_suite.work import Work
    from foretoken.core.records import StepRecord
    from foretoken.models.loaded import LoadedModel

_SKIPPED = 8  # iterations before anything is counted


class Sizes(NamedTuple):
    """How large everything is."""

    contexts: Sequence[int]
    widths: Sequence[int]
    passes: int
    prompt: int
    tokens: int
    rounds: int


class Pattern(NamedTuple):
    """A way of drafting: its tree, and how many tokens are right in each pass."""

    title: str
    shape: TreeShape
    right: Sequence[int]


FULL = Sizes(contexts=(8192, 2048, 512), widths=(1, 8, 16, 32, 64, 128), passes=12, prompt=512, tokens=160, rounds=3)
TOY = Sizes(contexts=(24, 12), widths=(1, 4), passes=2, prompt=12, tokens=24, rounds=1)
PATTERNS = {
    "n-gram": Pattern("n-gram-like: chain of 7", TreeShape.chain(7), (0, 7, 0, 1, 0, 4, 2, 0)),
    "medusa": Pattern(
        "Medusa-like: 64 nodes, depth 4", TreeShape.from_choices(PUBLISHED["mc_sim_7b_63"]), (1, 2, 1, 0, 3, 2, 1, 2)
    ),
    "eagle": Pattern(
        "EAGLE-like: 46 nodes, depth 5", TreeShape.cartesian((3, 2, 2, 1, 1)), (5, 2, 3, 1, 5, 3, 2, 5)
    ),
}  # fmt: skip


def run(work: Work) -> None:
    """Emits `model`, `generate`, `passes`, `iterations` and `efficiency`."""
    sizes = TOY if work.is_rehearsal else FULL
    context = max(*sizes.contexts, sizes.prompt + sizes.tokens) + max(sizes.widths) + 64
    config: Any = toy(context) if work.is_rehearsal else eight_billion(context)
    dtype = torch.float32 if work.is_rehearsal else torch.bfloat16
    begin = time.perf_counter()
    module = successor_model(config, dtype=dtype, device=work.device, seed=work.seed)
    work.emit(
        "model",
        {
            "layers": config.num_hidden_layers, "hidden": config.hidden_size, "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads, "intermediate": config.intermediate_size,
            "vocabulary": config.vocab_size, "dtype": str(dtype)[6:], "weight_bytes": read_bytes(module),
            "kv_bytes_a_token": 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
            * dtype.itemsize,
            "made_in_s": round(time.perf_counter() - begin, 2),
        },
    )  # fmt: skip
    _transformers(work, module, sizes)  # before the runner fuses its projections, which would slow it down
    model = wrap_model(module, name="successor")
    runner = "lean-stock" if work.is_rehearsal else "auto"
    _passes(work, model, sizes, runner)
    _decoding(work, model, sizes, runner)


def _transformers(work: Work, module: Any, sizes: Sizes) -> None:
    """Greedy `generate` of transformers with its defaults, prefill taken out."""
    prompt = list(prompt_ids(sizes.prompt, module.config.vocab_size))
    ids = torch.tensor([prompt], device=work.device)
    count = max(sizes.tokens // 3, 2)

    def seconds(tokens: int) -> tuple[float, list[int]]:
        _wait(work)
        begin = time.perf_counter()
        with torch.inference_mode():
            output = module.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens
            )
        text = output[0, len(prompt) :].tolist()
        return time.perf_counter() - begin, text

    rates: list[float] = []
    text: list[int] = []
    for number in range(sizes.rounds + 1):
        first, _ = seconds(1)
        whole, text = seconds(count)
        if number:
            rates.append((count - 1) / max(whole - first, 1e-9))
    work.emit(
        "generate",
        {
            "who": "transformers", "tokens_per_s": median(rates), "rounds": len(rates), "prompt": sizes.prompt,
            "tokens": count, "attention": module.config._attn_implementation,
            "is_expected_text": text == text_after(prompt[-1], count, module.config.vocab_size),
        },
    )  # fmt: skip


def _passes(work: Work, model: LoadedModel, sizes: Sizes, runner: str) -> None:
    """Passes of every width behind every context: from an idle GPU, and with the host's launches hidden."""
    context, widest = max(sizes.contexts), max(sizes.widths)
    target = Runner(model, num_slots=1, context_len=context + 1, max_nodes=widest, runner=runner)
    ids = prompt_ids(context, target.vocab_size)
    for start in range(0, context, target.prefill_chunk):
        target.prefill(0, ids[start : start + target.prefill_chunk], start)
    trees = {width: _tree(width, target.device) for width in sizes.widths}
    for length in sorted(sizes.contexts, reverse=True):  # a pass overwrites the rows behind its context

        def verify(width: int, length: int = length) -> object:
            return target.verify([0], [length], trees[width])

        launch_s = {}
        for width in sizes.widths:
            for _ in range(3):  # kernels are compiled, passes perhaps captured
                verify(width)
            _wait(work)
            begin = time.perf_counter()
            verify(width)
            launch_s[width] = time.perf_counter() - begin
            _wait(work)
        waited: dict[int, list[float]] = {width: [] for width in sizes.widths}
        queued: dict[int, list[float]] = {width: [] for width in sizes.widths}
        for _ in range(sizes.passes):
            for width in sizes.widths:
                waited[width].append(waited_seconds(lambda w=width: verify(w), work.device) * 1e6)  # type: ignore[misc]
                queued[width].append(
                    queued_seconds(lambda w=width: verify(w), work.device, launch_s=launch_s[width]) * 1e6  # type: ignore[misc]
                )
        for width in sizes.widths:
            work.emit(
                "passes",
                {
                    "context": length, "width": width, "runner": target.name, "launch_us": launch_s[width] * 1e6,
                    "waited": Times.of(waited[width]).as_dict(), "queued": Times.of(queued[width]).as_dict(),
                },
            )  # fmt: skip


def _decoding(work: Work, model: LoadedModel, sizes: Sizes, runner: str) -> None:
    prompt = list(prompt_ids(sizes.prompt, model.vocab_size))
    watches = {name: _Watch() for name in ("plain", *PATTERNS)}
    oracle = {
        "method": "oracle", "pattern": PATTERNS["n-gram"].right, "num_speculative_tokens": 7,
        "references": [[*prompt, *text_after(prompt[-1], 4 * sizes.tokens, model.vocab_size)]],
    }  # fmt: skip
    engines: dict[str, LLM] = {}
    for name, watch in watches.items():
        made: dict[str, Any] = {}
        if name == "n-gram":
            made["speculative_config"] = oracle
        elif name != "plain":
            made = {"drafter": scripted(PATTERNS[name].shape, PATTERNS[name].right), "trust_drafter": True}
        engines[name] = LLM(
            model, max_num_seqs=1, max_model_len=sizes.prompt + sizes.tokens + 1, runner=runner, on_step=watch.note,
            enable_prefix_caching=False, **made,
        )  # fmt: skip
    tried: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    texts: dict[str, list[int]] = {}
    for number in range(sizes.rounds + 1):
        for name, engine in engines.items():
            texts[name] = _decode(engine, watches[name], prompt, sizes.tokens)
            if number:
                tried[name].append((watches[name].rate, watches[name].tau))
    want = text_after(prompt[-1], sizes.tokens, model.vocab_size)
    for name in engines:
        ratios = [mine[0] / plain[0] for mine, plain in zip(tried[name], tried["plain"], strict=True)]
        tau = median(tau for _, tau in tried[name])
        work.emit(
            "efficiency",
            {
                "pattern": name, "title": PATTERNS[name].title if name in PATTERNS else "plain decoding",
                "runner": engines[name].target.name, "width": engines[name].target.max_nodes,
                "tokens_per_s": median(rate for rate, _ in tried[name]), "speed_up": median(ratios),
                "speed_up_min": min(ratios), "speed_up_max": max(ratios), "tau": tau, "tau_scripted": _tau(name),
                "efficiency": median(ratios) / tau, "rounds": len(ratios), "prompt": sizes.prompt,
                "tokens": sizes.tokens, "is_expected_text": texts[name] == want,
            },
        )  # fmt: skip
    for name, engine in engines.items():
        if not work.deadline.allows(3.0):
            work.left_out(f"the host's share of an iteration, {name}", "time")
            continue
        _decode(engine, watches[name], prompt, sizes.tokens)
        wall = median(watches[name].gaps)
        row = {"pattern": name, "wall_us": wall * 1e6, "context": sizes.prompt, **watches[name].stages}
        work.emit("iterations", row | _profiled(work, engine, watches[name], prompt, sizes.tokens, wall))


class _Watch:
    """Notes down iterations; the first ones warm up."""

    def __init__(self) -> None:
        self.on_iteration: Callable[[int], None] | None = None
        self.reset()

    def reset(self) -> None:
        self._times: list[float] = []
        self._records: list[StepRecord] = []

    def note(self, record: StepRecord) -> None:
        """An iteration has ended: its tokens are on the host."""
        self._times.append(time.perf_counter())
        self._records.append(record)
        if self.on_iteration is not None:
            self.on_iteration(len(self._times))

    @property
    def _first(self) -> int:
        """Where counting begins: late enough to be warm, early enough to leave something."""
        return min(_SKIPPED, len(self._times) // 4)

    @property
    def gaps(self) -> list[float]:
        """Seconds from iteration to iteration; the last one may be cut short by the end of the text."""
        times = self._times[self._first : -1]
        return [b - a for a, b in pairwise(times)]

    @property
    def num_tokens(self) -> int:
        records = self._records[self._first + 1 : -1]
        return sum(sum(step.num_emitted for step in record.sequences) for record in records)

    @property
    def rate(self) -> float:
        return self.num_tokens / sum(self.gaps)

    @property
    def tau(self) -> float:
        return self.num_tokens / len(self.gaps)

    @property
    def stages(self) -> dict[str, float]:
        """Median microseconds of the host in each stage; the one that waits for the GPU has its time in it."""
        seconds = [record.seconds for record in self._records[self._first + 1 : -1]]
        return {
            f"{stage}_us": median(getattr(each, stage) for each in seconds) * 1e6
            for stage in ("draft", "verify", "accept", "commit")
        }


def _decode(engine: LLM, watch: _Watch, prompt: list[int], tokens: int) -> list[int]:
    watch.reset()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return list(engine.generate(prompt, params)[0].outputs[0].token_ids)


def _profiled(
    work: Work, engine: LLM, watch: _Watch, prompt: list[int], tokens: int, wall: float
) -> dict[str, Any]:  # fmt: skip
    """How long the GPU is busy in an iteration, from the profiler's record of its kernels, and what is left idle.

    The engine decodes once more; `wall` is the seconds of an iteration without a profiler.
    """
    if not has_cuda_runtime(work.device):
        return {"busy_us": None, "gap_us": None, "why": "no GPU"}
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    first, last = _SKIPPED, max(_SKIPPED + 2, int(len(watch.gaps) * 0.8) + _SKIPPED)

    def switch(number: int) -> None:
        if number == first:
            torch.cuda.synchronize()
            profiler.start()
        elif number == last:
            torch.cuda.synchronize()
            profiler.stop()

    watch.on_iteration = switch
    try:
        _decode(engine, watch, prompt, tokens)
    except RuntimeError as err:  # a driver without its profiling interface
        return {"busy_us": None, "gap_us": None, "why": str(err).splitlines()[0][:200]}
    finally:
        watch.on_iteration = None
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    )
    if not spans:
        return {"busy_us": None, "gap_us": None, "why": "the profiler saw no kernels"}
    busy = covered(spans) / (last - first)
    return {"busy_us": busy, "gap_us": wall * 1e6 - busy, "launches": len(spans) / (last - first)}


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals, which are sorted by their beginning."""
    total, reached = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _tau(name: str) -> float:
    return 1.0 + sum(PATTERNS[name].right) / len(PATTERNS[name].right) if name in PATTERNS else 1.0


def _tree(width: int, device: torch.device) -> TokenTree:
    """A tree whose nodes have three children each."""
    parents = [-1, *((node - 1) // 3 for node in range(1, width))]
    return TokenTree.from_rows([TreeRow([1 + node for node in range(width)], parents)], device=device)


def _wait(work: Work) -> None:
    if has_cuda_runtime(work.device):
        torch.cuda.synchronize()

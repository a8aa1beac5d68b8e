"""Hybrid targets of real shapes with random weights: passes beside transformers and llama.cpp, and what drafts bring.

    python -m benchmarks.hybrids make DIRECTORY [--converter LLAMA_CPP --llama PYTHON]
    python -m benchmarks.hybrids run DIRECTORY --out NAME.jsonl [--llama PYTHON] [--only qwen3.5] [--parts passes]

`make` writes models of the shapes of Qwen3.5-0.8B and LFM2-350M in bfloat16 with a shortened vocabulary, untrained
draft heads for them, and with a folder of llama.cpp's sources GGUF files by its converter and quantizer. PYTHON is the
interpreter of an environment with `llama-cpp-python`.

`run` measures what the file of results lacks, and prints tables. *Passes*: contestants are processes with two threads
that take turns in every round, behind 128 tokens. Ours are `RUNNER[:FILE][@PROCESSOR]`: FILE is the kind of a GGUF
file, with "+a8" for inputs of 8 bits as in llama.cpp; PROCESSOR a line of `decoder/kernels/processors.txt`, for kernels
of older processors. *Replays*: the part of such a pass that commits and computes again what was accepted. *Speed-ups*:
drafts of untrained heads, accepted at published rates, beside plain decoding of the same prompts.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, Lfm2Config, Qwen3_5TextConfig

from benchmarks.machine import commit, describe_machine
from benchmarks.markdown import markdown_table
from benchmarks.pairs.contestants import Contestant
from foretoken.bench.compare import SetupEngines, in_turn
from foretoken.bench.workload import Workload
from foretoken.core import backend
from foretoken.decoder import library
from foretoken.entrypoints.config import PLAIN, Setup
from foretoken.files.atomic_files import JournalFile
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.heads.base import build_head
from foretoken.models.loading import load_model
from foretoken.models.parts import target_parts
from foretoken.planning.acceptance import filled
from foretoken.training.objectives import head_config

ROWS, PROMPT = 128, 1000  # tokens before a pass; of a prompt
_SLOW_S = 5.0  # who takes longer for a pass is asked once
# Gain of the last norm: the best of 32,768 random logits then has half of the probability, as in trained models.
_PEAK = 12.0
_GGUF_TYPES = {"q8_0": 7, "q4_0": 2}  # `llama_ftype`; other kinds are the converter's `--outtype`
_STAGES = ("verify_ms", "draft_ms", "host_ms")
_TOY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


class Published(NamedTuple):
    """What a trained head reached: tokens of a pass, the target's own included, by depth of its chains or of a tree."""

    name: str
    head: str
    tree: str
    lengths: dict[int, float]

    @property
    def setup(self) -> dict[str, Any]:
        """Keys of `speculative_config`: the engine chooses the depth of chains, trees are those that were published."""
        depth, length = max(self.lengths.items())
        if self.tree == "chain":
            joint = [after - before for before, after in pairwise([1.0, *filled(self.lengths)])]
            return {"tree": "chain", "synthetic_acceptance_rates": joint}
        bounds = {"max_nodes": 60, "tree_top_k": 10} if self.tree == "dynamic" else {}
        return {
            "tree": self.tree, "num_speculative_tokens": depth, "synthetic_acceptance_length": length, **bounds,
        }  # fmt: skip


# EAGLE, EAGLE-3's tree and HASS: their papers (arXiv 2401.15077, 2503.01840 with Llama 3.1 8B, 2408.15766); EAGLE-2,
# Hydra and Medusa of Vicuna 7B: Spec-Bench (arXiv 2401.07851); EAGLE-3's chain: `planning/curves.yaml`; that of
# Qwen3-1.7B: a public report, whose depth is not known.
PUBLISHED = (
    Published("EAGLE chain", "eagle", "chain", {1: 1.79, 2: 2.37, 3: 2.80, 4: 3.11, 5: 3.31}),
    Published("EAGLE-3 chain", "eagle3", "chain", {1: 1.79, 2: 2.39, 3: 2.78, 4: 3.02, 5: 3.21}),
    Published("EAGLE-3 chain of a 1.7B", "eagle3", "chain", {7: 2.17}),
    Published("EAGLE-2", "eagle", "dynamic", {6: 4.35}), Published("HASS", "eagle", "dynamic", {6: 5.15}),
    Published("EAGLE-3", "eagle3", "dynamic", {8: 6.23}), Published("Hydra", "hydra", "mc_sim_7b_63", {4: 3.26}),
    Published("Medusa", "medusa", "mc_sim_7b_63", {4: 2.32}),
)  # fmt: skip


def shapes(vocab_size: int, *, is_toy: bool = False) -> dict[str, Any]:
    """Returns configurations by name; `is_toy`: four layers of 64 for rehearsals."""
    common = {
        "vocab_size": vocab_size, "tie_word_embeddings": True, "max_position_embeddings": 8192, "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": None, "hidden_size": 1024,
    }  # fmt: skip
    qwen: dict[str, Any] = {
        "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    lfm2: dict[str, Any] = {
        "intermediate_size": 6656, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    }  # fmt: skip
    if is_toy:
        linear = {f"linear_{key}": 2 for key in ("num_key_heads", "num_value_heads")}
        linear |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
        qwen |= {**_TOY, "head_dim": 32, **linear}
        lfm2 |= {**_TOY, "full_attn_idxs": [2], "block_multiple_of": 32}
    return {"qwen3.5": Qwen3_5TextConfig(**(common | qwen)), "lfm2": Lfm2Config(**(common | lfm2))}


def make(options: argparse.Namespace) -> None:
    """Writes targets, heads and GGUF files that are missing."""
    for name, config in shapes(options.vocabulary, is_toy=options.toy).items():
        target = options.directory / name
        if not (target / "config.json").exists():
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            with torch.no_grad():
                (model.model.norm.weight if name == "qwen3.5" else model.model.embedding_norm.weight).fill_(_PEAK)
            model.save_pretrained(target)
            print(f"{target}: {sum(each.numel() for each in model.parameters()) / 1e6:.0f} M weights", flush=True)
        if not (target.with_name(f"{name}-{PUBLISHED[-1].head}") / "config.json").exists():
            write_heads(target)
        if options.converter:
            for kind in options.gguf:
                write_gguf(target, kind, options)


def write_heads(target: Path) -> None:
    """Writes heads that pass the target's features on, beside the target."""
    model = load_model(target, dtype="bfloat16", device="cpu")
    for method in dict.fromkeys(each.head for each in PUBLISHED):
        head: Any = build_head(head_config(method, model, {}), dtype=torch.float32)
        head.initialize(target_parts(model, dtype=torch.float32))
        if method == "eagle3":
            with torch.no_grad():
                head.norm.fill_(_PEAK)
        checkpoint = HeadCheckpoint.of_head(head.to(torch.bfloat16), target=TargetFingerprint.of(model))
        native.write_checkpoint(checkpoint, target.with_name(f"{target.name}-{method}"), replaces=True)


# Without a vocabulary: nothing here reads text, and the converter knows tokenizers by name alone.
_CONVERT = """
import runpy, sys
sources = sys.argv.pop(1)
sys.path[:0] = [sources, sources + "/gguf-py"]
from conversion.base import TextModel
def without_words(self):
    self.gguf_writer.add_tokenizer_model("none")
    self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])
TextModel._set_vocab_gpt2 = without_words
runpy.run_path(sources + "/convert_hf_to_gguf.py", run_name="__main__")
"""
_QUANTIZE = """
import ctypes, sys, llama_cpp
llama_cpp.llama_backend_init()
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = int(sys.argv[3])
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))
"""


def gguf_of(target: Path, kind: str) -> Path:
    """Path of a GGUF file."""
    return target.with_name(f"{target.name}.{kind}.gguf")


def write_gguf(target: Path, kind: str, options: argparse.Namespace) -> None:
    """Converts a target, or quantizes its file in bfloat16."""
    out = gguf_of(target, kind)
    if out.exists():
        return
    begun = out.with_suffix(".part")
    if kind in _GGUF_TYPES:
        write_gguf(target, "bf16", options)
        whole = str(gguf_of(target, "bf16"))
        command = [options.llama, "-c", _QUANTIZE, whole, str(begun), str(_GGUF_TYPES[kind])]
    else:
        command = [sys.executable, "-c", _CONVERT, str(options.converter), str(target), "--outfile", str(begun)]
        command += ["--outtype", kind, *(["--no-mtp"] if target.name == "qwen3.5" else [])]
    subprocess.run(command, check=True)
    begun.rename(out)


def contestants(target: Path, options: argparse.Namespace) -> list[Contestant]:
    """Processes that hold a target; the first one is the base of all ratios."""
    found = [
        ours(name, target, options)
        for name in [*(options.ours or runners(target)), "transformers"]
    ]  # fmt: skip
    for kind in options.gguf if options.llama else ():
        file = gguf_of(target, kind)
        if file.exists():
            found.append(Contestant(f"llama.cpp {kind}", "", options.llama, "llama", target=str(file), draft=None))
    return found


def ours(name: str, target: Path, options: argparse.Namespace) -> Contestant:
    """A process for `RUNNER[:FILE][@PROCESSOR]`, see the module."""
    (runner, _, file), processor = name.partition("@")[0].partition(":"), name.partition("@")[2] or None
    variables = {}
    if processor:  # kernels that are compiled for it stay beside the results
        cache = options.out.with_suffix("") / processor
        cache.mkdir(parents=True, exist_ok=True)
        variables["FORETOKEN_CACHE"] = str(cache)
    made = Contestant(
        name, "", sys.executable, "hybrid", variables=variables, runner=runner, processor=processor,
        target=str(gguf_of(target, file.removesuffix("+a8")) if file else target),
        rounds_inputs=file.endswith("+a8"), vocab_size=options.vocabulary,
    )  # fmt: skip
    made.share_kept()
    return made


def runners(target: Path) -> list[str]:
    """The best runner, the same with kernels of older processors and over quantized files, and the generic one."""
    older = [each.name for each in library._fitting_processors()[1:]]
    forced = [f"auto@{name}" for name in ("avx512-bf16", "avx512", "avx2") if name in older]
    return ["auto", *forced, *(f"auto:{kind}+a8" for kind in _GGUF_TYPES if gguf_of(target, kind).exists()), "generic"]


def passes(tokens: list[int]) -> list[tuple[str, int]]:
    """Shapes and tokens of all passes."""
    trees = [(shape, count) for shape in ("tree", "dynamic") for count in tokens if count > 1]
    return [*(("chain", count) for count in tokens), *trees, ("replay 4", 16), ("replay 15", 16), ("prompt", PROMPT)]


def request(who: str, shape: str, tokens: int) -> dict[str, Any] | None:
    """What to ask a contestant for a pass; None if it does not take part."""
    count = 25 if shape.startswith("replay") else 5 if tokens <= 16 else 3 if tokens <= 64 else 1
    if who.startswith("llama.cpp"):
        rows = {"chain": ROWS, "prompt": 0}.get(shape)
        return None if rows is None else {"rows": rows, "tokens": tokens, "count": count, "grows": True}
    if who == "transformers" and (shape, tokens) not in (("chain", 1), ("prompt", PROMPT)):
        return None
    return {"shape": shape, "rows": ROWS, "tokens": tokens, "count": count}


Lines = dict[tuple[str, str, int, int], dict[str, dict[str, Any]]]  # by target, shape, tokens and round: by contestant


def lines_of(journal: JournalFile, part: str) -> Lines:
    """Lines of one part; of a round that was measured again the last ones."""
    found: Lines = defaultdict(dict)
    for line in journal.lines:
        if line["part"] == part:
            found[line["target"], line["what"], line["tokens"], line["round"]][line["who"]] = line
    return found


def measure_passes(target: Path, journal: JournalFile, options: argparse.Namespace) -> None:
    """Measures rounds in which an answer is missing, as a whole."""
    everyone = contestants(target, options)
    try:
        for number in range(options.rounds):
            for shape, tokens in passes(options.tokens):
                known = lines_of(journal, "passes")
                slow = {
                    who for (name, what, count, _), lines in known.items() for who, line in lines.items()
                    if (name, what, count) == (target.name, shape, tokens) and line["seconds"] > _SLOW_S
                }  # fmt: skip
                asked = {each.name: request(each.name, shape, tokens) for each in everyone if each.name not in slow}
                asked = {who: wanted for who, wanted in asked.items() if wanted is not None}
                if asked.keys() <= known[target.name, shape, tokens, number].keys():
                    continue
                for each in in_turn(everyone, number):
                    if wanted := asked.get(each.name):
                        answer = each.answer(**wanted)
                        line = {"part": "passes", "target": target.name, "what": shape, "tokens": tokens}
                        journal.add(line | {"round": number, "who": each.name} | answer)
            print(f"{target.name}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    finally:
        for each in everyone:
            each.end()


def measure_speed_ups(target: Path, journal: JournalFile, options: argparse.Namespace) -> None:
    """Decodes prompts with every head whose file is there, and plainly; a prompt is decoded by all or anew."""
    setups = [
        Setup(each.name, {
            "method": each.head, "model": f"{target}-{each.head}", "rejection_sample_method": "synthetic", **each.setup,
        })
        for each in PUBLISHED
    ]  # fmt: skip
    known, names = lines_of(journal, "speed-ups"), {PLAIN, *(each.name for each in setups)}
    missing = [i for i in range(options.prompts) if not names <= known[target.name, "request", ROWS, i].keys()]
    if not missing:
        return
    backend.set_num_threads(2)
    model, generator = load_model(target, dtype="bfloat16", device="cpu"), torch.Generator().manual_seed(0)
    texts = torch.randint(model.vocab_size, (options.prompts, ROWS), generator=generator).tolist()
    workload = Workload(prompts=texts, temperatures=(0.0,), max_tokens=options.max_tokens)
    engines = SetupEngines(model, None, setups, workload, runner=options.runner)
    engines.warm_up(0.0)
    for number in missing:
        for who in in_turn(engines.names, number):
            found = engines.measure(who, 0.0, [number])
            line = {"part": "speed-ups", "target": target.name, "what": "request", "tokens": ROWS, "round": number}
            line |= {"who": who, "runner": found.runner, "rate": found.tokens_per_s, "tau": found.tau}
            line |= {"verify_ms": found.verify_ms, "draft_ms": found.draft_ms, "nodes": found.metrics.tree_nodes}
            journal.add(line | {"host_ms": found.host_ms - found.draft_ms})
        print(f"{target.name}: prompt {number + 1} of {options.prompts}", file=sys.stderr, flush=True)


def passes_table(target: str, found: Lines) -> str:
    """Milliseconds of each pass, with the ratio to the first contestant in brackets; of replays their share."""
    rounds: dict[str, list[dict[str, dict[str, Any]]]] = defaultdict(list)
    labels: dict[str, str] = {}
    for (name, shape, tokens, _), lines in found.items():
        if name == target and lines:
            rounds[f"{shape}, {tokens}"].append(lines)
            runners_of = {who: line.get("runner", who) for who, line in lines.items()}
            labels |= {who: who if runner == who else f"{who}: {runner}" for who, runner in runners_of.items()}
    rows = [[what, *(_cell(who, next(iter(labels)), each) for who in labels)] for what, each in rounds.items()]
    return markdown_table([target, *labels.values()], rows)


def _cell(who: str, base: str, rounds: list[dict[str, dict[str, Any]]]) -> str:
    own = [lines[who] for lines in rounds if who in lines]
    if not own:
        return ""
    if own[0].get("share") is not None:
        return f"{median(line['share'] for line in own):.1%}"
    ratios = [lines[who]["seconds"] / lines[base]["seconds"] for lines in rounds if {who, base} <= lines.keys()]
    ratio = f" ({median(ratios):.2f})" if ratios and who != base else ""
    return f"{1e3 * median(line['seconds'] for line in own):.1f}{ratio}"


def speed_ups_table(target: str, found: Lines) -> str:
    """Medians over prompts of each head."""
    rounds = [lines for (name, *_), lines in found.items() if name == target and PLAIN in lines]
    rows = []
    for who in dict.fromkeys(who for lines in rounds for who in lines):
        own = [lines[who] for lines in rounds if who in lines]
        over = median(lines[who]["rate"] / lines[PLAIN]["rate"] for lines in rounds if who in lines)
        values = {key: median(line[key] for line in own) for key in ("rate", "tau", "nodes", *_STAGES)}
        published = next((max(each.lengths.values()) for each in PUBLISHED if each.name == who), 1.0)
        cells = [who, f"{published:.2f}", f"{values['tau']:.2f}", f"{values['nodes']:.1f}", f"{values['rate']:.1f}"]
        rows.append([*cells, f"{over:.2f}", *(f"{values[key]:.2f}" for key in _STAGES)])
    heads = ["tokens a pass, published", "reached", "drafted nodes a pass", "tokens/s", "over plain"]
    heads += ["pass, ms", "drafting, ms", "host, ms"]
    return markdown_table([f"{target}, {rounds[0][PLAIN]['runner']}", *heads], rows) if rounds else ""


def report(journal: JournalFile) -> str:
    """All tables in Markdown, under their conditions."""
    facts = ", ".join(f"{key} {value}" for key, value in journal.conditions.items())
    parts = [f"{journal.date}, {facts}. Milliseconds of a pass behind {ROWS} tokens, with the first column's share."]
    for part, table in (("passes", passes_table), ("speed-ups", speed_ups_table)):
        found = lines_of(journal, part)
        parts += [table(target, found) for target in dict.fromkeys(key[0] for key in found)]
    return "\n\n".join(parts)


def run(options: argparse.Namespace) -> None:
    """Measures what is missing, and prints the report."""
    conditions = {**describe_machine(), "torch": torch.__version__, "commit": commit("foretoken")}
    journal = JournalFile(options.out, conditions, advice="Give another --out, or remove that file.")
    for name in options.only:
        target = options.directory / name
        if not (target / "config.json").exists():
            sys.exit(f"there is no '{target}'. Make it with `python -m benchmarks.hybrids make {options.directory}`.")
        options.vocabulary = json.loads((target / "config.json").read_text())["vocab_size"]
        if "passes" in options.parts:
            measure_passes(target, journal, options)
        if "speed-ups" in options.parts:
            measure_speed_ups(target, journal, options)
    print(report(journal))


def main(arguments: list[str]) -> None:
    """Runs one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making, running = commands.add_parser("make"), commands.add_parser("run")
    for each in (making, running):
        each.add_argument("directory", type=Path)
        each.add_argument("--llama", metavar="PYTHON", help="interpreter with llama-cpp-python")
        each.add_argument("--gguf", nargs="+", default=["bf16", "q8_0", "q4_0"], help="bf16, f16, q8_0, q4_0")
    making.add_argument("--converter", type=Path, metavar="LLAMA_CPP", help="folder of llama.cpp's sources")
    making.add_argument("--vocabulary", type=int, default=32768)
    making.add_argument("--toy", action="store_true", help="four layers of 64, for rehearsals")
    running.add_argument("--out", type=Path, required=True, help="file of results; what it holds is not measured again")
    running.add_argument("--only", nargs="+", default=["qwen3.5", "lfm2"])
    running.add_argument("--parts", nargs="+", default=["passes", "speed-ups"])
    running.add_argument("--ours", nargs="+", default=[], help="contestants; the first one is the base")
    running.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64])
    running.add_argument("--rounds", type=int, default=5)
    running.add_argument("--runner", default="auto", help="of the speed-ups")
    running.add_argument("--prompts", type=int, default=3)
    running.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args(arguments)
    make(options) if options.command == "make" else run(options)


if __name__ == "__main__":
    main(sys.argv[1:])

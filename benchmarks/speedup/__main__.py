"""Command line: makes cost twins of the bundled model, measures every method on them, writes tables.

python -m benchmarks.speedup --threads 2 --out benchmarks/results/speedup
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import commit, describe_machine
from benchmarks.speedup.measure import Settings, measure
from benchmarks.speedup.report import as_json, as_markdown
from benchmarks.speedup.rows import Journal, rows_of
from benchmarks.speedup.sizes import Size, digest_of, methods_of, prepare, twin_label, weights_bytes
from foretoken.bench.plots import in_order
from foretoken.bench.workload import load_prompts
from foretoken.core.backend import set_num_threads
from foretoken.core.errors import ForetokenError

_SIZES = "12x256,32x256,12x1024,24x1024"  # with the same prompts, so that sizes compare
_MODEL = Path(__file__).resolve().parents[2] / "models" / "tinycode"


def main(arguments: list[str]) -> int:
    """Measures what is missing and writes the report; returns the exit status."""
    try:
        return _run(_parser().parse_args(arguments), arguments)
    except (ValueError, OSError, ForetokenError) as err:
        print(f"Error: {err}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted. The same command goes on where this run stopped.", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    if options.threads is not None:
        set_num_threads(options.threads)
    target: Path = options.model
    methods = in_order(options.methods.split(",") if options.methods else methods_of(target))
    prompts = load_prompts(options.prompts)
    sizes = [Size.parse(text, options.num_prompts) for text in options.sizes.split(",")]
    sizes = [size.with_at_most(len(prompts)) for size in sizes]
    settings = Settings(
        methods=methods,
        prompts=prompts,
        temperatures=[float(text) for text in options.temperatures.split(",")],
        max_tokens=options.max_tokens,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
        runner=options.runner,
    )
    conditions = conditions_of(settings, target, options.prompts)
    journal = Journal(options.runs / f"{options.out.name}.jsonl", conditions)
    places = prepare(target, sizes, options.runs, _say, getattr(torch, options.dtype))
    measure(places, settings, journal, _say)
    write_report(journal, settings, places, options.out, ["python", "-m", "benchmarks.speedup", *arguments])
    return 0


def conditions_of(settings: Settings, target: Path, prompts: str) -> dict[str, Any]:
    """Everything that figures of one table have in common, JSON-ready; prompts: the source of the prompt set."""
    machine = describe_machine()
    return {
        "model": target.resolve().name,
        "model_sha256": digest_of(target),
        "dtype": settings.dtype,
        "device": settings.device if settings.device == "cpu" else torch.cuda.get_device_name(settings.device),
        "threads": torch.get_num_threads(),
        "runner": settings.runner,
        "prompts": prompts,
        "max_tokens": settings.max_tokens,
        "seed": settings.seed,
        "processor": f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['instruction_sets'])})",
        "python": machine["python"],
        "torch": torch.__version__,
        "commit": commit("foretoken", "models"),
    }


def write_report(journal: Journal, settings: Settings, places: dict[Size, Path], out: Path, command: list[str]) -> None:
    """Writes Markdown and JSON, and prints the Markdown; out: file without suffix; command: as it was typed."""
    sizes = sorted(places, key=lambda size: weights_bytes(places[size]))
    rows = rows_of(journal, [size.name for size in sizes], settings.temperatures, settings.names)
    facts = journal.conditions
    twins = [f"{label} ({weights_bytes(places[s]) / 2**20:.0f} MiB)" for s in sizes if (label := twin_label(places[s]))]
    sentences = [
        f"Model {facts['model']} and cost twins of it ({', '.join(twins) or 'none here'}): a twin has the text, the",
        "drafts and the acceptance of the small trained model at the cost of the larger size, drafters padded",
        f"likewise. {facts['dtype']}, one request at a time, {facts['max_tokens']} output tokens, prompts",
        f"'{facts['prompts']}', all methods in turn prompt by prompt. {facts['processor']}, device {facts['device']},",
        f"{facts['threads']} threads, Python {facts['python']}, torch {facts['torch']};",
        f"{journal.date}, commit {facts['commit']}. Command: `{shlex.join(command)}`.",
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    report = as_markdown(rows, sentences)
    out.with_name(out.name + ".md").write_text(report, encoding="utf-8")
    record = as_json(rows, {**facts, "date": journal.date, "cost_twins": twins, "command": shlex.join(command)})
    out.with_name(out.name + ".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(report)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speedup", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="files to write, without suffix")
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs/speedup"),
        help="where cost twins and what was measured are kept; both are used again (default: %(default)s)",
    )
    parser.add_argument(
        "--sizes",
        default=_SIZES,
        help="LAYERSxHIDDEN, with :PROMPTS for another number of prompts; the hidden size is the model's times a power "
        "of four, such as 32x4096 on a GPU (default: %(default)s)",
    )
    parser.add_argument("--num-prompts", type=int, default=16, help="where a size does not say (default: %(default)s)")
    parser.add_argument(
        "--methods", help="with commas, as `foretoken bench -s` takes them; all of the model when left out"
    )
    parser.add_argument("--temperatures", default="0,0.8", help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="output tokens a prompt (default: %(default)s)")
    parser.add_argument("--prompts", default="heldout", help="as `foretoken bench` takes them (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; the i-th gets seed + i")
    parser.add_argument("--model", type=Path, default=_MODEL, help="a trained model with its drafters beside it")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda (default: %(default)s)")
    parser.add_argument("--runner", default="auto", help="as `foretoken bench` takes it (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's own choice when left out")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

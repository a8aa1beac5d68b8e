"""Command line: compare, install a rival, write a model to measure on.

python -m benchmarks.rivals --model DIR --dtype bfloat16 --threads 2 --out benchmarks/results/NAME
python -m benchmarks.rivals install llama_cpp
python -m benchmarks.rivals model --layers 24 --hidden 1024 --out DIR
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.rivals.compare import Comparison, Settings, compare
from benchmarks.rivals.contestants import choose_contestants
from benchmarks.rivals.environments import DEFAULT_ENV_DIR, ENVIRONMENTS, install
from benchmarks.rivals.machine import commit, describe_machine
from benchmarks.rivals.plot import write_plot
from benchmarks.rivals.prompts import of_length, read_prompts
from benchmarks.rivals.report import as_json, as_markdown, pass_rows, request_rows
from foretoken.core.errors import ForetokenError
from foretoken.models.config_checks import read_twin_record


def main(arguments: list[str]) -> int:
    """Runs a command; returns the exit status."""
    try:
        if arguments[:1] == ["install"]:
            return _install(arguments[1:])
        if arguments[:1] == ["model"]:
            return _model(arguments[1:])
        return _compare(arguments)
    except (ValueError, OSError, ForetokenError) as err:
        print(f"Error: {err}", file=sys.stderr)
        return 2


def _install(arguments: list[str]) -> int:
    """Makes rivals' environments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals install", description=_install.__doc__)
    parser.add_argument(
        "rivals", nargs="+", choices=sorted(ENVIRONMENTS), metavar="RIVAL", help=", ".join(ENVIRONMENTS)
    )
    _add_env_dir(parser)
    options = parser.parse_args(arguments)
    for rival in options.rivals:
        try:
            install(rival, options.env_dir)
        except subprocess.CalledProcessError as err:
            print(f"Error: {rival} is not installed: pip ended with status {err.returncode}.", file=sys.stderr)
            return 1
    return 0


def _model(arguments: list[str]) -> int:
    """Writes a random-weight Llama to measure on."""
    from benchmarks.rivals.random_model import write_random_model  # transformers takes seconds to import

    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals model", description=_model.__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    write_random_model(options.out, layers=options.layers, hidden=options.hidden, seed=options.seed)
    return 0


def _compare(arguments: list[str]) -> int:
    """Measures, prints the report and writes it."""
    parser = _compare_parser()
    options = parser.parse_args(arguments)
    only = [name for part in options.only for name in part.split(",") if name]
    contestants = choose_contestants(
        only, has_draft=options.draft_model is not None, model=Path(options.model), bits=options.bits
    )
    prompts = read_prompts(options.prompts, options.model, limit=options.num_prompts)
    settings = Settings(
        model=options.model,
        draft_model=options.draft_model,
        dtype=options.dtype,
        bits=options.bits,
        threads=options.threads,
        prompts=prompts,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        first_prompts=of_length(prompts, options.first_token) if options.first_token else (),
        rounds=options.rounds,
        widths=[int(width) for width in options.widths.split(",") if width],
        context=options.context,
        repeats=options.repeats,
        options=parse_options(options.option),
        env_dir=options.env_dir,
        timeout_s=options.timeout,
    )
    comparison = compare(settings, contestants, lambda line: print(line, file=sys.stderr, flush=True))
    _write(comparison, settings, options.out, arguments)
    return 0 if comparison.contestants else 1


def parse_options(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Reads `NAME:KEY=VALUE` settings; a value is JSON, or else text.

    Raises:
        ValueError: When one is not of that form.
    """
    options: dict[str, dict[str, Any]] = defaultdict(dict)
    for text in texts:
        name, colon, setting = text.partition(":")
        key, equals, value = setting.partition("=")
        if not (name and colon and key and equals):
            raise ValueError(
                f"--option '{text}' is not of the form NAME:KEY=VALUE, such as openvino:ATTENTION_BACKEND=PA."
            )
        try:
            options[name][key] = json.loads(value)
        except json.JSONDecodeError:
            options[name][key] = value
    return dict(options)


def _write(comparison: Comparison, settings: Settings, out: Path, arguments: list[str]) -> None:
    """Prints the report; writes it as Markdown, JSON and, with matplotlib, as a picture."""
    machine, command = describe_machine(), shlex.join(["python", "-m", "benchmarks.rivals", *arguments])
    config = json.loads((Path(settings.model) / "config.json").read_text(encoding="utf-8"))
    shape = f"{config.get('num_hidden_layers')}x{config.get('hidden_size')}"
    name, twin = Path(settings.model).resolve().name, read_twin_record(config, settings.model)
    shown = f"{name}, {shape}" if twin is None else str(twin).capitalize()
    lengths = sorted(len(prompt) for prompt in settings.prompts)
    how = "greedy" if settings.temperature == 0 else f"sampled at T {settings.temperature:g}"
    first_token_len = len(settings.first_prompts[0]) if settings.first_prompts else None
    precision = settings.dtype if settings.bits is None else f"weights in {settings.bits} bits, else {settings.dtype}"
    conditions = [
        f"Model {name} ({config.get('model_type')}, {shape if twin is None else twin}), {precision}, {how},",
        f"one request at a time, {settings.threads} threads, {len(settings.prompts)} prompts of {lengths[0]} to",
        f"{lengths[-1]} tokens, {settings.max_tokens} output tokens, {settings.rounds} interleaved rounds",
        "after a warm-up,",
        *([f"first tokens after {first_token_len} prompt tokens,"] if first_token_len else []),
        f"passes behind {settings.context} tokens, {settings.repeats} repeats."
        if settings.widths
        else "no passes timed.",
        f"{machine['cpu']} with {machine['cores']} cores ({', '.join(machine['instruction_sets'])}),",
        f"{machine['memory_gib']} GiB. Commit {commit()}. Command: `{command}`.",
    ]
    report = as_markdown(comparison, conditions)
    print(report)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(out.name + ".md").write_text(report, encoding="utf-8")
    record = {
        "command": command,
        "commit": commit(),
        "machine": machine,
        "model": {"name": name, "cost_twin": None if twin is None else twin.label, "config": config},
        "settings": {
            "dtype": settings.dtype,
            "bits": settings.bits,
            "threads": settings.threads,
            "prompt_lengths": [len(prompt) for prompt in settings.prompts],
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "first_token_prompt_length": first_token_len,
            "rounds": settings.rounds,
            "widths": list(settings.widths),
            "context": settings.context,
            "repeats": settings.repeats,
            "options": settings.options,
        },
        **as_json(comparison),
    }
    out.with_name(out.name + ".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    title = f"{shown}, {precision}, {how}, {settings.threads} threads"
    if not write_plot(request_rows(comparison), pass_rows(comparison), out, title):
        print(
            "No plot: it needs matplotlib (pip install matplotlib) and HF generate or foretoken plain.", file=sys.stderr
        )


def _compare_parser() -> argparse.ArgumentParser:
    """The options of a comparison."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rivals",
        description="Compares foretoken with other engines. Also: `install RIVAL`, `model --out DIR`.",
    )
    parser.add_argument("--model", required=True, help="directory of the target")
    parser.add_argument("--draft-model", help="directory of the draft model, for engines that take one")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--bits",
        type=int,
        choices=(4, 8),
        help="round weights to so many, with each engine's own tools and formats",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--prompts", default="heldout", help=".jsonl with `prompt` or `prompt_ids`; bundled ones if left out"
    )
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; above, everybody samples")
    parser.add_argument(
        "--first-token",
        type=int,
        default=0,
        metavar="LENGTH",
        help="also time the first token after prompts of so many",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--widths", default="1,16,64", help="tokens of the single passes timed; '' for none")
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache before these passes")
    parser.add_argument("--repeats", type=int, default=5, help="passes timed at each width and round")
    parser.add_argument("--only", action="append", default=[], help="rivals or contestants, such as hf,llama_cpp.plain")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME:KEY=VALUE", help="a setting of a rival or contestant"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="longest that one answer may take, in seconds")
    parser.add_argument("--out", type=Path, required=True, help="files to write, without suffix")
    _add_env_dir(parser)
    return parser


def _add_env_dir(parser: argparse.ArgumentParser) -> None:
    """The option that both comparing and installing have."""
    parser.add_argument("--env-dir", type=Path, default=DEFAULT_ENV_DIR, help="where the rivals' environments lie")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

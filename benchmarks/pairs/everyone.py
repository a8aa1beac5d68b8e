"""All methods on several real targets beside their rivals: one command measures, one shows.

    python -m benchmarks.pairs.everyone run OUT --models DIR --prompts DIR [--edits DIR] [--llama PYTHON] [--ik PYTHON]
        [--transformers] [--only SmolLM2 …] [--per-category 10] [--tokens 128] [--temperatures 0 0.8]
    python -m benchmarks.pairs.everyone show OUT

DIR of `--models` holds the files of `TARGETS`, that of `--prompts` `spec-bench/question.jsonl` and
`humaneval/HumanEval.jsonl.gz`, that of `--edits` the tasks of Aider's refactoring benchmark. PYTHON is an interpreter
with `llama-cpp-python` or `ik-llama-cpp-python`. Requests are written to `OUT/requests.jsonl` as they end; the same
command goes on where it stopped. Contestants are processes that take turns, prompt by prompt, each with two threads.
"""

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.machine import commit, describe_machine
from benchmarks.pairs.contestants import Contestant, assisted, ours, theirs
from benchmarks.pairs.prompts import GROUPS, in_tokens, spread, write_edits
from benchmarks.pairs.report import over, same_texts, speed, table
from foretoken.models.loading import load_tokenizer


class Target(NamedTuple):
    """A file, its draft model, its bundled heads (method and directory by name), and rivals that cannot decode it."""

    file: str
    draft: str | None = None
    heads: Mapping[str, tuple[str, str]] = MappingProxyType({})
    without: tuple[str, ...] = ()

    def with_heads(self) -> dict[str, Any]:
        """Returns options of each head, and of a lookup beside it."""
        made = {name: {"method": method, "model": place} for name, (method, place) in self.heads.items()}
        return made | {f"lookup + {name}": {"drafters": ["ngram", each]} for name, each in made.items()}


TARGETS = {
    "SmolLM2 135M": Target(
        "smollm2-135m-instruct.q4_1.gguf",
        heads={"HASS": ("eagle", "models/smollm2-135m-hass")},
        without=("ik_llama.cpp",),  # release 0.1.5 ends every chat of this file with its first token
    ),
    "Qwen2.5-Coder 0.5B": Target(
        "qwen2.5-coder-0.5b-instruct.q4_k_m.gguf", heads={"HASS": ("eagle", "models/qwen2.5-coder-0.5b-hass")}
    ),
    "Qwen2.5-Coder 1.5B": Target("qwen2.5-coder-1.5b-instruct.q4_k_m.gguf", "qwen2.5-coder-0.5b-instruct.q4_k_m.gguf"),
}
EIGHT_BITS = ", 8 bits"  # inputs of 8 bits, as the rivals have them
UNTRAINED = {"prompt lookup": "ngram", "suffix": "suffix", "token recycling": "recycling"}


def contestants(name: str, options: argparse.Namespace, *, temperature: float) -> list[Contestant]:
    """Everyone for one target; rivals' drafts are greedy, so above 0 only transformers is beside."""
    target = TARGETS[name]
    file = str(options.models / target.file)
    draft = None if target.draft is None else str(options.models / target.draft)
    methods: dict[str, Any] = dict(UNTRAINED)
    if draft is not None:
        methods["draft model"] = {"method": "draft_model", "model": draft}
        methods["lookup + draft model"] = {"drafters": ["ngram", {"method": "draft_model", "model": draft}]}
    methods |= target.with_heads()
    settings: dict[str, Any] = {"plain": {}} | {
        each: {"speculative_config": config} for each, config in methods.items()
    }
    rounded = ["plain", *(each for each in settings if each.startswith("lookup + "))]
    found = ours(file, settings | {f"{each}{EIGHT_BITS}": {**settings[each], "quantization": "a8"} for each in rounded})
    for rival, python in (("llama.cpp", options.llama), ("ik_llama.cpp", options.ik)):
        if python and not temperature and rival not in target.without:
            found += theirs(rival, python, file, draft, [2, 4], ngrams=True)
    return found + (assisted(file, draft) if options.transformers else [])


def run(options: argparse.Namespace) -> None:
    """Measures what is missing in the file of requests."""
    options.out.mkdir(parents=True, exist_ok=True)
    file, machine, code = options.out / "requests.jsonl", str(describe_machine()["cpu"]), commit("foretoken")
    known = {_place(row) for row in _rows(file, ends=True)}
    sources = [options.prompts / "spec-bench" / "question.jsonl", options.prompts / "humaneval" / "HumanEval.jsonl.gz"]
    if options.edits:
        sources.append(options.out / "edits.jsonl")
        write_edits(options.edits, sources[-1])
    for name in options.only or TARGETS:
        tokenizer = load_tokenizer(str(options.models / TARGETS[name].file))
        asked = in_tokens(map(str, sources), tokenizer, limit=4096 - options.tokens, groups=GROUPS)
        for temperature in options.temperatures:
            everyone, begin = contestants(name, options, temperature=temperature), time.monotonic()
            work = [
                (category, number, prompt)
                for category, prompts in asked.items()
                for number, prompt in enumerate(spread(prompts, options.per_category))
            ]
            for done, (category, number, prompt) in enumerate(work):
                for each in everyone[number % len(everyone) :] + everyone[: number % len(everyone)]:
                    row = {
                        "target": name, "temperature": temperature, "category": category, "prompt": _digest(prompt),
                        "tokens": options.tokens, "who": each.name, "base": each.base, "prompt_tokens": len(prompt),
                        "machine": machine, "commit": code,
                    }  # fmt: skip
                    if _place(row) in known:
                        continue
                    found = each.answer(
                        prompt=prompt, tokens=options.tokens, temperature=temperature, top_p=1.0, seed=number
                    )
                    with file.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps(row | found) + "\n")
                left = (time.monotonic() - begin) / (done + 1) * (len(work) - done - 1)
                print(f"{name}, T {temperature}: {done + 1}/{len(work)} prompts, {left / 60:.0f} min left", flush=True)
            for each in everyone:
                each.end()


def show(options: argparse.Namespace) -> None:
    """Prints a table for each target and temperature, and the best of each kind."""
    rows: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for row in {_place(row): row for row in _rows(options.out / "requests.jsonl")}.values():  # the last one of each
        rows[row["target"], row["temperature"]].append(row)
    short = ["| target, T | plain | best without training | best head | best of all rivals |", "|---" * 5 + "|"]
    for (name, temperature), all_rows in rows.items():
        everyone = list(dict.fromkeys(row["who"] for row in all_rows))
        complete = _complete(all_rows, everyone)
        if not complete:
            print(f"\n{name}, T {temperature}: no prompt was answered by all yet")
            continue
        bases = {row["who"]: row["base"] for row in all_rows}
        found = {who: [row for row in complete if row["who"] == who] for who in everyone}
        machines = ", ".join(sorted({f"{row['machine']}, commit {row['commit']}" for row in complete}))
        categories = list(dict.fromkeys(row["category"] for row in complete))
        print(f"\n**{name}, T {temperature}**, {len(found['plain'])} prompts, {machines}\n")
        print(table(found, bases, categories))
        short.append(_short(name, temperature, found, bases))
        if not temperature:
            differing = [who for who in everyone if same_texts(found[who], found[bases[who]]) < len(found[who])]
            print(f"\ntexts that differ from plain decoding of the same engine: {', '.join(differing) or 'none'}")
    print("\n" + "\n".join(short))


def _complete(rows: list[dict[str, Any]], everyone: list[str]) -> list[dict[str, Any]]:
    """The rows of prompts that everyone has answered, in the same order for all."""
    answered = defaultdict[Any, set[str]](set)
    for row in rows:
        answered[row["category"], row["prompt"], row["tokens"]].add(row["who"])
    order = {place: number for number, place in enumerate(answered) if len(answered[place]) == len(everyone)}
    kept = [row for row in rows if (row["category"], row["prompt"], row["tokens"]) in order]
    return sorted(kept, key=lambda row: order[row["category"], row["prompt"], row["tokens"]])


def _rows(file: Path, *, ends: bool = False) -> list[dict[str, Any]]:
    """The rows of a file, none if there is no file; `ends`: cuts a last line that a killed run left unfinished."""
    if not file.exists():
        return []
    whole, _, rest = file.read_bytes().rpartition(b"\n")
    if ends and rest:
        file.write_bytes(whole + b"\n" if whole else b"")
    return [json.loads(line) for line in whole.splitlines()]


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("target", "temperature", "category", "prompt", "tokens", "who"))


def _digest(prompt: list[int]) -> str:
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:12]


def _short(name: str, temperature: float, found: dict[str, list[dict[str, Any]]], bases: dict[str, str]) -> str:
    rates = {who: statistics.median(map(speed, runs)) for who, runs in found.items()}
    own = [who for who in found if bases[who] == "plain" and who != "plain"]
    heads = [who for who in own if who in TARGETS[name].with_heads()]
    others = [who for who in found if bases[who] != "plain" and EIGHT_BITS not in who]

    def best(names: list[str]) -> str:
        if not names:
            return ""
        ratios = {each: over(found[each], found["plain"]) for each in names}
        who = max(names, key=lambda each: ratios[each])
        return f"{who} {rates[who]:.1f} ({ratios[who]:.2f})"

    untrained = [who for who in own if who not in heads]
    cells = [f"{rates['plain']:.1f}", *(best(names) for names in (untrained, heads, others))]
    return f"| {name}, {temperature} | {' | '.join(cells)} |"


def main() -> None:
    """Runs one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("out", type=Path)
    running.add_argument("--models", type=Path, required=True)
    running.add_argument("--prompts", type=Path, required=True)
    running.add_argument("--edits", type=Path)
    running.add_argument("--llama", metavar="PYTHON")
    running.add_argument("--ik", metavar="PYTHON")
    running.add_argument("--transformers", action="store_true")
    running.add_argument("--only", nargs="+", default=[], choices=TARGETS)
    running.add_argument("--per-category", type=int, default=10)
    running.add_argument("--tokens", type=int, default=128)
    running.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    commands.add_parser("show").add_argument("out", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        missing = [path for path in (options.models, options.prompts, options.edits) if path and not path.is_dir()]
        if missing:
            sys.exit(f"there is no directory '{missing[0]}'.")
        run(options)
    else:
        show(options)


if __name__ == "__main__":
    main()

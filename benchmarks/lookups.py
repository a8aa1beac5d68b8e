"""What lookups cost the host in each iteration at a long context, beside plain decoding.

    python -m benchmarks.lookups --context 8000 -s ngram -s ngram:tree -s suffix -s recycling -s lookahead

The bundled model goes on with texts of that many tokens, its context widened: what it writes there is
poor, which changes what is accepted, and hardly what a lookup takes. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

from transformers import AutoModelForCausalLM

from benchmarks.rivals.machine import commit, describe_machine
from foretoken import LLM, SamplingParams
from foretoken.bench.workload import load_prompts
from foretoken.decoder.library import set_num_threads
from foretoken.entrypoints.config import PLAIN, parse_setup
from foretoken.models.loading import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.records import StepRecord

_MODEL = Path(__file__).resolve().parents[1] / "models" / "tinycode"
_LOOKUPS = ("ngram", "ngram:tree", "suffix", "recycling", "lookahead")
_SETS = ("heldout", "edit", "prose")


def main(arguments: list[str]) -> int:
    """Measures and prints a table; returns the exit status."""
    options = _parser().parse_args(arguments)
    set_num_threads(options.threads)
    prompts = long_prompts(options.context, options.num_prompts)
    machine = describe_machine()
    print(
        f"{options.context} tokens of context, {len(prompts)} texts, {options.max_tokens} tokens each, greedy; "
        f"{machine['cpu']}, {options.threads} threads; commit {commit('foretoken')}. Medians, and 95 % are below:\n"
    )
    print("| drafter | drafting and the tree, ms | 95 % | accept and commit beyond plain, ms | tau |")
    print("|---|---|---|---|---|")
    plain = 0.0
    for setup in (None, *(options.setup or _LOOKUPS)):
        records = steps(setup, prompts, options)
        drafts = [1e3 * record.seconds.draft for record in records]
        rest = median(1e3 * (record.seconds.accept + record.seconds.commit) for record in records)
        plain = plain or rest
        tau = sum(step.num_emitted for record in records for step in record.sequences) / len(records)
        figures = f"{median(drafts):.3f} | {quantiles(drafts, n=20)[-1]:.3f} | {rest - plain:.3f} | {tau:.2f}"
        print(f"| {setup or PLAIN} | {figures} |", flush=True)
    return 0


def long_prompts(length: int, count: int) -> list[list[int]]:
    """Texts of `length` tokens each, cut from the package's prompt sets; the i-th begins with its i-th prompt."""
    tokenizer = load_tokenizer(str(_MODEL))
    assert tokenizer is not None, "the bundled model has one"
    texts = [text for name in _SETS for text in load_prompts(name)]
    prompts = []
    for first in range(count):
        ids: list[int] = []
        while len(ids) < length:
            for text in texts[first:] + texts[:first]:
                ids += tokenizer.encode(text)
        prompts.append(ids[:length])
    return prompts


def steps(setup: str | None, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> list[StepRecord]:
    """Iterations in which a draft was asked for; setup: as `foretoken bench -s` takes it, None for plain decoding."""
    records: list[StepRecord] = []
    model = AutoModelForCausalLM.from_pretrained(_MODEL, dtype="float32")
    model.config.max_position_embeddings = options.context + options.max_tokens + 64
    config = None if setup is None else parse_setup(setup, target=str(_MODEL)).config
    llm = LLM(
        model, tokenizer=str(_MODEL), speculative_config=config and {**config, "num_speculative_tokens": options.depth},
        max_num_seqs=1, on_step=records.append,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    for prompt in prompts:
        llm.generate([prompt], params)
    return [record for record in records if setup is None or not record.declined]


def _parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lookups", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "-s", "--setup", action="append", help=f"a lookup, may be repeated (default: {', '.join(_LOOKUPS)})"
    )
    parser.add_argument("--context", type=int, default=8000, help="tokens of every prompt (default: %(default)s)")
    parser.add_argument("--num-prompts", type=int, default=2, help="texts (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="output tokens of each (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=10, help="drafted tokens in depth (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

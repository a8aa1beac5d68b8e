"""Writes docs/dropins.md: every argument and field of vLLM's and transformers' calls, and what becomes of it here.

Usage: python .ci/make_dropins.py [--check]. With --check nothing is written, and the exit status is 1 where the file
differs from what would be written.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from inspect import signature
from pathlib import Path

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.core.results import CompletionOutput, Logprob
from foretoken.core.vllm_sampling import OTHER_FIELDS
from foretoken.engine.chats import OTHER_KEYWORDS, ChatFormat
from foretoken.engine.vllm_arguments import OTHER_ARGUMENTS
from foretoken.hf.generate_fields import ARGUMENTS, FIELDS, Meaning

COMMAND = "python .ci/make_dropins.py"
PLACE = Path(__file__).parents[1] / "docs" / "dropins.md"
_OWN_ARGUMENTS = {  # of `LLM`, which vLLM's does not have
    "drafter", "trust_drafter", "device", "runner", "on_step", "allow_unknown_ids", "trace",
}  # fmt: skip
_HEAD = f"""\
# Drop-ins

Written by `{COMMAND}` from the code: change that, then run the command again.

## transformers

`foretoken.hf.accelerate(model, drafter)` makes a model's own `generate` speculative; `foretoken.hf.release(model)`,
or the end of `with accelerate(...)`, undoes it. Arguments, defaults, warnings, padding, streamers and stopping
criteria are transformers' own code; only the decoding loop is another. "By transformers" means that a call which sets
the field is served by transformers as if nothing had been accelerated, and that the log says so once. So are calls in
training mode, under autocast, and of models that are asked for more tokens than their context holds. A field that is
in neither table, as one of a later transformers, is served by transformers too.
"""
_VLLM = """\
## vLLM

`from foretoken import LLM, SamplingParams` takes the place of vLLM's import. `use_tqdm` is off unless it is asked
for. Metrics: `from foretoken.core.metrics import Counter, Gauge, Vector` for `vllm.v1.metrics.reader`; draft tokens
count nodes of trees, positions count depths. What asks for nothing that is missing here, such as
`tensor_parallel_size=1`, is taken and ignored; anything else is refused in a sentence, whose end the table shows.
"""


def page() -> str:
    """The whole of docs/dropins.md."""
    parameters = [name for name in signature(LLM).parameters if name not in {"others", *_OWN_ARGUMENTS}]
    forms = [each.name for each in fields(ChatFormat)]
    parts = [
        _HEAD,
        _meanings("argument of `generate`", ARGUMENTS),
        _meanings("field of `GenerationConfig`", FIELDS),
        _VLLM,
        _table("argument of `LLM`", parameters, {name: each.instead for name, each in OTHER_ARGUMENTS.items()}),
        _table(
            "field of `SamplingParams`",
            [each.name for each in fields(SamplingParams)],
            {name: each.instead for name, each in OTHER_FIELDS.items()},
        ),
        _table(
            "argument of `LLM.chat`", ["messages", "sampling_params", "use_tqdm", *forms],
            dict.fromkeys(OTHER_KEYWORDS, "Leave it out."),
        ),
        *(_table(f"field of `{each.__name__}`", [field.name for field in fields(each)], {})
          for each in (RequestOutput, CompletionOutput, Logprob)),
    ]  # fmt: skip
    return "\n".join(parts)


def _meanings(heading: str, meanings: Mapping[str, Meaning]) -> str:
    """A table of what is done with fields of transformers'."""
    rows = [f"| `{name}` | {each.how} | {each.note} |" for name, each in meanings.items()]
    return "\n".join([f"| {heading} | | |", "|---|---|---|", *rows, ""])


def _table(heading: str, works: Iterable[str], refused: Mapping[str, str]) -> str:
    """A table of names that work and names that are refused, with what there is instead."""
    rows = [f"| `{name}` | works | |" for name in works]
    rows += [f"| `{name}` | refused where it asks for anything | {instead} |" for name, instead in refused.items()]
    return "\n".join([f"| {heading} | | |", "|---|---|---|", *rows, ""])


def main() -> int:
    """Writes the page, or with --check says whether it is up to date; the exit status is 1 where it is not."""
    parser = argparse.ArgumentParser(description="Write docs/dropins.md from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is stale")
    arguments = parser.parse_args()
    if not arguments.check:
        PLACE.write_text(page(), encoding="utf-8")
    elif not PLACE.is_file() or PLACE.read_text(encoding="utf-8") != page():
        print(f"docs/dropins.md does not say what the code says. Run {COMMAND} and commit the result.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

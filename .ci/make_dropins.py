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
from foretoken.core.sampling_params import OTHER_FIELDS, OTHER_KEYWORDS, OtherField
from foretoken.entrypoints.vllm_arguments import OTHER_ARGUMENTS
from foretoken.hf.generate_request import ARGUMENTS, FIELDS, Meaning
from foretoken.text.prompts import CONTENT_FORMAT, ChatFormat

COMMAND = "python .ci/make_dropins.py"
PLACE = Path(__file__).parents[1] / "docs" / "dropins.md"
_VLLM_NAMES = (  # of the package `vllm`
    "LLM", "SamplingParams", "EngineArgs", "AsyncEngineArgs", "PromptType", "TextPrompt", "TokensPrompt",
    "RequestOutput", "CompletionOutput",
)  # fmt: skip
_OWN_ARGUMENTS = {  # of `LLM`, which vLLM's does not have
    "drafter", "trust_drafter", "device", "on_step", "allow_unknown_ids", "trace",
}  # fmt: skip
_NOTES = {  # of names that work
    "gpu_memory_utilization": "share of the free memory for the KV cache alone; above 0.5 counts as 0.5",
    "n": "at most 128", "logprobs": "at most 1024", "prompt_logprobs": "at most 1024",
    "output_kind": "for results of `AsyncLLM.generate`", "use_tqdm": "default False",
    "speculative_config": "[syntax](methods.md#how-drafters-are-named); a mapping, or text as on the command line",
    "quantization": '"int4", "int8", "w4a8" and "w8a8" round the weights at load, on CPUs; vLLM\'s names are refused',
    "dtype": '"auto" on a CPU is bfloat16 for weights that are stored in integers, else float32',
    "runner": '"auto" and "generate"; others choose how passes are computed',
}  # fmt: skip
_HEAD = f"""\
# Drop-ins

Written by `{COMMAND}` from the code: change that, then run the command again.

## transformers

`foretoken.hf.accelerate(model, drafter)` makes a model's own `generate` speculative. `foretoken.hf.release(model)`, or
the end of `with accelerate(...)`, undoes this. Arguments, defaults, warnings, padding, streamers and stopping criteria
are transformers' own code. foretoken replaces only the decoding loop.

"By transformers" means: transformers serves a call that sets the field, as without acceleration, and the log says so
once. transformers also serves calls in training mode or under autocast, models with forward hooks or a replaced
`forward`, requests for more tokens than the context holds, and fields that are in neither table.
"""
_VLLM = f"""\
## vLLM

`from foretoken import ...` takes the place of `from vllm import ...` for
{", ".join(f"`{name}`" for name in _VLLM_NAMES)}.
The modules `foretoken.sampling_params`, `foretoken.inputs` and `foretoken.outputs` hold the names of vLLM's modules.
`AsyncLLM` comes from `foretoken` too. `from foretoken.core.results import Counter, Gauge, Vector` replaces
`vllm.v1.metrics.reader`; draft tokens count nodes of trees, positions count depths. There is no `LLMEngine`: `AsyncLLM`
takes requests one by one, from threads and from tasks. Methods of vLLM's `LLM` for pooling, beam search, adapters and
sleep are missing. `tests/clients/vllm_scripts` holds scripts with the calls of vLLM's offline examples.

"Ignored" names the neutral values of an argument, such as `tensor_parallel_size=1`, which ask for nothing that is
missing here. Any other value is refused, and the error ends with the sentence in the table. Arguments that no table
names are refused by their name.
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
        _table(
            "argument of `LLM`", parameters,
            {name: (each.taken.words, each.instead) for name, each in OTHER_ARGUMENTS.items()},
        ),
        _table("field of `SamplingParams`", [each.name for each in fields(SamplingParams)], _taken(OTHER_FIELDS)),
        _table("argument of `LLM.generate`", ["prompts", "sampling_params", "use_tqdm"], _taken(OTHER_KEYWORDS)),
        _table(
            "argument of `LLM.chat`", ["messages", "sampling_params", "use_tqdm", *forms],
            _taken({"chat_template_content_format": CONTENT_FORMAT, **OTHER_KEYWORDS}),
        ),
        *(_table(f"field of `{each.__name__}`", [field.name for field in fields(each)], {})
          for each in (RequestOutput, CompletionOutput, Logprob)),
    ]  # fmt: skip
    return "\n".join(parts)


def _meanings(heading: str, meanings: Mapping[str, Meaning]) -> str:
    """A table of what is done with fields of transformers'."""
    rows = [f"| `{name}` | {each.how} | {each.note} |" for name, each in meanings.items()]
    return "\n".join([f"| {heading} | | |", "|---|---|---|", *rows, ""])


def _taken(others: Mapping[str, OtherField]) -> dict[str, tuple[str, str]]:
    """Of fields of vLLM's requests: the values that ask for nothing, and what there is instead of the others."""
    return {
        name: (", ".join(f"`{value!r}`" for value in (*each.neutral, None)), each.instead)
        for name, each in others.items()
    }


def _table(heading: str, works: Iterable[str], others: Mapping[str, tuple[str, str]]) -> str:
    """A table of names that work, and of others with the values that are ignored and what there is instead."""
    rows = [f"| `{name}` | works | {_NOTES.get(name, '')} |" for name in works]
    rows += [f"| `{name}` | ignored: {values} | {instead} |" for name, (values, instead) in others.items()]
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

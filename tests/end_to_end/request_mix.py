"""Requests that use every sampling and stopping option, each over a prompt of its own."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from end_to_end.tiny_llms import llm
from tiny_models import EOS_ID, VOCAB_SIZE

from foretoken import RequestOutput, SamplingParams

CONTEXT_LEN = 44  # short, so that requests without max_tokens reach it inside accepted paths


class Request(NamedTuple):
    """One prompt and how it is sampled."""

    name: str
    prompt: list[int]
    params: SamplingParams


@cache
def request_mix() -> tuple[Request, ...]:
    """Every option, with stop strings, stop ids and bad words taken from what the plain text really contains."""
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    options: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "greedy, context limit": {"temperature": 0.0, "max_tokens": None},
        "greedy, logprobs": {"temperature": 0.0, "logprobs": 3, "max_tokens": 18},
        "greedy, penalties": {"temperature": 0.0, **penalties},
        "greedy, 1 token": {"temperature": 0.0, "max_tokens": 1},
        "greedy, 2 tokens": {"temperature": 0.0, "max_tokens": 2},
        "greedy, 5 tokens": {"temperature": 0.0, "max_tokens": 5},
        "greedy, ends early": {"temperature": 0.0, "logit_bias": {EOS_ID: 1.2}},
        "sampled": {"temperature": 0.8, "seed": 7},
        "sampled, context limit": {"temperature": 0.8, "seed": -2, "max_tokens": None, "ignore_eos": True},
        "top-k": {"temperature": 0.9, "top_k": 6, "seed": 1 << 70},
        "top-p": {"temperature": 1.2, "top_p": 0.7, "seed": 3},
        "min-p": {"temperature": 1.5, "min_p": 0.1, "seed": 4},
        "all truncations": {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 5},
        "sampled, penalties": {"temperature": 0.8, "seed": 6, **penalties},
        "logit bias": {"temperature": 0.8, "seed": 8, "logit_bias": {9: 4.0, 12: -100.0, 30: 2.5}},
        "bad words": {"temperature": 0.0, "bad_words": "from the text"},
        "sampled, bad words": {"temperature": 0.7, "seed": 9, "bad_words": "from the text"},
        "min tokens": {"temperature": 0.8, "seed": 10, "min_tokens": 9, "logit_bias": {EOS_ID: 9.0}},
        "ends at eos": {"temperature": 0.8, "seed": 11, "logit_bias": {EOS_ID: 2.0}, "skip_special_tokens": False},
        "stop string": {"temperature": 0.0, "stop": "from the text"},
        "sampled, stop string kept": {
            "temperature": 0.8, "seed": 12, "stop": "from the text", "include_stop_str_in_output": True,
        },
        "stop id": {"temperature": 0.8, "seed": 13, "stop_token_ids": "from the text"},
        "three completions": {"temperature": 0.8, "seed": 14, "n": 3, "logprobs": 0},
        "three greedy ones": {"temperature": 0.0, "n": 3, "max_tokens": 9},
        "allowed tokens": {"temperature": 0.0, "max_tokens": 12, "allowed_token_ids": "from the text"},
        "sampled, allowed tokens": {
            "temperature": 0.8, "seed": 15, "max_tokens": 12, "allowed_token_ids": "from the text",
        },
        "prompt logprobs": {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 0, "n": 2, "max_tokens": 9},
    }  # fmt: skip
    return tuple(_request(index, name, keys) for index, (name, keys) in enumerate(options.items()))


def _request(index: int, name: str, keys: dict[str, Any]) -> Request:
    """A request over the `index`-th prompt: lengths 1..14, every third repeats itself for lookups to find."""
    length = 1 + (5 * index) % 14
    prompt = [3 + (11 * index + 7 * i + index * i * i) % (VOCAB_SIZE - 3) for i in range(length)]
    if index % 3 == 0:
        prompt = (prompt[:4] * 4)[: max(length, 9)]
    open_keys = {key for key, value in keys.items() if value == "from the text"}
    params = SamplingParams(**{"max_tokens": 24, **{key: v for key, v in keys.items() if key not in open_keys}})
    if open_keys:
        plain = plain_outputs((Request(name, prompt, params),))[0].outputs[0]
        ids, text = plain.token_ids, plain.text
        found: dict[str, Any] = {
            "bad_words": [[ids[3]], ids[6:8], ids[9:12], "th"],
            "stop": ["never there", text[9:13]],
            "stop_token_ids": [ids[11]],
            "allowed_token_ids": sorted({*range(VOCAB_SIZE)} - {ids[3], *ids[6:9]}),
        }
        params = replace(params, **{key: found[key] for key in open_keys})
    return Request(name, prompt, params)


def plain_outputs(requests: tuple[Request, ...], runner: str = "generic") -> list[RequestOutput]:
    """What plain decoding says to each request, one at a time."""
    plain = llm({}, max_num_seqs=1, max_model_len=CONTEXT_LEN, runner=runner)
    return plain.generate([r.prompt for r in requests], [r.params for r in requests])


@cache
def plain_mix(runner: str = "generic") -> tuple[RequestOutput, ...]:
    """Plain decoding of the whole mix."""
    return tuple(plain_outputs(request_mix(), runner))


def references(outputs: tuple[RequestOutput, ...]) -> list[list[int]]:
    """Prompt and first completion of each request, for oracles, and for heads to be trained on.

    Tests that compare runners hand every one of them the generic runner's, so that all have the same heads.
    """
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def with_predictions(outputs: Sequence[RequestOutput], *, is_any: bool = True) -> list[dict[str, Any]]:
    """The prompts, each with a prediction of what was written: every ninth token is another, every eleventh left out.

    Every fourth request brings none, all where `is_any` is False, and others cache salts of their own.
    """
    prompts: list[dict[str, Any]] = []
    for index, output in enumerate(outputs):
        ids = [3 if at % 9 == 8 else token for at, token in enumerate(output.outputs[0].token_ids) if at % 11 != 10]
        prediction = ids if is_any and ids and index % 4 != 3 else None
        prompts.append({"prompt_token_ids": output.prompt_token_ids, "prediction": prediction})
        if index % 3 == 0:
            prompts[-1]["cache_salt"] = f"of request {index}"
    return prompts

"""Requests whose prompts begin alike, in every way of sampling and stopping, some with salts."""

from functools import cache
from typing import Any, NamedTuple

from end_to_end.tiny_llms import llm
from tiny_models import VOCAB_SIZE

from foretoken import RequestOutput, SamplingParams

CONTEXT_LEN = 60
TEXTS = [[3 + (11 * text + 7 * i + text * i * i) % (VOCAB_SIZE - 3) for i in range(40)] for text in range(2)]
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}


class Request(NamedTuple):
    """A prompt, how it is sampled, and its salt."""

    name: str
    prompt: list[int]
    params: SamplingParams
    salt: str | None

    @property
    def salted(self) -> dict[str, Any]:
        """The prompt as `LLM.generate` takes it."""
        return {"prompt_token_ids": self.prompt, "cache_salt": self.salt}


@cache
def prefix_mix() -> tuple[Request, ...]:
    """Two texts in parts of several lengths, most with other tokens behind them, and some of them twice."""
    options: list[tuple[str, int, dict[str, Any]]] = [
        ("greedy", 30, {"temperature": 0.0}),
        ("sampled", 30, {"temperature": 0.8, "seed": 1}),
        ("greedy, penalties", 26, {"temperature": 0.0, **PENALTIES}),
        ("three completions", 34, {"temperature": 0.8, "seed": 2, "n": 3}),
        ("context limit", 40, {"temperature": 0.0, "max_tokens": None}),
        ("prompt logprobs", 22, {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 0}),
        ("sampled, penalties", 18, {"temperature": 0.8, "seed": 3, **PENALTIES}),
        ("one token", 38, {"temperature": 0.0, "max_tokens": 1}),
        ("sampled, context limit", 40, {"temperature": 0.9, "seed": 4, "max_tokens": None, "ignore_eos": True}),
        ("short", 9, {"temperature": 0.0}),
    ]
    return tuple(
        Request(
            f"{name}, text {text}, {turn}",
            TEXTS[text][:length] + [5 + index, 9, 5 + turn][: 0 if name == "greedy" else 1 + index % 3],
            SamplingParams(**{"max_tokens": 9, **keys}),
            "mine" if (index + turn) % 4 == 3 else None,
        )
        for turn in range(2)
        for index, (name, length, keys) in enumerate(options)
        for text in range(2)
        if (turn == 0 or index < 4) and (text == 0 or index < 5)
    )


@cache
def plain_prefix_mix(runner: str = "generic") -> tuple[RequestOutput, ...]:
    """Plain decoding of all of them, one at a time, every prompt read as a whole."""
    plain = llm({}, max_num_seqs=1, max_model_len=CONTEXT_LEN, runner=runner, enable_prefix_caching=False)
    mix = prefix_mix()
    return tuple(plain.generate([r.prompt for r in mix], [r.params for r in mix]))

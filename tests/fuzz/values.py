"""Random values: valid ones of each field at and between its bounds, and everything else that a caller might pass."""

import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from tiny_models import CONTEXT_LEN, EOS_ID, VOCAB_SIZE

Make = Callable[[random.Random], Any]
ALPHABET = " abcdefghijklmnopqrstuvwxyz\nABCDEFGHIJKL0123456789."  # characters with a token of their own


class Unprintable:
    """An object whose text cannot be had."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def _recursive() -> list[Any]:
    """A list that holds itself."""
    inner: list[Any] = []
    inner.append(inner)
    return inner


_ODD: list[Make] = [
    lambda rng: None,
    lambda rng: rng.choice([True, False]),
    lambda rng: rng.choice(["", "x", "0", "1", "nan", "None", "\x00", "a\nb", " " * 500, "é" * 700, "{}", "[]"]),
    lambda rng: rng.choice(["\ud800", "a\udfffb", "\ud83d" * 3]),
    lambda rng: rng.choice([b"", b"abc", bytearray(b"x"), memoryview(b"y")]),
    lambda rng: rng.choice([float("nan"), float("inf"), -float("inf"), -0.0, 1e308, 5e-324, 0.5, -1.5]),
    lambda rng: rng.choice([0, -1, 1, 2**31, 2**63, -(2**63) - 1, 2**64, 10**30, 10**6000, -(10**6000)]),
    lambda rng: rng.choice([np.int64(3), np.int8(-1), np.uint64(2**63), np.float32("nan"), np.bool_(1), np.half(1)]),
    lambda rng: rng.choice([np.zeros(0), np.array(3), np.arange(4), np.eye(2), np.array(["a"]), np.array([None])]),
    lambda rng: rng.choice([torch.tensor(2), torch.tensor([1.5]), torch.zeros(2, 0), torch.ones(2, 2)]),
    lambda rng: rng.choice([Decimal("0.5"), Decimal("nan"), Fraction(1, 3), 1j, ...]),
    lambda rng: rng.choice([[], (), {}, set(), frozenset({1}), range(3), range(0), [None], [[]], [[[1]]], ["a", 1]]),
    lambda rng: rng.choice([{"a": 1}, {1: 2}, {None: None}, {"prompt": {}}, {"input_ids": None}, {("a",): []}]),
    lambda rng: rng.choice([object(), object, Unprintable(), len, iter([1]), (x for x in [1]), Exception("x")]),
    lambda rng: _recursive(),
    lambda rng: [odd(rng) for _ in range(rng.randrange(4))],
    lambda rng: {rng.choice(["a", "method", "model", 3, ""]): odd(rng)},
]  # fmt: skip


def odd(rng: random.Random) -> Any:
    """Any value at all."""
    return rng.choice(_ODD)(rng)


def token(rng: random.Random) -> int:
    """A token id other than the special ones."""
    return rng.randrange(3, VOCAB_SIZE)


def tokens(rng: random.Random, low: int, high: int) -> list[int]:
    """Token ids; every third list repeats a part of itself, for lookups to find."""
    length = rng.randint(low, high)
    part = [token(rng) for _ in range(rng.choice([length, length, max(1, length // 3)]))]
    return (part * (length // len(part) + 1))[:length] if part else []


def text(rng: random.Random, low: int, high: int) -> str:
    """Text that the tokenizer knows every character of."""
    return "".join(rng.choices(ALPHABET, k=rng.randint(low, high)))


def _number(*values: float) -> Make:
    """One of some numbers, as any type that stands for it."""

    def make(rng: random.Random) -> Any:
        value = rng.choice(values)
        kinds: list[Callable[[Any], Any]] = [lambda v: v, lambda v: v, np.float64, Fraction, np.float32]
        made = rng.choice(kinds)(value)
        return made if (made > 0) == (value > 0) else value  # float32 rounds the smallest to zero

    return make


def _integer(*values: int) -> Make:
    """One of some integers, as any type that stands for it."""

    def make(rng: random.Random) -> Any:
        value = rng.choice(values)
        return np.int64(value) if -(2**63) <= value < 2**63 and rng.random() < 0.2 else value

    return make


def _bias(rng: random.Random) -> dict[int, float]:
    """A logit bias."""
    ids = [EOS_ID, *[token(rng) for _ in range(rng.randrange(5))]]
    return {key: rng.choice([-100.0, -3.0, 0.0, 1, 4.5, 100, np.float32(2.5)]) for key in ids}


def _bad_words(rng: random.Random) -> list[Any]:
    """Forbidden words in both forms."""
    words: list[Any] = [tokens(rng, 1, 3) for _ in range(rng.randrange(4))]
    words += [rng.choice(["th", "a", " ", "he", "A", "0", "ab", " b", "\n"]) for _ in range(rng.randrange(3))]
    rng.shuffle(words)
    return rng.choice([list, tuple])(words)


_FORMS: tuple[dict[str, Any], ...] = (  # that the tokens of tiny models can write
    {"regex": "[a-z ]{2,9}"}, {"regex": "(th|he)[0-9]+"}, {"choice": ["abc", "the", "th e.", "0"]},
    {"json": {"type": "integer"}}, {"json": {"enum": [1, 23, 234]}}, {"grammar": 'start: (/[a-e]/ "th")+'},
    {"regex": "[a-c]{2}", "reasoning": ["", "."]},
)  # fmt: skip


FIELDS: dict[str, Make] = {
    "n": _integer(1, 1, 1, 2, 3),
    "temperature": _number(0, 0, 0.0, 1e-6, 1e-5, 0.3, 0.8, 1, 1.5, 3.0, 100),
    "top_k": _integer(-1, 0, 1, 2, 5, 20, VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 2**63, 2**63 - 1, 10**30),
    "top_p": _number(1e-9, 1e-30, 0.1, 0.5, 0.9, 0.999999, 1.0, 1),
    "min_p": _number(0, 1e-9, 0.02, 0.3, 1.0),
    "repetition_penalty": _number(1.0, 1, 1.1, 1.3, 0.5, 100, 0.01, 1e-6),
    "presence_penalty": _number(0, 0.4, -0.4, 100, -100.0),
    "frequency_penalty": _number(0, 0.3, -0.3, 100.0, -100),
    "logit_bias": _bias,
    "bad_words": _bad_words,
    "allowed_token_ids": lambda rng: rng.choice([None, tokens(rng, 1, 6), set(tokens(rng, 9, 40)), np.array([EOS_ID])]),
    "min_tokens": _integer(0, 1, 5),
    "max_tokens": lambda rng: rng.choice([None, 5, 6, 12, 24, 24, 1000, 2**31 - 1, np.int32(9)]),
    "stop": lambda rng: rng.choice([text(rng, 1, 2), [text(rng, 1, 3) for _ in range(3)], (), ("é", "th"), {"a"}]),
    "stop_token_ids": lambda rng: rng.choice([tokens(rng, 0, 4), tuple(tokens(rng, 1, 2)), set(tokens(rng, 1, 3))]),
    "ignore_eos": lambda rng: rng.choice([True, False]),
    "include_stop_str_in_output": lambda rng: rng.choice([True, False]),
    "seed": _integer(0, 1, -1, 7, 2**31, 2**63, 2**64 - 1, 1 << 70, -(1 << 64), 10**40),
    "logprobs": lambda rng: rng.choice([None, 0, 1, 3, VOCAB_SIZE, 1024, np.int64(2)]),
    "prompt_logprobs": lambda rng: rng.choice([None, 0, 1, VOCAB_SIZE, np.int64(2)]),
    "structured_outputs": lambda rng: rng.choice([None, *_FORMS]),
    "skip_special_tokens": lambda rng: rng.choice([True, False]),
}  # fmt: skip


def sampling_fields(rng: random.Random) -> dict[str, Any]:
    """Valid sampling parameters: greedy or seeded mostly, with a few further fields set."""
    chosen = rng.sample(sorted(FIELDS), rng.choice([0, 1, 2, 3, 5, 8]))
    given = {name: FIELDS[name](rng) for name in chosen}
    kind = rng.random()
    if kind < 0.4:
        given["temperature"] = 0.0
    elif kind < 0.8:
        given.setdefault("temperature", rng.choice([0.5, 0.8, 1.0, 1.4]))
        given.setdefault("seed", rng.randrange(1000))
    given.setdefault("max_tokens", rng.choice([None, 5, 8, 16, 24, CONTEXT_LEN]))
    return given


def spoilt_fields(rng: random.Random) -> dict[str, Any]:
    """Sampling parameters of which one or two hold any value at all; that may happen to be a valid one."""
    given = sampling_fields(rng)
    for name in rng.sample(sorted(FIELDS), rng.choice([1, 1, 1, 2])):
        value = odd(rng)
        if name == "logit_bias" and rng.random() < 0.5:
            value = {rng.choice([token(rng), odd_key(rng)]): odd(rng)}
        given[name] = rng.choice([value, value, [value], [value, 3]]) if name in _CONTAINERS else value
    return given


def odd_key(rng: random.Random) -> Any:
    """Any hashable value."""
    value = odd(rng)
    try:
        hash(value)
    except TypeError:
        return str(type(value))
    return value


_CONTAINERS = ("bad_words", "stop", "stop_token_ids", "allowed_token_ids")

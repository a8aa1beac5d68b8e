"""What the native kernels are handed, in the memory layout of `decoder.cpp`, and what they return."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from enum import IntEnum


class Matrix(Structure):
    """A row-major matrix in the model's dtype, and its bias in float32 or null."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("rows", c_int64), ("cols", c_int64))


class Layer(Structure):
    """Weights of one layer, and its keys and values in the cache."""

    _fields_ = (
        *((name, Matrix) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm", "keys", "values")),
        ("window", c_int64),
    )


class Model(Structure):
    """A model on a slot cache."""

    _fields_ = (
        *((name, c_int64) for name in (
            "is_bfloat16", "num_layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "capacity",
            "num_slots", "num_positions",
        )),
        ("epsilon", c_float),
        ("scale", c_float),
        *((name, c_void_p) for name in ("embedding", "cos", "sin", "final_norm")),
        ("head", Matrix),
        ("layers", POINTER(Layer)),
    )  # fmt: skip


class PassArguments(Structure):
    """Inputs and outputs of one call."""

    _fields_ = (
        *((name, c_int64) for name in ("num_threads", "num_sequences", "num_logits")),
        *((name, c_void_p) for name in (
            "tokens", "inputs", "positions", "parents", "slots", "prefix", "starts", "node_starts", "logit_rows",
            "logits", "taps",
        )),
        ("num_taps", c_int64),
        ("features", c_void_p),
        ("workspace", c_void_p),
    )  # fmt: skip


class Status(IntEnum):
    """What a kernel returns: 0, or why it has not begun."""

    DONE = 0
    NO_MEMORY = 1
    MISSING = 2
    THREADS = 3
    TOKENS = 4
    POSITIONS = 5
    SLOTS = 6
    CACHE_ROWS = 7
    PARENTS = 8
    SEQUENCES = 9
    LOGIT_ROWS = 10

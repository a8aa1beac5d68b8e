"""Arguments of the native kernels, in the memory layout of `kernels/interface.h`, and their return codes."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum


class MatrixStruct(Structure):
    """A row-major matrix in the model's dtype, or in int8 with float32 scales; its bias in float32 or null."""

    _fields_ = (
        ("weight", c_void_p), ("bias", c_void_p), ("rows", c_int64), ("cols", c_int64), ("scales", c_void_p),
        ("pass_bytes", c_int64),
    )  # fmt: skip


class NormStruct(Structure):
    """A norm; a null weight means no norm."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_float), ("kind", c_int32))


class ExpertsArguments(Structure):
    """A mixture of experts; a count of 0 for a dense layer."""

    _fields_ = (
        ("router", MatrixStruct),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        *((name, c_int64) for name in ("count", "top_k", "intermediate", "is_normalised")),
    )


class Layer(Structure):
    """Weights and options of one layer, and its keys and values in the cache."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        ("experts", ExpertsArguments),
        *((name, NormStruct) for name in (
            "attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "side_norm", "query_norm",
            "key_norm",
        )),
        *((name, c_void_p) for name in ("cos", "sin", "keys", "values")),
        *((name, c_int64) for name in ("pairs", "window", "activation", "norms_all_heads")),
        ("scale", c_float),
        ("softcap", c_float),
    )  # fmt: skip


class Model(Structure):
    """A model on a slot cache."""

    _fields_ = (
        *((name, c_int64) for name in (
            "is_bfloat16", "num_layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "num_positions",
            "capacity", "num_slots", "slot_rows", "head_rows", "layer_rows", "intermediate", "has_post_norms",
            "num_experts", "top_k", "expert_intermediate",
        )),
        ("embedding_scale", c_float),
        ("logit_softcap", c_float),
        ("embedding", c_void_p),
        ("final_norm", NormStruct),
        ("head", MatrixStruct),
        ("layers", POINTER(Layer)),
    )  # fmt: skip


class PassArguments(Structure):
    """Inputs and outputs of one call."""

    _fields_ = (
        *((name, c_int64) for name in ("num_threads", "num_sequences", "num_logits")),
        *((name, c_void_p) for name in (
            "tokens", "inputs", "sides", "positions", "parents", "slots", "prefix", "starts", "node_starts",
            "logit_rows", "logits", "inverse_temperature", "seeds", "impossible", "chosen", "taps",
        )),
        ("num_impossible", c_int64),
        ("num_taps", c_int64),
        ("is_append", c_int64),
        ("features_are_bfloat16", c_int64),
        ("features", c_void_p),
        ("workspace", c_void_p),
    )  # fmt: skip


class DraftArguments(Structure):
    """Draft trees of one shape, and the choice of their tokens."""

    _fields_ = (
        *((name, c_int64) for name in ("num_sequences", "num_nodes", "num_candidates", "num_rows", "vocab")),
        *((name, c_void_p) for name in (
            "parents", "ranks", "draws", "inverse_temperature", "seeds", "root_positions", "tokens", "scores", "kinds",
            "row_of", "rows", "node_parents", "node_numbers", "candidates", "path_scores", "candidate_parents",
        )),
    )  # fmt: skip


class Draw(IntEnum):
    """The choice of a sequence's draft tokens."""

    GREEDILY = 0
    COUPLED = 1
    SAMPLED = 2


class Status(IntEnum):
    """The result of a kernel: 0, or the reason why it did not begin."""

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
    SHAPE = 11
    DRAWS = 12

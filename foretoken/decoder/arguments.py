"""Arguments of the native kernels, in the memory layout of `kernels/interface.h`, and their return codes."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


MOST_INPUTS = 6  # `kMostInputs` of the kernels


class MatrixStruct(Structure):
    """A row-major matrix in the model's dtype, or in 4 to 8 bits; its bias in float32 or null."""

    _fields_ = (
        ("weight", c_void_p), ("bias", c_void_p), ("rows", c_int64), ("cols", c_int64), ("scales", c_void_p),
        ("pass_bytes", c_int64), ("bits", c_int64), ("group_scales", c_void_p), ("group_offsets", c_void_p),
        ("super_scales", c_void_p), ("super_offsets", c_void_p), ("group", c_int64), ("scale_kind", c_int64),
        ("offsets_are_lowest", c_int64), ("input_bits", c_int64), ("input_group", c_int64), ("input_order", c_void_p),
    )  # fmt: skip


def address(tensor: Tensor | None) -> int | None:
    """Returns where the memory of a tensor begins, None for None."""
    return None if tensor is None else tensor.data_ptr()


class NormStruct(Structure):
    """A norm; a null weight means no norm."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_float), ("kind", c_int32))


class ExpertsArguments(Structure):
    """A mixture of experts; a count of 0 for a dense layer."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("router", "gate_up", "down", "shared_gate")),
        *((name, c_int64) for name in ("count", "top_k", "intermediate", "is_normalised", "is_sigmoid", "is_gated")),
        ("score_bias", c_void_p),
        *((name, c_float) for name in ("epsilon", "factor")),
    )


class RecurrentArguments(Structure):
    """What a layer has in place of attention or beside it; a kind of 0 for nothing."""

    _fields_ = (
        ("inputs", MatrixStruct * MOST_INPUTS),
        ("output", MatrixStruct),
        *((name, c_int64) for name in (
            "kind", "num_inputs", "width", "row_at", "row_size", "gate_at", "factor_at", "channels", "query_at",
            "key_at", "value_at", "key_heads", "heads", "key_dim", "value_dim", "norm_size", "gates_first", "state_at",
            "rows_before",
        )),
        *((name, c_void_p) for name in ("places", "factors", "taps", "tap_bias", "decay", "step_bias", "skip")),
        ("norm", NormStruct),
        ("beta_scale", c_float),
        ("output_factor", c_float),
    )  # fmt: skip


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
        *((name, c_int64) for name in ("pairs", "window", "activation", "norms_all_heads", "gates_heads")),
        *((name, c_float) for name in ("scale", "softcap", "attention_factor", "mlp_factor", "gate_factor")),
        ("recurrent", RecurrentArguments),
    )  # fmt: skip


class Model(Structure):
    """A model on a slot cache."""

    _fields_ = (
        *((name, c_int64) for name in (
            "is_bfloat16", "num_layers", "hidden", "heads", "kv_heads", "head_dim", "vocab",
            "num_positions", "capacity", "num_slots", "slot_rows", "head_rows", "layer_rows", "rows_are_rounded",
            "intermediate", "num_experts", "top_k", "expert_intermediate",
            "window", "state_size", "row_size", "recurrent_width", "recurrent_channels", "recurrent_heads",
            "recurrent_outputs", "recurrent_keys",
        )),
        *((name, c_float) for name in ("embedding_scale", "logit_scale", "logit_softcap")),
        ("embedding", MatrixStruct),
        ("final_norm", NormStruct),
        ("head", MatrixStruct),
        ("head_tokens", c_void_p),
        ("num_logits", c_int64),
        ("layers", POINTER(Layer)),
    )  # fmt: skip


class PassArguments(Structure):
    """Inputs and outputs of one call."""

    _fields_ = (
        *((name, c_int64) for name in ("num_threads", "num_sequences", "num_logits")),
        *((name, c_void_p) for name in (
            "tokens", "inputs", "sides", "positions", "parents", "slots", "prefix", "starts", "node_starts",
            "logit_rows", "logits", "inverse_temperature", "seeds", "impossible_ids", "chosen",
            "attention_rows", "attention", "taps", "states_from", "states_to", "rows_to", "known", "known_starts",
            "settled",
        )),
        ("num_impossible", c_int64),
        ("num_attention", c_int64),
        ("attention_cols", c_int64),
        ("num_taps", c_int64),
        ("is_append", c_int64),
        ("features_are_bfloat16", c_int64),
        ("features", c_void_p),
        ("workspace", c_void_p),
    )  # fmt: skip


class StoredBlocks(Structure):
    """A matrix as a GGUF file has it, and the panels that it becomes."""

    _fields_ = (
        ("blocks", c_void_p), ("order", c_void_p), ("kind", c_int64), ("rows", c_int64), ("cols", c_int64),
        *((name, c_void_p) for name in ("numbers", "scales", "offsets", "super_scales", "super_offsets", "table")),
    )  # fmt: skip


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
    ATTENTION_ROWS = 13
    NOT_FINITE = 14

"""What the native kernels are told of a draft head, in the memory layout of `kernels/head_interface.h`."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p

from foretoken.decoder.lean.structures import Matrix, Norm


class HeadMatrix(Structure):
    """A matrix in its own dtype."""

    _fields_ = (("matrix", Matrix), ("is_bfloat16", c_int64))


class Step(Structure):
    """What drafts the children of the nodes of one depth."""

    _fields_ = (
        ("first", HeadMatrix),
        ("lm_head", HeadMatrix),
        ("norm", Norm),
        ("blocks", POINTER(HeadMatrix)),
        ("num_blocks", c_int64),
        ("embedding", c_void_p),
        *((name, c_int64) for name in ("num_tokens", "embedding_is_bfloat16")),
        *((name, c_float) for name in ("embedding_scale", "logit_scale", "logit_softcap")),
    )


class Head(Structure):
    """All steps of a head."""

    _fields_ = (
        *((name, c_int64) for name in ("kind", "num_steps", "hidden", "width", "vocab")),
        ("token_map", c_void_p),
        *((name, c_float) for name in ("feature_rms", "feature_epsilon")),
        ("steps", POINTER(Step)),
    )


class AutoregressiveHead(Structure):
    """A head of one decoder block, whose output is also the state that its next step reads."""

    _fields_ = (
        ("fuse", HeadMatrix),
        ("lm_head", HeadMatrix),
        ("token_map", c_void_p),
        ("vocab", c_int64),
        ("embedding", c_void_p),
        *((name, c_int64) for name in ("num_tokens", "embedding_is_bfloat16", "feeds_normed")),
        *((name, Norm) for name in ("norm", "state_norm")),
        *((name, c_float) for name in ("embedding_scale", "logit_scale", "logit_softcap")),
    )

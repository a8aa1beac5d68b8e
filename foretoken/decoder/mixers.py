"""Describes what recurrent blocks have in place of attention or beside it, for the native kernels; see `blocks.py`.

Letters: E hidden size, C channels, K taps of a convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.checks import require
from foretoken.decoder.blocks import Matrix, Norm, Part


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Convolution(Part):
    """A causal convolution of each channel over a token and the K - 1 tokens before it.

    Attributes:
        weight: (C, K), any dtype.
        bias: (C,), any dtype, or None.
    """

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShortConvolution(Part):
    """Computes gate * convolution(factor * x), without a state (LFM2).

    Attributes:
        projection: (3 C, E): the rows of x, of the gate and of the factor, C each, in any order.
        order: Of the three: the places of x, gate and factor.
        output: (E, C).
        output_factor: Of what is added to the block's inputs.
    """

    projection: Matrix
    order: tuple[int, int, int]
    convolution: Convolution
    output: Matrix
    output_factor: float = 1.0

    def __post_init__(self) -> None:
        require(sorted(self.order) == [0, 1, 2], f"the order of the projection's rows is {self.order}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearAttention(Part):
    """A state S (key_dim, value_dim) of each head, in float32: the gated delta rule (Gated DeltaNet), or Mamba2.

        q, k, v = silu(convolution(..)), of a token and those before it
        S = exp(decay * softplus(step + step_bias)) * S
        S = S + k (sigmoid(beta) * beta_scale * (v - k^T S))^T, with k and q of length 1; or S + softplus(..) * k v^T
        o = S^T q + skip * v
        outputs = norm(o) * silu(gate), or norm(o * silu(gate)), or o * silu(gate)

    Attributes:
        projections: Up to six. Their outputs, one matrix after another, are the columns of a token.
        places: (outputs,) int32, the column of each output; None for their order.
        factors: (outputs,) float32, of the columns; None for 1.
        columns: Where among these the inputs of the convolution begin, and the gates of the outputs. Right behind the
            former are the steps of the heads, and their betas if there are any.
        channels: Where the queries, keys and values begin among the inputs of the convolution, all heads of each side
            by side.
        decay: (heads,), float32, negative.
        step_bias: (heads,).
        skip: (heads,), or None.
        norm: (heads * value_dim,), or None.
        norm_size: Outputs that are normed together.
        beta_scale: 0: no delta rule (Mamba2), whose keys and queries have any length.
        output: (E, heads * value_dim).
        output_factor: Of what is added to the block's inputs.
    """

    projections: tuple[Matrix, ...]
    places: Tensor | None = None
    factors: Tensor | None = None
    columns: tuple[int, int]
    channels: tuple[int, int, int]
    convolution: Convolution
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    decay: Tensor
    step_bias: Tensor
    skip: Tensor | None = None
    norm: Norm | None
    norm_size: int
    gates_first: bool
    beta_scale: float
    output: Matrix
    output_factor: float = 1.0

    def __post_init__(self) -> None:
        count = sum(int(each.weight.shape[0]) for each in self.projections)
        is_order = self.places is None or torch.equal(self.places.sort().values, torch.arange(count))
        require(is_order, "the places of the projections are no permutation")
        require(self.places is None or self.factors is None, "columns have places or factors, not both")

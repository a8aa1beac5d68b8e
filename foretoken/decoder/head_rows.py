"""A part of an LM head: the rows of some tokens, so that a draft model reads less in every level of a draft.

Letters: V vocabulary, E hidden size, R rows.

Source: FR-Spec (arXiv 2502.14856): drafts cover the most frequent tokens, verification all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.native_linear import weight_version
from foretoken.decoder.quantized import QuantizedLinear, QuantizedMatrix, quantized

if TYPE_CHECKING:
    from foretoken.decoder.blocks import LeanWeights
    from foretoken.decoder.quantized import Quantization


class HeadRows:
    """Copies of some rows of an LM head, which can be exchanged in place; decoders and captured graphs follow.

    Attributes:
        layer: (..., E) to (..., R).
        tokens: (R,) int64, the token of each row, all different.
    """

    def __init__(self, head: nn.Module, tokens: Tensor, quantization: Quantization | None = None) -> None:
        """Copies the rows of (R,) int64 tokens, rounded if asked for; the head stays as it is.

        Raises `UnsuitableError` for another head than a plain linear layer.
        """
        whole: Any = head
        if type(head) not in (nn.Linear, QuantizedLinear):
            raise UnsuitableError(f"the LM head is a {type(head).__name__}. Expected a plain linear layer.")
        stored: Tensor | QuantizedMatrix = whole.matrix if isinstance(head, QuantizedLinear) else whole.weight.detach()
        self._stored, self._quantization = stored, quantization
        self._version = weight_version(stored) if isinstance(stored, Tensor) else 0
        weight = self._rounded()
        bias: Tensor | None = None if whole.bias is None else whole.bias.detach()
        self._weight, self._bias, self.tokens = weight, bias, tokens.clone()
        self.layer: nn.Module
        if isinstance(weight, QuantizedMatrix):
            self.layer = QuantizedLinear(weight.taken(tokens), None if bias is None else bias[tokens])
        else:
            self.layer = nn.Linear(weight.shape[1], len(tokens), bias=bias is not None, device="meta")
            self.layer.weight = nn.Parameter(weight[tokens], requires_grad=False)
            if bias is not None:
                self.layer.bias = nn.Parameter(bias[tokens], requires_grad=False)

    def _rounded(self) -> Tensor | QuantizedMatrix:
        if self._quantization is None or isinstance(self._stored, QuantizedMatrix):
            return self._stored
        return quantized(self._stored, self._quantization, dtype=torch.bfloat16)

    def follow_weight(self) -> None:
        """Copies the rows anew after writes to the head's weight; raises `UnsuitableError` if it is not finite."""
        if isinstance(self._stored, Tensor) and weight_version(self._stored) != self._version:
            self._version, self._weight = weight_version(self._stored), self._rounded()
            self.exchange(torch.arange(len(self.tokens), device=self.tokens.device), self.tokens.clone())

    def exchange(self, places: Tensor, tokens: Tensor) -> None:
        """Writes the rows of other tokens to (K,) int64 places; no token gets two rows."""
        layer: Any = self.layer
        if isinstance(self._weight, QuantizedMatrix):
            layer.matrix.put(places, self._weight, tokens)
        else:
            layer.weight.data[places] = self._weight[tokens]
        if self._bias is not None:
            layer.bias.data[places] = self._bias[tokens]
        self.tokens[places] = tokens

    def within(self, weights: LeanWeights) -> LeanWeights:
        """Returns the weights of a model with these rows in place of its LM head."""
        return replace(weights, head=self.layer, head_tokens=self.tokens)

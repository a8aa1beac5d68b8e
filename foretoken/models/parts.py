"""The target's parts that draft heads share: embedding and LM head as functions, and the scaling of positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call

from foretoken.core.errors import ModelError
from foretoken.decoder.blocks import Blocks, LmHead, ScaledEmbedding
from foretoken.decoder.native_linear import HeadRows, NativeLinear, fast_linear, linear_layer
from foretoken.decoder.quantized_modules import QuantizedEmbedding, QuantizedLinear, embedding_table, is_plain_embedding
from foretoken.models.config import logits_shape
from foretoken.models.lean_weights import read_weights

if TYPE_CHECKING:
    from foretoken.decoder.quantized import Quantization
    from foretoken.models.loaded import LoadedModel

_FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm", "norm_f", "embedding_norm")
STATIC_KINDS = ("linear", "llama3", "yarn")
_COMPARES_LENGTHS = ("llama3", "yarn")


class NativeParts(NamedTuple):
    """The shared modules for the native kernels; the LM head has the target's scale and cap of logits."""

    embedding: ScaledEmbedding
    head: LmHead


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    """The target's modules that heads share and never train.

    Attributes:
        embed: (...) int64 to (..., E), the target's input embeddings.
        lm_head: (..., E), the feature `final`, to (..., V) logits, scaled and capped like the target's.
        lm_head_weight: (V, E), for heads that start from a copy; without data ("meta") if it is in 4 or 8 bits.
        final_norm: (..., E), the output of the last block, to the feature `final`; None if the norm is not found.
        blocks: Returns the target's blocks, for heads that start from copies; raises `UnsuitableError` for
            architectures that lean decoders do not know. None where a head cannot start.
        native: Both for the native kernels; None for other modules, or if gradients may be needed.
        head_rows: Of the LM head, if `lm_head` and `native` have a part of it: V is then their number. In training
            heads learn over these tokens alone.
    """

    embed: Callable[[Tensor], Tensor]
    lm_head: Callable[[Tensor], Tensor]
    lm_head_weight: Tensor
    final_norm: Callable[[Tensor], Tensor] | None = None
    blocks: Callable[[], Blocks] | None = None
    native: NativeParts | None = None
    head_rows: HeadRows | None = None

    def follow_weights(self) -> None:
        """Renews a quantized copy of the LM head after writes to the target's weight."""
        if self.head_rows is not None:
            self.head_rows.follow_weight()
        elif self.native is not None and isinstance(self.native.head.layer, NativeLinear):
            self.native.head.layer.requantize(self.lm_head_weight)


def target_parts(
    model: LoadedModel,
    *,
    dtype: torch.dtype | None = None,
    is_inference: bool = False,
    quantization: Quantization | None = None,
    head_tokens: Tensor | None = None,
) -> TargetParts:
    """Returns the shared modules of a loaded target.

    Args:
        dtype: The caller's dtype; the target's weights then get no gradients. None for the target's modules as they
            are.
        is_inference: Whether no gradients are needed. Nothing is copied then, and the LM head may run on native kernels
            and return float32.
        quantization: With `is_inference`, for a quantized copy of the LM head, for drafts alone.
        head_tokens: (R,) int64, the tokens of the rows that the LM head has; None for all.

    Raises:
        UnsuitableError: If the LM head cannot be quantized, or has another class than those with rows.
        ModelError: For a dtype without `is_inference`, if the model was quantized.
    """
    if model.quantization is not None and dtype is not None and not is_inference:
        raise ModelError(
            f"'{model.name}' was quantized to {model.quantization}, and training and copies need its weights as they "
            "are. Load it without quantization, or name the directory of the original model."
        )
    module: Any = model.module
    embedding: Any = module.get_input_embeddings()
    head: Any = module.get_output_embeddings()
    factor, cap = logits_shape(model.config)
    native, weight = None, _dense_weight(head)
    rows = None if head_tokens is None else HeadRows(head, head_tokens.to(model.device), quantization)
    if rows is not None:
        head = rows.layer
    if is_inference:
        fast = fast_linear(head, quantization=quantization if rows is None else None, compacts=False)
        own, wanted = model.dtype, dtype or model.dtype
        takes_any = own == wanted or isinstance(fast, NativeLinear)
        embed, lm_head = lambda tokens: embedding(tokens).to(wanted), fast if takes_any else lambda x: fast(x.to(own))
        native = _native(embedding, LmHead(fast, factor, cap or 0.0))
    elif dtype == model.dtype:  # without gradients of weights, which would double the cost of the LM head
        is_plain = type(head) is nn.Linear  # other classes may compute anything from their weight
        frozen = linear_layer(head.weight, head.bias) if is_plain else head
        embed, lm_head = lambda tokens: embedding(tokens).detach(), frozen
    elif dtype is not None:
        embed, lm_head = _converted(embedding, head, dtype)
    else:
        embed, lm_head = embedding, head
    return TargetParts(
        embed=embed,
        lm_head=lambda features: _shaped(lm_head(features), factor, cap),
        lm_head_weight=weight,
        final_norm=_frozen_norm(model.backbone),
        blocks=lambda: read_weights(model, num_positions=1).layers,
        native=native,
        head_rows=rows,
    )


def taught_parts(parts: TargetParts, tokens: Sequence[int] | None) -> TargetParts:
    """Returns parts for a head that drafts some tokens of the whole LM head: logits of others are -inf. None for all.

    To measure heads; drafters read the rows of these tokens alone, see `target_parts`.
    """
    if tokens is None:
        return parts
    is_other = torch.ones(parts.lm_head_weight.shape[0], dtype=torch.bool, device=parts.lm_head_weight.device)
    is_other[list(tokens)] = False
    return replace(parts, lm_head=lambda x: parts.lm_head(x).masked_fill(is_other.to(x.device), float("-inf")))


def _dense_weight(head: Any) -> Tensor:
    if isinstance(head, QuantizedLinear):
        return torch.empty(head.matrix.shape, dtype=head.matrix.dtype, device="meta")
    weight: Tensor = head.weight.detach()
    return weight


def final_norm(backbone: nn.Module) -> Any | None:
    """Returns the norm after the last block; None if it is not found."""
    return next((getattr(backbone, name) for name in _FINAL_NORMS if hasattr(backbone, name)), None)


def _frozen_norm(backbone: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Returns the final norm; its weights get no gradients."""
    module = final_norm(backbone)
    if module is None:
        return None

    weight = next(module.parameters(), None)

    def norm(x: Tensor) -> Tensor:
        fitted = x if weight is None else x.to(weight.dtype)
        frozen = {name: each.detach() for name, each in module.named_parameters()} if torch.is_grad_enabled() else None
        result: Tensor = module(fitted) if frozen is None else functional_call(module, frozen, (fitted,))
        return result.to(x.dtype)

    return norm


def _native(embedding: Any, head: LmHead) -> NativeParts | None:
    is_table = isinstance(embedding, QuantizedEmbedding) or is_plain_embedding(embedding)
    if not is_table or not isinstance(head.layer, NativeLinear):
        return None
    return NativeParts(ScaledEmbedding(*embedding_table(embedding)), head)


def _converted(embedding: Any, head: Any, dtype: torch.dtype) -> tuple[Any, nn.Linear]:
    """Copies the modules to another dtype; tied weights stay one copy."""
    is_tied = embedding.weight is head.weight
    bias = None if head.bias is None else head.bias.to(dtype)
    copy = linear_layer(head.weight.to(dtype), bias)
    rows = copy.weight if is_tied else embedding.weight.detach().to(dtype)
    # Some embedding modules scale their rows, as Gemma's does.
    scale = getattr(embedding, "embed_scale", None)
    factor = 1.0 if scale is None else float(scale)

    def embed(tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, rows) * factor

    return embed, copy


def _shaped(logits: Tensor, factor: float, cap: float | None) -> Tensor:
    logits = logits if factor == 1.0 else logits * factor
    return logits if cap is None else torch.tanh(logits / cap) * cap


def scaled_frequencies(
    scaling: Mapping[str, Any], *, theta: float, head_dim: int, device: torch.device
) -> tuple[Tensor, float]:
    """Returns (Dh / 2,) float32 angles per position, and the factor of cosines and sines.

    `scaling`: transformers' `rope_parameters` without the base; one of `STATIC_KINDS`. Raises `ValueError` if the
    parameters are invalid.
    """
    kind = scaling.get("rope_type")
    if kind not in STATIC_KINDS:
        raise ValueError(f"rope_type is {kind!r}. Expected {', '.join(STATIC_KINDS)}")
    original = scaling.get("original_max_position_embeddings")
    if kind in _COMPARES_LENGTHS and not isinstance(original, int):
        raise ValueError(
            f"original_max_position_embeddings of rotary scaling '{kind}' is {original!r}. Expected a length"
        )
    try:
        config = transformers.LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=original or 1,
            rope_parameters={**scaling, "rope_theta": theta},
        )
        frequencies, factor = transformers.ROPE_INIT_FUNCTIONS[kind](config, device)
    except (KeyError, TypeError, ZeroDivisionError, AttributeError) as err:
        raise ValueError(f"rotary scaling {dict(scaling)} makes no sense: {err!r}") from err
    return frequencies, float(factor)


def target_base(config: Any) -> float:
    """Returns the base of the rotary frequencies of a text configuration: the first, if kinds of layers differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    stated = (each["rope_theta"] for each in (rope, *rope.values()) if isinstance(each, dict) and "rope_theta" in each)
    return float(next(stated, 10000.0))


def target_scaling(config: Any) -> dict[str, Any] | None:
    """Returns `rope_type` and parameters of a text configuration without the base; None without scaling."""
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(part, dict) for part in rope.values()):  # one entry for each kind of layer
        rope = next((part for part in rope.values() if part.get("rope_type", "default") != "default"), {})
    if rope.get("rope_type", "default") == "default":
        return None
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if scaling["rope_type"] in _COMPARES_LENGTHS:
        scaling.setdefault("original_max_position_embeddings", getattr(config, "max_position_embeddings", None))
    return scaling

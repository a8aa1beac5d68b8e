"""What a lean decoder needs of a transformers model: its weights where they lie, and the few facts around them.

The block it knows: RMS norm, grouped-query attention with rotary positions over a full or sliding window, residual, RMS
norm, gated SiLU, residual. Biases, norms of queries and keys, tied embeddings and every static rotary scaling are
options of it. Everything else is refused here, by name, and left to the generic decoder.

Letters: V vocabulary, D hidden size, E head size, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.target.decoder import UnsuitableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.target.loading import LoadedModel
    from foretoken.target.taps import Tap

_ARCHITECTURES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_QUERY_KEY_VALUE, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One decoder layer.

    Attributes:
        attention: The module that holds `q_proj`, `k_proj`, `v_proj` and `o_proj`.
        mlp: The module that holds `gate_proj`, `up_proj` and `down_proj`.
        attention_norm: (D,) float32.
        mlp_norm: (D,) float32.
        query_norm: (E,) float32, applied to each head before its rotation, or None.
        key_norm: Likewise.
        window: Only keys less than this many positions back are seen; None for all.
    """

    attention: Any
    mlp: Any
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanWeights:
    """A model that a lean decoder knows.

    Attributes:
        embedding: (V, D); of no rows where blocks stand alone.
        blocks: In order.
        final_norm: (D,) float32.
        head: The LM head module; its weight is the embedding where they are tied. Not read without an embedding.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: E.
        epsilon: Of every norm.
        scale: Factor of the dot products of attention.
        cos: (P, E / 2) float32, rotary tables with their scaling, of every position a pass may feed.
        sin: Likewise.
    """

    embedding: Tensor
    blocks: Sequence[Block]
    final_norm: Tensor
    head: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    scale: float
    cos: Tensor
    sin: Tensor


def read_weights(model: LoadedModel, num_positions: int) -> LeanWeights:
    """Finds the weights of a model; copies nothing but norms.

    Args:
        model: A loaded causal LM.
        num_positions: P.

    Raises:
        UnsuitableError: When the model is anything but the known block, naming what is foreign.
    """
    module: Any = model.module
    _check_known(module, model.config)
    backbone, config = module.model, model.config
    first = backbone.layers[0].self_attn
    cos, sin = _rotary_tables(backbone.rotary_emb, min(num_positions, model.context_len), model.device)
    return LeanWeights(
        embedding=backbone.embed_tokens.weight.detach(),
        blocks=[_block(layer, config, index) for index, layer in enumerate(backbone.layers)],
        final_norm=_norm(backbone.norm),
        head=module.lm_head,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=first.head_dim,
        epsilon=backbone.norm.variance_epsilon,
        scale=first.scaling,
        cos=cos,
        sin=sin,
    )


def tap_indices(taps: Sequence[Tap], num_layers: int) -> list[int]:
    """Boundary indices of taps; `final` is one past the last block's output.

    Raises:
        UnsuitableError: When a tap does not exist; the generic decoder says so in full.
    """
    indices = [num_layers + 1 if tap == "final" else tap for tap in taps]
    if any(not isinstance(i, int) or not 0 <= i <= num_layers + 1 for i in indices) or num_layers + 1 in taps:
        raise UnsuitableError(f"taps {list(taps)} do not all exist.")
    return [int(i) for i in indices]


def _check_known(module: Any, config: Any) -> None:
    """Raises `UnsuitableError` naming the first thing that is not the known block."""
    name = type(module).__name__
    if name not in _ARCHITECTURES or not type(module).__module__.startswith("transformers."):
        raise UnsuitableError(f"{name} is not among the architectures it knows.")
    if config.hidden_act != "silu":
        raise UnsuitableError(f"{name} with activation '{config.hidden_act}' is not among what it knows.")
    # A projection that was quantised, adapted or hooked is no plain matrix any more.
    foreign = [
        f"{key} ({type(part).__name__})"
        for key, part in module.named_modules()
        if key.endswith("_proj") and (not _is_plain(part))
    ]
    if foreign:
        raise UnsuitableError(f"{foreign[0]} is not a plain linear layer.")
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if len(dtypes) > 1:
        raise UnsuitableError(f"its weights differ in dtype: {', '.join(sorted(map(str, dtypes)))}.")


def _is_plain(part: nn.Module) -> bool:
    """Whether a projection is a linear layer as transformers makes it."""
    has_hooks = bool(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
    return not has_hooks and type(part) is nn.Linear


def _block(layer: Any, config: Any, index: int) -> Block:
    """One layer's weights and window."""
    attention = layer.self_attn
    kinds = getattr(config, "layer_types", None)
    # Mistral hands its window to every layer and has no layer types; the others slide where the types say so.
    is_sliding = kinds is None or kinds[index] == "sliding_attention"
    return Block(
        attention=attention,
        mlp=layer.mlp,
        attention_norm=_norm(layer.input_layernorm),
        mlp_norm=_norm(layer.post_attention_layernorm),
        query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        window=getattr(config, "sliding_window", None) if is_sliding else None,
    )


def _norm(module: Any) -> Tensor:
    """A norm's weight in float32."""
    weight: Tensor = module.weight.detach().float().contiguous()
    return weight


def _rotary_tables(rotary: Any, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, (P, E / 2) float32, as the model's own module computes them.

    Both halves of a head turn by the same angles, so half of what the module gives is enough.
    """
    positions = torch.arange(num_positions, device=device).unsqueeze(0)
    with torch.inference_mode():
        cos, sin = rotary(torch.empty(0, dtype=torch.float32, device=device), positions)
    half = cos.shape[2] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

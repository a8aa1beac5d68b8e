"""Tree attention for architectures of transformers that compute attention themselves instead of calling a plug-in.

A layer is adapted by an attribute of its own instance; outside a pass over the slot cache it computes what it always
did. Layers that add a bias to the scores (ALiBi) are left alone, and so are their models.

Letters: B sequences, T tokens fed, H query heads, E head size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from foretoken.attention.dispatch import tree_attention
from foretoken.hf.plugin import current_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

_WITH_SCORES = {"GPTJAttention", "CodeGenAttention", "GPTNeoSelfAttention"}  # they compute scores in `_attn`


def adapt_attention(model: nn.Module) -> bool:
    """Sends the attention of every layer to `tree_attention`, in place.

    Args:
        model: A transformers causal LM that is used by us alone.

    Returns:
        Whether it is of an architecture that is known here; otherwise nothing is changed.
    """
    layers: list[Any] = []
    for module in model.modules():
        name = type(module).__name__
        is_falcon = name == "FalconAttention" and not getattr(model.config, "alibi", False)
        if type(module).__module__.startswith("transformers.") and (is_falcon or name in _WITH_SCORES):
            layers.append(module)
    for layer in layers:
        if type(layer).__name__ == "FalconAttention":
            layer.forward = partial(_falcon, layer, layer.forward)
        else:
            layer._attn = partial(_from_scores, layer, layer._attn)
    return bool(layers)


def _from_scores(
    layer: Any, own: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None
) -> tuple[Tensor, None]:
    """Stands for `_attn`: (1, H, M, E) queries, keys and values as the cache gave them, to (1, H, M, E)."""
    layout = current_layout()
    if layout is None:
        result: tuple[Tensor, None] = own(query, key, value, attention_mask)
        return result
    is_local = getattr(layer, "attention_type", "global") == "local"  # GPT-Neo, which does not scale its scores either
    output = tree_attention(
        query[0].transpose(0, 1).to(key.dtype), key, value, layout,
        scale=1.0 / float(getattr(layer, "scale_attn", 1.0)), window=layer.config.window_size if is_local else None,
    )  # fmt: skip
    return output.transpose(0, 1).unsqueeze(0), None


def _falcon(
    layer: Any, own: Callable[..., Any], hidden_states: Tensor, alibi: Tensor | None, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stands for the forward of a Falcon attention with rotary positions."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    layout, cache = current_layout(), kwargs.get("layer_past")
    if layout is None or cache is None:
        result: tuple[Tensor, None] = own(hidden_states, alibi, attention_mask, **kwargs)
        return result
    query, key, value = (part.transpose(1, 2) for part in layer._split_heads(layer.query_key_value(hidden_states)))
    query, key = apply_rotary_pos_emb(query, key, *kwargs["position_embeddings"])
    keys, values = cache.update(key, value, layer.layer_idx)
    output = tree_attention(query[0].transpose(0, 1), keys, values, layout, scale=layer.inv_norm_factor)
    return layer.dense(output.flatten(1).unsqueeze(0)), None

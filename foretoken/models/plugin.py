"""Connects transformers models to our KV cache and attention through their public plug-in points."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin

from foretoken.attention.layout import tree_attention
from foretoken.core.errors import ModelError
from foretoken.models.forward_pass import ATTENTION_NAME, current_layout, current_pass

if TYPE_CHECKING:
    from foretoken.decoder.slot_cache import SlotCache

_HARMLESS_TENSORS = {"position_ids", "cache_position"}  # forward arguments that some models pass to attention


class SlotCacheLayer(CacheLayerMixin):
    """One layer of a `SlotCache` for transformers; `update` returns the whole layer, not one sequence's rows."""

    is_sliding = False
    is_compileable = False

    def __init__(self, store: SlotCache, layer: int) -> None:
        super().__init__()
        self._store, self._layer = store, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: rows are preallocated."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,  # noqa: ARG002 - the base class's signature
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Writes (1, Hk, M, D) to the pass' rows; returns (slots, Hk, capacity, D) for `tree_attention`."""
        layout = current_layout()
        assert layout is not None, "the cache is written only inside a pass"
        return self._store.write(self._layer, layout, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - the base class's signature
        """Returns unused sizes: transformers builds no mask."""
        return self._store.capacity, 0

    def get_seq_length(self) -> int:
        """Returns 0, unused: positions are explicit."""
        return 0

    def get_max_length(self) -> int:
        """Returns the rows of a slot."""
        return self._store.capacity


class RecurrentCacheLayer(LinearAttentionCacheLayerMixin):
    """Says that a layer has a state; `foretoken.models.recurrent` hands the states to the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.has_previous_state = {0: True}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0) -> Tensor:
        """Raises: the recurrent layers of our passes have caches of their own."""
        raise NotImplementedError

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0) -> Tensor:
        """Raises, as `update_conv_state`."""
        raise NotImplementedError


class HybridCacheLayer(SlotCacheLayer, RecurrentCacheLayer):
    """A layer with attention beside a recurrent mixer."""

    def __init__(self, store: SlotCache, layer: int) -> None:
        RecurrentCacheLayer.__init__(self)
        SlotCacheLayer.__init__(self, store, layer)

    lazy_initialization = SlotCacheLayer.lazy_initialization


def as_transformers_cache(store: SlotCache) -> Cache:
    """Returns the cache for `model(past_key_values=...)`."""
    recurrent = () if store.states is None else store.states.layers
    layers: list[Any] = []
    for layer, keys in enumerate(store.keys):
        if keys.shape[1] == 0:  # no heads, thus no attention
            layers.append(RecurrentCacheLayer() if layer in recurrent else DummyLayer())
        else:
            layers.append((HybridCacheLayer if layer in recurrent else SlotCacheLayer)(store, layer))
    return Cache(layers=layers)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention for transformers, in every attention layer of a pass of ours.

    Raises `ModelError` for a mask, bias or choice of keys of the layer's own, which a tree would lose.
    """
    forward_pass = current_pass()
    if forward_pass is None or forward_pass.layout is None:
        raise ModelError(
            f"{type(module).__name__} belongs to a foretoken runner and attends only inside its passes. Call a model "
            "of your own, or give this one its attention back: model.set_attn_implementation('sdpa')."
        )
    own = ["attention_mask"] * (attention_mask is not None)
    own += [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _HARMLESS_TENSORS]
    if own:
        raise ModelError(
            f"{type(module).__name__} hands {', '.join(own)} to attention, which foretoken cannot apply to a token "
            "tree. Expected plain, sliding-window, soft-capped or sink attention. It cannot be used as a target."
        )
    window = kwargs["sliding_window"] if "sliding_window" in kwargs else getattr(module, "sliding_window", None)
    forward_pass.windows[getattr(module, "layer_idx", len(forward_pass.windows))] = window
    output = tree_attention(
        query[0].transpose(0, 1),
        key,
        value,
        forward_pass.layout,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        softcap=softcap,
        sinks=s_aux,
    )
    # Contiguous, as from transformers: some models call `view` on it.
    return output.unsqueeze(0).contiguous(), None


# No mask function is registered under the name, so transformers builds no mask.
AttentionInterface.register(ATTENTION_NAME, _attention)


_WITH_SCORES = {"GPTJAttention", "CodeGenAttention", "GPTNeoSelfAttention"}  # they compute scores in `_attn`


def adapt_attention(model: nn.Module) -> bool:
    """Replaces the attention of GPT-J, CodeGen, GPT-Neo and rotary Falcon in place; returns whether there is any."""
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
    """Replaces `_attn`; takes and returns (1, H, M, E)."""
    layout = current_layout()
    if layout is None:
        result: tuple[Tensor, None] = own(query, key, value, attention_mask)
        return result
    is_local = getattr(layer, "attention_type", "global") == "local"  # GPT-Neo, which does not scale its scores
    output = tree_attention(
        query[0].transpose(0, 1).to(key.dtype), key, value, layout,
        scale=1.0 / float(getattr(layer, "scale_attn", 1.0)), window=layer.config.window_size if is_local else None,
    )  # fmt: skip
    return output.transpose(0, 1).unsqueeze(0), None


def _falcon(
    layer: Any, own: Callable[..., Any], hidden_states: Tensor, alibi: Tensor | None, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
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

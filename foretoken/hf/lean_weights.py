"""Finding in a transformers model what a lean decoder runs (`foretoken.decoder.lean.weights`).

Everything but the known block is refused here, by name, and left to the generic decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.lean.weights import Block, LeanWeights

if TYPE_CHECKING:
    from foretoken.hf.loading import LoadedModel

_ARCHITECTURES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


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
        module=module,
        is_borrowed=model.is_borrowed,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=first.head_dim,
        epsilon=backbone.norm.variance_epsilon,
        scale=first.scaling,
        cos=cos,
        sin=sin,
    )


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

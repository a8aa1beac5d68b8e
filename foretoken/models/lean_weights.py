"""Finds the weights for a lean decoder (`LeanWeights`) in transformers modules, by a table of architectures.

An unknown architecture or part is refused by name and left to the generic decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.blocks import (
    Activation,
    Block,
    Blocks,
    BlockSpec,
    Experts,
    FeedForward,
    FeedForwardBlock,
    LeanWeights,
    Matrix,
    Norm,
    RecurrentBlock,
    Rotary,
)
from foretoken.decoder.memory import is_plain
from foretoken.decoder.mixers import Convolution, LinearAttention, ShortConvolution
from foretoken.decoder.quantized_modules import QuantizedEmbedding, QuantizedExperts, QuantizedLinear, embedding_table
from foretoken.models.architectures import LEAN_ARCHITECTURES, LeanArchitecture
from foretoken.models.borrowed import foreign_call
from foretoken.models.config import logits_shape

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel


_LAYERS = (
    nn.Linear, QuantizedLinear, QuantizedExperts, nn.Embedding, QuantizedEmbedding, nn.LayerNorm, nn.Dropout,
    nn.ModuleList, nn.Conv1d, nn.Identity,
)  # fmt: skip
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}  # fmt: skip


def read_weights(model: LoadedModel, num_positions: int) -> LeanWeights:
    """Finds the weights of a model, copies norms alone; raises `UnsuitableError` if a part is unknown."""
    if model.lean is not None:
        return model.lean(num_positions)
    module: Any = model.module
    architecture = _known_architecture(module, model.config)
    backbone = _part(module, "model", architecture)
    tables, rotary = None, getattr(backbone, architecture.names.get("rotary_emb", "rotary_emb"), None)
    if rotary is not None:
        tables = _rotary_tables(rotary, min(num_positions, model.context_len), model)
    embedding, scale = embedding_table(_part(backbone, "embed_tokens", architecture))
    logit_scale, logit_softcap = logits_shape(model.config)
    return LeanWeights(
        embedding=embedding,
        embedding_scale=scale * getattr(backbone, "embedding_multiplier", 1.0),
        layers=Blocks(
            blocks=[
                _block(layer, model.config, index, architecture, tables) for index, layer in enumerate(backbone.layers)
            ],
            final_norm=_norm(_part(backbone, "norm", architecture), architecture.norm_offset),
        ),
        head=module.lm_head,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        is_borrowed=model.is_borrowed,
    )


def _known_architecture(module: Any, config: Any) -> LeanArchitecture:
    name = type(module).__name__
    if name not in LEAN_ARCHITECTURES:
        raise UnsuitableError(f"{name} is not among the architectures it knows.")
    if not _is_of_transformers(module):
        raise UnsuitableError(f"{name}, or a part of it, is no class of transformers.")
    architecture = LEAN_ARCHITECTURES[name]
    activation = _activation(config, architecture)
    if activation not in _ACTIVATIONS:
        raise UnsuitableError(f"{name} with activation '{activation}' is not among what it knows.")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsuitableError(f"{name} with bidirectional attention is not among what it knows.")
    # A quantized or adapted projection is not a plain matrix.
    foreign = [
        f"{key} ({type(part).__name__})"
        for key, part in module.named_modules()
        if key.endswith(("_proj", "_linear", ".c_fc", ".gate", ".router", ".experts")) and not _is_plain(part)
    ]
    if foreign:
        raise UnsuitableError(f"{foreign[0]} is not a plain linear layer.")
    from transformers.activations import ACT2FN

    known = (*_LAYERS, *(type(ACT2FN[each]) for each in (activation, "silu" if architecture.mixer else activation)))
    replaced = [
        f"{key} is a {type(part).__name__}, which {name} does not have"
        for key, part in module.named_modules()
        if type(part) not in known and type(part).__module__ != type(module).__module__
    ]
    replaced += [  # torchao keeps plain layers, and puts its integers into their weights
        f"{key} is a {type(weight).__name__}, not a plain tensor"
        for key, weight in module.named_parameters()
        if not is_plain(weight)
    ]
    call = foreign_call(module)
    if replaced or call:
        raise UnsuitableError(f"{(*replaced, call)[0]}.")
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if len(dtypes) > 1:
        raise UnsuitableError(f"its weights differ in dtype: {', '.join(sorted(map(str, dtypes)))}.")
    return architecture


def _is_plain(part: nn.Module) -> bool:
    is_own = type(part).__name__.endswith(("Experts", "Router")) and _is_of_transformers(part)
    return type(part) in (nn.Linear, QuantizedLinear, QuantizedExperts, nn.Identity) or is_own


def _is_of_transformers(part: nn.Module) -> bool:
    return type(part).__module__.startswith("transformers.")


def _rotary_tables(module: Any, num_positions: int, model: LoadedModel) -> Callable[..., Rotary]:
    """Returns a function from a kind of layer, if there are several, to tables from the model's own module."""
    positions = torch.arange(num_positions, device=model.device).unsqueeze(0)

    @cache
    def tables(*kind: str) -> Rotary:
        with torch.inference_mode():
            cos, sin = module(torch.empty(0, dtype=torch.float32, device=model.device), positions, *kind)
        half = cos.shape[2] // 2  # both halves turn by the same angles
        cos, sin = (each[0, :, :half].clone(memory_format=torch.contiguous_format) for each in (cos, sin))
        return Rotary(cos=cos, sin=sin)

    return tables


def _part(owner: Any, name: str, architecture: LeanArchitecture) -> Any:
    """Returns a part by Llama's name."""
    return getattr(owner, architecture.names.get(name, name))


def _activation(config: Any, architecture: LeanArchitecture) -> str:
    return "silu" if architecture.activation is None else str(getattr(config, architecture.activation, "silu"))


class _Layer(NamedTuple):
    """A layer and its parts, None for one that it does not have."""

    module: Any
    attention: Any
    mixer: Any
    mlp: Any
    norms: dict[str, Any]  # of `Block`
    activation: Activation

    @classmethod
    def of(cls, module: Any, config: Any, architecture: LeanArchitecture) -> _Layer:
        attention, mixer = getattr(module, "self_attn", None), getattr(module, architecture.mixer or "", None)
        mlp, norms = None, architecture.norms
        if not architecture.is_one_part:
            mlp, norms = _mlp(module, architecture), norms if attention else architecture.mixer_norms or norms
        elif hasattr(mixer, "q_proj"):
            attention, mixer = mixer, None
        elif not hasattr(mixer, "A_log"):
            mlp = _mixture(mixer, getattr(mixer, "shared_experts", None), architecture)
            mixer, norms = None, {"mlp_norm": norms["attention_norm"]}
            if type(getattr(module.mixer, "fc1_latent_proj", None)) not in (type(None), nn.Identity):
                raise UnsuitableError("experts of fewer inputs than the hidden size are not among what it knows.")
        made = {field: _norm(getattr(module, name), architecture.norm_offset) for field, name in norms.items()}
        own = None if mixer is None else _mixer(module, mixer)
        return cls(module, attention, own, mlp, made, _ACTIVATIONS[_activation(config, architecture)])

    @property
    def mlp_factor(self) -> float:
        own = getattr(getattr(self.module, "feed_forward", None), "down_multiplier", 1.0)
        return float(own * getattr(self.module, "residual_multiplier", 1.0))


def _block(
    module: Any, config: Any, index: int, architecture: LeanArchitecture, tables: Callable[..., Rotary] | None
) -> Block | RecurrentBlock | FeedForwardBlock:
    layer = _Layer.of(module, config, architecture)
    attention, norms = layer.attention, layer.norms
    if attention is None:
        parts: Any = {"mlp": layer.mlp, "activation": layer.activation, "mlp_factor": layer.mlp_factor, **norms}
        return FeedForwardBlock(**parts) if layer.mixer is None else RecurrentBlock(mixer=layer.mixer, **parts)
    factor, read = getattr(module, "residual_multiplier", 1.0), getattr(module, "attention_in_multiplier", 1.0)
    head_dim = attention.head_dim
    queries = config.num_attention_heads * head_dim * (2 if architecture.gates_heads else 1)
    sizes = [queries, *[config.num_key_value_heads * head_dim] * 2]
    query, key, value = _matrices(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj", sizes)
    if hasattr(attention, architecture.names.get("q_norm", "q_norm")):
        names = {"query_norm": "q_norm", "key_norm": "k_norm"}
        norms |= {
            field: _norm(_part(attention, name, architecture), architecture.norm_offset)
            for field, name in names.items()
        }
    windows = {
        "none": None,
        "config": getattr(config, "sliding_window", None),
        "layer": getattr(attention, "sliding_window", None),
    }
    return Block(
        spec=BlockSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scale=attention.scaling * getattr(attention, "key_multiplier", 1.0) * read**2,
            softcap=config.attn_logit_softcapping if architecture.softcap else None,
            window=windows[architecture.window],
            activation=layer.activation,
        ),
        query=_of_scaled(query, read),
        key=_of_scaled(key, read),
        value=_of_scaled(value, read),
        output=_of_scaled(Matrix.of(_part(attention, "o_proj", architecture)), read),
        mlp=layer.mlp,
        rotary=_rotary(attention, config, index, tables),
        gates_heads=architecture.gates_heads,
        beside=layer.mixer,
        attention_factor=factor * getattr(module, "attn_out_multiplier", 1.0) * read,
        mlp_factor=layer.mlp_factor,
        **norms,
    )


def _of_scaled(matrix: Matrix, factor: float) -> Matrix:
    """Returns the layer f for which factor * f(x) is what `matrix` makes of factor * x."""
    return matrix if matrix.bias is None or factor == 1.0 else replace(matrix, bias=matrix.bias.detach() / factor)


def _mixer(layer: Any, module: Any) -> ShortConvolution | LinearAttention:
    if getattr(module, "activation", "silu") not in ("silu", "swish"):
        raise UnsuitableError(f"recurrent layers with activation '{module.activation}' are not among what it knows.")
    output = Matrix.of(module.out_proj if hasattr(module, "out_proj") else module.o_proj)
    factor = getattr(layer, "residual_multiplier", 1.0) * getattr(layer, "ssm_out_multiplier", 1.0)
    parts: Any = {"output": output, "output_factor": factor}
    if hasattr(module, "head_k_dim"):
        return _gated_delta(module, **parts)
    return _state_space(module, **parts) if hasattr(module, "A_log") else _short_convolution(module, **parts)


def _convolution(module: Any) -> Convolution:
    bias = None if module.bias is None else module.bias.detach()
    return Convolution(weight=module.weight.detach().squeeze(1), bias=bias)


def _short_convolution(mixer: Any, **output: Any) -> ShortConvolution:
    """LFM2: the rows of the factor, the gate and the input."""
    projection, convolution = Matrix.of(mixer.in_proj), _convolution(mixer.conv)
    return ShortConvolution(projection=projection, order=(2, 1, 0), convolution=convolution, **output)


_DELTA_NET = (
    ("in_proj_qkv", "in_proj_a", "in_proj_b", "in_proj_z"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"),
)


def _gated_delta(mixer: Any, **output: Any) -> LinearAttention:
    """Gated DeltaNet: queries, keys, values; steps; betas; gates."""
    keys, heads = mixer.key_dim, mixer.num_v_heads
    norm = _norm(mixer.norm if hasattr(mixer, "norm") else mixer.o_norm)
    names = next(names for names in _DELTA_NET if hasattr(mixer, names[0]))
    return LinearAttention(
        projections=tuple(Matrix.of(getattr(mixer, name)) for name in names),
        places=_interleaved(mixer) if "in_proj_qkvz" in names else None,
        columns=(0, 2 * keys + mixer.value_dim + 2 * heads),
        channels=(0, keys, 2 * keys),
        convolution=_convolution(mixer.conv1d),
        num_key_heads=mixer.num_k_heads,
        num_heads=heads,
        key_dim=mixer.head_k_dim,
        value_dim=mixer.head_v_dim,
        decay=-mixer.A_log.detach().float().exp(),
        step_bias=mixer.dt_bias.detach(),
        norm=Norm(weight=norm.weight.repeat(heads), epsilon=norm.epsilon),
        norm_size=mixer.head_v_dim,
        gates_first=False,
        beta_scale=2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0,
        **output,
    )


def _interleaved(mixer: Any) -> Tensor:
    """The places of Qwen3-Next's outputs: of each key head queries, keys, values and gates; then betas and steps."""
    keys, values, heads = mixer.key_dim, mixer.value_dim, mixer.num_v_heads
    sizes = [keys, keys, values, heads, heads, values]  # queries, keys, values, steps, betas, gates
    parts = [part.view(mixer.num_k_heads, -1) for part in torch.arange(sum(sizes)).split(sizes)]
    ordered = [torch.cat([parts[at] for at in each], dim=1).flatten() for each in ((0, 1, 2, 5), (4, 3))]
    return torch.cat(ordered).int()


def _state_space(mixer: Any, **output: Any) -> LinearAttention:
    """Mamba2: gates; values, keys, queries; steps."""
    inner, groups, size = mixer.intermediate_size, mixer.n_groups, mixer.ssm_state_size
    factor, factors = getattr(mixer, "ssm_in_multiplier", 1.0), getattr(mixer, "mup_vector", None)
    return LinearAttention(
        projections=(_of_scaled(Matrix.of(mixer.in_proj), factor),),
        factors=None if factors is None else factors.detach().float().flatten() * factor,
        columns=(inner, 0),
        channels=(inner + groups * size, inner, 0),
        convolution=_convolution(mixer.conv1d),
        num_key_heads=groups,
        num_heads=mixer.num_heads,
        key_dim=size,
        value_dim=mixer.head_dim,
        decay=-mixer.A_log.detach().float().exp(),
        step_bias=mixer.dt_bias.detach(),
        skip=mixer.D.detach(),
        norm=None if isinstance(mixer.norm, nn.Identity) else _norm(mixer.norm),
        norm_size=inner // groups,
        gates_first=not getattr(mixer.norm, "norm_before_gate", False),
        beta_scale=0.0,
        **output,
    )


def _rotary(attention: Any, config: Any, index: int, tables: Callable[..., Rotary] | None) -> Rotary | None:
    """Returns the rotation of a layer: none (SmolLM3), one for all, or one for each kind of layer (Gemma 3)."""
    if tables is None or not getattr(attention, "use_rope", True):
        return None
    by_kind = any(isinstance(part, dict) for part in (config.rope_parameters or {}).values())
    return tables(config.layer_types[index]) if by_kind else tables()


def _mlp(layer: Any, architecture: LeanArchitecture) -> FeedForward | Experts:
    module = _part(layer, "mlp", architecture)
    if "experts" not in architecture.names:
        return _mixture(module, getattr(module, "shared_expert", None), architecture)
    mixture = getattr(layer, architecture.names["experts"])  # beside the shared one
    return _feed_forward(module, architecture) if mixture is None else _mixture(mixture, module, architecture)


def _mixture(module: Any, shared: Any, architecture: LeanArchitecture) -> FeedForward | Experts:
    if not hasattr(module, "experts"):
        return _feed_forward(module, architecture)
    experts, router = module.experts, module.router if hasattr(module, "router") else module.gate
    is_quantized, gate = isinstance(experts, QuantizedExperts), getattr(module, "shared_expert_gate", None)
    is_gated = experts.is_gated if is_quantized else hasattr(experts, "gate_up_proj")
    return Experts(
        router=Matrix(weight=router.weight),
        gate_up=experts.gate_up if is_quantized else experts.gate_up_proj if is_gated else experts.up_proj,
        down=experts.down if is_quantized else experts.down_proj,
        top_k=router.top_k,
        is_normalized=getattr(router, "norm_topk_prob", True),  # Mixtral always does
        is_gated=is_gated,
        **_sigmoids(module, router, architecture),
        shared=None if shared is None else _feed_forward(shared, architecture),
        shared_gate=None if gate is None else Matrix.of(gate),
    )


def _sigmoids(module: Any, router: Any, architecture: LeanArchitecture) -> dict[str, Any]:
    if architecture.sigmoid_epsilon is None:
        return {}
    if getattr(router, "num_group", 1) != getattr(router, "topk_group", 1):
        raise UnsuitableError("experts that are chosen by groups are not among what it knows.")
    bias = getattr(module, "expert_bias", getattr(router, "e_score_correction_bias", None))  # LFM2, Nemotron-H
    return {
        "is_sigmoid": True,
        "score_bias": None if bias is None else bias.detach().float(),
        "factor": router.routed_scaling_factor,
        "epsilon": architecture.sigmoid_epsilon,
    }


def _feed_forward(module: Any, architecture: LeanArchitecture) -> FeedForward:
    if hasattr(module, "c_fc"):
        return FeedForward(gate=None, up=Matrix.of(module.c_fc), down=Matrix.of(module.c_proj))
    down = _part(module, "down_proj", architecture)
    if not hasattr(module, "gate_proj") and hasattr(module, "up_proj"):
        return FeedForward(gate=None, up=Matrix.of(module.up_proj), down=Matrix.of(down))
    names = tuple(architecture.names.get(name, name) for name in ("gate_proj", "up_proj"))
    joined = architecture.names.get("gate_up_proj", "gate_up_proj")
    gate, up = _matrices(module, names, joined, [down.in_features] * 2)
    return FeedForward(gate=gate, up=up, down=Matrix.of(down), gate_factor=getattr(module, "gate_multiplier", 1.0))


def _matrices(owner: Any, names: tuple[str, ...], joined: str, sizes: list[int]) -> list[Matrix]:
    if not hasattr(owner, joined):
        return [Matrix.of(getattr(owner, name)) for name in names]
    whole = getattr(owner, joined)
    if isinstance(whole, QuantizedLinear):
        ends = list(accumulate(sizes))
        weights: Any = [whole.matrix.rows(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    else:
        weights = whole.weight.detach().split(sizes)
    biases = [None] * len(sizes) if whole.bias is None else whole.bias.detach().split(sizes)
    return [Matrix(weight=weight, bias=bias) for weight, bias in zip(weights, biases, strict=True)]


def _norm(module: Any, offset: float = 0.0) -> Norm:
    is_layer_norm = isinstance(module, nn.LayerNorm)
    epsilon = module.eps if hasattr(module, "eps") else module.variance_epsilon
    bias = _wide(module.bias) if is_layer_norm and module.bias is not None else None
    weight = _wide(module.weight)
    return Norm(
        weight=weight if offset == 0.0 else weight + offset,
        bias=bias,
        epsilon=epsilon,
        kind="layer" if is_layer_norm else "rms",
    )


def _wide(parameter: Tensor) -> Tensor:
    """Returns a parameter in at least float32, without a copy if it is already."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32)).contiguous()

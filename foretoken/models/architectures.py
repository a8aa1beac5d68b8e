"""The architectures with rows of their own in one table, by their `model_type` in transformers. Needs no torch.

Lean decoders run the rows with `lean`; the generic decoder runs all others. GGUF files hold the rows with `gguf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretoken.decoder.blocks import Activation


_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanArchitecture:
    """How an architecture differs from Llama.

    Attributes:
        norms: Names of a layer's norms, by the fields of `Block`.
        norm_offset: Added to a norm's weight.
        activation: The configuration's entry that names the activation; None if transformers always takes silu.
        window: Source of the sliding window: "none", "config" (one for all layers), or "layer"
            (`self_attn.sliding_window`).
        softcap: Whether the configuration caps attention scores.
        names: Of parts, where they differ from Llama's: of the model, of a layer, of `self_attn`, of the feed-forward
            layer, of the embedding and the final norm. "experts": those of a layer beside its feed-forward layer.
        mixer: The recurrent part of a layer, in place of `self_attn` or beside it; None if no layer has one.
        mixer_norms: As `norms`, of recurrent layers; None for the same.
        gates_heads: Whether queries have gates of the heads' outputs, see `Block`.
        sigmoid_epsilon: Where the scores of experts are sigmoids, what is added to the sum of weights; otherwise None.
        is_one_part: Whether a layer has one part and one norm, the `mixer` and `norms["attention_norm"]`: attention, a
            recurrent part or a feed-forward layer.
    """

    norms: Mapping[str, str] = field(default_factory=lambda: _NORMS)
    norm_offset: float = 0.0
    activation: str | None = "hidden_act"
    window: str = "none"
    softcap: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    mixer: str | None = None
    mixer_norms: Mapping[str, str] | None = None
    gates_heads: bool = False
    sigmoid_epsilon: float | None = None
    is_one_part: bool = False


# transformers' names of the parts of a block, by the names of their tensors in GGUF files.
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """How llama.cpp stores an architecture. "Field" is one of the configuration of transformers.

    Attributes:
        name: Of the architecture in the file.
        mixture: Of the same architecture with experts, if files name it otherwise.
        own_parts: The parts of a block by their tensors' names, where they differ from Llama's.
        own_weights: Weights of a block by their tensors' whole names, where transformers' names end otherwise.
        outer: The parts outside blocks by their tensors' names, where they differ from Llama's.
        switches: Fields that a tensor's presence tells.
        epsilon: The key of the norms' epsilon, and its field.
        is_permuted: Whether rows of queries and keys are in pairs that turn together, see `Settings.row_order`.
        norm_offset: What a file adds to weights of norms, except for those of recurrent layers.
        keys: Further keys that `gguf_hybrids` reads.
        scales: Fields of factors by their keys.
        window: How many layers from one without a window to the next; 0: no layer has its own.
        default_window: Of a file that does not state it; None for none.
        has_own_head_dim: Whether the configuration has a field for it whatever its value.
        is_lean: Whether lean decoders read the file themselves, which takes the columns below.
        activation: Of the feed-forward layer.
        scales_embedding: Whether embeddings are multiplied by sqrt(hidden size), rounded to the dtype of the model.
        has_head_norms: Whether the heads of queries and keys have norms.
        biases: The matrices with biases that no setting tells.
    """

    name: str
    own_parts: Mapping[str, str] = field(default_factory=dict)
    mixture: str | None = field(default=None, kw_only=True)
    own_weights: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    outer: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    switches: Mapping[str, str] = field(default_factory=dict)
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    is_permuted: bool = False
    norm_offset: float = 0.0
    keys: tuple[str, ...] = ()
    scales: Mapping[str, str] = field(default_factory=dict)
    window: int = 0
    default_window: int | None = None
    has_own_head_dim: bool = False
    is_lean: bool = False
    activation: Activation = "silu"
    scales_embedding: bool = False
    has_head_norms: bool = False
    biases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names in files."""
        return (self.name,) if self.mixture is None else (self.name, self.mixture)

    @property
    def parts(self) -> dict[str, str]:
        """Names of the parts of a block in transformers, by the names of their tensors."""
        return {**_PARTS, **self.own_parts}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table.

    Attributes:
        name: Of its class in transformers.
        lean: How lean decoders find the weights in transformers' module; None if they do not know the architecture.
        gguf: How GGUF files have it; None if they have it under no name, or under the name of another row.
        is_plain: Whether safetensors and configuration are Llama's, but for biases, norms of heads and windows: such
            models are inspected without transformers, and padded to cost twins.
    """

    name: str
    lean: LeanArchitecture | None = None
    gguf: GgufArchitecture | None = None
    is_plain: bool = False


def _mamba(module: str) -> dict[str, str]:
    """Returns the parts of a Mamba2 layer."""
    parts = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return {name: f"{module}.{part}" for name, part in parts.items()}


def _mamba1(module: str) -> dict[str, str]:
    """Returns the parts of a Mamba layer."""
    return _mamba(module) | {"ssm_x": f"{module}.x_proj", "ssm_dt": f"{module}.dt_proj"}


def _mamba1_weights(module: str) -> dict[str, str]:
    return {"ssm_a": f"{module}.A_log", "ssm_d": f"{module}.D"}


def _mamba_weights(module: str) -> dict[str, str]:
    weights = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    return {name: f"{module}.{weight}" for name, weight in weights.items()}


_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_BIASES = _BIAS | {"mlp_bias": "blk.0.ffn_up.bias"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_NORMS = _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")}
_LFM2_EXPERTS = {name: f"feed_forward.{part.removeprefix('mlp.')}" for name, part in _EXPERTS.items()}
_GRANITE_EXPERTS = {name: f"block_sparse_moe.{part.removeprefix('mlp.')}" for name, part in _EXPERTS.items()}
_LAYER_NORM = ("attention.layer_norm_epsilon", "layer_norm_eps")
_LOGIT_SCALE = {"logit_scale": "logit_scale"}
_GRANITE_SCALES = {
    "logit_scale": "logits_scaling", "residual_scale": "residual_multiplier", "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
}  # fmt: skip
_CONFIG_WINDOW, _LAYER_WINDOW = LeanArchitecture(window="config"), LeanArchitecture(window="layer")
_OLMO_NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_OLMO = LeanArchitecture(norms=_OLMO_NORMS)
_GEMMA = LeanArchitecture(
    norms=_NORMS | _OLMO_NORMS | {"mlp_norm": "pre_feedforward_layernorm"}, norm_offset=1.0,
    activation="hidden_activation", window="layer",
)  # fmt: skip
_GATED_DELTA = LeanArchitecture(norm_offset=1.0, mixer="linear_attn", gates_heads=True)
_BAMBA = LeanArchitecture(
    norms={"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}, mixer="mamba",
    names={"norm": "final_layernorm", "mlp": "feed_forward"},
)  # fmt: skip
_ONE_PART = LeanArchitecture(
    norms={"attention_norm": "norm"}, mixer="mixer", names={"embed_tokens": "embeddings", "norm": "norm_f"},
    is_one_part=True,
)  # fmt: skip
_NEMOTRON = replace(_ONE_PART, activation="mlp_hidden_act", sigmoid_epsilon=1e-20)
_CONVOLUTIONS = LeanArchitecture(
    norms={"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"},
    mixer="conv",
    activation=None,
    names={
        "norm": "embedding_norm",
        "o_proj": "out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    },
)
_LFM2 = {
    "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "attn_norm": "operator_norm", "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}  # fmt: skip
_LFM2_NORM, _LFM2_KEYS = {"token_embd_norm": "model.embedding_norm"}, ("shortconv.l_cache",)
_LFM2_EPSILON = ("attention.layer_norm_rms_epsilon", "norm_eps")
_GRANITE_SHARED = {
    f"ffn_{part}{kind}": f"shared_mlp.{name}"
    for part, name in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "output_linear"))
    for kind in ("", "_shexp")
}  # transformers joins gate and up
_FALCON_H1 = {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")} | {
    "ffn_norm": "pre_ff_layernorm"
}
_NEMOTRON_H = {f"attn_{part}": f"mixer.{part}_proj" for part in ("q", "k", "v")} | {
    "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj", "attn_norm": "norm",
    "ffn_gate_inp": "mixer.gate", "ffn_up_exps": "mixer.experts.up_proj", "ffn_down_exps": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj", "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip
_NEMOTRON_KEYS = (
    *("moe_latent_size", "expert_shared_feed_forward_length", "expert_shared_count"),
    *("expert_weights_norm", "expert_weights_scale", "expert_group_count", "expert_group_used_count"),
)
_MAMBA_SWITCHES = {"use_bias": "blk.0.ssm_in.bias", "use_conv_bias": "blk.0.ssm_conv1d.bias"}
_MAMBA_OUTER = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
_MAMBA_EPSILON = ("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")
_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
_DELTA_NET_WEIGHTS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_QWEN3_NEXT = _DELTA_NET | {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"}  # the latter once
_SHARED_EXPERT = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")} | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate"
}
_SSM_KEYS = tuple(f"ssm.{key}" for key in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size"))
_MAMBA = GgufArchitecture(
    "mamba", _mamba1("mixer") | {"attn_norm": "norm"}, _MAMBA_SWITCHES, own_weights=_mamba1_weights("mixer"),
    outer=_MAMBA_OUTER, epsilon=_MAMBA_EPSILON, keys=(*_SSM_KEYS, "ssm.dt_b_c_rms"),
)  # fmt: skip
_QWEN3_NEXT_KEYS = (*_SSM_KEYS, "attention.recurrent_layers", "full_attention_interval")
_DELTA_NET_KEYS = (*_QWEN3_NEXT_KEYS, "rope.dimension_sections")
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", LeanArchitecture(), GgufArchitecture(
        "llama", switches=_BIASES, is_permuted=True, has_own_head_dim=True, is_lean=True), is_plain=True),
    "mistral": Architecture("MistralForCausalLM", _CONFIG_WINDOW, is_plain=True),  # "llama" in GGUF files
    "mixtral": Architecture("MixtralForCausalLM", _CONFIG_WINDOW, GgufArchitecture(  # "llama" with experts
        "llama", _EXPERTS | {"ffn_gate_inp": "mlp.gate"}, is_permuted=True)),
    "qwen2": Architecture("Qwen2ForCausalLM", _LAYER_WINDOW, GgufArchitecture(
        "qwen2", is_lean=True, biases=("attn_q", "attn_k", "attn_v")), is_plain=True),
    "qwen3": Architecture("Qwen3ForCausalLM", _LAYER_WINDOW, GgufArchitecture(
        "qwen3", switches=_BIAS, has_own_head_dim=True, is_lean=True, has_head_norms=True), is_plain=True),
    "phi3": Architecture("Phi3ForCausalLM", _CONFIG_WINDOW, GgufArchitecture(
        "phi3", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})),
    "starcoder2": Architecture("Starcoder2ForCausalLM", _CONFIG_WINDOW, GgufArchitecture(
        "starcoder2", {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, {"use_bias": "blk.0.attn_q.bias"},
        epsilon=("attention.layer_norm_epsilon", "norm_epsilon"))),
    "gemma2": Architecture("Gemma2ForCausalLM", replace(_GEMMA, softcap=True), GgufArchitecture(
        "gemma2", _GEMMA_NORMS, norm_offset=1.0, window=2, default_window=4096, has_own_head_dim=True)),
    "gemma3_text": Architecture("Gemma3ForCausalLM", _GEMMA, GgufArchitecture(
        "gemma3", _GEMMA_NORMS, norm_offset=1.0, window=6, has_own_head_dim=True, is_lean=True, activation="gelu_tanh",
        scales_embedding=True, has_head_norms=True)),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM", _LAYER_WINDOW, GgufArchitecture(
        "qwen3moe", _EXPERTS | {"ffn_gate_inp": "mlp.gate"}, _BIAS, has_own_head_dim=True)),
    "smollm3": Architecture("SmolLM3ForCausalLM", _LAYER_WINDOW, GgufArchitecture(
        "smollm3", switches=_BIASES, is_permuted=True)),
    "olmo2": Architecture("Olmo2ForCausalLM", _OLMO, GgufArchitecture("olmo2", _POST_NORMS, _BIAS)),
    "olmo3": Architecture("Olmo3ForCausalLM", replace(_OLMO, window="layer"), GgufArchitecture(
        "olmo2", _POST_NORMS, _BIAS, window=4)),  # "olmo2" with a window
    "bamba": Architecture("BambaForCausalLM", _BAMBA, GgufArchitecture(  # Granite's with rotary positions
        "granitehybrid", _mamba("mamba") | _FALCON_H1, own_weights=_mamba_weights("mamba"),
        outer={"output_norm": "model.final_layernorm"}, is_permuted=True, keys=_SSM_KEYS)),
    "granitemoehybrid": Architecture("GraniteMoeHybridForCausalLM", LeanArchitecture(mixer="mamba", names={
        "mlp": "shared_mlp", "gate_up_proj": "input_linear", "down_proj": "output_linear",
        "experts": "block_sparse_moe"}), GgufArchitecture(
        "granitehybrid", _mamba("mamba") | _GRANITE_EXPERTS | _GRANITE_SHARED | {
            "ffn_gate_inp": "block_sparse_moe.router"}, own_weights=_mamba_weights("mamba"), is_permuted=True,
        keys=(*_SSM_KEYS, "expert_shared_feed_forward_length"), scales=_GRANITE_SCALES)),
    "falcon_h1": Architecture("FalconH1ForCausalLM", _BAMBA, GgufArchitecture(
        "falcon-h1", _mamba("mamba") | _FALCON_H1, {"mamba_rms_norm": "blk.0.ssm_norm.weight"},
        own_weights=_mamba_weights("mamba") | {"ffn_norm": "pre_ff_layernorm.weight"},  # without its kind
        outer={"output_norm": "model.final_layernorm"}, keys=_SSM_KEYS, has_own_head_dim=True)),
    "nemotron_h": Architecture("NemotronHForCausalLM", _NEMOTRON, GgufArchitecture(
        "nemotron_h", _mamba("mixer") | _NEMOTRON_H, mixture="nemotron_h_moe",
        own_weights=_mamba_weights("mixer") | {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        outer={"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
        epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"), keys=(*_SSM_KEYS, *_NEMOTRON_KEYS),
        has_own_head_dim=True)),
    "mamba2": Architecture("Mamba2ForCausalLM", replace(
        _ONE_PART, names={**_ONE_PART.names, "model": "backbone"}), GgufArchitecture(
        "mamba2", _mamba("mixer") | {"attn_norm": "norm"}, _MAMBA_SWITCHES, own_weights=_mamba_weights("mixer"),
        outer=_MAMBA_OUTER, epsilon=_MAMBA_EPSILON, keys=_SSM_KEYS)),
    "mamba": Architecture("MambaForCausalLM", gguf=_MAMBA),
    "falcon_mamba": Architecture("FalconMambaForCausalLM", gguf=_MAMBA),  # "mamba" with norms, whose epsilon files lack
    "jamba": Architecture("JambaForCausalLM", gguf=GgufArchitecture(
        "jamba", _mamba1("mamba") | _FALCON_H1 | _LFM2_EXPERTS | {"ffn_gate_inp": "feed_forward.router"}
        | {f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
        {"mamba_conv_bias": "blk.0.ssm_conv1d.bias"}, own_weights=_mamba1_weights("mamba"),
        outer={"output_norm": "model.final_layernorm"}, keys=_SSM_KEYS)),
    "lfm2_moe": Architecture("Lfm2MoeForCausalLM", replace(
        _CONVOLUTIONS, sigmoid_epsilon=1e-6, names={**_CONVOLUTIONS.names, "rotary_emb": "pos_emb"}), GgufArchitecture(
        "lfm2moe", _LFM2 | _LFM2_EXPERTS | {"ffn_gate_inp": "feed_forward.gate"},
        own_weights={"exp_probs_b.bias": "feed_forward.expert_bias"}, outer=_LFM2_NORM, epsilon=_LFM2_EPSILON,
        keys=(*_LFM2_KEYS, "leading_dense_block_count", "expert_gating_func"))),
    "granite": Architecture("GraniteForCausalLM", LeanArchitecture(), GgufArchitecture(
        "granite", switches=_BIASES, is_permuted=True, scales=_GRANITE_SCALES)),
    "glm4": Architecture("Glm4ForCausalLM", gguf=GgufArchitecture("glm4", {
        "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj"}, _BIAS, has_own_head_dim=True)),
    "exaone4": Architecture("Exaone4ForCausalLM", gguf=GgufArchitecture("exaone4", _POST_NORMS, has_own_head_dim=True)),
    "cohere": Architecture("CohereForCausalLM", gguf=GgufArchitecture(
        "command-r", switches=_BIAS | {"use_qk_norm": "blk.0.attn_q_norm.weight"}, epsilon=_LAYER_NORM,
        scales=_LOGIT_SCALE)),
    "cohere2": Architecture("Cohere2ForCausalLM", gguf=GgufArchitecture(
        "cohere2", switches=_BIAS, epsilon=_LAYER_NORM, scales=_LOGIT_SCALE, window=4)),
    "gpt_oss": Architecture("GptOssForCausalLM", gguf=GgufArchitecture("gpt-oss", _EXPERTS | {
        "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}, _BIAS,
        own_weights={"attn_sinks.weight": "self_attn.sinks"}, window=2, has_own_head_dim=True)),
    "qwen2_moe": Architecture("Qwen2MoeForCausalLM", _LAYER_WINDOW),
    "qwen3_5_moe_text": Architecture("Qwen3_5MoeForCausalLM", _GATED_DELTA, GgufArchitecture(
        "qwen35moe", _DELTA_NET | _EXPERTS | _SHARED_EXPERT | {"ffn_gate_inp": "mlp.gate"},
        own_weights=_DELTA_NET_WEIGHTS, norm_offset=1.0, has_own_head_dim=True,
        keys=(*_DELTA_NET_KEYS, "expert_shared_feed_forward_length"))),
    "qwen3_next": Architecture("Qwen3NextForCausalLM", _GATED_DELTA, GgufArchitecture(
        "qwen3next", _QWEN3_NEXT | _EXPERTS | _SHARED_EXPERT | {"ffn_gate_inp": "mlp.gate"},
        own_weights=_DELTA_NET_WEIGHTS, norm_offset=1.0, has_own_head_dim=True,
        keys=(*_QWEN3_NEXT_KEYS, "expert_shared_feed_forward_length"))),
    "olmo_hybrid": Architecture("OlmoHybridForCausalLM", replace(_OLMO, mixer="linear_attn", mixer_norms=_NORMS)),
    "lfm2": Architecture("Lfm2ForCausalLM", _CONVOLUTIONS, GgufArchitecture(
        "lfm2", _LFM2, outer=_LFM2_NORM, epsilon=_LFM2_EPSILON, keys=_LFM2_KEYS)),
    "qwen3_5_text": Architecture("Qwen3_5ForCausalLM", _GATED_DELTA, GgufArchitecture(
        "qwen35", _DELTA_NET, own_weights=_DELTA_NET_WEIGHTS, norm_offset=1.0, keys=_DELTA_NET_KEYS,
        has_own_head_dim=True)),
}  # fmt: skip
LEAN_ARCHITECTURES = {each.name: each.lean for each in ARCHITECTURES.values() if each.lean is not None}
GGUF_ARCHITECTURES = {kind: each.gguf for kind, each in ARCHITECTURES.items() if each.gguf is not None}
PLAIN_ARCHITECTURES = {kind: each.name for kind, each in ARCHITECTURES.items() if each.is_plain}


def is_lean(name: str) -> bool:
    """Decides whether a lean decoder knows an architecture, by its class or type in transformers, or its GGUF name."""
    return any(
        each.lean is not None and name in (kind, each.name, *(each.gguf.names if each.gguf else ()))
        for kind, each in ARCHITECTURES.items()
    )

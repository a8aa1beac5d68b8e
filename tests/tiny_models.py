"""Tiny random causal LMs of every architecture that the tests run, made from configurations in milliseconds.

`from tiny_models import ARCHITECTURES, tiny_model` works in every test folder, because `tests/` is on pytest's path.

The weights are wide (standard deviation 0.25 instead of 0.02) and biases, norms and attention sinks are random too:
attention then matters, greedy text varies, and a scale or a bias that gets lost on the way shows.
"""

from typing import Any

import torch
import transformers as hf

VOCAB_SIZE = 67
CONTEXT_LEN = 96
WINDOW = 6  # sliding window of the architectures that have one
EOS_ID = 2

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LEN,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,  # a tied random model repeats its input
}
_IDS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": EOS_ID}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}

_CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (hf.LlamaConfig, {}),
    "llama_tied": (hf.LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen2": (hf.Qwen2Config, {}),
    "qwen3": (hf.Qwen3Config, {"head_dim": 8}),
    "mistral": (hf.MistralConfig, {"sliding_window": WINDOW, "head_dim": 8}),
    "gemma2": (
        hf.Gemma2Config,
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 6,
            # Low caps, so that they bend the scores and logits of a tiny model.
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "layer_types": _ALTERNATING,
        },
    ),
    "gemma3": (
        hf.Gemma3TextConfig,
        {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 6, "layer_types": _ALTERNATING},
    ),
    "gpt2": (
        hf.GPT2Config,
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT_LEN},
    ),
    "gpt_neox": (hf.GPTNeoXConfig, {"num_attention_heads": 4, "rotary_pct": 0.5}),
    "phi": (hf.PhiConfig, {}),
    "phi3": (hf.Phi3Config, {"sliding_window": WINDOW}),
    "mixtral": (hf.MixtralConfig, {**_MOE, "sliding_window": None}),
    "qwen3_moe": (
        hf.Qwen3MoeConfig,
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "qwen2_moe": (
        hf.Qwen2MoeConfig,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "starcoder2": (hf.Starcoder2Config, {"sliding_window": WINDOW}),
    "olmo2": (hf.Olmo2Config, {}),
    "cohere": (hf.CohereConfig, {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "granite": (
        hf.GraniteConfig,
        {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
    "opt": (hf.OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.25}),
    "smollm3": (hf.SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "glm4": (hf.Glm4Config, {"head_dim": 8}),
    "stablelm": (hf.StableLmConfig, {}),
    "gpt_oss": (
        hf.GptOssConfig,
        {
            **_MOE,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        hf.DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
}

_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,  # two for each key head
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
_GRANITE = {
    **_MAMBA2,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 40,
    "embedding_multiplier": 2.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
_MULTIPLIERS = {
    "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.7, 1.3],
    "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.2, "key_multiplier": 0.6, "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.1, "ssm_multipliers": [1.5, 0.5, 0.7, 0.9, 1.3],
}  # fmt: skip
_NEMOTRON = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 8,
}
_MIXERS_ONLY = {"state_size": 8, "expand": 2, "use_bias": True}

_RECURRENT: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3_next": (hf.Qwen3NextConfig, {**_LINEAR, **_EXPERTS, "head_dim": 8}),
    "qwen3_5": (hf.Qwen3_5TextConfig, {**_LINEAR, "head_dim": 8}),
    "qwen3_5_moe": (hf.Qwen3_5MoeTextConfig, {**_LINEAR, **_EXPERTS, "head_dim": 8}),
    "olmo_hybrid": (hf.OlmoHybridConfig, {**_LINEAR, "linear_num_key_heads": 4, "linear_num_value_heads": 4}),
    "lfm2": (hf.Lfm2Config, {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "lfm2_moe": (
        hf.Lfm2MoeConfig,
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "granitemoehybrid": (hf.GraniteMoeHybridConfig, {**_GRANITE, **_MOE}),
    "granitemoehybrid_dense": (hf.GraniteMoeHybridConfig, {**_GRANITE, "num_local_experts": 0}),
    "bamba": (
        hf.BambaConfig,
        {
            **_MAMBA2,
            "attn_layer_indices": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "falcon_h1": (hf.FalconH1Config, {**_MAMBA2, **_MULTIPLIERS, "mamba_d_ssm": 64, "mamba_rms_norm": True}),
    "falcon_h1_biases": (
        hf.FalconH1Config,
        {**_MAMBA2, **_MULTIPLIERS, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}
        | {"mamba_d_ssm": 64, "mamba_rms_norm": False, "projectors_bias": True},
    ),
    "nemotron_h": (hf.NemotronHConfig, {**_NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp", "mamba"]}),
    "nemotron_h_moe": (
        hf.NemotronHConfig,
        {
            **_NEMOTRON,
            "layers_block_type": ["mamba", "attention", "moe", "mamba"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
    ),
    "zamba2": (
        hf.Zamba2Config,
        {
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "num_key_value_heads": 4,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 8,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
    ),
    "mamba2": (hf.Mamba2Config, {**_MIXERS_ONLY, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}),
    "jamba": (
        hf.JambaConfig,
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "mamba": (hf.MambaConfig, _MIXERS_ONLY),
    "falcon_mamba": (hf.FalconMambaConfig, _MIXERS_ONLY),
}

ARCHITECTURES: tuple[str, ...] = tuple(_CONFIGS)
RECURRENT_ARCHITECTURES: tuple[str, ...] = tuple(_RECURRENT)
# Those that the lean decoders know.
LEAN_ARCHITECTURES = (
    "llama", "llama_tied", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3", "smollm3", "olmo2", "starcoder2",
    "mixtral", "qwen3_moe", "qwen2_moe", "granite",
)  # fmt: skip
LEAN_RECURRENT = tuple(name for name in _RECURRENT if name not in ("zamba2", "jamba", "mamba", "falcon_mamba"))


def tiny_config(architecture: str, **changes: Any) -> Any:
    """The configuration of a tiny model.

    Args:
        architecture: One of `ARCHITECTURES` or `RECURRENT_ARCHITECTURES`.
        changes: Values that override it.
    """
    kind, special = (_CONFIGS | _RECURRENT)[architecture]
    return kind(**{**_SIZES, **_IDS, **special, **changes})


def tiny_model(architecture: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random transformers causal LM in evaluation mode; the same seed gives the same weights.

    Args:
        architecture: One of `ARCHITECTURES`.
        seed: Of the weights.
        dtype: Of the weights; they are drawn in float32 and rounded.
        changes: Configuration values that override the tiny ones.
    """
    return random_model(tiny_config(architecture, **changes), seed=seed, dtype=dtype)


def random_model(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A random causal LM of any configuration, with every one-dimensional parameter moved off its neutral value."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = hf.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
            for name, buffer in module.named_buffers():
                if name.endswith(("expert_bias", "score_correction_bias")):
                    buffer.add_(torch.randn_like(buffer), alpha=0.2)
    return module.to(dtype).eval()

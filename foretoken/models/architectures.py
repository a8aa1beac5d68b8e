"""The architectures that lean decoders know, by the names of their classes in transformers. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanArchitecture:
    """How an architecture differs from Llama.

    Attributes:
        norms: Names of a layer's norms before and after attention, before and after the feed-forward layer; None
            without a norm.
        norm_offset: Added to a norm's weight.
        activation: The configuration's entry that names the activation.
        window: Source of the sliding window: "none", "config" (one for all layers), or "layer"
            (`self_attn.sliding_window`).
        softcap: Whether the configuration caps attention scores.
    """

    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm", None, "post_attention_layernorm", None,
    )  # fmt: skip
    norm_offset: float = 0.0
    activation: str = "hidden_act"
    window: str = "none"
    softcap: bool = False


_SANDWICH = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
LEAN_ARCHITECTURES = {
    "LlamaForCausalLM": LeanArchitecture(),
    "MistralForCausalLM": LeanArchitecture(window="config"),
    "MixtralForCausalLM": LeanArchitecture(window="config"),
    "Qwen2ForCausalLM": LeanArchitecture(window="layer"),
    "Qwen3ForCausalLM": LeanArchitecture(window="layer"),
    "Qwen3MoeForCausalLM": LeanArchitecture(window="layer"),
    "Phi3ForCausalLM": LeanArchitecture(window="config"),
    "SmolLM3ForCausalLM": LeanArchitecture(window="layer"),
    "Olmo2ForCausalLM": LeanArchitecture(norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm")),
    "Olmo3ForCausalLM": LeanArchitecture(
        norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"), window="layer"
    ),
    "Gemma2ForCausalLM": LeanArchitecture(
        norms=_SANDWICH, norm_offset=1.0, activation="hidden_activation", window="layer", softcap=True
    ),
    "Gemma3ForCausalLM": LeanArchitecture(
        norms=_SANDWICH, norm_offset=1.0, activation="hidden_activation", window="layer"
    ),
    "Starcoder2ForCausalLM": LeanArchitecture(window="config"),
}


def is_lean(name: str) -> bool:
    """Decides whether a lean decoder knows an architecture, by its class in transformers or its name in GGUF files."""
    ending = "ForCausalLM"
    return name in LEAN_ARCHITECTURES or f"{name}{ending}".lower() in map(str.lower, LEAN_ARCHITECTURES)

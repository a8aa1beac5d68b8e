"""Tiny EAGLE heads, and their files under the names of their authors, written by hand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_heads import E, V, write_files
from torch import Tensor

from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.eagle import EagleConfig
from foretoken.heads.eagle3 import Eagle3Config

VD, INNER, LAYERS = 5, 6, 12
LAYER = LayerConfig(
    num_attention_heads=2, num_key_value_heads=1, head_dim=4, intermediate_size=INNER, rms_norm_eps=1e-5
)
TARGET = SimpleNamespace(num_hidden_layers=LAYERS, max_position_embeddings=64, architectures=["LlamaForCausalLM"])
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": E,
    "intermediate_size": INNER,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": V,
}


def layer(name: str, read: int, *, bias: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama's layer whose attention reads so many numbers, the norms before it left out."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.self_attn.q_proj.weight": (8, read),
        f"{name}.self_attn.k_proj.weight": (4, read),
        f"{name}.self_attn.v_proj.weight": (4, read),
        f"{name}.self_attn.o_proj.weight": (E, 8),
        f"{name}.mlp.gate_proj.weight": (INNER, E),
        f"{name}.mlp.up_proj.weight": (INNER, E),
        f"{name}.mlp.down_proj.weight": (E, INNER),
        f"{name}.post_attention_layernorm.weight": (E,),
    }
    if bias:
        shapes |= {f"{name}.self_attn.{part}_proj.bias": ({"q": 8}.get(part, 4),) for part in "qkv"}
    return shapes


EAGLE = {"embed_tokens.weight": (V, E), "fc.weight": (E, 2 * E), "fc.bias": (E,)} | layer("layers.0", E)


def eagle3_shapes(name: str = "midlayer", *, taps: int = 3, target: int = E) -> dict[str, tuple[int, ...]]:
    """Shapes of an EAGLE-3 head, the map of drafted tokens left out; name: of its block."""
    return {
        "fc.weight": (E, taps * target),
        f"{name}.input_layernorm.weight": (E,),
        f"{name}.hidden_norm.weight": (E,),
        **layer(name, 2 * E),
        "norm.weight": (E,),
        "lm_head.weight": (VD, E),
    }


TOKENS = [1, 2, 5, 9, 12]
OFFSETS = torch.tensor([1, 1, 3, 6, 8])
IS_DRAFTED = torch.zeros(V, dtype=torch.bool).index_fill_(0, torch.tensor(TOKENS), True)


def write_eagle3(
    directory: Path, shapes: dict[str, tuple[int, ...]], config: Any, **more: Tensor | None
) -> dict[str, Tensor]:
    """An EAGLE-3 file by hand, with its map; more: other tensors in the place of some, None for no such tensor."""
    write_files(directory, shapes, config)
    tensors = load_file(directory / "model.safetensors") | {"d2t": OFFSETS, "t2d": IS_DRAFTED}
    for key, tensor in more.items():
        tensors.pop(key) if tensor is None else tensors.update({key: tensor})
    save_file(tensors, directory / "model.safetensors")
    return tensors


def restate(directory: Path, **changes: Any) -> None:
    """Changes keys of a `config.json`; None takes one away."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def eagle(**changes: Any) -> EagleConfig:
    return EagleConfig(**{"hidden_size": E, "vocab_size": V, "layer": LAYER, "has_bias": True, **changes})


def eagle3(**changes: Any) -> Eagle3Config:
    sizes = {"hidden_size": E, "vocab_size": V, "boundaries": (2, 6, 9), "layer": LAYER, "draft_vocab_size": VD}
    return Eagle3Config(**{**sizes, **changes})

"""Writes a Hugging Face Llama directory as a GGUF file for llama.cpp, in the precision asked for.

The file has no vocabulary: prompts come as token ids. Norms are float32, as llama.cpp wants them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_TYPES = {"bfloat16": gguf.GGMLQuantizationType.BF16, "float32": gguf.GGMLQuantizationType.F32}
_NUMPY_TYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model: Path, out: Path, dtype: str) -> None:
    """Converts a Llama.

    Args:
        model: Directory with `config.json` and safetensors.
        out: File to write.
        dtype: "bfloat16" or "float32", of the matrices.

    Raises:
        ValueError: When the model is no plain Llama.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"'{model.name}' is a {config['model_type']} model. Expected llama; convert it by hand.")
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise ValueError(f"'{model.name}' scales its rotary embedding. Expected the default kind; convert it by hand.")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    temporary = out.with_suffix(".tmp")
    writer = gguf.GGUFWriter(temporary, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", config.get("rope_theta", 10000.0))))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    rotated_heads = {"q_proj.weight": heads, "k_proj.weight": kv_heads}
    for name, weight in read_safetensors(model):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        rotated = next((n for suffix, n in rotated_heads.items() if name.endswith(suffix)), None)
        array = weight if rotated is None else interleave_rotary_halves(weight, rotated)
        kind = _TYPES[dtype] if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.replace(out)


def read_safetensors(model: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of a directory as float32; numpy has no bfloat16, so the bits are widened here."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            header_len = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_len))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                file.seek(8 + header_len + begin)
                array = np.frombuffer(file.read(end - begin), dtype=_NUMPY_TYPES[entry["dtype"]])
                if entry["dtype"] == "BF16":
                    array = (array.astype(np.uint32) << 16).view(np.float32)
                yield name, array.astype(np.float32).reshape(entry["shape"])


def interleave_rotary_halves(weight: Any, heads: int) -> Any:
    """Rows of a query or key projection in llama.cpp's order.

    transformers rotates row i of a head together with row i + Dh/2, llama.cpp rotates rows 2i and 2i + 1.

    Args:
        weight: (heads * Dh, D).
        heads: Heads that the rows belong to.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _gguf_name(name: str) -> str:
    """A weight's name in llama.cpp's words."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"

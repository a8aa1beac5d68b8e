"""Writes a random-weight Llama to measure on; its passes cost what a trained one's cost.

The tokenizer of the bundled model comes with it, because OpenVINO GenAI loads no model without one. There is no
end-of-sequence token, so nothing stops early. Embeddings are not tied: a tied random model repeats its input.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

_TOKENIZER_FROM = Path(__file__).resolve().parents[2] / "models" / "tinycode"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_VOCAB_SIZE = 6144  # of that tokenizer
_HEAD_DIM = 64


def write_random_model(
    out: Path, *, layers: int, hidden: int, intermediate: int | None = None, seed: int = 0, context_len: int = 2048
) -> None:
    """Writes a Hugging Face directory with bfloat16 weights; float32 measurements load the same values.

    Args:
        out: Directory to write.
        layers: Decoder layers.
        hidden: Hidden size, a multiple of 64: heads are 64 wide, and pairs of them share keys and values.
        intermediate: Inner size of the MLP; 2.75 times the hidden size when None.
        seed: Of the weights, normal with standard deviation 0.02.
        context_len: Positions.

    Raises:
        ValueError: When the hidden size does not fit.
    """
    if hidden % _HEAD_DIM:
        raise ValueError(f"--hidden is {hidden}. Expected a multiple of {_HEAD_DIM}.")
    heads = hidden // _HEAD_DIM
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate or hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=_HEAD_DIM,
        max_position_embeddings=context_len,
        initializer_range=0.02,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        architectures=["LlamaForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.bfloat16)
    module.generation_config = GenerationConfig()
    module.save_pretrained(out)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(_TOKENIZER_FROM / name, out / name)

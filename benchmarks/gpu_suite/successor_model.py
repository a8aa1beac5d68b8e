"""A random Llama whose greedy text is known beforehand: after token t comes t + 1.

Its layers are random and cost what trained ones cost. Its embeddings are so long that they outweigh what the layers
add, and its LM head knows each token's successor by its embedding. Every choice is then clear by far, whatever rounding
does in passes of different widths, so a script of accepted drafts is kept to the letter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

# The layers of the large shape together add about 10 to each number. In bfloat16 the less they weigh, the less do
# passes of two runners differ: at 32 layers 1.3 % of the logits here, 2.7 % with 8.0 and 4.6 % with 2.0.
_EMBEDDING_STD = 32.0
_HEAD_STD = 0.02


def eight_billion(context_len: int) -> LlamaConfig:
    """The shape of Llama 3.1 8B."""
    return _config(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        vocab_size=128256, max_position_embeddings=context_len,
    )  # fmt: skip


def toy(context_len: int) -> LlamaConfig:
    """A shape for rehearsals."""
    return _config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=512, max_position_embeddings=context_len,
    )  # fmt: skip


def _config(**sizes: Any) -> LlamaConfig:
    """A Llama without special tokens, so that nothing ends a text."""
    return LlamaConfig(
        **sizes, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def successor_model(config: LlamaConfig, *, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """Makes the model where it will run; no file is read or written.

    Args:
        config: Its shape.
        dtype: Of the weights.
        device: Where they are made.
        seed: Of the weights.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    module.eval().requires_grad_(requires_grad=False)
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    embedding.normal_(std=_EMBEDDING_STD)
    head.copy_(embedding.roll(1, 0) * (_HEAD_STD / _EMBEDDING_STD))
    module.generation_config = GenerationConfig(pad_token_id=0)
    return module


def text_after(token: int, count: int, vocab_size: int) -> list[int]:
    """The model's greedy text after a token."""
    return [(token + 1 + i) % vocab_size for i in range(count)]


def read_bytes(module: Any) -> int:
    """Bytes of weights that a pass over one token reads: all but the other tokens' embeddings."""
    total = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    embedding = module.get_input_embeddings().weight
    return int(total - embedding.numel() * embedding.element_size())


def prompt_ids(length: int, vocab_size: int) -> Sequence[int]:
    """A prompt that the model itself might have written."""
    return text_after(vocab_size // 2, length, vocab_size)

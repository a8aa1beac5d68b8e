"""Models that cannot be rolled back, or do not attend through the plug-in, are refused by name and reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from tiny_models import random_model

from foretoken.core.errors import ModelError
from foretoken.models.config import check_architecture
from foretoken.models.loading import load_model, wrap_model
from foretoken.runner.runner import Runner

_SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GATED = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 96}

# They warn, or do not even warn, that they have no use for the plug-in.
IGNORE_THE_PLUGIN: dict[str, Callable[[], Any]] = {
    "falcon with alibi": lambda: hf.FalconConfig(**_SIZES, max_position_embeddings=96, alibi=True),
    "bloom": lambda: hf.BloomConfig(vocab_size=67, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
    "mpt": lambda: hf.MptConfig(vocab_size=67, d_model=32, n_layers=2, n_heads=4, max_seq_len=96),
    "xglm": lambda: hf.XGLMConfig(
        vocab_size=67, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, max_position_embeddings=96
    ),
    "openai gpt": lambda: hf.OpenAIGPTConfig(vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=96),
    "roformer": lambda: hf.RoFormerConfig(**_SIZES, intermediate_size=48, embedding_size=32, is_decoder=True),
}
RECURRENT: dict[str, Callable[[], Any]] = {
    "recurrent_gemma": lambda: hf.RecurrentGemmaConfig(**_GATED, lru_width=32, attention_window_size=8),
    "minimax": lambda: hf.MiniMaxConfig(
        **_GATED, head_dim=8, num_local_experts=2, num_experts_per_tok=1, layer_types=["linear_attention"] * 2
    ),
}


def run(config: Any, num_slots: int) -> Runner:
    return Runner(wrap_model(random_model(config), name="tiny"), num_slots=num_slots, max_nodes=12)


@pytest.mark.parametrize("num_slots", [1, 3])  # with one slot shapes fit by chance, and the logits are wrong
@pytest.mark.parametrize("architecture", IGNORE_THE_PLUGIN)
def test_ignoring_the_plugin(architecture: str, num_slots: int) -> None:
    with pytest.raises(ModelError, match=r"ignores the attention plug-in.* It cannot be used as a target\.$"):
        run(IGNORE_THE_PLUGIN[architecture](), num_slots)


@pytest.mark.parametrize("architecture", IGNORE_THE_PLUGIN)
def test_ignoring_the_plugin_is_no_fault_of_the_files(architecture: str, tmp_path: Path) -> None:
    random_model(IGNORE_THE_PLUGIN[architecture]()).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"\(\w+\) ignores the attention plug-in: transformers computes"):
        load_model(tmp_path)


def test_no_kv_cache() -> None:
    """BERT that reads both ways."""
    config = hf.BertConfig(**{**_SIZES, "pad_token_id": 0}, intermediate_size=48)
    with pytest.raises(ModelError, match=r"keeps no keys and values between passes.* Expected a causal LM"):
        run(config, 1)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_recurrent_state(architecture: str) -> None:
    config = RECURRENT[architecture]()
    match = r"has layers of kind linear_attention.*, whose state foretoken cannot keep .* or one of bamba, falcon_h1"
    with pytest.raises(ModelError, match=match):
        check_architecture(config, "tiny")
    with pytest.raises(ModelError, match=match):
        wrap_model(random_model(config), name="tiny")


def test_recurrent_state_that_only_the_module_admits() -> None:
    config = hf.RwkvConfig(vocab_size=67, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    check_architecture(config, "tiny")  # nothing in the configuration says so
    with pytest.raises(
        ModelError, match=r"'tiny' \(RwkvConfig\) has recurrent layers, whose state foretoken cannot keep"
    ):
        wrap_model(random_model(config), name="tiny")


def test_encoder_decoder() -> None:
    config = hf.T5Config(vocab_size=67, d_model=32, num_layers=2, num_heads=4, d_ff=48)
    with pytest.raises(ModelError, match=r"'tiny' is an encoder-decoder model\. Expected a decoder-only causal LM"):
        check_architecture(config, "tiny")


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (lambda: hf.Llama4TextConfig(**_GATED, head_dim=8, num_local_experts=2), "chunked_attention"),
        (lambda: hf.LlamaConfig(**_GATED, layer_types=["chunked_attention"] * 2), "chunked_attention"),
        (lambda: hf.LlamaConfig(**_GATED, layer_types=["conv", "indexed_attention"]), "conv, indexed_attention"),
    ],
    ids=["llama 4", "chunks in a known architecture", "two kinds"],
)
def test_other_kinds_of_layers(config: Callable[[], Any], kinds: str) -> None:
    with pytest.raises(ModelError, match=rf"has layers of kind {kinds}, whose state foretoken cannot keep"):
        check_architecture(config(), "tiny")


def test_layers_that_share_keys_and_values() -> None:
    config = hf.Gemma3nTextConfig(
        **{**_GATED, "num_hidden_layers": 4, "intermediate_size": [48] * 4, "pad_token_id": 0},
        head_dim=8,
        sliding_window=6,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=67,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    with pytest.raises(ModelError, match="layer 2 of Gemma3nForCausalLM keeps DummyLayer, neither keys and values nor"):
        run(config, 1)


def test_a_model_without_blocks() -> None:
    with pytest.raises(ModelError, match=r"num_hidden_layers in the configuration of 'tiny' is 0\. Expected a whole"):
        run(hf.LlamaConfig(**{**_GATED, "num_hidden_layers": 0}), 1)

"""Facts about heads of our own format: read without torch they are the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_eagles import eagle, eagle3
from tiny_heads import E, V, hydra, medusa, random_head

from foretoken.core.errors import ModelError
from foretoken.formats import native
from foretoken.formats.describe import describe_head, native_facts
from foretoken.formats.registry import read_head
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig

PREFIX = LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=2, intermediate_size=12)
CONFIGS: list[Any] = [
    medusa(draft_vocab_size=7),
    medusa(own_lm_head=False, has_bias=False, tied_blocks=True, num_layers=2),
    hydra(own_lm_head=False, num_heads=3, prefix=PREFIX),
    hydra(num_layers=4),
    MlpSpeculatorConfig(hidden_size=E, vocab_size=V, inner_dim=6),
    MlpSpeculatorConfig(hidden_size=E, vocab_size=V, inner_dim=6, tie_weights=False),
    eagle(),
    eagle3(fc_norms=True, feeds_normed=True),
    eagle3(draft_hidden_size=6, own_embedding=True, draft_vocab_size=None),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
@pytest.mark.parametrize("more", [{}, {"acceptance": [[0.5, 0.25]], "choices": [[0], [0, 0]], "notes": {"a": 1}}])
def test_facts_without_torch_are_the_same(config: Any, more: dict[str, Any], tmp_path: Path) -> None:
    native.write_checkpoint(random_head(config, dtype=torch.bfloat16, **more), tmp_path)
    assert native_facts(tmp_path) == json.loads(json.dumps(describe_head(*read_head(tmp_path))))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"foretoken_head": "medusa"}', '{"foretoken_head": "os", "config": {}}', "[" * 100_000],
)
def test_what_is_no_head_of_ours_is_left_to_others(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert native_facts(tmp_path) is None
    assert native_facts(tmp_path / "none") is None


@pytest.mark.parametrize(
    "change", [{"foretoken_head": "dflash"}, {"config": 7}, {"target": [1]}, {"acceptance": 3}, {"choices": 3}], ids=str
)
def test_nonsense_is_left_to_the_full_reading(change: dict[str, Any], tmp_path: Path) -> None:
    native.write_checkpoint(random_head(CONFIGS[0]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    assert native_facts(tmp_path) is None


def test_damaged_weights_are_an_error(tmp_path: Path) -> None:
    native.write_checkpoint(random_head(CONFIGS[0]), tmp_path)
    weights = tmp_path / native.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(ModelError, match=r"model\.safetensors is missing or damaged"):
        native_facts(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing or damaged"):
        native_facts(tmp_path)

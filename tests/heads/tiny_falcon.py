"""A tiny Falcon head."""

from typing import Any

import torch
from heads.head_formulas import E, V, random_weights

from foretoken.heads.base import build_head
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.falcon import FalconConfig, FalconHead

LAYER = LayerConfig(
    num_attention_heads=4, num_key_value_heads=2, head_dim=4, intermediate_size=7, rms_norm_eps=1e-5, rope_theta=50.0
)


def falcon(**sizes: Any) -> FalconHead:
    """A head without a neutral weight."""
    block = sizes.get("block", 2)
    values = {"block": block, "num_steps": 3 * block, "layer": LAYER, **sizes}
    head = random_weights(build_head(FalconConfig(hidden_size=E, vocab_size=V, **values), dtype=torch.float64))
    assert isinstance(head, FalconHead)
    return head

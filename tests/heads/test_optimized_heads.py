"""Heads whose products run on native kernels, as they do when drafting on a CPU, against the same heads in torch."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from foretoken.core.passes import Pass
from foretoken.decoder.block_stack import BlockStack
from foretoken.decoder.native_linear import NativeLinear, fast_linear, linear_layer
from foretoken.heads.base import Head, HeadConfig, build_head
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.hydra import HydraConfig, HydraHeads
from foretoken.heads.medusa import MedusaConfig, MedusaHeads
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig
from foretoken.models.loading import wrap_model
from foretoken.models.parts import target_parts

pytestmark = pytest.mark.native

SIZES: dict[str, Any] = {"hidden_size": 32, "vocab_size": 61, "num_heads": 3}
PREFIX = LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=24)
HEADS: dict[str, HeadConfig] = {
    "medusa": MedusaConfig(**SIZES, num_layers=2),
    "medusa, own LM heads": MedusaConfig(**SIZES, own_lm_head=True),
    "medusa, part of the vocabulary": MedusaConfig(**SIZES, own_lm_head=True, draft_vocab_size=20),
    "hydra": HydraConfig(**SIZES, num_layers=3),
    "hydra, tied": HydraConfig(**SIZES, num_layers=3, tied_blocks=True),
    "hydra++, own LM heads": HydraConfig(**SIZES, num_layers=1, own_lm_head=True, prefix=PREFIX),
    "mlp_speculator": MlpSpeculatorConfig(**SIZES, inner_dim=24),
    "mlp_speculator, tied": MlpSpeculatorConfig(**SIZES, inner_dim=24, tie_weights=True),
}


def pair(name: str, *, fits_bfloat16: bool, quantization: Any = None) -> tuple[Head, Head]:
    """A random head, and the same one optimised for inference."""
    torch.manual_seed(0)
    head = build_head(HEADS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
            if fits_bfloat16:
                parameter.copy_(parameter.to(torch.bfloat16))
    head.requires_grad_(requires_grad=False).eval()
    quick = deepcopy(head)
    quick.optimize_for_inference(quantization)
    return head, quick


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("fits_bfloat16", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_the_same_logits(name: str, fits_bfloat16: bool, quantization: Any) -> None:
    target = wrap_model(tiny_model("llama"), name="tiny")
    parts = target_parts(target)
    head, quick = pair(name, fits_bfloat16=fits_bfloat16, quantization=quantization)
    torch.manual_seed(1)
    # A product in bfloat16 rounds what it reads, where the processor multiplies that; int8 has 7 bits for a weight.
    tolerance = 0.05 if fits_bfloat16 or quantization else 1e-4
    for batch, nodes in ((1, 1), (2, 5)):
        expected_state = found_state = torch.randn(batch, nodes, 32)
        for index in range(head.config.num_heads):
            tokens = torch.randint(61, (batch, nodes))
            expected_state, hidden = head.step(index, expected_state, tokens, parts)
            expected = head.logits(index, hidden, parts)
            found_state, hidden = quick.step(index, found_state, tokens, parts)
            found = quick.logits(index, hidden, parts)
            is_known = expected > float("-inf")
            assert torch.equal(found > float("-inf"), is_known)
            assert (found - expected)[is_known].abs().max() < tolerance * expected[is_known].abs().max()


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", [name for name in HEADS if name.startswith("medusa")])
def test_all_heads_of_medusa_at_once(name: str, quantization: Any) -> None:
    target = wrap_model(tiny_model("llama"), name="tiny")
    parts = target_parts(target)
    head, quick = pair(name, fits_bfloat16=False, quantization=quantization)
    assert isinstance(head, MedusaHeads)
    assert isinstance(quick, MedusaHeads)
    features = torch.randn(3, 32)
    for count in (1, 2, 3):
        expected, found = head.all_logits(features, parts, count), quick.all_logits(features, parts, count)
        is_known = expected > float("-inf")
        assert torch.equal(found > float("-inf"), is_known)
        tolerance = 1e-4 if quantization is None else 0.05
        assert (found - expected)[is_known].abs().max() < tolerance * expected[is_known].abs().max()


def test_hydras_first_blocks_are_one_product() -> None:
    _, quick = pair("hydra", fits_bfloat16=True)
    assert isinstance(quick, HydraHeads)
    assert all(isinstance(block.both, NativeLinear) for block in quick.first)


@pytest.mark.parametrize("fits_bfloat16", [False, True])
def test_the_block_of_hydra_is_halved_as_a_whole(fits_bfloat16: bool) -> None:
    """Where bfloat16 holds all of its weights; what it gives is the same up to that dtype's rounding."""
    head, quick = pair("hydra++, own LM heads", fits_bfloat16=fits_bfloat16)
    assert isinstance(head, HydraHeads)
    assert isinstance(quick, HydraHeads)
    assert head.prefix is not None
    assert quick.prefix is not None
    assert quick.prefix.norm.dtype == (torch.bfloat16 if fits_bfloat16 else torch.float32)
    features = torch.randn(9, 32)
    work = Pass.of_chains([[0] * 9], slots=[0], prefix_lens=[0])
    expected, found = (
        BlockStack(prefix.as_blocks(16), num_slots=1, capacity=16).run(features, work).float()
        for prefix in (head.prefix, quick.prefix)
    )
    tolerance = 0.03 if fits_bfloat16 else 0.0
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_weights_that_fit_are_halved() -> None:
    """A float32 weight is kept in bfloat16 only where that holds it exactly, and only where nobody else uses it."""
    weight = torch.randn(8, 16).to(torch.bfloat16).float()
    for changed, shared, expected in (
        (weight, False, torch.bfloat16),
        (weight, True, torch.float32),
        (weight + 2.0**-20, False, torch.float32),
    ):
        quick = fast_linear(linear_layer(changed), compacts=not shared)
        assert isinstance(quick, NativeLinear)
        assert quick._weight.dtype == expected

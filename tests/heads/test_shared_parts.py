"""What heads share with the target is what the target itself computes, in every architecture."""

from typing import Any

import pytest
import torch
from tiny_models import ARCHITECTURES, VOCAB_SIZE, tiny_model
from torch import Tensor

from foretoken.heads.medusa import MedusaConfig, MedusaHeads
from foretoken.models.generic import find_blocks, run_plain
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import wrap_model
from foretoken.models.parts import target_parts
from foretoken.training.teacher import Teacher

# Learned positions are added after the embedding, and Granite's factor is outside of its embedding module.
MORE_BEFORE_THE_FIRST_BLOCK = ("gpt2", "opt", "granite")
LAST_BIT = {"rtol": 3e-7, "atol": 3e-7}  # a division by Granite's scale is a product here
TEXT = torch.randint(3, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(1))


def loaded(architecture: str, **changes: Any) -> LoadedModel:
    return wrap_model(tiny_model(architecture, **changes), name=architecture)


def seen(target: LoadedModel) -> tuple[Tensor, Tensor, Tensor]:
    """What the first block gets, what the LM head gets, and the logits of an ordinary pass."""
    caught: dict[str, Tensor] = {}

    def at_block(module: Any, args: Any, kwargs: Any) -> None:
        caught["block"] = args[0] if args else kwargs["hidden_states"]

    def at_head(module: Any, args: Any) -> None:
        caught["head"] = args[0]

    head: Any = target.module.get_output_embeddings()  # type: ignore[operator]
    handles = [
        find_blocks(target.module, target.num_layers)[0].register_forward_pre_hook(at_block, with_kwargs=True),
        head.register_forward_pre_hook(at_head),
    ]
    try:
        logits = run_plain(target.module, TEXT).logits
    finally:
        for handle in handles:
            handle.remove()
    return caught["block"], caught["head"], logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lm_head_of_the_feature_is_the_logits(architecture: str) -> None:
    target = loaded(architecture)
    _, final, logits = seen(target)
    parts = target_parts(target)
    with torch.no_grad():
        torch.testing.assert_close(parts.lm_head(final), logits, **LAST_BIT)
        feature = Teacher(target).features(TEXT)
        assert not feature.requires_grad
        # The teacher may run another kernel than the ordinary pass: float32 rounding over three blocks.
        torch.testing.assert_close(feature, final, rtol=1e-4, atol=3e-5)
        torch.testing.assert_close(parts.lm_head(feature), logits, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in MORE_BEFORE_THE_FIRST_BLOCK])
def test_embedding_is_what_the_first_block_gets(architecture: str) -> None:
    target = loaded(architecture)
    with torch.no_grad():
        assert torch.equal(target_parts(target).embed(TEXT), seen(target)[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_copies_in_another_dtype_compute_the_same(architecture: str) -> None:
    target = loaded(architecture)
    own, copies = target_parts(target), target_parts(target, dtype=torch.float64)
    with torch.no_grad():
        _, final, _ = seen(target)
        found = copies.lm_head(final.double())
        assert found.dtype == copies.embed(TEXT).dtype == torch.float64
        torch.testing.assert_close(found, own.lm_head(final).double(), rtol=1e-5, atol=1e-5)  # float32's rounding
        torch.testing.assert_close(copies.embed(TEXT), own.embed(TEXT).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_new_medusa_heads_predict_as_the_target_does(architecture: str) -> None:
    target = loaded(architecture)
    parts = target_parts(target)
    head = MedusaHeads(MedusaConfig(hidden_size=32, vocab_size=VOCAB_SIZE, num_heads=2))
    head.initialize(parts)
    with torch.no_grad():
        _, final, logits = seen(target)
        for i, hidden in enumerate(head.teacher_forced(final, TEXT, parts)):
            torch.testing.assert_close(head.logits(i, hidden, parts), logits, **LAST_BIT)


def test_the_teacher_leaves_the_models_attention_as_it_was() -> None:
    target = loaded("llama")
    before = target.config._attn_implementation
    Teacher(target).features(TEXT)
    assert target.config._attn_implementation == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_training_a_head_gives_the_target_no_gradient(architecture: str, dtype: torch.dtype) -> None:
    """A gradient of the LM head's weight costs as much as the one that is wanted, and nobody reads it."""
    target = wrap_model(tiny_model(architecture).float().requires_grad_(), name=architecture)
    parts = target_parts(target, dtype=dtype)
    shift = torch.zeros(*TEXT.shape, target.config.hidden_size, dtype=dtype, requires_grad=True)
    parts.lm_head(parts.embed(TEXT) + shift).square().sum().backward()
    assert shift.grad is not None
    assert shift.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in target.module.parameters())

"""The decoder block of Hydra++ against a slow formula, against transformers' Llama, and fed piece by piece."""

import random
from typing import Any
from unittest import mock

import pytest
import torch
from head_formulas import SAME, E, numbers, prefix_layer
from heads.fed_prefix import GROUPS, Fed, block
from pairwise import slow_products
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaModel

from foretoken.drafters import head_features

pytestmark = pytest.mark.native


@pytest.mark.parametrize("theta", [10000.0, 50.0])
@pytest.mark.parametrize("name", GROUPS)
def test_formula(name: str, theta: float) -> None:
    layer = block(*GROUPS[name], theta=theta)
    features = numbers(2, 7, E, seed=9)
    found = layer(features)
    for b in range(2):
        torch.testing.assert_close(found[b], prefix_layer(layer.state_dict(), layer.config, features[b]), **SAME)


SCALINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip


@pytest.mark.parametrize(("name", "theta", "kind"), slow_products(list(GROUPS), [10000.0, 50.0], list(SCALINGS)))
def test_one_layer_of_llama(name: str, theta: float, kind: str) -> None:
    heads, groups = GROUPS[name]
    width = 12  # a multiple of the heads, as Llama demands, yet not heads times their size
    scaling = SCALINGS[kind]
    layer = block(heads, groups, width, theta, scaling)
    config = LlamaConfig(
        vocab_size=4, hidden_size=width, intermediate_size=10, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=groups, head_dim=8, rms_norm_eps=1e-5, attn_implementation="eager",
        rope_parameters={**(scaling or {"rope_type": "default"}), "rope_theta": theta},
    )  # fmt: skip
    model = LlamaModel(config).to(torch.float64).eval()
    names = {
        "layers.0.self_attn.": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "layers.0.mlp.": ("gate_proj", "up_proj", "down_proj"),
    }
    own = layer.state_dict()
    theirs = {f"{prefix}{part}.weight": own[f"{part}.weight"] for prefix, parts in names.items() for part in parts}
    theirs["layers.0.input_layernorm.weight"] = own["input_norm"]
    theirs["layers.0.post_attention_layernorm.weight"] = own["post_attention_norm"]
    theirs["norm.weight"] = own["norm"]
    missing, unexpected = model.load_state_dict(theirs, strict=False)
    assert (missing, unexpected) == (["embed_tokens.weight"], [])
    features = numbers(2, 11, width, seed=9)
    with torch.no_grad():
        expected = model(inputs_embeds=features, use_cache=False).last_hidden_state
    # Llama's norms, rotations and softmax are float32 whatever the weights are.
    torch.testing.assert_close(layer(features), expected, rtol=2e-6, atol=2e-6)
    if scaling is not None:
        plain = block(heads, groups, width, theta)(features)
        assert (plain - expected).abs().max() > 1e-3, "the scaling matters here"


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": "much"},
        {"rope_type": "linear", "factor": float("nan")},
        {"rope_type": "yarn", "factor": 2.0},
        {"factor": 2.0},
        {"rope_type": ["linear"], "factor": 2.0},
    ],
)
def test_scalings_that_make_no_sense(scaling: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        block(scaling=scaling)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["torch", "native kernels"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """What the block is fed in, which decides what runs it."""
    kind: torch.dtype = request.param
    return kind


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(("chunk", "kind"), [(1, "yarn"), (2, "plain"), (3, "linear"), (4, "llama3"), (5, "plain")])
def test_chunks_of_one_size(chunk: int, kind: str, name: str, dtype: torch.dtype) -> None:
    fed = Fed(block(*GROUPS[name], scaling=SCALINGS[kind]), dtype)
    fed.begin(0, seed=1, size=25)
    for _ in range(25 // chunk):
        fed.commit({0: chunk})
        fed.check([0])


@pytest.mark.parametrize("prompt", [1, 31, 32, 33, 40, 80])
def test_prompt_before_chunks(prompt: int, dtype: torch.dtype) -> None:
    """Prompts on both sides of what is fed beside other slots, and of the size of a chunk."""
    fed = Fed(block(), dtype)
    with mock.patch.object(head_features, "CHUNK", 16):
        for slot in (0, 1):
            fed.begin(slot, seed=slot)
        fed.commit({0: prompt, 1: 3})
        fed.check([1, 0])
        fed.commit({0: 4, 1: 2})
        fed.check([0, 1])


@pytest.mark.parametrize("seed", range(6))
def test_ragged_slots_that_come_and_go(seed: int, dtype: torch.dtype) -> None:
    """Any interleaving of commits, proposals over some slots and new sequences; NaN in whatever is not committed."""
    dice = random.Random(seed)
    fed = Fed(block(), dtype)
    for slot in range(3):
        fed.begin(slot, seed=10 * seed + slot)
    for turn in range(40):
        slots = dice.sample(range(3), dice.randint(1, 3))
        counts = {}
        for slot in slots:
            if fed.length[slot] > 60 or dice.random() < 0.1:
                if dice.random() < 0.5:  # the engine may also begin a slot anew without another word
                    fed.features.begin(slot, None)
                fed.begin(slot, seed=1000 * seed + 10 * turn + slot)
            is_prompt = fed.length[slot] == 0
            counts[slot] = dice.randint(1, 50 if is_prompt else 5)
        fed.commit(counts)
        known = [slot for slot in range(3) if fed.length[slot]]
        if dice.random() < 0.7:
            fed.check(dice.sample(known, dice.randint(1, len(known))))


@pytest.mark.parametrize(("length", "waiting", "source"), slow_products([1, 8, 19, 20, 22, 59, 60], [0, 3, 40], [0, 1]))
def test_a_text_that_begins_as_another_ones(length: int, waiting: int, source: int, dtype: torch.dtype) -> None:
    """In the other one's slot or beside it, with rows that were fed and features that wait."""
    fed = Fed(block(), dtype)
    fed.begin(source, seed=1)
    fed.commit({source: 20})
    fed.check([source])
    if waiting:
        fed.commit({source: waiting})
    kept = fed.begin_alike(0, source, length, seed=2)
    assert kept == min(length, 20 + waiting)
    fed.commit({0: 4})
    fed.check([0])
    fed.commit({0: 1})
    fed.check([0] if source == 0 else [0, 1])


def test_what_follows_a_prefix_that_was_fed_as_a_whole_is_known_with_the_next_position(dtype: torch.dtype) -> None:
    fed = Fed(block(), dtype)
    fed.begin(1, seed=1)
    fed.commit({1: 20})
    fed.check([1])
    fed.begin_alike(0, 1, 12, seed=2)
    assert not fed.features.is_known(0, 12)
    fed.commit({0: 1})
    fed.check([0])


def test_a_slot_used_again_equals_a_fresh_one(dtype: torch.dtype) -> None:
    used, fresh = Fed(block(), dtype), Fed(block(), dtype)
    used.begin(0, seed=1)
    used.commit({0: 60})
    used.check([0])
    used.features.begin(0, None)
    assert not used.features.is_known(0, 60)
    for fed in (used, fresh):
        fed.begin(0, seed=2)
        fed.commit({0: 7})
    assert torch.equal(used.features.of([0], [[0] * 8]), fresh.features.of([0], [[0] * 8]))


def test_a_slot_that_missed_a_part_is_not_drafted_for(dtype: torch.dtype) -> None:
    fed = Fed(block(), dtype)
    fed.begin(0, seed=1)
    fed.commit({0: 5})
    fed.length[0] += 2  # positions that the drafter was never told of
    fed.commit({0: 3})
    assert not fed.features.is_known(0, 10)
    assert not fed.features.is_known(0, 8)
    assert not fed.features.is_known(1, 0)


def test_a_full_slot(dtype: torch.dtype) -> None:
    """The last positions of the context, beside a slot that pads them further."""
    fed = Fed(block(), dtype, context_len=40)
    fed.begin(0, seed=1)
    fed.begin(1, seed=2)
    fed.commit({0: 38})
    fed.check([0])
    fed.commit({0: 2, 1: 32})
    fed.check([0, 1])

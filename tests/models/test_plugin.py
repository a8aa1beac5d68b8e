"""What the function that transformers calls makes of its arguments, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foretoken.attention.layout import AttentionLayout, reference_attention
from foretoken.core.errors import ModelError
from foretoken.core.passes import Pass
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.models.forward_pass import ATTENTION_NAME, ForwardPass, current_pass, running
from foretoken.models.plugin import as_transformers_cache

HEADS, WIDTH, LENGTH = 2, 4, 5


def attend(module: dict[str, Any], **arguments: Any) -> tuple[torch.Tensor, ForwardPass]:
    """A prompt of five tokens through the registered function, with scores large enough to tell scales apart."""
    generator = torch.Generator().manual_seed(0)
    states = 2 * torch.randn(3, 1, HEADS, LENGTH, WIDTH, generator=generator)
    layout = AttentionLayout(Pass.of_chains([[0] * LENGTH], slots=[0], prefix_lens=[0]))
    with running(ForwardPass(layout=layout)) as forward_pass:
        function = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]
        output, weights = function(
            SimpleNamespace(**module), *states, arguments.pop("attention_mask", None), **arguments
        )
    assert weights is None
    return output[0], forward_pass


def expected(*, scale: float, window: int | None = None, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    query, key, value = 2 * torch.randn(3, HEADS, LENGTH, WIDTH, generator=generator)
    back = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
    mask = (back >= 0) & (back < (window or LENGTH))
    return reference_attention(query, key, value, mask, scale=scale, **options).transpose(0, 1)


@pytest.mark.parametrize(
    ("module", "arguments", "window"),
    [
        ({}, {}, None),
        ({"sliding_window": 3}, {}, 3),  # held by the layer only
        ({}, {"sliding_window": 3}, 3),
        ({"sliding_window": 2}, {"sliding_window": 3}, 3),
        ({"sliding_window": 2}, {"sliding_window": None}, None),  # a full layer of a model that slides elsewhere
    ],
)
def test_window(module: dict[str, Any], arguments: dict[str, Any], window: int | None) -> None:
    output, forward_pass = attend({"layer_idx": 7, **module}, **arguments)
    torch.testing.assert_close(output, expected(scale=0.5, window=window))  # 0.5 is 1 / sqrt(4), the default
    assert forward_pass.windows == {7: window}


def test_scale_cap_and_sinks() -> None:
    sinks = torch.tensor([0.5, -1.0])
    output, _ = attend({}, scaling=0.3, softcap=2.0, s_aux=sinks)
    torch.testing.assert_close(output, expected(scale=0.3, softcap=2.0, sinks=sinks))


def test_layers_without_an_index_are_counted() -> None:
    layout = AttentionLayout(Pass.of_chains([[0]], slots=[0], prefix_lens=[0]))
    one = torch.ones(1, 1, 1, 1)
    with running(ForwardPass(layout=layout)) as forward_pass:
        for _ in range(3):
            ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME](SimpleNamespace(sliding_window=9), one, one, one, None)
    assert forward_pass.windows == {0: 9, 1: 9, 2: 9}


@pytest.mark.parametrize("name", ["attention_mask", "position_bias", "block_indices"])
def test_what_a_tree_would_lose_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=rf"hands {name} to attention, which foretoken cannot apply to a token tree"):
        attend({}, **{name: torch.zeros(1, 1, LENGTH, LENGTH)})


def test_what_models_merely_hand_on_is_not() -> None:
    output, _ = attend({}, position_ids=torch.arange(LENGTH), dropout=0.0, is_causal=True, use_cache=True, indices=None)
    torch.testing.assert_close(output, expected(scale=0.5))


def test_passes_nest_and_end() -> None:
    layout = AttentionLayout(Pass.of_chains([[0]], slots=[0], prefix_lens=[0]))
    assert current_pass() is None
    with running(ForwardPass(layout=layout)) as outer:
        with running(ForwardPass(layout=layout)) as inner:
            assert current_pass() is inner
        assert current_pass() is outer
        with pytest.raises(ZeroDivisionError), running(ForwardPass(layout=layout)):
            raise ZeroDivisionError
        assert current_pass() is outer
    assert current_pass() is None


def test_the_cache_is_written_only_inside_a_pass() -> None:
    store = SlotCache([LayerShape(1, 1, 1)], num_slots=1, capacity=4, dtype=torch.float32, device=torch.device("cpu"))
    cache = as_transformers_cache(store)
    one = torch.ones(1, 1, 1, 1)
    with pytest.raises(AssertionError, match="only inside a pass"):
        cache.update(one, one, 0)
    layout = AttentionLayout(Pass.of_chains([[0]], slots=[0], prefix_lens=[2]))
    with running(ForwardPass(layout=layout)):
        keys, values = cache.update(one, -one, 0)
    assert keys.flatten().tolist() == [0, 0, 1, 0]
    assert values.flatten().tolist() == [0, 0, -1, 0]

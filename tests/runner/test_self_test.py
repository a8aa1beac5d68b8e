"""The proof at load can fail: broken attention, lost windows and damaged weights are refused, each in a sentence."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from plain_model import FLOAT32_TOLERANCE, PlainModel, relative_error
from tiny_models import WINDOW, random_model, tiny_model
from torch import Tensor
from transformers import DogeConfig, PhimoeConfig

from foretoken.attention.layout import AttentionLayout, tree_attention
from foretoken.core.errors import ModelError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree
from foretoken.decoder.slot_cache import SlotCache
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner

_SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def run(module: Any, num_slots: int = 2) -> Runner:
    return Runner(wrap_model(module, name="tiny"), num_slots=num_slots, max_nodes=12, runner="generic")


def changed(layout: AttentionLayout, **changes: Any) -> AttentionLayout:
    """The layout of another pass than the one that runs."""
    return AttentionLayout(replace(layout._work, **changes))


def causal_over_rows(query: Tensor, keys: Tensor, values: Tensor, layout: AttentionLayout, **options: Any) -> Tensor:
    """Attention that takes a tree for a chain."""
    return tree_attention(query, keys, values, changed(layout, is_causal=True), **options)


def every_row(query: Tensor, keys: Tensor, values: Tensor, layout: AttentionLayout, **options: Any) -> Tensor:
    """Attention that has lost its mask."""
    everything = AttentionLayout(layout._work)
    for row in range(len(layout.slots)):
        everything._masks[row, options.get("window")] = None
    return tree_attention(query, keys, values, everything, **options)


def other_slot(query: Tensor, keys: Tensor, values: Tensor, layout: AttentionLayout, **options: Any) -> Tensor:
    """Attention that reads its neighbour's rows."""
    return tree_attention(query, keys.roll(1, 0), values.roll(1, 0), layout, **options)


@pytest.mark.parametrize(
    ("architecture", "broken", "dtype"),
    [
        ("llama", causal_over_rows, torch.float32),
        ("llama", every_row, torch.bfloat16),
        ("llama", other_slot, torch.float64),
        ("gpt2", causal_over_rows, torch.bfloat16),
        ("gpt2", every_row, torch.float64),
        ("gpt2", other_slot, torch.float32),
    ],
)
def test_broken_attention_is_refused(
    architecture: str, broken: Callable[..., Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny_model(architecture, dtype=dtype)
    run(module)  # whole, it is accepted
    monkeypatch.setattr("foretoken.models.plugin.tree_attention", broken)
    with pytest.raises(ModelError, match=r"gives wrong logits for a token tree .* It cannot be used as a target\."):
        run(module)


def first_sequence_twice(
    query: Tensor, keys: Tensor, values: Tensor, layout: AttentionLayout, **options: Any
) -> Tensor:
    """Attention that is right for one sequence and takes the second for the first."""
    output = tree_attention(query, keys, values, layout, **options)
    first = output[layout.tokens_of(0)]
    return first[torch.arange(len(output)) % len(first)]


def same_length(query: Tensor, keys: Tensor, values: Tensor, layout: AttentionLayout, **options: Any) -> Tensor:
    """Attention that takes the first prefix for everybody's."""
    prefix_lens = [layout._work.prefix_lens[0]] * len(layout.slots)
    return tree_attention(query, keys, values, changed(layout, prefix_lens=prefix_lens), **options)


def same_tree(query: Tensor, keys: Tensor, values: Tensor, layout: AttentionLayout, **options: Any) -> Tensor:
    """Attention that takes the first tree for everybody's."""
    if layout._work.is_causal:
        return tree_attention(query, keys, values, layout, **options)
    parents, first = layout._work.parents, layout._work.parents[layout.tokens_of(0)]
    even = first[torch.cat([torch.arange(count) for count in tokens_of_each(layout)])]
    return tree_attention(query, keys, values, changed(layout, parents=even[: len(parents)]), **options)


def tokens_of_each(layout: AttentionLayout) -> list[int]:
    return [end - start for start, end in pairwise(layout._work.offsets)]


def in_order(query: Tensor, keys: Tensor, values: Tensor, layout: AttentionLayout, **options: Any) -> Tensor:
    """Attention that takes the slots in order."""
    return tree_attention(query, keys, values, changed(layout, slots=sorted(layout.slots)), **options)


@pytest.mark.parametrize("broken", [first_sequence_twice, same_length, same_tree, in_order])
def test_attention_that_is_right_for_one_sequence_only_is_refused(
    broken: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.models.plugin.tree_attention", broken)
    run(tiny_model("llama"), num_slots=1)  # a single sequence shows nothing, and is all that a single slot ever sees
    with pytest.raises(ModelError, match="gives wrong logits for a token tree"):
        run(tiny_model("llama"), num_slots=2)


def test_what_a_batch_makes_a_model_raise_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_only(query: Tensor, keys: Tensor, values: Tensor, layout: AttentionLayout, **options: Any) -> Tensor:
        if len(layout.slots) > 1:
            raise RuntimeError("view size is not compatible\nwith input tensor's size")
        return tree_attention(query, keys, values, layout, **options)

    monkeypatch.setattr("foretoken.models.plugin.tree_attention", one_only)
    match = r"^LlamaForCausalLM cannot run a batch of token trees \(view size is not compatible\)\. It cannot be used"
    with pytest.raises(ModelError, match=match):
        run(tiny_model("llama"))


def test_a_context_too_short_for_any_tree() -> None:
    with pytest.raises(ModelError, match=r"the context of 'tiny' is 3 tokens\. Expected at least 4"):
        run(tiny_model("llama", max_position_embeddings=3))
    assert run(tiny_model("llama", max_position_embeddings=4)).context_len == 4
    assert run(tiny_model("gpt2", max_position_embeddings=4)).context_len == 4  # learned positions: none past the last


def test_rows_written_to_the_wrong_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SlotCache.write

    def shifted(cache: SlotCache, layer: int, layout: AttentionLayout, key: Tensor, value: Tensor) -> Any:
        prefix_lens = [start + 1 for start in layout._work.prefix_lens]
        return whole(cache, layer, changed(layout, prefix_lens=prefix_lens), key, value)

    monkeypatch.setattr(SlotCache, "write", shifted)
    with pytest.raises(ModelError, match="gives wrong logits for a token tree"):
        run(tiny_model("llama"))


def test_positions_by_row_instead_of_depth_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    of_tree = Pass.of_tree

    def by_row(tree: TokenTree, **others: Any) -> Pass:
        depths = torch.arange(tree.width).expand_as(tree.depths)
        return of_tree(replace(tree, depths=depths, host_facts=None), **others)

    monkeypatch.setattr(Pass, "of_tree", by_row)
    with pytest.raises(ModelError, match="gives wrong logits for a token tree"):
        run(tiny_model("llama"))


@pytest.mark.parametrize(
    ("architecture", "seed"), [("mixtral", 5), ("deepseek_v3", 9), ("gpt_oss", 9), ("qwen3_moe", 5)]
)
def test_a_token_that_rounding_sends_to_another_expert_is_no_fault(architecture: str, seed: int) -> None:
    # Weights whose first set of tokens meets a near-tie of experts in bfloat16, with errors of 0.15 to 0.7.
    run(tiny_model(architecture, seed=seed, dtype=torch.bfloat16))


def test_weights_that_are_not_numbers_are_refused() -> None:
    # A comparison with NaN is false, so Python's max over errors would have kept 0 and let this model pass.
    module = tiny_model("llama")
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"logits that are not numbers in torch\.float32.*damaged"):
        run(module)


def test_forbidden_tokens_do_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that gives -inf to ids it forbids is right; a broken one is still found beside them."""
    module = tiny_model("phi")
    with torch.no_grad():
        module.lm_head.bias[7] = float("-inf")
        module.lm_head.bias[8] = torch.finfo(torch.float32).min
    run(module)
    monkeypatch.setattr("foretoken.models.plugin.tree_attention", every_row)
    with pytest.raises(ModelError, match="gives wrong logits"):
        run(module)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_a_layer_that_keeps_its_window_to_itself_is_refused(architecture: str) -> None:
    module = tiny_model(architecture)
    for layer in module.model.layers:
        layer.self_attn.sliding_window = None
    with pytest.raises(ModelError, match=r"layers \[0, 2\] of \w+ slide a window but do not say which"):
        run(module)


def test_a_window_known_only_to_the_mask_is_refused() -> None:
    # Phi-3.5-MoE has no layer types and slides in its mask alone: its short self-test looks right.
    config = PhimoeConfig(**_SIZES, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ModelError, match=r"layers \[0, 1\] of PhimoeForCausalLM slide a window but do not say which"):
        run(random_model(config))


def test_a_window_as_long_as_the_context_may_stay_unsaid() -> None:
    # As in the published Phi-3.5-MoE: no sequence ever gets past the window.
    config = PhimoeConfig(**_SIZES, sliding_window=96, num_local_experts=2, num_experts_per_tok=1)
    assert run(random_model(config)).context_len == 96


def test_a_mask_of_the_models_own_is_refused() -> None:
    # Doge weighs keys in a mask that each layer makes from its values; nothing of it would survive in a tree.
    config = DogeConfig(**{**_SIZES, "head_dim": 8})
    with pytest.raises(ModelError, match="DogeAttention hands attention_mask to attention"):
        run(random_model(config))


def test_long_rope_ends_before_it_changes_frequencies() -> None:
    """Past the pretrained length LongRoPE rotates the whole batch in another way: the context stops there."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 24,
    }
    changes = {"sliding_window": None, "original_max_position_embeddings": 24, "rope_parameters": rope}
    runner, plain = run(tiny_model("phi3", **changes)), PlainModel(tiny_model("phi3", **changes))
    assert runner.model.context_len == runner.context_len == 24
    short, longest = [5, 6, 7], list(range(3, 3 + 23))
    # The premise: one position further, the model itself would give every token of the sequence another embedding.
    assert relative_error(plain([*longest, 9, 8])[:3], plain(longest)[:3]) > 1e-2
    runner.prefill(0, short, 0)
    runner.prefill(1, longest, 0)
    tree = TokenTree.roots([9, 9])
    ours = runner.verify([0, 1], [len(short), len(longest)], tree).logits
    theirs = torch.stack([plain([*tokens, 9])[-1] for tokens in (short, longest)])
    assert relative_error(ours, theirs) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("runner", ["lean-native", "generic"])
def test_decays_that_overflow_in_transformers_chunks_are_named(runner: str) -> None:
    module = tiny_model("qwen3_5")
    with torch.no_grad():
        module.model.layers[0].linear_attn.A_log[1] = 100.0
    with pytest.raises(ModelError, match=r"block 0 .* not numbers where transformers .* largest A_log is 100, and exp"):
        Runner(wrap_model(module, name="large"), num_slots=2, context_len=40, runner=runner)

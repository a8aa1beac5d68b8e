"""Tiny models for the lean decoders, and checks that a decoder is right and exact."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

import torch
import transformers as hf
from limits import threads
from tiny_models import random_model, tiny_config, tiny_model
from torch import Tensor
from tree_decoding import SLOTS, decode, logits_by_sequence

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner

LEAN = ("lean-native", "lean-stock")
TOLERANCE = 1e-5  # relative to the largest logit, float32

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "short_factor": [1.0, 3.0],
    "long_factor": [9.0, 9.0], "original_max_position_embeddings": 64,
}  # fmt: skip
BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
}
PARTLY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

# What published checkpoints of these architectures differ in, each where it could be lost.
VARIANTS: dict[str, Any] = {
    "llama": tiny_config("llama"),
    "tied": tiny_config("llama", tie_word_embeddings=True),
    "attention bias": tiny_config("llama", attention_bias=True),
    "mlp bias": tiny_config("llama", mlp_bias=True),
    "one kv head": tiny_config("llama", num_key_value_heads=1),
    "as many kv heads": tiny_config("llama", num_key_value_heads=4),
    "three in a group": tiny_config("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=8),
    "head_dim above hidden / heads": tiny_config("llama", head_dim=16),
    "head_dim 80": tiny_config("llama", head_dim=80),
    "head_dim 128": tiny_config("llama", head_dim=128, num_hidden_layers=2),
    "odd sizes": tiny_config("llama", hidden_size=44, intermediate_size=101, head_dim=6, vocab_size=131),
    "rope theta": tiny_config("llama", rope_parameters={"rope_type": "default", "rope_theta": 50.0}),
    "rope linear": tiny_config("llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "rope dynamic": tiny_config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "rope yarn": tiny_config(
        "llama",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24,
        },
    ),
    "rope llama3": tiny_config(
        "llama",
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        },
    ),
    "mistral": tiny_config("mistral"),
    "mistral without a window": tiny_config("mistral", sliding_window=None),
    "qwen2": tiny_config("qwen2"),
    "qwen2 sliding some": tiny_config(
        "qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "qwen3": tiny_config("qwen3"),
    "qwen3 tied": tiny_config("qwen3", tie_word_embeddings=True, attention_bias=True),
    "phi3": tiny_config("phi3"),
    "phi3 turned in part": tiny_config("phi3", rope_parameters=PARTLY, sliding_window=None),
    "phi3 longrope": tiny_config(
        "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64, sliding_window=None
    ),
    "gemma2": tiny_config("gemma2"),
    "gemma3": tiny_config("gemma3"),
    "gemma3 two rotations": tiny_config("gemma3", rope_parameters=BY_KIND, final_logit_softcapping=3.0),
    "gemma3 tied": tiny_config("gemma3", tie_word_embeddings=True, attention_bias=True),
    "smollm3": tiny_config("smollm3"),
    "smollm3 sliding": tiny_config("smollm3", use_sliding_window=True, sliding_window=6, attention_bias=True),
    "olmo2": tiny_config("olmo2"),
    "olmo2 odd sizes": tiny_config(
        "olmo2", hidden_size=36, num_attention_heads=6, num_key_value_heads=3, intermediate_size=101
    ),
    "olmo3": hf.Olmo3Config(
        **tiny_config("olmo2").to_dict()
        | {
            "model_type": "olmo3",
            "sliding_window": 6,
            "rope_parameters": BY_KIND,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
    ),
    "starcoder2": tiny_config("starcoder2"),
    "starcoder2 gelu": tiny_config("starcoder2", hidden_act="gelu", use_bias=False, sliding_window=None),
    "llama gelu": tiny_config("llama", hidden_act="gelu"),
    "mixtral": tiny_config("mixtral", sliding_window=6),
    "qwen3_moe": tiny_config("qwen3_moe"),
    "qwen3_moe as the router says": tiny_config("qwen3_moe", norm_topk_prob=False),
    "qwen3_moe some dense": tiny_config("qwen3_moe", mlp_only_layers=[1]),
    "qwen3_moe many experts": tiny_config(
        "qwen3_moe", num_experts=19, num_experts_per_tok=5, moe_intermediate_size=24, hidden_size=40
    ),
    "granite": tiny_config("granite"),
    "qwen2_moe": tiny_config("qwen2_moe"),
    "qwen2_moe some dense": tiny_config("qwen2_moe", mlp_only_layers=[1], use_sliding_window=True, sliding_window=6),
    "qwen3_moe all experts": tiny_config("qwen3_moe", num_experts_per_tok=4),
}  # fmt: skip
LLAMA_LIKE = ("llama", "odd sizes", "qwen3", "mistral")


def runner(config: Any, kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Runner:
    """A runner with four slots over a random model."""
    return Runner(wrap_model(random_model(config, dtype=dtype), name="tiny"), num_slots=4, runner=kind, **more)


def assert_like_generic(config: Any, kinds: Iterable[str]) -> None:
    """Logits over prompts, trees and commits are those of the generic decoder."""
    theirs = decode(runner(config, "generic", max_nodes=12), rounds=4)
    for kind in kinds:
        for a, b in zip(decode(runner(config, kind, max_nodes=12), rounds=4), theirs, strict=True):
            for row in range(len(SLOTS)):
                mine, reference = a.logits(row), b.logits(row)
                assert (mine - reference).abs().max() <= TOLERANCE * reference.abs().max(), kind


def assert_exact(made: Runner) -> None:
    """A path in a tree, in a batch, on two threads: bit for bit what one token at a time gives on one.

    Args:
        made: With four slots and at least 40 nodes.
    """
    prompt, path = [5, 9, 3, 60, 21, 8, 30, 33, 2], [7, 11, 13, 4, 40]
    made.prefill(0, prompt, 0)
    alone = []
    for depth, token in enumerate(path):
        alone.append(made.verify([0], [len(prompt) + depth], TokenTree.roots([token])).logits[0])  # type: ignore[index]
    # The path in the middle of a tree: every second node is a stranger.
    tokens, parents, nodes = [path[0], 50], [-1, 0], [0]
    for token in path[1:]:
        parents += [nodes[-1], nodes[-1]]
        nodes.append(len(tokens))
        tokens += [token, 51]
    tree = TreeRow(tokens, parents)
    wide = TreeRow(tokens + [52] * (38 - len(tokens)), parents + [0] * (38 - len(parents)))
    for num_threads, (slot, other) in product((1, 2), ((1, 3), (2, 0))):
        with threads(num_threads):
            for start in range(0, len(prompt), 4):
                made.prefill(slot, prompt[start : start + 4], start)
            made.prefill(other, [3, 4], 0)
            for rows in ([tree], [wide], [wide, TreeRow([6, 7], [-1, 0])], [TreeRow([6], [-1]), tree]):
                at = next(i for i, row in enumerate(rows) if len(row.tokens) > 2)
                slots = [other, other][: len(rows)]
                slots[at] = slot
                lengths = [2] * len(rows)
                lengths[at] = len(prompt)
                trees = TokenTree.from_rows(rows)
                logits = logits_by_sequence(made.verify(slots, lengths, trees), trees)[at]
                for node, expected in zip(nodes, alone, strict=True):
                    assert torch.equal(logits[node], expected)


def assert_near_truth(config: Any, kind: str, dtype: torch.dtype) -> None:
    """Two correct forwards differ in bfloat16: in the mean this one is no further from float64 than the generic one."""
    exact = wrap_model(random_model(config, dtype=dtype).double(), name="exact")
    truth = decode(Runner(exact, num_slots=4, max_nodes=12, runner="generic"))
    errors = {}
    for each in (kind, "generic"):
        done = decode(runner(config, each, dtype, max_nodes=12))
        errors[each] = [
            float((a.logits(row) - b.logits(row)).norm() / b.logits(row).norm())
            for a, b in zip(done, truth, strict=True)
            for row in range(len(SLOTS))
        ]
    assert fmean(errors[kind]) <= 1.3 * fmean(errors["generic"]) + 1e-6
    assert max(errors[kind]) <= 1.5 * max(errors["generic"]) + 1e-6


def assert_undisturbed(architecture: str, dtype: torch.dtype, orders: Iterable[tuple[str, ...]], **how: Any) -> None:
    """Decoders of one model, in these orders, give what each gives alone, and the weights are the bits they were."""
    tree = TokenTree.from_rows([TreeRow([5, 6, 7], [-1, 0, 0])])

    def loaded() -> Any:
        return replace(wrap_model(tiny_model(architecture, dtype=dtype), name="tiny"), **how)

    def logits(model: Any, kind: str) -> Tensor:
        found = Runner(model, num_slots=1, runner=kind).verify([0], [0], tree).logits
        assert found is not None
        return found

    orders = list(orders)
    alone = {kind: logits(loaded(), kind) for kind in orders[0]}
    tolerance = TOLERANCE if dtype != torch.bfloat16 else 0.1  # another matrix gives 0.5 and more
    for found in alone.values():
        assert (found - alone["generic"]).abs().max() <= tolerance * alone["generic"].abs().max()
    for order in orders:
        model = loaded()
        before = {key: value.clone() for key, value in model.module.state_dict().items()}
        for kind in (*order, *order):
            assert torch.equal(logits(model, kind), alone[kind])
        after = model.module.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[key]) for key, value in before.items())

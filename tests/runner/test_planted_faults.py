"""The self-test refuses decoders with a planted fault, in float32 and in bfloat16, and accepts those without."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import LEAN_ARCHITECTURES, WINDOW, tiny_model
from torch import Tensor

from foretoken.attention.layout import AttentionLayout
from foretoken.core.errors import ModelError
from foretoken.core.passes import Pass
from foretoken.decoder.blocks import Block, Experts, FeedForward, LeanWeights, Matrix
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import wrap_model
from foretoken.models.making.in_memory import quantize_model
from foretoken.runner import decoders
from foretoken.runner.runner import Runner

DTYPES = (torch.float32, torch.bfloat16)


def outlier_model(dtype: torch.dtype) -> Any:
    """A model as rounding hurts it most: one massive channel, and scores of a hundred from the biases of its keys."""
    module = tiny_model("llama", attention_bias=True)
    with torch.no_grad():
        module.model.embed_tokens.weight[:, 3] += 40
        norms = [module.model.norm]
        for layer in module.model.layers:
            layer.self_attn.k_proj.bias *= 100
            norms += [layer.input_layernorm, layer.post_attention_layernorm]
        for norm in norms:
            norm.weight *= 8
            norm.weight[3] = 0.02
    return module.to(dtype)


@cache
def loaded(architecture: str, dtype: torch.dtype, quantization: Any = None, rows: Any = "auto") -> LoadedModel:
    module = outlier_model(dtype) if architecture == "outliers" else tiny_model(architecture, dtype=dtype)
    model = replace(wrap_model(module, name=architecture), kv_cache_dtype=rows)
    return model if quantization is None else quantize_model(model, quantization)


def prove(model: LoadedModel, kind: str) -> Runner:
    return Runner(model, num_slots=2, max_nodes=12, runner=kind)


def test_rounding_alone_exceeds_what_logits_allowed() -> None:
    """The premise: logits of the outlier model in bfloat16 differ from float32's by more than the 0.05 of old."""
    ids, module = torch.tensor([[3, 10, 17, 24, 31, 38, 45, 52]]), outlier_model(torch.bfloat16)
    with torch.inference_mode():
        narrow, wide = module(ids).logits.float(), module.float()(ids).logits
    assert float(((narrow - wide).norm(dim=-1) / wide.norm(dim=-1)).max()) > 0.2


# Pairs of formats and architectures, rather than their product.
WHOLE = [
    *((name, dtype, None, "auto") for name in (*LEAN_ARCHITECTURES, "outliers") for dtype in DTYPES),
    ("llama", torch.float32, "w8a8", "auto"),
    ("qwen2", torch.bfloat16, "w8a8", "auto"),
    ("gemma2", torch.bfloat16, "w4a8", "auto"),
    ("starcoder2", torch.float32, "w4a8", "auto"),
    ("mixtral", torch.bfloat16, "int4", "auto"),
    ("qwen3_moe", torch.float32, "int8", "auto"),
    ("gemma3", torch.float32, None, "int8"),
    ("phi3", torch.bfloat16, None, "int8"),
    ("outliers", torch.bfloat16, "w8a8", "int8"),
]


@pytest.mark.parametrize(("name", "dtype", "quantization", "rows"), WHOLE)
def test_right_decoders_are_accepted(name: str, dtype: torch.dtype, quantization: Any, rows: Any) -> None:
    model = loaded(name, dtype, quantization, rows)
    assert prove(model, "lean-native").name == "lean-native"
    if rows == "auto":
        assert prove(model, "lean-stock" if quantization is None else "generic").model is model


def changed(weights: LeanWeights, change: Callable[[Block], Block], *, only: int | None = None) -> LeanWeights:
    blocks = [change(each) if only in (None, index) else each for index, each in enumerate(weights.layers.blocks)]
    return replace(weights, layers=replace(weights.layers, blocks=blocks))


def in_spec(**values: Any) -> Callable[[LeanWeights], LeanWeights]:
    return lambda weights: changed(weights, lambda block: replace(block, spec=replace(block.spec, **values)))


def in_block(**values: Any) -> Callable[[LeanWeights], LeanWeights]:
    return lambda weights: changed(weights, lambda block: replace(block, **values))


def without_bias(name: str) -> Callable[[LeanWeights], LeanWeights]:
    def change(block: Block) -> Block:
        return replace(block, **{name: replace(getattr(block, name), bias=None)})

    return lambda weights: changed(weights, change, only=1)


def other_scale(weights: LeanWeights) -> LeanWeights:
    return changed(
        weights, lambda block: replace(block, spec=replace(block.spec, scale=1.2 * block.spec.attention_scale))
    )


def swapped_heads(weights: LeanWeights) -> LeanWeights:
    def change(block: Block) -> Block:
        size, matrix = block.spec.head_dim, block.query
        order = torch.arange(len(matrix.dense())).unflatten(0, (-1, size))[[1, 0, *range(2, block.spec.num_heads)]]
        bias = None if matrix.bias is None else matrix.bias[order.flatten()]
        return replace(block, query=Matrix(weight=matrix.dense()[order.flatten()].contiguous(), bias=bias))

    return changed(weights, change)


def swapped_blocks(weights: LeanWeights) -> LeanWeights:
    first, second, *others = weights.layers.blocks
    return replace(weights, layers=replace(weights.layers, blocks=[second, first, *others]))


def turned(change: Callable[[Tensor], Tensor]) -> Callable[[LeanWeights], LeanWeights]:
    """Other rotations: `change` turns the angles of every position and frequency into others."""

    def rotary(block: Block) -> Block:
        assert block.rotary is not None
        angles = change(torch.atan2(block.rotary.sin, block.rotary.cos))
        return replace(block, rotary=replace(block.rotary, cos=angles.cos(), sin=angles.sin()))

    return lambda weights: changed(weights, rotary)


def in_feed_forward(change: Callable[[FeedForward], FeedForward]) -> Callable[[LeanWeights], LeanWeights]:
    def block(each: Block) -> Block:
        assert isinstance(each.mlp, FeedForward)
        return replace(each, mlp=change(each.mlp))

    return lambda weights: changed(weights, block)


def in_experts(**values: Any) -> Callable[[LeanWeights], LeanWeights]:
    def block(each: Block) -> Block:
        assert isinstance(each.mlp, Experts)
        return replace(each, mlp=replace(each.mlp, **values))

    return lambda weights: changed(weights, block)


# What a table or a reader of weights may get wrong: architecture that shows it, and the fault.
READING: dict[str, tuple[str, Callable[[LeanWeights], LeanWeights]]] = {
    "the bias of queries in one block": ("outliers", without_bias("query")),
    "the bias of keys in one block": ("qwen2", without_bias("key")),
    "the bias of values in one block": ("outliers", without_bias("value")),
    "the bias of outputs in one block": ("starcoder2", without_bias("output")),
    "the scale of scores": ("outliers", other_scale),
    "a soft cap of scores": ("gemma2", in_spec(softcap=None)),
    "no window": ("mistral", in_spec(window=None)),
    "a window of one less": ("mistral", in_spec(window=WINDOW - 1)),
    "a window of one more": ("phi3", in_spec(window=WINDOW + 1)),
    "a window in every layer": ("gemma3", in_spec(window=WINDOW)),
    "two heads of queries": ("outliers", swapped_heads),
    "two blocks": ("outliers", swapped_blocks),
    "no positions": ("outliers", in_block(rotary=None)),
    "positions of other signs": ("qwen3", turned(lambda angles: -angles)),
    "positions of half the distance": ("outliers", turned(lambda angles: angles / 2)),
    "one frequency": ("outliers", turned(lambda angles: torch.cat([angles[:, :1], angles[:, :-1]], 1))),
    "positions in layers without": (
        "smollm3", lambda weights: in_block(rotary=weights.layers.blocks[0].rotary)(weights)
    ),
    "no norms of queries and keys": ("qwen3", in_block(query_norm=None, key_norm=None)),
    "no norm after attention": ("gemma2", in_block(attention_post_norm=None)),
    "no norm before the feed-forward layer": ("outliers", in_block(mlp_norm=None)),
    "another activation": ("llama", in_spec(activation="gelu")),
    "gate and up": (
        "outliers", in_feed_forward(lambda own: replace(own, gate=own.up, up=own.gate or own.up))
    ),
    "one expert instead of two": ("mixtral", in_experts(top_k=1)),
    "weights of experts": ("qwen3_moe", in_experts(is_normalized=True)),
    "the scale of embeddings": ("gemma3", lambda weights: replace(weights, embedding_scale=1.0)),
    "the cap of logits": ("gemma2", lambda weights: replace(weights, logit_softcap=None)),
    "no final norm": ("outliers", lambda weights: replace(weights, layers=replace(weights.layers, final_norm=None))),
}  # fmt: skip


@pytest.mark.parametrize("fault", READING)
def test_weights_that_are_read_wrongly_are_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, plant = READING[fault]
    read = decoders.read_weights
    monkeypatch.setattr(decoders, "read_weights", lambda *arguments: plant(read(*arguments)))
    for dtype in DTYPES:
        with pytest.raises(ModelError, match="gives wrong logits for a token tree"):
            prove(loaded(architecture, dtype), "lean-native")


def on_trees(change: Callable[[Pass], Pass]) -> Callable[[Pass], Pass]:
    return lambda work: work if work.is_causal else change(work)


def other_parent(work: Pass) -> Pass:
    parents = work.parents.clone()
    parents[5] = 1  # instead of 2
    return replace(work, parents=parents)


def other_position(work: Pass) -> Pass:
    positions = work.positions.clone()
    positions[5] += 1
    return replace(work, positions=positions)


def shorter_prefix(work: Pass) -> Pass:
    return replace(work, prefix_lens=[length - 1 for length in work.prefix_lens])


# What a decoder may get wrong in a pass.
PASSES: dict[str, Callable[[Pass], Pass]] = {
    "one ancestor": on_trees(other_parent),
    "one position": on_trees(other_position),
    "slots": on_trees(lambda work: replace(work, slots=work.slots[::-1])),
    "one row of the prefix": on_trees(shorter_prefix),
    "a chain for a tree": on_trees(lambda work: replace(work, parents=torch.cat([
        torch.arange(-1, end - start - 1) for start, end in zip(work.offsets, work.offsets[1:], strict=False)
    ]))),
    "positions of prompts": lambda work: replace(work, positions=work.positions // 2) if work.is_causal else work,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["lean-native", "lean-stock", "generic"])
@pytest.mark.parametrize("fault", PASSES)
def test_passes_that_are_run_wrongly_are_refused(
    fault: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = decoders.DECODERS[kind]

    class Wrong:
        name, is_exact = kind, kind in decoders.EXACT

        def __init__(self, *arguments: Any) -> None:
            self._decoder = make(*arguments)

        def run(self, work: Pass) -> Any:
            return self._decoder.run(PASSES[fault](work))

    monkeypatch.setitem(decoders.DECODERS, kind, Wrong)
    with pytest.raises(ModelError, match="gives wrong logits for a token tree"):
        prove(loaded("outliers", dtype), kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["lean-stock", "generic"])
@pytest.mark.parametrize("node", [1, 5])
def test_one_flipped_ancestor_bit_is_refused(
    node: int, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = AttentionLayout._build_mask

    def flipped(layout: AttentionLayout, sequence: int, window: int | None) -> Tensor | None:
        mask = build(layout, sequence, window)
        if mask is not None and not layout._work.is_causal and sequence == 0:
            mask[node, -4] ^= True  # the node's view of node 2: a sibling, or an ancestor
        return mask

    monkeypatch.setattr(AttentionLayout, "_build_mask", flipped)
    for architecture in ("outliers", "llama"):
        with pytest.raises(ModelError, match="gives wrong logits for a token tree"):
            prove(loaded(architecture, dtype), kind)

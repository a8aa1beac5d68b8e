"""Drafts of the native kernels, every level in one call: those of the same heads step by step in torch."""

import platform
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from pairwise import slow_products
from tiny_models import VOCAB_SIZE, tiny_model
from torch import Tensor

from foretoken.core.errors import PassError
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import TokenTree
from foretoken.decoder import library
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.blocks import ScaledEmbedding
from foretoken.decoder.quantized import Quantization, QuantizedMatrix
from foretoken.drafters.head_drafter import fill_by_steps
from foretoken.drafters.native.heads import HeadKernels
from foretoken.heads.base import Head, HeadConfig, build_head
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.hydra import HydraConfig
from foretoken.heads.medusa import MedusaConfig, MedusaHeads
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig
from foretoken.models.loading import wrap_model
from foretoken.models.making.in_memory import quantize_model
from foretoken.models.parts import TargetParts, target_parts
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees.choices import TreeShape
from foretoken.trees.dynamic import AnyShape, DynamicShape, ShapedExpansion, begin_expansion
from foretoken.trees.expansion import TreeExpansion
from tests.tree_checks import check_tree

pytestmark = pytest.mark.native

WIDTH = 32
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "vocab_size": VOCAB_SIZE, "num_heads": 3}
PREFIX = LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=24)
HEADS: dict[str, HeadConfig] = {
    "medusa": MedusaConfig(**SIZES),
    "medusa of LM heads alone": MedusaConfig(**SIZES, num_layers=0, own_lm_head=True),
    "medusa without biases": MedusaConfig(**SIZES, num_layers=2, has_bias=False, own_lm_head=True),
    "medusa, tied": MedusaConfig(**SIZES, num_layers=3, tied_blocks=True),
    "medusa, part of the vocabulary": MedusaConfig(**SIZES, own_lm_head=True, draft_vocab_size=20),
    "hydra": HydraConfig(**SIZES, num_layers=1),
    "hydra, own LM heads": HydraConfig(**SIZES, num_layers=2, own_lm_head=True),
    "hydra, three blocks": HydraConfig(**SIZES, num_layers=3),
    "hydra++, tied": HydraConfig(**SIZES, num_layers=3, tied_blocks=True, prefix=PREFIX),
    "mlp_speculator": MlpSpeculatorConfig(**SIZES, inner_dim=24, tie_weights=False),
    "mlp_speculator, tied": MlpSpeculatorConfig(**SIZES, inner_dim=40),
    "mlp_speculator, features as they are": MlpSpeculatorConfig(**SIZES, inner_dim=32, scale_input=False),
}
SHAPES = {
    "chain": TreeShape.chain(3),
    "tree": TreeShape.from_choices([(0,), (1,), (3,), (0, 0), (0, 2), (3, 0), (3, 1), (0, 2, 0), (3, 0, 0), (3, 0, 4)]),
    "two levels": TreeShape.cartesian((4, 3)),
}
DYNAMIC = [DynamicShape(top_k=4, depth=3, max_nodes=20), DynamicShape(top_k=5, depth=1, max_nodes=4)]
GREEDY, COUPLED, SAMPLED = (0.0, False), (0.8, True), (1.3, False)
DRAWS = {
    "greedy": [GREEDY],
    "coupled": [COUPLED, COUPLED],
    "sampled": [SAMPLED],
    "mixed": [SAMPLED, GREEDY, COUPLED, SAMPLED],
}


def made(
    name: str, dtype: torch.dtype, architecture: str = "llama", *, rounding: Quantization | None = None
) -> tuple[Head, TargetParts]:
    """A random head as it drafts on a CPU, and what it shares with a target in a dtype, which holds its weights too.

    rounding: Of the target.
    """
    torch.manual_seed(0)
    head = build_head(HEADS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.3).to(dtype))
    if isinstance(head, MedusaHeads) and head.token_map is not None:
        head.token_map.copy_(torch.randperm(VOCAB_SIZE)[: len(head.token_map)].sort().values)
    head.requires_grad_(requires_grad=False).eval()
    head.optimize_for_inference()
    target = wrap_model(tiny_model(architecture, dtype=dtype), name=architecture)
    target = target if rounding is None else quantize_model(target, rounding)
    return head, target_parts(target, dtype=torch.float32, is_inference=True)


def kernels_of(head: Head, parts: TargetParts) -> HeadKernels:
    steps = head.native_steps(parts)
    assert steps is not None
    return HeadKernels(steps)


def expansion_of(shape: AnyShape, draws: list[tuple[float, bool]], roots: Tensor) -> ShapedExpansion:
    requests = [SamplingRequest(params=SamplingParams(temperature=t), seed=i - 1) for i, (t, _) in enumerate(draws)]
    batch = SamplingBatch.build(requests, VOCAB_SIZE)
    chosen = DraftDraws.build(batch, [is_coupled for _, is_coupled in draws], 9 + torch.arange(len(draws)))
    return begin_expansion(shape, roots, chosen)


def finished(expansion: ShapedExpansion) -> TokenTree:
    roots = expansion.roots.tolist()
    return expansion.finish(range(len(roots)), [expansion.shape.depth] * len(roots), roots)


def by_steps(head: Head, parts: TargetParts, expansion: ShapedExpansion, features: Tensor) -> TokenTree:
    """The tree in torch's operations; a level of Medusa's has one row of logits."""
    if isinstance(head, MedusaHeads):
        for depth in range(expansion.shape.depth):
            logits = head.logits(depth, head.step(depth, features, features, parts)[1], parts)
            expansion.grow(depth, logits.unsqueeze(1))
    else:
        is_encoded = isinstance(head.config, HydraConfig)  # where there is a prefix, it has seen the features
        fill_by_steps(head, parts, expansion, features if is_encoded else head.encode(features))
    return finished(expansion)


def by_kernels(head: Head, parts: TargetParts, expansion: ShapedExpansion, features: Tensor) -> TokenTree:
    kernels = kernels_of(head, parts)
    assert kernels.can_fill(expansion)
    kernels.fill(expansion, features)
    return finished(expansion)


def assert_same(ours: TokenTree, theirs: TokenTree, tolerance: float) -> None:
    check_tree(ours)
    assert ours.scores is not None
    assert theirs.scores is not None
    assert torch.equal(ours.tokens, theirs.tokens)
    torch.testing.assert_close(ours.scores, theirs.scores, rtol=tolerance, atol=tolerance)
    assert (ours.distributions is None) == (theirs.distributions is None)
    if ours.distributions is not None and theirs.distributions is not None:
        assert torch.equal(ours.distributions.kinds, theirs.distributions.kinds)
        assert torch.equal(ours.distributions.row_of, theirs.distributions.row_of)
        torch.testing.assert_close(ours.distributions.rows, theirs.distributions.rows, rtol=tolerance, atol=tolerance)


# Both read the same weights; where processors multiply in bfloat16 a last bit of an input may round to another one.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}


@pytest.mark.parametrize(("name", "dtype", "draws"), slow_products(list(HEADS), list(TOLERANCE), list(DRAWS)))
@torch.inference_mode()
def test_drafts_are_those_of_the_steps(name: str, dtype: torch.dtype, draws: str) -> None:
    head, parts = made(name, dtype)
    batch = len(DRAWS[draws])
    for seed, shape in enumerate(SHAPES.values()):
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(batch, WIDTH, generator=generator)
        roots = torch.randint(VOCAB_SIZE, (batch,), generator=generator)
        ours, theirs = (
            fill(head, parts, expansion_of(shape, DRAWS[draws], roots), features) for fill in (by_kernels, by_steps)
        )
        assert_same(ours, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("name", "dtype", "draws"),
    slow_products([name for name in HEADS if "medusa" not in name], list(TOLERANCE), list(DRAWS)),
)
@torch.inference_mode()
def test_dynamic_trees_are_those_of_the_steps(name: str, dtype: torch.dtype, draws: str) -> None:
    """The same nodes, connected alike: every sequence has a tree of its own."""
    head, parts = made(name, dtype)
    for seed, shape in enumerate(DYNAMIC):
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(len(DRAWS[draws]), WIDTH, generator=generator)
        roots = torch.randint(VOCAB_SIZE, (len(features),), generator=generator)
        ours, theirs = (
            fill(head, parts, expansion_of(shape, DRAWS[draws], roots), features) for fill in (by_kernels, by_steps)
        )
        assert_same(ours, theirs, TOLERANCE[dtype])
        assert torch.equal(ours.parents, theirs.parents)
        assert torch.equal(ours.depths, theirs.depths)
        assert ours.host_facts == theirs.host_facts


@torch.inference_mode()
def test_dynamic_trees_of_heads_that_read_no_tokens_are_left_to_torch() -> None:
    head, parts = made("medusa", torch.float32)
    assert not kernels_of(head, parts).can_fill(expansion_of(DYNAMIC[0], [GREEDY], torch.tensor([3])))


@pytest.mark.parametrize("architecture", ["gemma2", "granite"])
@pytest.mark.parametrize("name", ["medusa", "hydra"])
@torch.inference_mode()
def test_what_a_target_does_to_embeddings_and_logits(name: str, architecture: str) -> None:
    """Gemma scales embeddings and caps logits, Granite scales logits."""
    head, parts = made(name, torch.float32, architecture)
    features, roots = torch.randn(2, WIDTH), torch.tensor([3, 66])
    ours, theirs = (
        fill(head, parts, expansion_of(SHAPES["tree"], [GREEDY, SAMPLED], roots), features)
        for fill in (by_kernels, by_steps)
    )
    assert_same(ours, theirs, 1e-4)
    assert parts.native is not None
    assert parts.native.head.scale != 1.0 or parts.native.head.softcap > 0


def with_dense_rows(parts: TargetParts) -> TargetParts:
    """The same with the dequantized rows of an embedding in integers, for the kernels."""
    assert parts.native is not None
    table, scale = parts.native.embedding
    assert isinstance(table, QuantizedMatrix)
    dense = ScaledEmbedding(table.dequantized().to(table.dtype), scale)
    return replace(parts, native=parts.native._replace(embedding=dense))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("name", "architecture"), [("hydra", "llama"), ("hydra", "gemma2"), ("hydra++, tied", "llama")]
)
@torch.inference_mode()
def test_a_targets_embedding_in_integers(name: str, architecture: str, dtype: torch.dtype) -> None:
    """Every bit of a draft is that of the dequantized rows, and torch drafts the same."""
    head, parts = made(name, dtype, architecture, rounding="int8")
    features, roots = torch.randn(4, WIDTH), torch.tensor([3, 66, 15, 16])
    ours, dense, theirs = (
        fill(head, each, expansion_of(SHAPES["tree"], DRAWS["mixed"], roots), features)
        for fill, each in ((by_kernels, parts), (by_kernels, with_dense_rows(parts)), (by_steps, parts))
    )
    assert_same(ours, dense, 0.0)
    assert_same(ours, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["medusa", "hydra, three blocks", "mlp_speculator"])
@torch.inference_mode()
def test_company_and_threads_change_no_bit(name: str) -> None:
    head, parts = made(name, torch.bfloat16)
    kernels = kernels_of(head, parts)
    features, roots = torch.randn(4, WIDTH), torch.randint(VOCAB_SIZE, (4,))
    before, trees = torch.get_num_threads(), []
    for threads, rows in ((2, slice(4)), (1, slice(4)), (3, slice(1, 2))):
        expansion = expansion_of(SHAPES["tree"], [GREEDY] * len(roots[rows]), roots[rows])
        torch.set_num_threads(threads)
        try:
            kernels.fill(expansion, features[rows])
        finally:
            torch.set_num_threads(before)
        trees.append(finished(expansion))
    for other, rows in zip(trees[1:], (slice(4), slice(1, 2)), strict=True):
        assert torch.equal(other.tokens, trees[0].tokens[rows])
        assert torch.equal(other.scores, trees[0].scores[rows])  # type: ignore[arg-type, index]


def test_what_the_kernels_leave_to_torch() -> None:
    """Truncated distributions, trees deeper than there are steps, and heads or targets that they do not know."""
    head, parts = made("hydra", torch.float32)
    kernels = kernels_of(head, parts)
    assert kernels.can_fill(expansion_of(SHAPES["tree"], [SAMPLED], torch.tensor([3])))
    assert not kernels.can_fill(expansion_of(TreeShape.chain(4), [SAMPLED], torch.tensor([3])))
    batch = SamplingBatch.build(
        [SamplingRequest(params=SamplingParams(temperature=1.0, top_p=0.9), seed=0)], VOCAB_SIZE
    )
    draws = DraftDraws.build(batch, [False], torch.tensor([9]))
    assert not kernels.can_fill(TreeExpansion(SHAPES["chain"], torch.tensor([3]), draws))
    assert head.native_steps(replace(parts, native=None)) is None
    for name in HEADS:
        plain = build_head(HEADS[name], dtype=torch.float64)
        for parameter in plain.parameters():
            torch.nn.init.normal_(parameter)  # zeros, which fresh memory may hold, would fit bfloat16
        plain.optimize_for_inference()
        steps = plain.native_steps(parts)
        with pytest.raises(UnsuitableError, match="Expected a native linear layer"):
            HeadKernels(steps)  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused() -> None:
    head, parts = made("hydra", torch.float32)
    kernels = kernels_of(head, parts)
    for features in (torch.zeros(1, WIDTH + 1), torch.zeros(2, WIDTH), torch.zeros(1, WIDTH, dtype=torch.float64)):
        with pytest.raises(PassError, match=r"features is .* Expected \(1, 32\) torch.float32"):
            kernels.fill(expansion_of(SHAPES["chain"], [GREEDY], torch.tensor([3])), features)
    for root in (-1, VOCAB_SIZE, 2**62):
        with pytest.raises(PassError, match=r"the roots are \[-?\d+\]\. Expected ids below 67"):
            kernels.fill(expansion_of(SHAPES["chain"], [GREEDY], torch.tensor([root])), torch.zeros(1, WIDTH))
    steps = head.native_steps(parts)
    assert steps is not None
    for changes in (
        {"width": 40},
        {"hidden_size": 16},
        {"vocab_size": 60},
        {"kind": "state"},
        {"kind": "feature", "width": 8},
    ):
        with pytest.raises(UnsuitableError, match="Its kernels expect"):
            HeadKernels(replace(steps, **changes))


def test_weights_that_move_are_followed() -> None:
    """Sharing a weight's memory moves it; freeing it is an error in words."""
    head, parts = made("mlp_speculator", torch.float32)
    kernels = kernels_of(head, parts)
    features, roots, trees = torch.randn(1, WIDTH), torch.tensor([3]), []
    for change in (lambda weight: None, lambda weight: weight.share_memory_()):
        change(head.get_parameter("embeddings.0.weight"))
        expansion = expansion_of(SHAPES["chain"], [GREEDY], roots)
        kernels.fill(expansion, features)
        trees.append(finished(expansion))
    assert torch.equal(trees[0].scores, trees[1].scores)  # type: ignore[arg-type]
    head.get_parameter("embeddings.0.weight").untyped_storage().resize_(0)
    with pytest.raises(PassError, match="was freed or cut"):
        kernels.fill(expansion_of(SHAPES["chain"], [GREEDY], roots), features)


@pytest.fixture
def older_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels without 512-bit registers and bf16 dot products."""
    monkeypatch.setattr(library, "_fitting_processors", lambda: [library._Processor("older", ("-march=x86-64-v3",))])
    library.native_library.cache_clear()
    yield
    library.native_library.cache_clear()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a generation of x86 processors")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.usefixtures("older_processor")
@torch.inference_mode()
def test_older_processors(dtype: torch.dtype) -> None:
    for name in HEADS:
        head, parts = made(name, dtype)
        features, roots = torch.randn(3, WIDTH), torch.tensor([3, 4, 5])
        ours, theirs = (
            fill(head, parts, expansion_of(SHAPES["tree"], [GREEDY, COUPLED, SAMPLED], roots), features)
            for fill in (by_kernels, by_steps)
        )
        assert_same(ours, theirs, TOLERANCE[dtype])

"""Blocks with a cache of their own: every option on every backend against a slow formula, fed piece by piece.

Slow because kernels are compiled for each instruction set, once on a machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoder.instruction_sets import INSTRUCTION_SETS, kernels_for
from decoder.slow_blocks import Slow
from limits import threads
from torch import Tensor

from foretoken.core.errors import PassError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.block_stack import BlockStack
from foretoken.decoder.blocks import Block, Blocks, BlockSpec, Experts, FeedForward, Matrix, Norm, Rotary, Side

pytestmark = pytest.mark.native

E, H, HK, D, INNER, SLOTS, CAPACITY = 24, 4, 2, 6, 20, 3, 40
BACKENDS = {"native": torch.float32, "torch": torch.float64}


def numbers(*shape: int, seed: int, scale: float = 0.5) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix(outputs: int, inputs: int, seed: int, *, has_bias: bool = False) -> Matrix:
    bias = numbers(outputs, seed=1000 + seed) if has_bias else None
    return Matrix(weight=numbers(outputs, inputs, seed=seed), bias=bias)


def norm(size: int, seed: int, kind: Any = "rms") -> Norm:
    bias = numbers(size, seed=2000 + seed) if kind == "layer" else None
    return Norm(weight=1 + numbers(size, seed=seed), bias=bias, epsilon=1e-5, kind=kind)


def rotary(rotated: int, theta: float = 100.0) -> Rotary:
    made = Rotary.plain(num_positions=CAPACITY, head_dim=rotated, theta=theta)
    return Rotary(cos=made.cos.double(), sin=made.sin.double())


def block(seed: int = 0, *, spec: dict[str, Any] | None = None, has_bias: bool = False, **changes: Any) -> Block:
    made: dict[str, Any] = {
        "spec": BlockSpec(**{"num_heads": H, "num_kv_heads": HK, "head_dim": D, **(spec or {})}),
        "query": matrix(H * D, E, seed + 1, has_bias=has_bias),
        "key": matrix(HK * D, E, seed + 2, has_bias=has_bias),
        "value": matrix(HK * D, E, seed + 3, has_bias=has_bias),
        "output": matrix(E, H * D, seed + 4, has_bias=has_bias),
        "mlp": FeedForward(
            gate=matrix(INNER, E, seed + 5), up=matrix(INNER, E, seed + 6), down=matrix(E, INNER, seed + 7)
        ),
        "attention_norm": norm(E, seed + 8),
        "mlp_norm": norm(E, seed + 9),
        "rotary": rotary(D),
    }
    return Block(**{**made, **changes})


def with_side(made: Block, **changes: Any) -> Block:
    """The block with a second input, whose columns stand before the others."""

    def wider(of: Matrix, seed: int) -> Matrix:
        return replace(of, weight=torch.cat([numbers(len(of.weight), E, seed=seed), of.weight], dim=1))

    read = {name: wider(getattr(made, name), 40 + i) for i, name in enumerate(("query", "key", "value"))}
    return replace(made, **{**read, "side": Side(norm=norm(E, 43)), **changes})


def side_of(layers: Blocks, inputs: Tensor) -> Tensor | None:
    """A second input for every row, where the first block has one."""
    return inputs.flip(1).cos() if layers.has_side else None


def experts(count: int, top_k: int, *, is_normalized: bool, **shared: Any) -> Experts:
    return Experts(
        router=matrix(count, E, 50),
        gate_up=numbers(count, 2 * INNER, E, seed=51),
        down=numbers(count, E, INNER, seed=52),
        top_k=top_k,
        is_normalized=is_normalized,
        **shared,
    )


GATED_MLP = FeedForward(gate=matrix(INNER, E, 70), up=matrix(INNER, E, 71), down=matrix(E, INNER, 72))
PLAIN_MLP = FeedForward(gate=None, up=matrix(INNER, E, 60, has_bias=True), down=matrix(E, INNER, 61, has_bias=True))
OPTIONS: dict[str, Callable[[], Block]] = {
    "as llama": block,
    "biases": lambda: block(has_bias=True),
    "post norms": lambda: block(attention_post_norm=norm(E, 30), mlp_post_norm=norm(E, 31)),
    "post norms only": lambda: block(
        attention_norm=None, mlp_norm=None, attention_post_norm=norm(E, 30), mlp_post_norm=norm(E, 31)
    ),
    "no norms": lambda: block(attention_norm=None, mlp_norm=None),
    "layer norms": lambda: block(
        attention_norm=norm(E, 30, "layer"), mlp_norm=norm(E, 31, "layer"), mlp_post_norm=norm(E, 32, "layer")
    ),
    "head norms": lambda: block(query_norm=norm(D, 32), key_norm=norm(D, 33)),
    "head layer norms": lambda: block(query_norm=norm(D, 32, "layer"), key_norm=norm(D, 33, "layer")),
    "norms over all heads": lambda: block(query_norm=norm(H * D, 32), key_norm=norm(HK * D, 33)),
    "gelu tanh": lambda: block(spec={"activation": "gelu_tanh"}),
    "gelu": lambda: block(spec={"activation": "gelu"}),
    "not gated": lambda: block(mlp=PLAIN_MLP, spec={"activation": "gelu_tanh"}),
    "squared relu": lambda: block(mlp=PLAIN_MLP, spec={"activation": "relu2"}),
    "turned in part": lambda: block(rotary=rotary(4)),
    "not turned": lambda: block(rotary=None),
    "softcap": lambda: block(spec={"softcap": 1.5}),
    "scale": lambda: block(spec={"scale": 0.7}),
    "window": lambda: block(spec={"window": 5}),
    "two inputs": lambda: with_side(block(has_bias=True)),
    "two inputs, one normed": lambda: with_side(block(), attention_norm=None),
    "two inputs, a layer norm": lambda: with_side(block(), side=Side(norm=norm(E, 44, "layer"))),
    "experts": lambda: block(mlp=experts(5, 2, is_normalized=True)),
    "experts as the router says": lambda: block(
        mlp=experts(4, 3, is_normalized=False), mlp_post_norm=norm(E, 34), spec={"activation": "gelu"}
    ),
    "factors": lambda: block(attention_factor=0.3, mlp_factor=1.7),
    "factors behind norms": lambda: block(
        attention_post_norm=norm(E, 30), mlp_post_norm=norm(E, 31), attention_factor=0.3, mlp_factor=1.7
    ),
    "a factor of experts": lambda: block(mlp=experts(5, 2, is_normalized=True), mlp_factor=0.3),
    "experts by sigmoids": lambda: block(
        mlp=experts(5, 2, is_normalized=True, is_sigmoid=True, score_bias=numbers(5, seed=53), factor=1.5, epsilon=0.1)
    ),
    "experts without gates": lambda: block(
        mlp=replace(experts(5, 2, is_normalized=True), gate_up=numbers(5, INNER, E, seed=51), is_gated=False),
        spec={"activation": "relu2"},
    ),
    "a shared expert": lambda: block(mlp=experts(5, 2, is_normalized=True, shared=PLAIN_MLP)),
    "a shared expert with a gate": lambda: block(
        mlp=experts(5, 2, is_normalized=True, shared=GATED_MLP, shared_gate=matrix(1, E, 73, has_bias=True))
    ),
    "a shared expert with a norm": lambda: block(
        mlp=experts(5, 2, is_normalized=True, shared=GATED_MLP, shared_gate=matrix(1, E, 73)),
        mlp_post_norm=norm(E, 34),
    ),
}


def in_dtype(layers: Blocks, dtype: torch.dtype) -> Blocks:
    """All tensors in another dtype: norms and tables in float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)

    def converted(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype)
        if isinstance(value, Norm | Rotary):
            parts = {
                name: part.to(wide) for name in value.__slots__ if isinstance(part := getattr(value, name), Tensor)
            }
            return replace(value, **parts)
        if isinstance(value, Block | Matrix | FeedForward | Experts | Side):
            return replace(value, **{name: converted(getattr(value, name)) for name in value.__slots__})
        return value

    return Blocks(blocks=[converted(each) for each in layers.blocks], final_norm=converted(layers.final_norm))


def two(make: Callable[[], Block]) -> Blocks:
    """The block in question, and a plain one that sees what it gives; in float64."""
    return Blocks(blocks=[make(), block(100)], final_norm=norm(E, 35))


def slow_of(layers: Blocks, inputs: Tensor) -> list[Tensor]:
    """The formula's boundaries."""
    return Slow(layers)(inputs, side_of(layers, inputs))


def chains(lengths: Sequence[int], *, slots: Sequence[int], prefix_lens: Sequence[int]) -> Pass:
    return Pass.of_chains([[0] * length for length in lengths], slots=slots, prefix_lens=prefix_lens)


def stack_of(layers: Blocks, backend: Any, **more: Any) -> BlockStack:
    made = BlockStack(in_dtype(layers, BACKENDS[backend]), num_slots=SLOTS, capacity=CAPACITY, backend=backend, **more)
    assert made.backend == backend
    return made


def assert_close(found: Tensor, expected: Tensor, backend: str) -> None:
    tolerance = 2e-5 if backend == "native" else 1e-10
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


def one_by_one(stack: BlockStack, layers: Blocks, text: Tensor) -> Tensor:
    """The output of each row of a text behind those before it, on one thread."""
    work = [chains([1], slots=[0], prefix_lens=[t]) for t in range(len(text))]
    with threads(1):
        return torch.cat([stack.run(part, work[t], side_of(layers, part)) for t, part in enumerate(text.split(1))])


def assert_exact(layers: Blocks, quantization: Any = None) -> None:
    """Rows alone on one thread and beside other sequences on two have the same bits."""
    made: Any = {"num_slots": SLOTS, "capacity": CAPACITY, "backend": "native", "quantization": quantization}
    text = numbers(9, E, seed=74, scale=1.0)
    fed, work = torch.cat([text, numbers(7, E, seed=75)]), chains([9, 5, 2], slots=[1, 0, 2], prefix_lens=[0, 0, 0])
    with threads(2):
        found = BlockStack(layers, **made).run(fed, work, side_of(layers, fed))
    assert found.dtype == layers.dtype
    assert torch.equal(found[:9], one_by_one(BlockStack(layers, **made), layers, text))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_the_formula(option: str, backend: str) -> None:
    """Two sequences in pieces of different lengths, then a tree behind each of whose nodes its path lies."""
    layers = two(OPTIONS[option])
    stack = stack_of(layers, backend)
    texts = [numbers(14, E, seed=79, scale=1.0), numbers(9, E, seed=71, scale=1.0)]  # none that float32 magnifies
    known = [slow_of(layers, text) for text in texts]
    at = [0, 0]
    for pieces in ((5, 1), (1, 4), (6, 2)):
        parts = [text[start : start + count] for text, start, count in zip(texts, at, pieces, strict=True)]
        fed, work = torch.cat(parts), chains(pieces, slots=[2, 0], prefix_lens=at)
        found = stack.run(fed, work, side_of(layers, fed))
        rows = [slice(start, start + count) for start, count in zip(at, pieces, strict=True)]
        assert_close(found, torch.cat([k[3][row] for k, row in zip(known, rows, strict=True)]), backend)
        at = [start + count for start, count in zip(at, pieces, strict=True)]
    parents = [-1, 0, 0, 1, 2, 4]
    nodes = numbers(len(parents), E, seed=72, scale=1.0)
    tree = TokenTree.from_rows([TreeRow([0] * len(parents), parents)])
    work = Pass.of_tree(tree, slots=[2], prefix_lens=[at[0]], last_position=CAPACITY - 1)
    stack.cache.poison(2, at[0])
    found = stack.run(nodes, work, side_of(layers, nodes))
    for leaf in (3, 5):
        path = [leaf]
        while path[0] > 0:
            path.insert(0, parents[path[0]])
        expected = slow_of(layers, torch.cat([texts[0][: at[0]], nodes[path]]))[3][at[0] :]
        assert_close(found[path], expected, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", ["as llama", "norms over all heads", "post norms only", "two inputs", "experts"])
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_appended_is_seen_by_what_comes_later(count: int, option: str, backend: str) -> None:
    layers = two(OPTIONS[option])
    layers = Blocks(blocks=layers.blocks[:count], final_norm=layers.final_norm)
    text, stack = numbers(12, E, seed=73, scale=1.0), stack_of(layers, backend)
    for start, end, feed in ((0, 7, stack.append), (7, 8, stack.append), (8, 12, stack.run)):
        part = text[start:end]
        found = feed(part, chains([end - start], slots=[1], prefix_lens=[start]), side_of(layers, part))
    assert found is not None
    assert_close(found, slow_of(layers, text)[-1][8:], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_accepted_path_is_committed(backend: str) -> None:
    layers = two(block)
    prompt, nodes, further = (numbers(count, E, seed=80 + count, scale=1.0) for count in (5, 4, 2))
    stack = stack_of(layers, backend)
    stack.run(prompt, chains([5], slots=[0], prefix_lens=[0]))
    tree = TokenTree.from_rows([TreeRow([0] * 4, [-1, 0, 0, 2])])
    stack.run(nodes, Pass.of_tree(tree, slots=[0], prefix_lens=[5], last_position=CAPACITY - 1))
    stack.cache.move_paths([0], [5], [[2, 3]])
    stack.cache.poison(0, 8)
    found = stack.run(further, chains([2], slots=[0], prefix_lens=[8]))
    assert_close(found, Slow(layers)(torch.cat([prompt, nodes[[0, 2, 3]], further]))[3][8:], backend)


@pytest.mark.parametrize("option", OPTIONS)
def test_native_blocks_are_exact(option: str) -> None:
    """In bfloat16, alone on one thread and beside others on two: the same bits."""
    assert_exact(in_dtype(two(OPTIONS[option]), torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_second_input_on_every_instruction_set(instruction_set: str, dtype: torch.dtype) -> None:
    """One token, and several at once; in bfloat16 a token may be rounded to it before each matrix."""
    layers, text = in_dtype(two(OPTIONS["two inputs"]), dtype), numbers(8, E, seed=77, scale=1.0)
    expected = slow_of(in_dtype(layers, torch.float64), text)[3]
    with kernels_for(instruction_set):
        stack = BlockStack(layers, num_slots=1, capacity=CAPACITY, backend="native")
        for start, end in ((0, 1), (1, 8)):
            part = text[start:end]
            found = stack.run(part, chains([end - start], slots=[0], prefix_lens=[start]), side_of(layers, part))
            tolerance = 2e-5 if dtype == torch.float32 else 0.05
            assert (found.double() - expected[start:end]).abs().max() <= tolerance * expected.abs().max()


def test_the_fastest_backend_is_taken() -> None:
    kinds = {torch.float32: "native", torch.bfloat16: "native", torch.float64: "torch", torch.float16: "torch"}
    for dtype, backend in kinds.items():
        made = BlockStack(in_dtype(two(block), dtype), num_slots=1, capacity=CAPACITY)
        assert made.backend == backend
        assert made.run(torch.ones(1, E), chains([1], slots=[0], prefix_lens=[0])).dtype == dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_passes_that_do_not_fit(backend: str) -> None:
    stack = stack_of(two(block), backend)
    work = chains([2], slots=[0], prefix_lens=[0])
    for run in (stack.run, stack.append):
        with pytest.raises(PassError, match=r"inputs are \(3, 24\). Expected \(2, 24\)"):
            run(torch.ones(3, E), work)
        with pytest.raises(PassError, match="the pass needs 41 rows of a slot, which has 40"):
            run(torch.ones(2, E), chains([2], slots=[0], prefix_lens=[CAPACITY - 1]))
        with pytest.raises(PassError, match=r"side is \(2, 24\). Expected None: the first block has no second input"):
            run(torch.ones(2, E), work, torch.ones(2, E))
    layers = in_dtype(two(block), BACKENDS[backend])
    lost = BlockStack(layers, num_slots=1, capacity=CAPACITY, backend=backend)  # type: ignore[arg-type]
    layers.blocks[0].query.weight.untyped_storage().resize_(8)
    with pytest.raises(PassError, match="was freed or cut"):
        lost.run(torch.ones(2, E), work)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", [None, torch.ones(1, E), torch.ones(2, E + 1)], ids=["none", "short", "wide"])
def test_a_second_input_that_does_not_fit(side: Tensor | None, backend: str) -> None:
    stack, work = stack_of(two(OPTIONS["two inputs"]), backend), chains([2], slots=[0], prefix_lens=[0])
    for run in (stack.run, stack.append):
        with pytest.raises(PassError, match=r"side is .*\. Expected \(2, 24\): a second input"):
            run(torch.ones(2, E), work, side)


def test_only_the_first_block_has_a_second_input() -> None:
    with pytest.raises(ValueError, match="only the first block has a second input"):
        Blocks(blocks=[block(), with_side(block())])


def test_stacks_that_cannot_be() -> None:
    layers = two(block)
    with pytest.raises(ValueError, match=r"a rotary table has 40 positions. Expected at least the capacity 41"):
        BlockStack(layers, num_slots=1, capacity=CAPACITY + 1)
    with pytest.raises(UnsuitableError, match=r"it runs float32 and bfloat16, not torch.float64"):
        BlockStack(layers, num_slots=1, capacity=CAPACITY, backend="native")


def test_the_formula_notices_what_is_lost() -> None:
    """The control: without any one option the outputs differ by far more than the tolerance."""
    text = numbers(9, E, seed=76, scale=1.0)
    plain = Slow(two(block))(text)[3]
    for option, make in OPTIONS.items():
        if option != "as llama":
            found = slow_of(two(make), text)[3]
            assert float((found - plain).abs().max() / plain.abs().max()) > 1e-3, option

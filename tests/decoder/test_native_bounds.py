"""What the native kernels are handed: whatever it is, a process survives it, and hears a sentence."""

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import limit_memory
from tiny_models import CONTEXT_LEN, VOCAB_SIZE, tiny_model

from foretoken.core import backend, passes
from foretoken.core.errors import ForetokenError, PassError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder import library, native, native_linear, native_model
from foretoken.decoder.base import PassOutput, UnsuitableError
from foretoken.decoder.blocks import Block, Blocks, BlockSpec, Experts, FeedForward, LeanWeights, Matrix, Norm, Side
from foretoken.decoder.native import NativeBlocks
from foretoken.decoder.native_linear import NativeLinear
from foretoken.decoder.quantized import QuantizedMatrix, quantized
from foretoken.decoder.quantized_modules import quantized_parts
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.drafters.native import heads, trees
from foretoken.models.lean_weights import read_weights
from foretoken.models.loading import wrap_model
from foretoken.runner import runner
from foretoken.runner.runner import Runner

pytestmark = pytest.mark.native

IS_SANITIZED = os.environ.get("FORETOKEN_SANITIZE") == "1"  # by `make sanitize`
SLOTS, CAPACITY = 2, 40
TREE = TokenTree.from_rows([TreeRow([5, 6, 7], [-1, 0, 0])] * 2)


def blocks(
    change: Callable[[LeanWeights], LeanWeights] = lambda weights: weights,
    architecture: str = "mistral",
    num_rows: int | None = None,
) -> NativeBlocks:
    model = wrap_model(tiny_model(architecture), name="tiny")  # with a window, so that all positions are read
    cache = SlotCache(
        [LayerShape(2, 8, 8)] * 3, num_slots=SLOTS, capacity=CAPACITY, dtype=model.dtype, device=model.device,
        num_rows=num_rows,
    )  # fmt: skip
    weights = change(read_weights(model, CAPACITY))
    return NativeBlocks(weights.layers, cache, [1, 4], ends=weights)


def a_pass(**changes: Any) -> Pass:
    """Two sequences of three tokens as a tree, with all logits; everything as it should be but what is named."""
    made = Pass.of_tree(TREE, slots=[0, 1], prefix_lens=[4, 0], last_position=CAPACITY - 1)
    return replace(made, **changes)


def level(**changes: Any) -> Pass:
    """The same as a level of a tree that is drafted, each behind two earlier nodes."""
    given: dict[str, Any] = {
        "positions": torch.tensor([4, 5, 6, 6, 6, 0, 1, 2, 2, 2]),
        "parents": torch.tensor([-1, 0, 0, 1, 1] * 2),
        "num_earlier": [2, 2],
    }
    return a_pass(**{**given, **changes})


def with_parents(*parents: int) -> torch.Tensor:
    return torch.tensor(parents * 2)


def run(made: NativeBlocks, work: Any, inputs: torch.Tensor | None = None) -> PassOutput:
    return made.run(work, inputs)


LARGE = 2**62
TOKENS, POSITIONS, PARENTS = a_pass().tokens, a_pass().positions, a_pass().parents
WRONG: dict[str, Any] = {
    "bool tokens": lambda: (a_pass(tokens=TOKENS.bool()),),
    "int32 tokens": lambda: (a_pass(tokens=TOKENS.int()),),
    "double inputs": lambda: (a_pass(), torch.zeros(6, 32, dtype=torch.float64)),
    "narrow inputs": lambda: (a_pass(), torch.zeros(6, 31)),
    "too few inputs": lambda: (a_pass(), torch.zeros(5, 32)),
    "too few tokens": lambda: (a_pass(tokens=TOKENS[:5]),),
    "tokens without data": lambda: (a_pass(tokens=TOKENS.to("meta")),),
    "freed tokens": lambda: (a_pass(tokens=freed(TOKENS)),),
    "a token past the vocabulary": lambda: (a_pass(tokens=TOKENS + VOCAB_SIZE - 6),),
    "a negative token": lambda: (a_pass(tokens=TOKENS - 6),),
    "a huge token": lambda: (a_pass(tokens=TOKENS + LARGE),),
    "positions of another shape": lambda: (a_pass(positions=POSITIONS[:4]),),
    "positions of earlier nodes left out": lambda: (level(positions=POSITIONS),),
    "float positions": lambda: (a_pass(positions=POSITIONS.float()),),
    "a negative position": lambda: (a_pass(positions=POSITIONS - 1),),
    "a position past the tables": lambda: (a_pass(positions=POSITIONS + CAPACITY - 4),),
    "a huge position of an earlier node": lambda: (level(positions=torch.tensor([-(2**63)] + [0] * 9)),),
    "a slot too high": lambda: (a_pass(slots=[0, SLOTS]),),
    "a negative slot": lambda: (a_pass(slots=[-1, 0]),),
    "a prefix that leaves no room": lambda: (a_pass(prefix_lens=[0, CAPACITY - 2]),),
    "a prefix that leaves no room for earlier nodes": lambda: (level(prefix_lens=[0, CAPACITY - 4]),),
    "a negative prefix": lambda: (a_pass(prefix_lens=[0, -1]),),
    "a huge prefix": lambda: (a_pass(prefix_lens=[0, 2**63 - 1]),),
    "more tokens than rows": lambda: (Pass.of_chains([[1] * (CAPACITY + 1)], slots=[0], prefix_lens=[0]),),
    "a parent that comes after": lambda: (a_pass(parents=with_parents(-1, 2, 1)),),
    "a node that is its own parent": lambda: (a_pass(parents=with_parents(-1, 1, 0)),),
    "a parent below the root": lambda: (a_pass(parents=with_parents(-2, 0, 0)),),
    "a parent in the sequence before": lambda: (a_pass(parents=torch.tensor([-1, 0, 0, 2, 0, 0])),),
    "parents of another dtype": lambda: (a_pass(parents=PARENTS.int()),),
    "parents of another shape": lambda: (a_pass(parents=PARENTS[:3]),),
    "parents of earlier nodes left out": lambda: (level(parents=PARENTS),),
    "a sequence without tokens": lambda: (a_pass(offsets=[0, 6, 6]),),
    "offsets that go back": lambda: (a_pass(offsets=[0, 9, 6]),),
    "offsets that begin late": lambda: (a_pass(offsets=[1, 3, 6]),),
    "more tokens than offsets say": lambda: (a_pass(offsets=[0, 3, 7]),),
    "fewer nodes than tokens": lambda: (a_pass(num_earlier=[-1, 0], positions=POSITIONS[1:], parents=PARENTS[1:]),),
    "a row of logits past the tokens": lambda: (a_pass(logit_rows=torch.tensor([0, 6])),),
    "a negative row of logits": lambda: (a_pass(logit_rows=torch.tensor([-1, 0])),),
    "rows of logits out of order": lambda: (a_pass(logit_rows=torch.tensor([3, 2])),),
    "more rows of logits than tokens": lambda: (a_pass(logit_rows=torch.tensor([0] * 7)),),
    "rows of logits of another dtype": lambda: (a_pass(logit_rows=torch.tensor([0.0, 1.0])),),
}


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory was given back."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


@pytest.mark.parametrize("what", WRONG)
def test_a_pass_that_does_not_fit_is_refused_and_does_nothing(what: str) -> None:
    made = blocks()
    before = [made._described._cache.keys[0].clone(), made._described._cache.values[2].clone()]
    with pytest.raises(ForetokenError) as caught:
        run(made, *WRONG[what]())
    assert isinstance(caught.value, PassError)
    assert isinstance(caught.value, ValueError)
    after = [made._described._cache.keys[0], made._described._cache.values[2]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for good in (a_pass(), level()):
        assert bool(made.run(good).logits.isfinite().all())  # type: ignore[union-attr]


@pytest.mark.parametrize("prefix", [0, 13])
def test_a_pass_beyond_shared_rows_is_refused(prefix: int) -> None:
    """Of 48 rows a place that begins at row 32 has 16, though a slot may have 40."""
    made = blocks(num_rows=48)
    assert made._described._cache.keys[0].shape == (3, 2, CAPACITY, 8)
    made.run(a_pass(slots=[2, 0], prefix_lens=[prefix, 0]))
    before = [made._described._cache.keys[0].clone(), made._described._cache.values[2].clone()]
    for slots, lengths in (([2, 0], [14, 0]), ([0, 2], [0, 14]), ([2, 0], [CAPACITY - 3, 0]), ([3, 0], [0, 0])):
        with pytest.raises(PassError, match=r"do not fit|the slots are"):
            made.run(a_pass(slots=slots, prefix_lens=lengths))
    assert all(map(torch.equal, before, [made._described._cache.keys[0], made._described._cache.values[2]]))


def with_side(weights: LeanWeights) -> LeanWeights:
    """The first block has a second input."""
    first = weights.layers.blocks[0]
    wider = {
        name: Matrix(weight=torch.cat([getattr(first, name).weight.detach()] * 2, dim=1))
        for name in ("query", "key", "value")
    }
    return with_first(weights, **wider, side=Side(norm=norm_of(32)))


@pytest.mark.parametrize(
    "sides",
    [
        None, torch.zeros(6, 31), torch.zeros(5, 32), torch.zeros(6, 32, dtype=torch.float64),
        torch.zeros(6, 32, device="meta"), torch.zeros(192),
    ],
    ids=["none", "narrow", "short", "double", "elsewhere", "flat"],
)  # fmt: skip
def test_a_second_input_that_does_not_fit(sides: Any) -> None:
    made = blocks(with_side)
    before = made._described._cache.keys[0].clone()
    for refused in (lambda: made.run(a_pass(), None, sides), lambda: made.append(a_pass(), torch.zeros(6, 32), sides)):
        with pytest.raises(PassError, match=r"lacks something: MISSING|sides is .*Expected \(6, 32\)"):
            refused()
    assert torch.equal(made._described._cache.keys[0], before)
    assert bool(made.run(a_pass(), None, torch.ones(6, 32)).logits.isfinite().all())  # type: ignore[union-attr]


def test_no_assert_guards_memory() -> None:
    """`python -O` removes them: none stands before the kernels."""
    for module in (native, native_model, passes, native_linear, library, runner, heads, trees):
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)], module.__name__


def test_no_row_of_logits() -> None:
    logits = blocks().run(a_pass(logit_rows=torch.zeros(0, dtype=torch.int64))).logits
    assert logits is not None
    assert logits.shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": [0]}, {"slots": []}, {"prefix_lens": [0, 0, 0]}, {"offsets": [0, 6]}, {"offsets": [0, 3, 6, 6]},
        {"num_earlier": [0]},
    ],
    ids=str,
)  # fmt: skip
def test_a_pass_whose_lists_disagree_is_none(changes: Any) -> None:
    with pytest.raises(ValueError, match=r"sequence|offsets"):
        a_pass(**changes)


def shrunk(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :-1].contiguous()


def with_blocks(weights: LeanWeights, change: Callable[[Block], dict[str, Any]]) -> LeanWeights:
    """Something of every block is another."""
    changed = [replace(block, **change(block)) for block in weights.layers.blocks]
    return replace(weights, layers=replace(weights.layers, blocks=changed))


def with_first(weights: LeanWeights, **changes: Any) -> LeanWeights:
    """Something of the first block is another."""
    first, *rest = weights.layers.blocks
    return replace(weights, layers=replace(weights.layers, blocks=[replace(first, **changes), *rest]))


def with_final_norm(weights: LeanWeights, weight: torch.Tensor) -> LeanWeights:
    norm = weights.layers.final_norm
    assert norm is not None
    return replace(weights, layers=replace(weights.layers, final_norm=replace(norm, weight=weight)))


def rounded(weight: torch.Tensor) -> QuantizedMatrix:
    return quantized_parts(weight, 2, "int8", dtype=torch.float32)


def shared_of(hidden: int) -> FeedForward:
    up = Matrix(weight=torch.ones(24, 32))
    return FeedForward(gate=up, up=up, down=Matrix(weight=torch.ones(hidden, 24)))


def with_experts(**changes: Callable[[Any], Any]) -> Callable[[LeanWeights], LeanWeights]:
    """Experts of which something is another."""
    return lambda weights: with_blocks(
        weights, lambda b: {"mlp": replace(b.mlp, **{name: change(b.mlp) for name, change in changes.items()})}
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda w: with_blocks(w, lambda b: {"rotary": replace(b.rotary, cos=b.rotary.cos.repeat(1, 2))}),
            "cosines is",
        ),
        (lambda w: with_blocks(w, lambda b: {"rotary": replace(b.rotary, cos=b.rotary.cos[:, :0])}), "cosines is"),
        (
            lambda w: with_blocks(w, lambda b: {"rotary": replace(b.rotary, sin=b.rotary.sin[:-1])}),
            "the table of sines",
        ),
        (lambda w: with_final_norm(w, shrunk(w.layers.final_norm.weight)), "the final norm"),
        (lambda w: replace(w, embedding=w.embedding.T.contiguous().T), "the embedding"),
        (lambda w: replace(w, embedding=w.embedding.bfloat16()), "the embedding"),
        (lambda w: with_blocks(w, lambda b: {"spec": replace(b.spec, head_dim=16)}), "is .* Expected"),
        (lambda w: with_blocks(w, lambda b: {"spec": replace(b.spec, num_kv_heads=4)}), "is .* Expected"),
        (
            lambda w: with_blocks(w, lambda b: {"spec": replace(b.spec, num_heads=2 + 2 * (b is w.layers.blocks[0]))}),
            "block 1 has other heads than the first",
        ),
        (
            lambda w: with_blocks(w, lambda b: dict.fromkeys(("query_norm", "key_norm"), norm_of(7))),
            "of queries is",
        ),
        (
            lambda w: with_blocks(w, lambda b: {"mlp": replace(b.mlp, up=Matrix(weight=torch.zeros(40, 32)))}),
            r"up_proj is \(40, 32\)",
        ),
        (lambda w: with_blocks(w, lambda b: {"query": Matrix(weight=torch.zeros(32, 64)[:, ::2])}), "q_proj is"),
        (lambda w: with_blocks(w, lambda b: {"query": Matrix(weight=torch.zeros(32, 64))}), r"q_proj is \(32, 64\)"),
        (lambda w: with_first(with_side(w), query=w.layers.blocks[0].query), r"q_proj is .*Expected \(32, 64\)"),
        (lambda w: with_first(with_side(w), side=Side(norm=norm_of(31))), r"the second input is .*Expected \(32,\)"),
        (lambda w: replace(w, head=torch.nn.Identity()), "the LM head is a Identity"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Any, what: str) -> None:
    with pytest.raises(UnsuitableError, match=what):
        blocks(change)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (with_experts(gate_up=lambda m: m.gate_up[:, :-1].contiguous()), "gate_up_proj of the experts is"),
        (with_experts(gate_up=lambda m: m.gate_up[:-1]), "gate_up_proj of the experts is"),
        (with_experts(down=lambda m: m.down.transpose(1, 2).contiguous()), "the experts is"),
        (with_experts(router=lambda m: Matrix(weight=m.router.weight[:-1])), "gate_up_proj of the experts is"),
        (with_experts(router=lambda m: Matrix(weight=m.router.weight[:, :-1].contiguous())), "the router is"),
        (with_experts(gate_up=lambda m: rounded(m.gate_up[:-1])), r"the experts is \(192, 32\). Expected \(256, 32\)"),
        (with_experts(down=lambda m: rounded(m.down[:-1])), "the experts is .* Expected"),
        (with_experts(router=lambda m: Matrix(weight=quantized(m.router.weight, "int8"))), "a router has no kernels"),
        (
            with_experts(shared=lambda _: shared_of(32), shared_gate=lambda m: Matrix(weight=m.router.weight)),
            r"shared_expert_gate is .*Expected \(1, 32\)",
        ),
        (with_experts(shared=lambda _: shared_of(31)), "down_proj is"),
    ],
)
def test_experts_that_do_not_fit_are_refused(change: Any, what: str) -> None:
    with pytest.raises(UnsuitableError, match=what):
        blocks(change, "qwen3_moe")


def norm_of(size: int) -> Norm:
    return Norm(weight=torch.ones(size), epsilon=1e-6)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: BlockSpec(num_heads=4, num_kv_heads=3, head_dim=8), "4 query heads of 8 do not share 3 KV heads"),
        (lambda: BlockSpec(num_heads=4, num_kv_heads=0, head_dim=8), "do not share 0"),
        (lambda: BlockSpec(num_heads=4, num_kv_heads=2, head_dim=8, window=0), "the window is 0"),
        (lambda: BlockSpec(num_heads=4, num_kv_heads=2, head_dim=8, softcap=0.0), "the softcap is 0.0"),
        (lambda: replace(norm_of(4), bias=torch.ones(4)), "an RMS norm has no bias"),
        (lambda: Blocks(blocks=[]), "at least one block"),
        (
            lambda: Experts(
                router=Matrix(weight=torch.ones(2, 4)), gate_up=torch.ones(2, 6, 4), down=torch.ones(2, 4, 3), top_k=3,
                is_normalized=True,
            ),
            "a token takes 3 of 2 experts",
        ),
        (
            lambda: Experts(
                router=Matrix(weight=torch.ones(2, 4)), gate_up=torch.ones(2, 6, 4), down=torch.ones(2, 4, 3), top_k=1,
                is_normalized=True, shared_gate=Matrix(weight=torch.ones(1, 4)),
            ),
            "a gate of no shared expert",
        ),
    ],
)  # fmt: skip
def test_blocks_that_cannot_be(make: Callable[[], Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_torchs_default_dtype_is_not_that_of_the_buffers(dtype: torch.dtype) -> None:
    """Half as many bytes as the kernels write would end the process."""
    made, linear = blocks(), NativeLinear(torch.ones(300, 200))
    expected, output = made.run(a_pass()).features, linear(torch.ones(4, 200))
    model = wrap_model(tiny_model("llama"), name="tiny")
    native = Runner(model, num_slots=1, max_nodes=4, runner="lean-native")
    logits = native.verify([0], [0], TokenTree.roots([5])).logits
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        got, again = made.run(a_pass(logit_rows=None)).features, native.verify([0], [0], TokenTree.roots([5])).logits
        assert torch.equal(linear(torch.ones(4, 200, dtype=torch.float32)), output)
    finally:
        torch.set_default_dtype(before)
    assert expected is not None
    assert got is not None
    assert torch.equal(got, expected)
    assert again.dtype == torch.float32
    assert torch.equal(again, logits)


@pytest.mark.parametrize(
    "x", [torch.zeros(3, 7), torch.zeros(2, 16), torch.zeros(8, device="meta"), torch.tensor(1.0)], ids=str
)
def test_inputs_that_do_not_fit(x: torch.Tensor) -> None:
    with pytest.raises(PassError, match=r"Expected \(\.\.\., 8\) on a CPU"):
        NativeLinear(torch.ones(5, 8))(x)


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        (torch.ones(5, 8), torch.ones(4)),
        (torch.ones(5, 8), torch.ones(5, device="meta")),
        (torch.ones(8), None),
        (torch.ones(0, 8), None),
        (torch.ones(5, 0), None),
        (torch.ones(5, 8, device="meta"), None),
    ],
)
def test_layers_of_what_does_not_fit(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    with pytest.raises(UnsuitableError):
        NativeLinear(weight, bias)


def test_a_workspace_that_cannot_be_had() -> None:
    """Of more than there is, and of sizes past 64 bits."""
    made = blocks()
    for nodes in (2**40, 2**56, 2**62, 2**63 - 1):
        with pytest.raises(PassError, match=f"there is no memory for a pass of {nodes} nodes"):
            made.workspaces.take(made._workspace_bytes(nodes, 1, 0), f"a pass of {nodes} nodes")


@pytest.mark.skipif(IS_SANITIZED, reason="the sanitizers need more address space than there is")
def test_an_allocation_that_fails_inside_the_kernels() -> None:
    linear = NativeLinear(torch.ones(1, 1))
    x = torch.ones(20_000_000, 1)  # 80 MB, which become 1.3 to 5 GB where each is padded to a step of a register
    linear(x[:10])
    with (
        limit_memory(300_000_000),
        pytest.raises(PassError, match=r"there is no memory for 20000000 inputs of 1\. Feed fewer at once\."),
    ):
        linear(x)
    assert torch.equal(linear(x[:10]), x[:10])


def test_more_threads_than_any_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take no more than a few per processor, whatever torch was told; the bits are the same."""
    linear, x = NativeLinear(torch.randn(512, 512)), torch.randn(4, 512)
    expected, made = linear(x), blocks()
    features = made.run(a_pass()).features
    monkeypatch.setattr(torch, "get_num_threads", lambda: 100_000)
    assert backend.kernel_threads() == backend.MAX_THREADS
    assert torch.equal(linear(x), expected)
    assert torch.equal(made.run(a_pass()).features, features)  # type: ignore[arg-type]


def test_positions_of_padding_may_be_anything() -> None:
    """The cache may be shorter than the model's context: its table of positions is, too."""
    model = wrap_model(tiny_model("llama"), name="tiny")
    made = Runner(model, num_slots=1, context_len=20, max_nodes=4, runner="lean-native")
    assert made.last_position < CONTEXT_LEN - 1
    tree = TokenTree.from_rows([TreeRow([5, 6], [-1, 0])])
    expected = made.verify([0], [0], tree).logits[0]
    far = replace(tree, depths=torch.tensor([[0, 10**12]]))
    assert torch.equal(made.verify([0], [0], far).logits[0], expected)


@pytest.mark.skipif(not IS_SANITIZED, reason="`make sanitize` runs it")
@pytest.mark.parametrize(("output", "what"), [(9, "heap-buffer-overflow"), (0, "misaligned address")])
def test_the_sanitizers_see(output: int, what: str) -> None:
    """The control of `make sanitize`: a result that is written past its end, and one to an odd address."""
    code = f"""
        import ctypes, torch
        from foretoken.decoder.native_linear import NativeLinear
        linear = NativeLinear(torch.ones(10, 8))
        x, y = torch.ones(1, 8), torch.empty(10 - {output} + 1)
        linear._multiply(ctypes.addressof(linear._matrix), 0, x.data_ptr(), 1, y.data_ptr() + {int(output == 0)}, 1)
    """
    with pytest.raises(AssertionError, match=what):
        script(code)


def script(code: str) -> str:
    """What a program prints; it must end by itself, without a signal."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=200,
        check=False, cwd=sys.path[0], env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-10000:]
    return done.stdout

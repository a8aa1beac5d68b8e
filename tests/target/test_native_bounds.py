"""What the native kernels are handed: whatever it is, a process survives it, and hears a sentence."""

from __future__ import annotations

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
from tiny_models import CONTEXT_LEN, VOCAB_SIZE, tiny_model

from foretoken.attention.layout import AttentionLayout
from foretoken.core.errors import ForetokenError, PassError
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.target import runner
from foretoken.target.decoder import UnsuitableError
from foretoken.target.lean import native, native_model, products, threads
from foretoken.target.lean.native import NativeBlocks
from foretoken.target.lean.products import NativeLinear
from foretoken.target.lean.weights import LeanWeights, read_weights
from foretoken.target.loading import wrap_model
from foretoken.target.runner import Runner
from foretoken.target.slot_cache import LayerShape, SlotCache

IS_SANITIZED = os.environ.get("FORETOKEN_SANITIZE") == "1"  # by `make sanitize`
SLOTS, CAPACITY, WIDTH = 2, 40, 3
TREE = TokenTree.from_rows([TreeRow([5, 6, 7], [-1, 0, 0])] * 2)


def blocks(change: Callable[[LeanWeights], LeanWeights] = lambda weights: weights, **module: Any) -> NativeBlocks:
    model = wrap_model(tiny_model("mistral", **module), name="tiny")  # with a window, so that all positions are read
    cache = SlotCache(
        [LayerShape(2, 8, 8)] * 3, num_slots=SLOTS, capacity=CAPACITY, dtype=model.dtype, device=model.device
    )
    return NativeBlocks(change(read_weights(model, CAPACITY)), cache, model.dtype, [1, 4])


def a_pass(**changes: Any) -> tuple[torch.Tensor, AttentionLayout, torch.Tensor | None]:
    """Two sequences of three tokens as a tree, everything as it should be but what is named."""
    tokens = changes.pop("tokens", TREE.tokens)
    logits = changes.pop("logits", torch.empty(2, WIDTH, VOCAB_SIZE))
    given: dict[str, Any] = {"slots": [0, 1], "prefix": [4, 0], "tree": TREE}
    given["positions"] = TREE.depths + torch.tensor([[4], [0]])
    return tokens, AttentionLayout(**{**given, **changes}), logits


def level(**changes: Any) -> tuple[torch.Tensor, AttentionLayout, torch.Tensor | None]:
    """The same as a level of a tree that is drafted, behind two earlier rows."""
    given: dict[str, Any] = {"tree": None, "offset": 2, "visible": torch.ones(2, WIDTH, 5, dtype=torch.bool)}
    return a_pass(**{**given, "scratch_positions": torch.arange(5).expand(2, -1), **changes})


def with_parents(*parents: int) -> TokenTree:
    return replace(TREE, parents=torch.tensor([parents] * 2))


LARGE = 2**62
WRONG: dict[str, Any] = {
    "bool tokens": lambda: a_pass(tokens=TREE.tokens.bool()),
    "int32 tokens": lambda: a_pass(tokens=TREE.tokens.int()),
    "double inputs": lambda: a_pass(tokens=torch.zeros(2, WIDTH, 32, dtype=torch.float64)),
    "narrow inputs": lambda: a_pass(tokens=torch.zeros(2, WIDTH, 31)),
    "tokens without data": lambda: a_pass(tokens=TREE.tokens.to("meta")),
    "freed tokens": lambda: a_pass(tokens=freed(TREE.tokens)),
    "a token past the vocabulary": lambda: a_pass(tokens=TREE.tokens + VOCAB_SIZE - 6),
    "a negative token": lambda: a_pass(tokens=TREE.tokens - 6),
    "a huge token": lambda: a_pass(tokens=TREE.tokens + LARGE),
    "positions of another shape": lambda: a_pass(positions=torch.zeros(2, 2, dtype=torch.int64)),
    "float positions": lambda: a_pass(positions=torch.zeros(2, WIDTH)),
    "a negative position": lambda: a_pass(positions=TREE.depths - 1),
    "a position past the tables": lambda: a_pass(positions=TREE.depths + CAPACITY - 1),
    "a slot too high": lambda: a_pass(slots=[0, SLOTS]),
    "a negative slot": lambda: a_pass(slots=[-1, 0]),
    "too few slots": lambda: a_pass(slots=[0]),
    "too many prefixes": lambda: a_pass(prefix=[0, 0, 0]),
    "a prefix that leaves no room": lambda: a_pass(prefix=[0, CAPACITY - 2]),
    "a negative prefix": lambda: a_pass(prefix=[0, -1]),
    "a huge prefix": lambda: a_pass(prefix=[0, 2**63 - 1]),
    "more tokens than rows": lambda: a_pass(
        tokens=torch.zeros(2, 50, dtype=torch.int64), positions=torch.zeros(2, 50, dtype=torch.int64), tree=None,
        logits=None,
    ),
    "a parent that comes after": lambda: a_pass(tree=with_parents(-1, 2, 1)),
    "a node that is its own parent": lambda: a_pass(tree=with_parents(-1, 1, 0)),
    "a parent below the root": lambda: a_pass(tree=with_parents(-2, 0, 0)),
    "parents of another dtype": lambda: a_pass(tree=replace(TREE, parents=TREE.parents.int())),
    "parents of another shape": lambda: a_pass(tree=replace(TREE, parents=TREE.parents[:1])),
    "a mask of another shape": lambda: level(visible=torch.ones(2, WIDTH, 4, dtype=torch.bool)),
    "a mask of another dtype": lambda: level(visible=torch.ones(2, WIDTH, 5)),
    "no scratch positions": lambda: level(scratch_positions=None),
    "scratch positions of another shape": lambda: level(scratch_positions=torch.zeros(2, 4, dtype=torch.int64)),
    "huge scratch positions": lambda: level(scratch_positions=torch.full((2, 5), -(2**63))),
    "a negative offset": lambda: level(offset=-1, visible=torch.ones(2, WIDTH, 2, dtype=torch.bool)),
    "an offset past the rows": lambda: level(
        offset=CAPACITY, visible=torch.ones(2, WIDTH, CAPACITY + WIDTH, dtype=torch.bool),
        scratch_positions=torch.zeros(2, CAPACITY + WIDTH, dtype=torch.int64),
    ),
    "half logits": lambda: a_pass(logits=torch.empty(2, WIDTH, VOCAB_SIZE, dtype=torch.bfloat16)),
    "narrow logits": lambda: a_pass(logits=torch.empty(2, WIDTH, VOCAB_SIZE - 1)),
    "scattered logits": lambda: a_pass(logits=torch.empty(2, VOCAB_SIZE, WIDTH).transpose(1, 2)),
}  # fmt: skip


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
        made.decode(*WRONG[what]())
    assert isinstance(caught.value, PassError)
    assert isinstance(caught.value, ValueError)
    after = [made._described._cache.keys[0], made._described._cache.values[2]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for good in (a_pass(), level()):
        made.decode(*good)
        assert bool(good[2].isfinite().all())  # type: ignore[union-attr]


def test_no_assert_guards_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -O` removes them: none stands before the kernels, and those of the layout are not needed."""
    for module in (native, native_model, products, threads, runner):
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)], module.__name__
    monkeypatch.setattr(AttentionLayout, "__post_init__", lambda layout: None)
    positions = torch.zeros(2, WIDTH, dtype=torch.int64)
    mask = torch.ones(2, WIDTH, WIDTH, dtype=torch.bool)
    for case in (a_pass(offset=2), a_pass(visible=mask, scratch_positions=positions)):
        with pytest.raises(PassError, match="do not fit `visible`"):
            blocks().decode(*case)


@pytest.mark.parametrize("shape", [(0, WIDTH), (2, 0), (0, 0)])
def test_passes_of_nothing(shape: tuple[int, int]) -> None:
    nothing = torch.zeros(*shape, dtype=torch.int64)
    layout = AttentionLayout(slots=[0, 1][: shape[0]], prefix=[0, 0][: shape[0]], positions=nothing)
    features = blocks().decode(nothing, layout, torch.empty(*shape, VOCAB_SIZE))
    assert features is not None
    assert features.shape == (*shape, 2, 32)


def shrunk(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :-1].contiguous()


def with_layer(weights: LeanWeights, weight: torch.Tensor) -> LeanWeights:
    """A layer's weight was replaced after the model had been made."""
    weights.blocks[1].mlp.up_proj.weight = torch.nn.Parameter(weight)
    return weights


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda w: replace(w, cos=shrunk(w.cos)), "the table of cosines is .* Expected"),
        (lambda w: replace(w, sin=w.sin[:-1]), "the table of sines"),
        (lambda w: replace(w, final_norm=shrunk(w.final_norm)), "the final norm"),
        (lambda w: replace(w, final_norm=w.final_norm.double()), "the final norm"),
        (lambda w: replace(w, embedding=w.embedding.T.contiguous().T), "the embedding"),
        (lambda w: replace(w, embedding=w.embedding.bfloat16()), "the embedding"),
        (lambda w: replace(w, head_dim=16), "is .* Expected"),
        (lambda w: replace(w, num_kv_heads=3), "4 query heads of 8 do not share 3 KV heads"),
        (lambda w: replace(w, num_kv_heads=4), "is .* Expected"),
        (lambda w: replace(w, blocks=[replace(block, key_norm=torch.ones(7)) for block in w.blocks]), "of keys is"),
        (lambda w: with_layer(w, torch.zeros(40, 32)), r"up_proj is \(40, 32\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Any, what: str) -> None:
    with pytest.raises(UnsuitableError, match=what):
        blocks(change)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_torchs_default_dtype_is_not_that_of_the_buffers(dtype: torch.dtype) -> None:
    """Half as many bytes as the kernels write would end the process."""
    made, linear = blocks(), NativeLinear(torch.ones(300, 200))
    expected, product = made.decode(*a_pass()), linear(torch.ones(4, 200))
    model = wrap_model(tiny_model("llama"), name="tiny")
    native = Runner(model, num_slots=1, max_nodes=4, runner="lean-native")
    logits = native.verify([0], [0], TokenTree.roots([5])).logits
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        got, again = made.decode(*a_pass(logits=None)), native.verify([0], [0], TokenTree.roots([5])).logits
        assert torch.equal(linear(torch.ones(4, 200, dtype=torch.float32)), product)
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
def test_products_of_what_does_not_fit(x: torch.Tensor) -> None:
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
    for tokens in (2**40, 2**56, 2**62, 2**63 - 1):
        with pytest.raises(PassError, match=f"there is no memory for a pass of {tokens} tokens"):
            made._take_workspace(tokens, 1)


@pytest.mark.skipif(IS_SANITIZED, reason="the sanitizers need more address space than there is")
def test_an_allocation_that_fails_inside_the_kernels() -> None:
    code = """
        import resource, torch
        from foretoken.core.errors import PassError
        from foretoken.target.lean.products import NativeLinear
        linear = NativeLinear(torch.ones(1, 1))
        x = torch.ones(20_000_000, 1)  # 80 MB, which become 1.3 to 5 GB where each is padded to a step of a register
        out = linear(x[:10])
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000, -1))
        try:
            linear(x)
        except PassError as err:
            print(err)
    """
    assert script(code) == "there is no memory for 20000000 inputs of 1. Feed fewer at once.\n"


def test_more_threads_than_any_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take no more than a few per processor, whatever torch was told; the bits are the same."""
    linear, x = NativeLinear(torch.randn(512, 512)), torch.randn(4, 512)
    expected, made = linear(x), blocks()
    features = made.decode(*a_pass())
    for module in (threads.torch, products.torch):
        monkeypatch.setattr(module, "get_num_threads", lambda: 100_000)
    assert threads.kernel_threads() == threads.MAX_THREADS
    assert torch.equal(linear(x), expected)
    assert torch.equal(made.decode(*a_pass()), features)  # type: ignore[arg-type]


def test_positions_of_padding_may_be_anything() -> None:
    """The cache may be shorter than the model's context: its table of positions is, too."""
    model = wrap_model(tiny_model("llama"), name="tiny")
    made = Runner(model, num_slots=1, context_len=20, max_nodes=4, runner="lean-native")
    assert made.last_position < CONTEXT_LEN - 1
    tree = TokenTree.from_rows([TreeRow([5, 6], [-1, 0])])
    expected = made.verify([0], [0], tree).logits[0, 0]
    far = replace(tree, depths=torch.tensor([[0, 10**12]]))
    assert torch.equal(made.verify([0], [0], far).logits[0, 0], expected)


@pytest.mark.skipif(not IS_SANITIZED, reason="`make sanitize` runs it")
@pytest.mark.parametrize(("output", "what"), [(9, "heap-buffer-overflow"), (0, "misaligned address")])
def test_the_sanitizers_see(output: int, what: str) -> None:
    """The control of `make sanitize`: a result that is written past its end, and one to an odd address."""
    code = f"""
        import ctypes, torch
        from foretoken.target.lean.products import NativeLinear
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

"""Any tree: random shapes up to wide and deep, trees grown level by level, trees at the end of the context."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_model import FLOAT32_TOLERANCE, PlainModel, relative_error
from tiny_models import ARCHITECTURES, CONTEXT_LEN, VOCAB_SIZE, tiny_model
from tree_decoding import Round, path_error, prefill, prompts, random_tokens, random_tree, tiny_runner

from foretoken.core.errors import RequestError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner

# Two levels below the root's children; 7 nodes in order of depth, as a draft model grows them.
LEVEL_PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]
WIDEST = 40
LEAN = ("lean-native", "lean-stock")


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def pair(request: pytest.FixtureRequest) -> tuple[Runner, PlainModel]:
    """A runner for wide trees and its oracle."""
    model = wrap_model(tiny_model(request.param), name=request.param)
    return Runner(model, num_slots=2, max_nodes=WIDEST), PlainModel(tiny_model(request.param))


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, WIDEST), min_size=1, max_size=2),
    lengths=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    branching=st.integers(1, WIDEST),
    seed=st.integers(0, 1000),
)
def test_any_tree(
    pair: tuple[Runner, PlainModel], sizes: list[int], lengths: tuple[int, int], branching: int, seed: int
) -> None:
    runner, plain = pair
    rng = random.Random(seed)
    committed = [random_tokens(rng, length) for length in lengths[: len(sizes)]]
    rows = []
    for size in sizes:
        # A parent among the last `branching` nodes: 1 is a chain, many are bushy.
        parents = [-1, *(rng.randrange(max(0, node - branching), node) for node in range(1, size))]
        rows.append(TreeRow(random_tokens(rng, size), parents))
    tree = TokenTree.from_rows(rows)
    slots = list(range(len(sizes)))
    for slot, tokens in zip(slots, committed, strict=True):
        prefill(runner, slot, tokens)
    output = runner.verify(slots, [len(tokens) for tokens in committed], tree)
    done = Round(committed=committed, tree=tree, output=output)
    assert path_error(plain, [done]) < FLOAT32_TOLERANCE


def expand(runner: Runner, slots: list[int], lengths: list[int], tree: TokenTree) -> torch.Tensor:
    """Logits at the nodes of equal trees that are fed level by level after their roots, (B, N, V)."""
    parents, depths = tree.parents[0], tree.depths[0].tolist()
    batch = len(slots)
    roots = Pass.of_chains(tree.tokens[:, :1].tolist(), slots=slots, prefix_lens=lengths, has_last_logits=True)
    parts = [runner.run(roots).logits.view(batch, 1, -1)]
    for depth in range(1, max(depths) + 1):
        nodes = [node for node in range(len(depths)) if depths[node] == depth]
        end, width = nodes[-1] + 1, len(nodes)
        work = Pass(
            tokens=tree.tokens[:, nodes].flatten(),
            positions=(torch.tensor(lengths).unsqueeze(1) + tree.depths[:, 1:end]).flatten(),
            parents=(parents[1:end] - 1).clamp_min(-1).repeat(batch),
            slots=slots,
            prefix_lens=[length + 1 for length in lengths],  # the root is seen by all, like the committed rows
            offsets=range(0, batch * width + 1, width),
            num_earlier=[nodes[0] - 1] * batch,
            logit_rows=torch.arange(batch * width),
        )
        parts.append(runner.run(work).logits.view(batch, width, -1))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_expanded_level_by_level_equals_verified_at_once(architecture: str) -> None:
    runner = tiny_runner(architecture)
    rng = random.Random(1)
    committed = prompts()
    slots, lengths = [0, 1, 2], [len(tokens) for tokens in committed]
    tree = TokenTree.from_rows([TreeRow(random_tokens(rng, len(LEVEL_PARENTS)), LEVEL_PARENTS) for _ in committed])
    for slot, tokens in zip(slots, committed, strict=True):
        prefill(runner, slot, tokens)
    at_once = runner.verify(slots, lengths, tree).logits.view(*tree.tokens.shape, -1)
    for slot, length in zip(slots, lengths, strict=True):
        runner.cache.poison(slot, length)  # what verifying wrote must not help
    assert relative_error(expand(runner, slots, lengths, tree), at_once) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "mistral"])
def test_tree_past_the_end_of_the_context(architecture: str) -> None:
    """The root fits, some nodes do not: those that fit are right, the others do not break the pass."""
    runner, plain = tiny_runner(architecture), PlainModel(tiny_model(architecture))
    prompt = random_tokens(random.Random(2), CONTEXT_LEN - 2)
    prefill(runner, 0, prompt, chunk=50)
    tree = TokenTree.from_rows([TreeRow([5, 6, 7, 8, 9], [-1, 0, 0, 2, 3])])
    ours = runner.verify([0], [len(prompt)], tree).logits
    for path in ([0, 1], [0, 2]):
        theirs = plain([*prompt, *tree.tokens[0, path].tolist()])[-2:]
        assert relative_error(ours[path], theirs) < FLOAT32_TOLERANCE


@pytest.mark.parametrize(("architecture", "kind"), [("gemma2", "generic"), *(("mistral", kind) for kind in LEAN)])
def test_the_rest_of_a_pass_does_not_matter(architecture: str, kind: str) -> None:
    """The same sequence alone, beside a wider tree, and beside that and a chunk of a third one's prompt."""
    runner = tiny_runner(architecture, runner=kind)
    rng = random.Random(3)
    committed = [random_tokens(rng, length) for length in (9, 13, 20)]
    small, wide = random_tree(rng, 4), random_tree(rng, 11)
    for slot, tokens in enumerate(committed):
        prefill(runner, slot, tokens[:13])
    alone = runner.verify([0], [9], TokenTree.from_rows([small])).logits
    trees = TokenTree.from_rows([wide, small])
    both = runner.verification([1, 0], [13, 9], trees)
    chunk = Pass.of_chains([committed[2][13:]], slots=[2], prefix_lens=[13])
    for work in (both, both.with_chains(chunk)):
        together = runner.run(work).logits[11:]
        assert together.shape == (4, VOCAB_SIZE)
        if runner.is_exact:
            assert torch.equal(together, alone)
        else:
            assert relative_error(together, alone) < FLOAT32_TOLERANCE
    tree = TokenTree.from_rows([small])
    chunked = runner.verify([2], [20], tree).logits
    prefill(runner, 3, committed[2])
    assert relative_error(runner.verify([3], [20], tree).logits, chunked) < FLOAT32_TOLERANCE


def test_prompt_longer_than_the_context_is_refused() -> None:
    runner = tiny_runner("llama", context_len=10)
    with pytest.raises(RequestError, match=r"11 tokens do not fit\. Expected at most 10\."):
        runner.prefill(0, [1] * 3, 8)


@pytest.mark.parametrize(("context_len", "max_nodes"), [(1, 1), (2, 64), (4, 1)])
def test_contexts_shorter_than_the_self_test(context_len: int, max_nodes: int) -> None:
    model = wrap_model(tiny_model("llama"), name="llama")
    runner = Runner(model, num_slots=1, context_len=context_len, max_nodes=max_nodes)
    assert runner.context_len == context_len
    runner.prefill(0, [3] * (context_len - 1), 0) if context_len > 1 else None
    ours = runner.verify([0], [context_len - 1], TokenTree.roots([5])).logits[0]
    theirs = PlainModel(tiny_model("llama"))([*[3] * (context_len - 1), 5])[-1]
    assert relative_error(ours, theirs) < FLOAT32_TOLERANCE

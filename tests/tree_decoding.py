"""Decoding with random trees and random acceptance, so that what is fed does not depend on what comes out."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from pairwise import slow_products
from plain_model import PlainModel, relative_error
from tiny_models import ARCHITECTURES, LEAN_ARCHITECTURES, VOCAB_SIZE, tiny_model

from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.base import PassOutput
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner

SLOTS = (2, 0, 3)  # of the three sequences, out of order
UNUSED = 1  # a slot that no sequence has
PROMPT_LENS = (4, 9, 17)  # around and past the sliding window of 6
MAX_NODES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One iteration: what was committed before it, the trees, and what verifying them gave."""

    committed: list[list[int]]
    tree: TokenTree
    output: PassOutput

    def logits(self, row: int) -> torch.Tensor:
        """(N, V) of one sequence's nodes, padding left out."""
        return logits_by_sequence(self.output, self.tree)[row]

    def features(self, row: int) -> torch.Tensor:
        """(N, F, D), likewise."""
        assert self.output.features is not None
        return self.output.features.split(self.tree.node_counts())[row]


def logits_by_sequence(output: PassOutput, tree: TokenTree) -> Sequence[torch.Tensor]:
    """(N, V) of every sequence of a verified batch."""
    assert output.logits is not None
    return output.logits.split(tree.node_counts())


RUNNERS = ("generic", "lean-native", "lean-stock")


def _is_known(architecture: str, runner: str) -> bool:
    """The lean decoders know some architectures."""
    return runner == "generic" or architecture in LEAN_ARCHITECTURES


# Every architecture on every runner that knows it; one runner each, in turns, is not slow.
CASES = slow_products(ARCHITECTURES, RUNNERS, each=1, allowed=_is_known)


def tiny_runner(architecture: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> Runner:
    """A runner with four slots over a tiny model."""
    model = wrap_model(tiny_model(architecture, dtype=dtype), name=architecture)
    return Runner(model, num_slots=4, max_nodes=MAX_NODES, **options)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def prompts(seed: int = 0) -> list[list[int]]:
    """Three prompts of different lengths."""
    rng = random.Random(f"prompts {seed}")
    return [random_tokens(rng, length) for length in PROMPT_LENS]


def random_tree(rng: random.Random, num_nodes: int) -> TreeRow:
    """A tree that branches at random."""
    return TreeRow(
        random_tokens(rng, num_nodes), [-1 if node == 0 else rng.randrange(node) for node in range(num_nodes)]
    )


def prefill(runner: Runner, slot: int, tokens: Sequence[int], chunk: int | None = None) -> None:
    """Feeds a prompt in chunks, whole when `chunk` is None."""
    step = chunk or len(tokens)
    for start in range(0, len(tokens), step):
        runner.prefill(slot, tokens[start : start + step], start)


def decode(
    runner: Runner,
    *,
    seed: int = 0,
    rounds: int = 3,
    after_commit: Callable[[int, list[int]], None] | None = None,
) -> list[Round]:
    """Prefills three prompts, then verifies random trees and commits random paths.

    Args:
        runner: With the slots `SLOTS`.
        seed: Of prompts, trees and paths.
        rounds: Iterations.
        after_commit: Called with a slot and the tokens committed in it, after prefill and after every commit.

    Returns:
        Every round; at least one committed path left rows out, or the test would prove nothing about moving them.
    """
    rng = random.Random(seed)
    committed = prompts(seed)
    done, has_gap = [], False
    for slot, tokens in zip(SLOTS, committed, strict=True):
        prefill(runner, slot, tokens, runner.prefill_chunk)
        if after_commit:
            after_commit(slot, tokens)
    for _ in range(rounds):
        tree = TokenTree.from_rows([random_tree(rng, rng.randint(5, 10)) for _ in SLOTS])
        output = runner.verify(SLOTS, [len(tokens) for tokens in committed], tree)
        done.append(Round(committed=[list(tokens) for tokens in committed], tree=tree, output=output))
        accepted = torch.tensor([rng.randrange(int(count)) for count in tree.num_nodes])
        paths = [[node for node in path if node >= 0] for path in tree.path_nodes(accepted).tolist()]
        lengths = [len(tokens) for tokens in committed]
        runner.commit(SLOTS, lengths, paths)
        for row, (slot, path) in enumerate(zip(SLOTS, paths, strict=True)):
            has_gap |= path != list(range(1, len(path) + 1))
            committed[row] = committed[row] + [int(tree.tokens[row, node]) for node in [0, *path]]
            if after_commit:
                after_commit(slot, committed[row])
    assert has_gap
    return done


def node_paths(tree: TokenTree, row: int) -> list[list[int]]:
    """Root-to-leaf paths of one tree as lists of nodes; every node is on one of them."""
    parents = tree.rows()[row].parents
    paths = []
    for leaf in set(range(len(parents))) - set(parents):
        path = [leaf]
        while path[0] != 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    return paths


def by_path(
    reference: Callable[[list[list[int]]], Sequence[torch.Tensor]], rounds: Sequence[Round]
) -> Iterator[tuple[Round, int, torch.Tensor]]:
    """Yields each sequence of each round with what ordinary forwards of its paths say at the nodes of its tree.

    Args:
        reference: Tokens of whole sequences to tensors (T, …), one entry a position.
        rounds: The rounds.

    Yields:
        The round, the sequence's index, and (N, …), padding nodes left out.
    """
    cases = [(each, row, node_paths(each.tree, row)) for each in rounds for row in range(len(each.committed))]
    texts = [
        [*each.committed[row], *each.tree.tokens[row, path].tolist()] for each, row, paths in cases for path in paths
    ]
    found = iter(reference(texts))
    for each, row, paths in cases:
        nodes: dict[int, torch.Tensor] = {}
        for path in paths:
            nodes |= dict(zip(path, next(found)[len(each.committed[row]) :], strict=True))
        yield each, row, torch.stack([nodes[node] for node in range(len(nodes))])


def path_error(plain: PlainModel, rounds: Sequence[Round]) -> float:
    """Greatest relative error of the logits at all nodes of all rounds."""
    return max(relative_error(each.logits(row), theirs) for each, row, theirs in by_path(plain.batch, rounds))


def grow(runner: Runner, *, seed: int = 0, rounds: int = 3) -> list[tuple[list[int], torch.Tensor]]:
    """Drafts as a draft model does: random trees grow by a few nodes a pass, and a random path is kept.

    Between two trees, none, one or two tokens are fed as a chain.

    Args:
        runner: With the slots `SLOTS`.
        seed: Of prompts, trees, paths and tokens.
        rounds: Trees.

    Returns:
        Texts that end with a node of a tree, and the node's logits, (V,).
    """
    rng = random.Random(seed)
    texts, found = prompts(seed), []
    for slot, tokens in zip(SLOTS, texts, strict=True):
        prefill(runner, slot, tokens, runner.prefill_chunk)
    for round_ in range(rounds):
        lengths = [len(text) for text in texts]
        if round_ % 3:
            chains = [random_tokens(rng, round_ % 3) for _ in SLOTS]
            texts = [[*text, *chain] for text, chain in zip(texts, chains, strict=True)]
            runner.run(Pass.of_chains(chains, slots=SLOTS, prefix_lens=lengths, has_last_logits=True))
            lengths = [len(text) for text in texts]
        parents = [[rng.randrange(-1, node) for node in range(8)] for _ in SLOTS]
        tokens = [random_tokens(rng, 8) for _ in SLOTS]
        paths: list[list[list[int]]] = [[] for _ in SLOTS]
        for own, above in zip(paths, parents, strict=True):
            for node, parent in enumerate(above):
                own.append([*(own[parent] if parent >= 0 else ()), node])
        fed = [0] * len(SLOTS)
        for left in (2, 1, 0):  # passes that follow
            ends = [rng.randrange(before + 1, 9 - left) if left else 8 for before in fed]
            counts = [end - before for end, before in zip(ends, fed, strict=True)]
            depths = [[len(path) - 1 for path in own[:end]] for own, end in zip(paths, ends, strict=True)]
            new_tokens = [own[at:end] for own, at, end in zip(tokens, fed, ends, strict=True)]
            work = Pass(
                tokens=torch.tensor([each for own in new_tokens for each in own]),
                positions=torch.tensor([lengths[row] + each for row, own in enumerate(depths) for each in own]),
                parents=torch.tensor([each for above, end in zip(parents, ends, strict=True) for each in above[:end]]),
                slots=SLOTS, prefix_lens=lengths, offsets=[0, *accumulate(counts)], num_earlier=fed,
                logit_rows=torch.arange(sum(counts)),
            )  # fmt: skip
            logits = runner.run(work).logits
            assert logits is not None
            for row, new in enumerate(logits.split(counts)):
                for node, each in enumerate(new, fed[row]):
                    found.append(([*texts[row], *(tokens[row][at] for at in paths[row][node])], each))
            fed = ends
        for row, slot in enumerate(SLOTS):
            kept = rng.choice([[], *paths[row]])
            runner.cache.keep_nodes(slot, lengths[row], kept)
            texts[row] = [*texts[row], *(tokens[row][node] for node in kept)]
    return found

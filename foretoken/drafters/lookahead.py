"""Lookahead decoding: the target improves guesses of later text while it verifies; the guesses' n-grams are drafted.

Every tree has two parts. The nodes of the window (`lookahead_window`) are probes: they are verified only for the
target's answers. The guesses are n-grams that the window gave earlier after the root's token. Guesses are ordinary
drafts that share one trie. A step emits up to N tokens, N - 1 guesses and the bonus token.

The window follows the target's most probable tokens at any temperature. Its first tokens come from the prompt, chosen
by the request's seed (0 without one): the same committed tokens and seed give the same drafts.

Source: Fu et al. 2024, "Lookahead Decoding" (arXiv 2402.02057), and the code of its authors (LADE).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from foretoken.core.backend import integers_on
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import PROBE, TokenTree, TreeRow
from foretoken.drafters.base import DrafterOptions, TargetReads, TreeOption
from foretoken.trees.merge import Trie

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle


class NgramPool:
    """N-grams by the token before them. Drops the oldest n-gram of a token, and the token that was seen longest ago."""

    def __init__(self, *, per_key: int, max_ngrams: int) -> None:
        """Makes an empty pool of at most `max_ngrams` n-grams, and at most `per_key` after one token."""
        self.num_ngrams, self._per_key, self._max_ngrams = 0, per_key, max_ngrams
        self._by_key: OrderedDict[int, dict[tuple[int, ...], None]] = OrderedDict()  # both: least recently seen first

    def add(self, key: int, ngram: tuple[int, ...]) -> None:
        """Adds an n-gram that was seen after a token."""
        ngrams = self._by_key.setdefault(key, {})
        self._by_key.move_to_end(key)
        if ngram in ngrams or len(ngrams) == self._per_key:
            del ngrams[ngram if ngram in ngrams else next(iter(ngrams))]
        else:
            self.num_ngrams += 1
        ngrams[ngram] = None
        while self.num_ngrams > self._max_ngrams:
            self.num_ngrams -= len(self._by_key.popitem(last=False)[1])

    def after(self, key: int) -> Iterator[tuple[int, ...]]:
        """Returns the n-grams seen after a token, the most recent first."""
        return reversed(self._by_key.get(key, {}))


def most_nodes(width: int, ngram: int) -> int:
    """Returns the nodes of the largest window, root included; a narrow window is largest while it fills."""
    return max(rows * (width + ngram - 1 - rows) for rows in range(1, ngram))


def answers_by_path(row: TreeRow, answers: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Returns the target's most probable token after every path of a verified tree; nodes that were cut off have none.

    `answers` are those after each node. Equal paths have equal answers.
    """
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(row.tokens)):
        if (above := paths.get(row.parents[node])) is not None:
            paths[node] = (*above, row.tokens[node])
    return {path: answers[node] for node, path in reversed(paths.items())}


class Window:
    """The window of one sequence: columns of tokens, by row; the first token of column 0 stands for the root."""

    def __init__(self, width: int, ngram: int, *, prompt: Sequence[int], unwanted: Container[int], seed: int) -> None:
        """Fills the window with tokens of the prompt.

        `unwanted` are tokens that end a text; they are not used unless the prompt has no others.
        """
        self._num_rows, self._unwanted, self._random = ngram - 1, unwanted, random.Random(seed)
        self._spare = [token for token in prompt if token not in unwanted] or list(prompt) or [0]
        self.columns = [[self._guess(None)] for _ in range(width + ngram - 2)]

    def add_to(self, trie: Trie, *, max_depth: int, max_nodes: int) -> None:
        """Adds the window below a root: the first columns, as many as fit into `max_nodes` nodes as a whole."""
        top, num_rows = 0, len(self.columns[0])
        for index, column in enumerate(self.columns):
            if index + num_rows - 1 > max_depth or len(trie.tokens) + num_rows - (index == 0) > max_nodes:
                return
            top = node = trie.add(top, column[0]) if index else 0
            for token in column[1:]:
                node = trie.add(node, token)

    def learn_answers(self, root: int, answers: Mapping[tuple[int, ...], int]) -> list[tuple[int, tuple[int, ...]]]:
        """Advances the window by `answers_by_path`; returns the n-grams of full columns, in order, after their keys."""
        firsts = [column[0] for column in self.columns]
        found = [answers.get((*firsts[1 : i + 1], *column[1:])) for i, column in enumerate(self.columns)]
        if len(self.columns[0]) < self._num_rows:
            if any(answer is not None for answer in found[1:]):
                columns = zip(self.columns[1:], found[1:], strict=True)
                self.columns = [[*column, self._guess(answer)] for column, answer in columns]
            return []
        ngrams = []
        for index, answer in enumerate(found):
            if answer is not None:
                top, *others = self.columns[index]
                ngrams.append((top if index else root, (*others, answer)))
                self.columns[index] = [*others, self._guess(answer)]
        return ngrams

    def _guess(self, answer: int | None) -> int:
        """Returns the answer, or a token of the prompt if there is none or the answer would end the text."""
        return self._random.choice(self._spare) if answer is None or answer in self._unwanted else answer


_MOST_NGRAMS = 16_384  # per sequence


class Options(DrafterOptions):
    """Options of lookahead decoding.

    `tree` is "tree", all guesses in a trie, or "chain", the most recent guess. `num_speculative_tokens` bounds the
    depth of guesses.

    Attributes:
        lookahead_window: W, columns of the window. LADE's `WINDOW_SIZE`.
        lookahead_ngram: N, tokens of an n-gram with the token before it; the window has N - 1 rows. LADE's `LEVEL`.
        lookahead_guesses: G, n-grams kept and drafted after a token. LADE's `GUESS_SET_SIZE`.
        lookahead_pool_from_prompt: Whether n-grams of prompt and output are drafted too. LADE's `POOL_FROM_PROMPT`.
    """

    is_trusted: ClassVar[bool] = True
    can_prune_tree: ClassVar[bool] = True

    tree: TreeOption = "tree"
    lookahead_window: int = Field(default=7, ge=1, le=256)
    lookahead_ngram: int = Field(default=5, ge=2, le=32)
    lookahead_guesses: int = Field(default=7, ge=1, le=256)
    lookahead_pool_from_prompt: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Options:
        if self.tree not in ("chain", "tree"):
            raise ConfigError(
                "method 'lookahead' has no static trees: its guesses make the tree. Expected 'tree' to be \"tree\" or "
                '"chain".'
            )
        least = most_nodes(self.lookahead_window, self.lookahead_ngram) + self.lookahead_ngram - 1
        if least > self.max_nodes:
            raise ConfigError(
                f"a window of {self.lookahead_window} with n-grams of {self.lookahead_ngram} tokens and one guess have "
                f"{least} nodes, more than max_nodes, {self.max_nodes}. Raise max_nodes, or lower lookahead_window or "
                "lookahead_ngram."
            )
        return self

    @property
    def is_adaptive(self) -> bool:
        """Whether a controller may choose guesses. False for a chain: a bound on depth would cut the window too."""
        return self.tree == "tree" and super().is_adaptive


@dataclass(slots=True)
class _State:
    window: Window
    pool: NgramPool
    num_pooled: int = 0


class LookaheadDrafter:
    """Drafts n-grams from the window, and lets the target improve the window."""

    name = "lookahead"
    reads = TargetReads(top_k=1)

    def __init__(self, options: Options) -> None:
        self._options, width, ngram = options, options.lookahead_window, options.lookahead_ngram
        self._guess_len = min(ngram - 1, options.num_speculative_tokens or ngram)
        self._num_guesses = 1 if options.tree == "chain" else options.lookahead_guesses
        widest = most_nodes(width, ngram) + self._num_guesses * self._guess_len
        deepest = max(width + ngram - 3, self._guess_len)
        self.nodes_by_depth: Sequence[int] = (1, *[min(widest, options.max_nodes)] * deepest)
        self._states: dict[int, _State] = {}

    def attach(self, target: TargetHandle) -> None:
        """Stores the device of trees and the tokens that end a text."""
        self._device, self._eos_ids = target.device, frozenset(target.model.eos_ids)

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Starts the window with tokens of the prompt."""
        window, ngram = self._options.lookahead_window, self._options.lookahead_ngram
        seed = request.params.seed or 0
        self._states[slot] = _State(
            Window(window, ngram, prompt=request.prompt, unwanted=self._eos_ids, seed=seed),
            NgramPool(per_key=self._options.lookahead_guesses, max_ngrams=_MOST_NGRAMS),
        )
        self._follow(self._states[slot], request.prompt)  # here, so that the first draft is not timed with it

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns the guesses after each root, then the window."""
        rows, sources = [], []
        each = zip(context.slots, context.tokens, context.max_depth, context.max_nodes, strict=True)
        for slot, tokens, depth, nodes in each:
            row, num_drafted = self._row(self._states[slot], tokens, depth, min(nodes, self.nodes_by_depth[-1]))
            rows.append(row)
            sources.append([0] * num_drafted + [PROBE] * (len(row.tokens) - num_drafted))
        tree = TokenTree.from_rows(rows, device=self._device)
        padded = [source + [0] * (tree.width - len(source)) for source in sources]
        return replace(tree, source=integers_on(padded, self._device))

    def commit(self, committed: Committed) -> None:
        """Advances the windows by the target's answers at their nodes, in any tree. Synchronises with the host."""
        verified = committed.verified
        if verified is None or verified.top_ids is None:
            return
        best = verified.top_ids[:, 0].tolist()
        for slot, row, start in zip(committed.slots, verified.tree.rows(), verified.offsets, strict=False):
            state, answers = self._states[slot], answers_by_path(row, best[start : start + len(row.tokens)])
            for key, ngram in state.window.learn_answers(row.tokens[0], answers):
                state.pool.add(key, ngram)

    def release(self, slot: int) -> None:
        """Forgets window and pool."""
        self._states.pop(slot, None)

    def _row(self, state: _State, tokens: Sequence[int], depth: int, max_nodes: int) -> tuple[TreeRow, int]:
        trie = Trie(tokens[-1])
        if depth <= 0:
            return trie.row(), 1
        self._follow(state, tokens)
        room = max_nodes - len(state.window.columns) * len(state.window.columns[0]) + 1  # both have the root
        for guess in islice(state.pool.after(tokens[-1]), self._num_guesses):
            trie.add_path(guess[: min(depth, self._guess_len)], room)
        num_drafted = len(trie.tokens)
        state.window.add_to(trie, max_depth=depth, max_nodes=max_nodes)
        return trie.row(), num_drafted

    def _follow(self, state: _State, tokens: Sequence[int]) -> None:
        """Pools the n-grams of new tokens, if the pool is filled from texts."""
        if self._options.lookahead_pool_from_prompt:
            length = self._options.lookahead_ngram
            for end in range(max(state.num_pooled + 1, length), len(tokens) + 1):
                state.pool.add(tokens[end - length], tuple(tokens[end - length + 1 : end]))
            state.num_pooled = len(tokens)


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return LookaheadDrafter(options)

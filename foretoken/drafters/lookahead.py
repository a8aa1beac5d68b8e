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
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from foretoken.core.backend import integers_on
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import PROBE, TokenTree, TreeRow
from foretoken.drafters.base import LookupOptions, TargetReads, TreeOption
from foretoken.trees.merge import Trie

if TYPE_CHECKING:
    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle

_MOST_NGRAMS = 16_384  # per sequence


class Options(LookupOptions):
    """Options of lookahead decoding.

    `tree` is "tree", all guesses in a trie, or "chain", the most recent guess. `num_speculative_tokens` bounds the
    depth of guesses.

    Attributes:
        lookahead_window: W, columns of the window. LADE's `WINDOW_SIZE`.
        lookahead_ngram: N, tokens of an n-gram with the token before it; the window has N - 1 rows. LADE's `LEVEL`.
        lookahead_guesses: G, n-grams kept and drafted after a token. LADE's `GUESS_SET_SIZE`.
        lookahead_pool_from_prompt: Whether n-grams of prompt and output are drafted too. LADE's `POOL_FROM_PROMPT`.
    """

    has_static_trees: ClassVar[bool] = False

    tree: TreeOption = "tree"
    lookahead_window: int = Field(default=7, ge=1, le=256)
    lookahead_ngram: int = Field(default=5, ge=2, le=32)
    lookahead_guesses: int = Field(default=7, ge=1, le=256)
    lookahead_pool_from_prompt: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Options:
        least = self.window_nodes + self.lookahead_ngram - 1
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

    @property
    def window_nodes(self) -> int:
        """Nodes of the largest window, root included; a narrow window is largest while it fills."""
        ngram = self.lookahead_ngram
        return max(rows * (self.lookahead_window + ngram - 1 - rows) for rows in range(1, ngram))


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
        self.num_ngrams -= len(ngrams)
        ngrams.pop(ngram, None)
        ngrams[ngram] = None
        if len(ngrams) > self._per_key:
            del ngrams[next(iter(ngrams))]
        self.num_ngrams += len(ngrams)
        while self.num_ngrams > self._max_ngrams:
            self.num_ngrams -= len(self._by_key.popitem(last=False)[1])

    def after(self, key: int) -> Iterator[tuple[int, ...]]:
        """Returns the n-grams seen after a token, the most recent first."""
        return reversed(self._by_key.get(key, {}))


class Window:
    """The window of one sequence, and the n-grams that it gave.

    Attributes:
        columns: Tokens by row; the first token of column 0 stands for the root.
        pool: Of the sequence.
    """

    def __init__(self, options: Options, prompt: Sequence[int], unwanted: Container[int], seed: int) -> None:
        """Fills the window with tokens of the prompt; with `unwanted` ones, which end a text, only without others."""
        self._ngram, self._unwanted, self._random = options.lookahead_ngram, unwanted, random.Random(seed)
        self._spare = [token for token in prompt if token not in unwanted] or list(prompt) or [0]
        self.columns = [[self._guess(None)] for _ in range(options.lookahead_window + self._ngram - 2)]
        self.pool = NgramPool(per_key=options.lookahead_guesses, max_ngrams=_MOST_NGRAMS)
        self._num_pooled = 0

    def add_to(self, trie: Trie, *, max_depth: int, max_nodes: int) -> None:
        """Adds the window below a root: the first columns, as many as fit into `max_nodes` nodes as a whole."""
        top, num_rows = 0, len(self.columns[0])
        for index, column in enumerate(self.columns):
            if index + num_rows - 1 > max_depth or len(trie.tokens) + num_rows - (index == 0) > max_nodes:
                return
            top = node = trie.add(top, column[0]) if index else 0
            for token in column[1:]:
                node = trie.add(node, token)

    def learn_answers(self, root: int, answers: Mapping[tuple[int, ...], int]) -> None:
        """Advances the window by the target's answer after each path, and pools the n-grams of full columns."""
        firsts = [column[0] for column in self.columns]
        found = [answers.get((*firsts[1 : i + 1], *column[1:])) for i, column in enumerate(self.columns)]
        if len(self.columns[0]) < self._ngram - 1:
            if any(answer is not None for answer in found[1:]):
                columns = zip(self.columns[1:], found[1:], strict=True)
                self.columns = [[*column, self._guess(answer)] for column, answer in columns]
            return
        for index, answer in enumerate(found):
            if answer is not None:
                top, *others = self.columns[index]
                self.pool.add(top if index else root, (*others, answer))
                self.columns[index] = [*others, self._guess(answer)]

    def pool_text(self, tokens: Sequence[int]) -> None:
        """Pools the n-grams of new tokens; `tokens` is the whole text."""
        for end in range(max(self._num_pooled + 1, self._ngram), len(tokens) + 1):
            self.pool.add(tokens[end - self._ngram], tuple(tokens[end - self._ngram + 1 : end]))
        self._num_pooled = len(tokens)

    def _guess(self, answer: int | None) -> int:
        """Returns the answer, or a token of the prompt if there is none or the answer would end the text."""
        return self._random.choice(self._spare) if answer is None or answer in self._unwanted else answer


class LookaheadDrafter:
    """Drafts n-grams from the window, and lets the target improve the window."""

    name = "lookahead"
    reads = TargetReads(top_k=1)

    def __init__(self, options: Options) -> None:
        self._options, width, ngram = options, options.lookahead_window, options.lookahead_ngram
        self._guess_len = min(ngram - 1, options.num_speculative_tokens or ngram)
        self._num_guesses = 1 if options.tree == "chain" else options.lookahead_guesses
        widest = options.window_nodes + self._num_guesses * self._guess_len
        deepest = max(width + ngram - 3, self._guess_len)
        self.nodes_by_depth: Sequence[int] = (1, *[min(widest, options.max_nodes)] * deepest)
        self._windows: dict[int, Window] = {}

    def attach(self, target: TargetHandle) -> None:
        """Stores the device of trees and the tokens that end a text."""
        self._device, self._eos_ids = target.device, frozenset(target.model.eos_ids)

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Starts the window with tokens of the prompt."""
        window = Window(self._options, request.prompt, self._eos_ids, request.params.seed or 0)
        self._windows[slot] = window
        if self._options.lookahead_pool_from_prompt:
            window.pool_text(request.prompt)  # here, so that the first draft is not timed with it

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns the guesses after each root, then the window."""
        rows, sources = [], []
        each = zip(context.slots, context.tokens, context.max_depth, context.max_nodes, strict=True)
        for slot, tokens, depth, nodes in each:
            row, num_drafted = self._row(self._windows[slot], tokens, depth, min(nodes, self.nodes_by_depth[-1]))
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
            paths: dict[int, tuple[int, ...]] = {0: ()}
            for node in range(1, len(row.tokens)):
                if (above := paths.get(row.parents[node])) is not None:  # None below nodes that were cut off
                    paths[node] = (*above, row.tokens[node])
            answers = {path: best[start + node] for node, path in paths.items()}  # equal paths have equal answers
            self._windows[slot].learn_answers(row.tokens[0], answers)

    def release(self, slot: int) -> None:
        """Forgets window and pool."""
        self._windows.pop(slot, None)

    def _row(self, window: Window, tokens: Sequence[int], depth: int, max_nodes: int) -> tuple[TreeRow, int]:
        """Returns one sequence's tree, and its nodes that are no probes."""
        trie = Trie(tokens[-1])
        if depth <= 0:
            return trie.row(), 1
        if self._options.lookahead_pool_from_prompt:
            window.pool_text(tokens)
        room = max_nodes - len(window.columns) * len(window.columns[0]) + 1  # both have the root
        for guess in islice(window.pool.after(tokens[-1]), self._num_guesses):
            trie.add_path(guess[: min(depth, self._guess_len)], room)
        num_drafted = len(trie.tokens)
        window.add_to(trie, max_depth=depth, max_nodes=max_nodes)
        return trie.row(), num_drafted


create: Callable[[Options], Drafter] = LookaheadDrafter  # see `foretoken.drafters.registry`

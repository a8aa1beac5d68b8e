"""Lookahead decoding: the target improves guesses of the text ahead while it verifies; their n-grams are drafted.

Every tree has two parts. The window (`lookahead_window`) is verified only for the target's answers: its nodes are
probes. The guesses are the n-grams that the window gave after the root's token earlier: drafts like any others, sharing
one trie. A step writes up to N tokens, N - 1 guesses and the bonus token.

The window follows the target's most probable tokens whatever the temperature, and its first tokens, those of the
prompt, are chosen by the request's seed (0 without one): the same committed tokens and seed give the same drafts.

Source: Fu et al. 2024, "Lookahead Decoding" (arXiv 2402.02057), and the code of its authors (LADE).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from foretoken.core.backend import integers_on
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import PROBE, TokenTree, TreeRow
from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle, TargetReads
from foretoken.drafters.options import DrafterOptions, TreeOption
from foretoken.lookups.lookahead_window import Answers, Window, most_nodes
from foretoken.lookups.ngram_pool import NgramPool
from foretoken.trees.merge import Trie

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_NGRAMS = 16_384  # of a sequence


class Options(DrafterOptions):
    """Options of lookahead decoding.

    `tree` is "tree", all guesses in a trie, or "chain", the most recent one; `num_speculative_tokens` bounds the depth
    of guesses.

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
        """There is room for a window and a guess, and the tree is one that guesses can have.

        Raises:
            ConfigError: Otherwise.
        """
        if self.tree not in ("chain", "tree"):
            raise ConfigError(
                "method 'lookahead' has no static trees: its guesses make the tree. Expected 'tree' to be \"tree\" or "
                '"chain".'
            )
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
        """Whether a controller may choose guesses; not for a chain, as a bound on depth would cut the window too."""
        return self.tree == "tree" and super().is_adaptive

    @property
    def window_nodes(self) -> int:
        """Nodes of the largest window, root included."""
        return most_nodes(self.lookahead_window, self.lookahead_ngram)

    @property
    def guess_len(self) -> int:
        """Most tokens of a guess."""
        return min(self.lookahead_ngram - 1, self.num_speculative_tokens or self.lookahead_ngram)

    @property
    def num_guesses(self) -> int:
        """Most guesses of a tree."""
        return 1 if self.tree == "chain" else self.lookahead_guesses


@dataclass(slots=True)
class _State:
    """What is kept of a sequence.

    Attributes:
        window: Of the present root.
        pool: N-grams seen.
        num_pooled: Tokens of the text whose n-grams are in the pool.
    """

    window: Window
    pool: NgramPool
    num_pooled: int = 0


class LookaheadDrafter:
    """Drafts n-grams that the window gave, and has the target improve the window."""

    name = "lookahead"
    reads = TargetReads(top_k=1)

    def __init__(self, options: Options) -> None:
        self._options = options
        widest = options.window_nodes + options.num_guesses * options.guess_len
        deepest = max(options.lookahead_window + options.lookahead_ngram - 3, options.guess_len)
        self.nodes_by_depth: Sequence[int] = (1, *[min(widest, options.max_nodes)] * deepest)
        self._states: dict[int, _State] = {}

    def attach(self, target: TargetHandle) -> None:
        """Learns where trees lie and which tokens end a text."""
        self._device, self._eos_ids = target.device, frozenset(target.model.eos_ids)

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Starts the window with tokens of the prompt."""
        options = self._options
        self._states[slot] = _State(
            window=Window(
                options.lookahead_window,
                options.lookahead_ngram,
                prompt=request.prompt,
                unwanted=self._eos_ids,
                seed=request.params.seed or 0,
            ),
            pool=NgramPool(per_key=options.lookahead_guesses, max_ngrams=_MOST_NGRAMS),
        )
        self._follow(self._states[slot], request.prompt)

    def propose(self, context: DraftContext) -> TokenTree:
        """The guesses after each root, then the window."""
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
        """Moves the windows by what the target said at their nodes, in whatever tree these were verified. Syncs."""
        verified = committed.verified
        if verified is None or verified.top_ids is None:
            return
        best = verified.top_ids[:, 0].tolist()
        for slot, row, start in zip(committed.slots, verified.tree.rows(), verified.offsets, strict=False):
            state = self._states[slot]
            for ngram in state.window.learn(row.tokens[0], Answers(row, best[start : start + len(row.tokens)])):
                state.pool.add(ngram.key, ngram.tokens)

    def release(self, slot: int) -> None:
        """Forgets window and pool."""
        self._states.pop(slot, None)

    def _row(self, state: _State, tokens: Sequence[int], depth: int, max_nodes: int) -> tuple[TreeRow, int]:
        """One sequence's tree, and how many of its nodes, which come first, are drafts."""
        trie = Trie(tokens[-1])
        if depth <= 0:
            return trie.row(), 1
        self._follow(state, tokens)
        room = max_nodes - state.window.num_nodes + 1  # both have the root
        for guess in islice(state.pool.after(tokens[-1]), self._options.num_guesses):
            trie.add_path(guess[: min(depth, self._options.guess_len)], room)
        num_drafted = len(trie.tokens)
        state.window.add_to(trie, max_depth=depth, max_nodes=max_nodes)
        return trie.row(), num_drafted

    def _follow(self, state: _State, tokens: Sequence[int]) -> None:
        """Adds the text's n-grams that are not in the pool yet, where that is asked for; tokens: the whole text."""
        length = self._options.lookahead_ngram
        if not self._options.lookahead_pool_from_prompt:
            return
        for end in range(max(state.num_pooled + 1, length), len(tokens) + 1):
            state.pool.add(tokens[end - length], tuple(tokens[end - length + 1 : end]))
        state.num_pooled = len(tokens)


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return LookaheadDrafter(options)

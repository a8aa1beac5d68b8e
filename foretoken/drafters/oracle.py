"""A drafter that knows the answer. It measures the engine's cost at a given acceptance, without trained weights.

It gets the whole texts of plain decoding, and a script of how many drafted tokens are right in each pass. `pattern=[0]`
is always wrong, `pattern=[5]` always right to depth 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import DrafterOptions, TargetReads
from foretoken.trees.merge import Trie

if TYPE_CHECKING:
    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle


class Options(DrafterOptions):
    """Options of the oracle; `references` are token ids of whole texts, prompt and output, of plain decoding.

    `pattern` is the number of right tokens in each pass of a sequence; it repeats when it ends.
    """

    is_trusted: ClassVar[bool] = True
    can_adapt_depth: ClassVar[bool] = False

    references: Sequence[Sequence[int]]
    pattern: Sequence[int] = Field(default=(4,), min_length=1)


class OracleDrafter:
    """Drafts the reference continuation, right down to the depth of the script and wrong below."""

    name = "oracle"
    reads = TargetReads()

    def __init__(self, options: Options) -> None:
        self._options = options
        self._depth = options.num_speculative_tokens or max(1, *options.pattern)
        self._has_siblings = options.tree != "chain"
        step = 2 if self._has_siblings else 1
        self.nodes_by_depth: Sequence[int] = range(1, step * self._depth + 2, step)
        self._references: dict[int, Sequence[int]] = {}
        self._passes: dict[int, int] = {}

    def attach(self, target: TargetHandle) -> None:
        """Stores the device of trees and the vocabulary size."""
        self._target = target

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Restarts the script."""
        del request
        self._references[slot], self._passes[slot] = (), 0

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns the reference continuation with the wrong tokens of the script."""
        rows = [
            self._trie(slot, tokens, min(self._depth, depth)).row()
            for slot, tokens, depth in zip(context.slots, context.tokens, context.max_depth, strict=True)
        ]
        return TokenTree.from_rows(rows, device=self._target.device)

    def commit(self, committed: Committed) -> None:
        """Advances the script by one pass, except after a part of a prompt."""
        if committed.verified is not None:
            for slot in committed.slots:
                self._passes[slot] += 1

    def release(self, slot: int) -> None:
        """Forgets the sequence."""
        self._references.pop(slot, None)
        self._passes.pop(slot, None)

    def _trie(self, slot: int, tokens: Sequence[int], depth: int) -> Trie:
        # Texts may share a prompt, so another reference may fit now.
        if list(self._references[slot][: len(tokens)]) != list(tokens):
            known = (r for r in self._options.references if list(r[: len(tokens)]) == list(tokens))
            self._references[slot] = next(known, ())
        following = self._references[slot][len(tokens) : len(tokens) + depth]
        num_right = self._options.pattern[self._passes[slot] % len(self._options.pattern)]
        trie, node = Trie(tokens[-1]), 0
        for d, token in enumerate(following):
            wrong = (token + 1) % self._target.vocab_size
            if self._has_siblings:
                trie.add(node, wrong)
            node = trie.add(node, token if d < num_right else (token + 2) % self._target.vocab_size)
        return trie


create: Callable[[Options], Drafter] = OracleDrafter  # see `foretoken.drafters.registry`

"""A drafter that knows the answer: it measures what the engine costs at a given acceptance, without trained weights.

It is given the whole texts that plain decoding produces and a script of how many drafted tokens are to be right in each
pass. `pattern=[0]` is always wrong, `pattern=[5]` always right to depth 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import Committed, DraftContext, Drafter, DrafterOptions, TargetFacts
from foretoken.trees.merge import Trie

if TYPE_CHECKING:
    from foretoken.core.taps import Tap


class Options(DrafterOptions):
    """Options of the oracle.

    Attributes:
        references: Token ids of whole texts, prompt and output, as plain decoding gives them.
        pattern: Right tokens in each pass of a sequence, repeated from the start when it ends.
    """

    is_trusted: ClassVar[bool] = True
    can_adapt_depth: ClassVar[bool] = False

    references: Sequence[Sequence[int]]
    pattern: Sequence[int] = Field(default=(4,), min_length=1)


class OracleDrafter:
    """Drafts the reference continuation, right as far as the script says and wrong from there."""

    name = "oracle"
    taps: tuple[Tap, ...] = ()

    def __init__(self, options: Options, target: TargetFacts) -> None:
        self._options, self._target = options, target
        self._depth = options.num_speculative_tokens or max(1, *options.pattern)
        self._has_siblings = options.tree != "chain"
        self.max_nodes = self._depth * (2 if self._has_siblings else 1) + 1
        self._references: dict[int, Sequence[int]] = {}
        self._passes: dict[int, int] = {}

    def propose(self, context: DraftContext) -> TokenTree:
        """See `Drafter`."""
        rows = [
            self._trie(slot, tokens, min(self._depth, depth)).row()
            for slot, tokens, depth in zip(context.slots, context.tokens, context.max_depth, strict=True)
        ]
        return TokenTree.from_rows(rows, device=self._target.device)

    def commit(self, committed: Committed) -> None:
        """The script goes on by one pass, except at prefill, which starts at position 0."""
        for slot in committed.slots:
            if slot in self._references:
                self._passes[slot] = self._passes.get(slot, 0) + 1

    def release(self, slot: int) -> None:
        """See `Drafter`."""
        self._references.pop(slot, None)
        self._passes.pop(slot, None)

    def _trie(self, slot: int, tokens: Sequence[int], depth: int) -> Trie:
        """One sequence's tree: a chain, with a wrong sibling before every node when siblings are asked for."""
        # Texts may share a prompt, so the one that fitted so far need not fit any longer.
        if list(self._references.get(slot, ())[: len(tokens)]) != list(tokens):
            known = (r for r in self._options.references if list(r[: len(tokens)]) == list(tokens))
            self._references[slot] = next(known, ())
        following = self._references[slot][len(tokens) : len(tokens) + depth]
        num_right = self._options.pattern[self._passes.get(slot, 0) % len(self._options.pattern)]
        trie, node = Trie(tokens[-1]), 0
        for d, token in enumerate(following):
            wrong = (token + 1) % self._target.vocab_size
            if self._has_siblings:
                trie.add(node, wrong)
            node = trie.add(node, token if d < num_right else (token + 2) % self._target.vocab_size)
        return trie


def create(options: Options, target: TargetFacts) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return OracleDrafter(options, target)

"""What became of every node of a verified tree, with the probabilities that decided it, as a value on the host.

Letters: N nodes of the tree, root and probes included.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class NodeOutcome(StrEnum):
    """What became of a node."""

    ROOT = "root"
    ACCEPTED = "accepted"
    REJECTED = "rejected"  # tested, and another token was written in its place
    UNREACHED = "unreached"  # its parent was not accepted
    ENDED = "ended"  # the text ended at its parent
    PROBE = "probe"  # verified only to read the target's answer there, or below such a node


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTrace:
    """One sequence's tree of one iteration.

    "The target's distribution" is the one that the request decodes from: after processors, and for sampled requests
    after temperature and truncation. Of greedy requests it is that at temperature 1, after processors.

    Attributes:
        rule: The acceptance rule: "greedy", "coupled", "sequential", "block", "lenient" or "typical".
        position: Of the root in the sequence, the prompt counted.
        tokens: N token ids; node 0 is the root, the last token of the text so far.
        parents: N, `parents[i] < i`, -1 of the root.
        depths: N.
        drafters: N, the names of those who proposed the node; none for the root.
        probes: Nodes that were verified only to read the target's answer.
        scores: N log-probabilities that the whole path down to a node is accepted, as its drafter estimated them; None
            where it has no estimate.
        draft_probs: N, the exact probability with which the node's token was drawn under its parent; None where it was
            chosen. None as a whole where all nodes were.
        token_probs: N, the probability of the node's token after its parent in the target's distribution; None for the
            root, and where logits are not finite.
        target_tokens: N, the target's own token after each node. With the rules "greedy" and "coupled" it is the one
            that plain decoding writes there, -1 where none is possible; with the others, which test nodes by chance,
            the most probable one.
        target_probs: N, the probability of `target_tokens` in the target's distribution, None as above.
        path: Accepted nodes in order, as far as they entered the text.
        next_token: The correction or bonus token after the path; None where the text ended before it.
    """

    rule: str
    position: int
    tokens: Sequence[int]
    parents: Sequence[int]
    depths: Sequence[int]
    drafters: Sequence[tuple[str, ...]]
    probes: frozenset[int]
    scores: Sequence[float] | None
    draft_probs: Sequence[float | None] | None
    token_probs: Sequence[float | None]
    target_tokens: Sequence[int]
    target_probs: Sequence[float | None]
    path: Sequence[int]
    next_token: int | None

    @property
    def is_accepted(self) -> list[bool]:
        """N, whether a node is on the accepted path; the root is not counted."""
        accepted = set(self.path)
        return [node in accepted for node in range(len(self.tokens))]

    def outcomes(self) -> list[NodeOutcome]:
        """What became of each of the N nodes."""
        reached, end = {0, *self.path}, [0, *self.path][-1]
        outcomes: list[NodeOutcome] = []
        for node, parent in enumerate(self.parents):
            if not node:
                outcomes.append(NodeOutcome.ROOT)
            elif node in self.probes or outcomes[parent] is NodeOutcome.PROBE:
                outcomes.append(NodeOutcome.PROBE)
            elif node in reached:
                outcomes.append(NodeOutcome.ACCEPTED)
            elif parent not in reached:
                outcomes.append(NodeOutcome.UNREACHED)
            elif parent == end and self.next_token is None:
                outcomes.append(NodeOutcome.ENDED)
            else:
                outcomes.append(NodeOutcome.REJECTED)
        return outcomes

    def written_after(self, node: int) -> int | None:
        """The token of the text after the root or an accepted node; None after others, and where the text ended."""
        nodes = [0, *self.path]
        if node not in nodes:
            return None
        place = nodes.index(node) + 1
        return self.tokens[nodes[place]] if place < len(nodes) else self.next_token

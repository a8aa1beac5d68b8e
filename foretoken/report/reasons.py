"""Why a node of a verified tree was not taken, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.core.records import NodeOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretoken.core.records import TreeTrace

BY_OUTCOME = {
    NodeOutcome.ROOT: "the last token of the text so far",
    NodeOutcome.ACCEPTED: "accepted",
    NodeOutcome.UNREACHED: "not tested: its parent was not accepted",
    NodeOutcome.ENDED: "not taken: the text ended before it",
    NodeOutcome.PROBE: "verified only to read the target's answer there",
}


def reason(trace: TreeTrace, node: int, shown: Callable[[int], str]) -> str:
    """Why a rejected node was.

    Args:
        trace: Of its tree.
        node: Whose outcome is `REJECTED`.
        shown: A token as it is shown.
    """
    parent = trace.parents[node]
    written, target, prob = trace.written_after(parent), trace.target_tokens[parent], trace.target_probs[parent]
    own = f"this node had {_probability(trace.token_probs[node])}"
    if written is not None and written == trace.tokens[node]:
        return "another node with the same token was accepted"
    if trace.rule in {"greedy", "coupled"}:
        if target < 0:
            return "no token was possible here"
        verb = "would write" if trace.rule == "greedy" else "drew"
        return f"the target {verb} {shown(target)} ({_probability(prob)}); {own}"
    drawn = None if trace.draft_probs is None else trace.draft_probs[node]
    draft = "" if drawn is None else f", and {_probability(drawn)} in the draft"
    instead = "" if written is None else f"; {shown(written)} was written instead"
    return f"rejected by the {trace.rule} test: {own} in the target{draft}{instead}"


def _probability(value: float | None) -> str:
    """A probability in words."""
    if value is None:
        return "no finite probability"
    return f"p = {value:.2g}" if value < 0.1 else f"p = {value:.2f}"

"""Makes the view of one trace: figures, tokens with their origin, and trees as compact lists for the page's script.

Letters: N nodes of a tree.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.core.records import NodeOutcome, TreeTrace
from foretoken.grammars.drafts import FORCED
from foretoken.report.trace_file import Iteration, Trace, tree_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


_KEPT = "\u200c\u200d"  # joiners that emoji and several scripts need
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp", "Co"}


def visible(text: str, kept: str = "\n\t") -> str:
    """Returns a text with escapes for characters that a browser would obey or hide; `kept` names exceptions."""
    return "".join(char if char in kept or char in _KEPT or not _is_hidden(char) else _escape(char) for char in text)


def label(text: str) -> str:
    r"""Returns a token in one line, with symbols for white space."""
    text = visible(text, kept="\n\t ")
    if not text:
        return "(no text)"
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣" if not text.strip(" ") else " ")


def _is_hidden(char: str) -> bool:
    return unicodedata.category(char) in _HIDDEN


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


BY_OUTCOME = {
    NodeOutcome.ROOT: "the last token of the text so far",
    NodeOutcome.ACCEPTED: "accepted",
    NodeOutcome.UNREACHED: "not tested: its parent was not accepted",
    NodeOutcome.ENDED: "not taken: the text ended before it",
    NodeOutcome.PROBE: "verified only to read the target's answer there",
}


def reason(trace: TreeTrace, node: int, shown: Callable[[int], str]) -> str:
    """Returns why a node with the outcome `REJECTED` was rejected; `shown` returns the text of a token id."""
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
    if value is None:
        return "no finite probability"
    return f"p = {value:.2g}" if value < 0.1 else f"p = {value:.2f}"


NUM_COLOURS = 8  # of the page's style sheet; further drafters use them again
_OUTCOMES = list(NodeOutcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One output token, its text cut at newlines.

    Attributes:
        iteration: The iteration that wrote the token, from 0.
        origin: Index of its drafter; 0 for the target.
        is_shown: Whether the token added any text; if not, `lines` describes it.
    """

    lines: list[str]
    iteration: int
    origin: int
    is_shown: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginView:
    """An origin of tokens: the target, a drafter, or several drafters at once."""

    name: str
    colour: int
    count: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceView:
    """One trace on a page; its text is escaped and never markup.

    Attributes:
        figures: Name and value of the summary's large numbers.
        origins: Origins of tokens; the target first.
        acceptance: For each depth from 1: the acceptance rate, and its counts if the trace has them.
        stages: Name and share of the time.
        data: Data for the script.
    """

    name: str
    conditions: dict[str, str]
    figures: list[tuple[str, str]]
    prompt: str
    tokens: list[TokenView]
    origins: list[OriginView]
    acceptance: list[tuple[float, str]]
    stages: list[tuple[str, float]]
    finish_reason: str
    data: dict[str, Any]


def view_of(name: str, trace: Trace) -> TraceView:
    """Returns the view of a trace; name: the name of its file."""
    origins: dict[tuple[str, ...], int] = {(): 0}
    counts: Counter[tuple[str, ...]] = Counter()
    tokens: list[TokenView] = []
    iterations = []
    parts = iter(trace.end.parts)
    for number, iteration in enumerate(trace.iterations):
        own = len(iteration.tokens) - len(iteration.accepted_from)
        for token, origin in zip(iteration.tokens, [*iteration.accepted_from, *[()] * own], strict=True):
            origins.setdefault(origin, len(origins))
            counts[origin] += 1
            tokens.append(_token(next(parts), iteration.texts.get(token, ""), number, origins[origin]))
        iterations.append(_iteration(iteration, origins))
    total = max(len(tokens), 1)
    return TraceView(
        name=visible(name),
        conditions={key: visible(str(value)) for key, value in trace.header.conditions.items()},
        figures=_figures(trace, len(tokens), counts),
        prompt=visible(trace.header.prompt),
        tokens=tokens,
        origins=[
            OriginView(name=_name(origin), colour=_colour(index), count=counts[origin], share=counts[origin] / total)
            for origin, index in origins.items()
            if counts[origin] or not index
        ],
        acceptance=_acceptance(trace.end.metrics),
        stages=_stages(trace.iterations),
        finish_reason=visible(trace.end.finish_reason or "interrupted"),
        data={
            "iterations": iterations,
            "origins": [[_name(origin), _colour(index)] for origin, index in origins.items()],
            "outcomes": [[str(outcome), BY_OUTCOME.get(outcome, "")] for outcome in _OUTCOMES],
        },
    )


def _token(part: str, alone: str, iteration: int, origin: int) -> TokenView:
    lines = visible(part).split("\n") if part else [label(alone)]
    return TokenView(lines=lines, iteration=iteration, origin=_colour(origin), is_shown=bool(part))


def _iteration(iteration: Iteration, origins: dict[tuple[str, ...], int]) -> dict[str, Any]:
    texts = {token: label(text) for token, text in iteration.texts.items()}
    view: dict[str, Any] = {
        "written": [texts.get(token, str(token)) for token in iteration.tokens],
        "accepted": len(iteration.accepted_from),
        "drafts": _drafts(iteration),
        "ms": round(1000 * sum(iteration.seconds.values()), 2),
        "note": visible(iteration.draft_error or iteration.declined or ""),
    }
    if iteration.tree is None:
        return view
    trace, shown = tree_of(iteration.tree), lambda token: f"“{texts.get(token, str(token))}”"
    for origin in trace.drafters:
        origins.setdefault(origin, len(origins))
    outcomes = trace.outcomes()
    view["tree"] = {
        "rule": visible(trace.rule),
        "position": trace.position,
        "text": [texts.get(token, str(token)) for token in trace.tokens],
        "id": list(trace.tokens),
        "parent": list(trace.parents),
        "origin": [origins[origin] for origin in trace.drafters],
        "outcome": [_OUTCOMES.index(outcome) for outcome in outcomes],
        "target": [_rounded(prob) for prob in trace.token_probs],
        "draft": _draft_probs(trace.parents, trace.scores, trace.draft_probs),
        "own": [texts.get(token, str(token)) for token in trace.target_tokens],
        "own_prob": [_rounded(prob) for prob in trace.target_probs],
        "why": {
            node: reason(trace, node, shown) for node, outcome in enumerate(outcomes) if outcome is NodeOutcome.REJECTED
        },
        "end": [0, *trace.path][-1],
        "next": None if trace.next_token is None else texts.get(trace.next_token, str(trace.next_token)),
    }
    return view


def _drafts(iteration: Iteration) -> str:
    verified, proposed = iteration.num_drafted, iteration.num_proposed
    counts = f"Drafted nodes: {verified} verified, {len(iteration.accepted_from)} accepted"
    if proposed is None or proposed == verified:
        return counts
    counts = counts.replace(": ", f": {proposed} proposed, ", 1)
    forced = 0 if iteration.tree is None else iteration.tree.drafters.count((FORCED,))
    continued = verified - proposed - forced
    reasons = [f"{forced} forced by the grammar"] if forced else []
    if continued > 0:  # some proposed nodes may have been dropped too
        reasons.append(f"{continued} or more added by a lookup below another drafter's draft")
    elif continued < 0:
        reasons.append("the others were proposed twice, or not expected to pay")
    return f"{counts} ({'; '.join(reasons)})" if reasons else counts


def _draft_probs(
    parents: Sequence[int], scores: Sequence[float] | None, drawn: Sequence[float | None] | None
) -> list[float | None] | None:
    """Returns N draft probabilities given the parent: of draws, or else from the estimates of paths."""
    if scores is None and drawn is None:
        return None
    found: list[float | None] = []
    for node, parent in enumerate(parents):
        value = None if drawn is None else drawn[node]
        if value is None and scores is not None and node and math.isfinite(scores[node]):
            value = min(math.exp(scores[node] - (scores[parent] if math.isfinite(scores[parent]) else 0.0)), 1.0)
        found.append(_rounded(value))
    return found


def _figures(trace: Trace, num_tokens: int, counts: Mapping[tuple[str, ...], int]) -> list[tuple[str, str]]:
    passes = max(len(trace.iterations), 1)
    seconds = sum(sum(iteration.seconds.values()) for iteration in trace.iterations)
    drafted = sum(iteration.num_drafted for iteration in trace.iterations)
    accepted = num_tokens - counts[()]
    return [
        ("tokens a target pass (tau)", f"{num_tokens / passes:.2f}"),
        ("tokens", f"{num_tokens}"),
        ("target passes", f"{len(trace.iterations)}"),
        ("drafted nodes a pass", f"{drafted / passes:.1f}"),
        ("of the text drafted", f"{accepted / max(num_tokens, 1):.0%}"),
        ("ms a token, prefill left out", f"{1000 * seconds / max(num_tokens, 1):.1f}"),
    ]


def _stages(iterations: Sequence[Iteration]) -> list[tuple[str, float]]:
    totals: defaultdict[str, float] = defaultdict(float)
    for iteration in iterations:
        for stage in ("draft", "verify", "accept", "commit"):
            totals[stage] += iteration.seconds.get(stage, 0.0)
    whole = sum(totals.values())
    return [(stage, seconds / whole) for stage, seconds in totals.items()] if whole > 0 else []


def _name(origin: tuple[str, ...]) -> str:
    return visible(" and ".join(origin)) if origin else "the target's own"


def _colour(index: int) -> int:
    return 0 if not index else (index - 1) % NUM_COLOURS + 1


def _acceptance(metrics: Mapping[str, Any]) -> list[tuple[float, str]]:
    shares = [min(max(float(value), 0.0), 1.0) for value in metrics.get("acceptance_by_depth", [])]
    accepted, drafted = (metrics.get(f"{name}_at_depth", []) for name in ("accepted", "drafted"))
    counts = [f"{some} of {all_}" for some, all_ in zip(accepted, drafted, strict=False)]
    return list(zip(shares, counts if len(counts) == len(shares) else [""] * len(shares), strict=True))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")

"""Self-contained HTML pages of traces, results of sweeps and pictures.

A page uses no network and no other file, and no text in it can become markup or script. Letters: N nodes of a tree.
"""

import base64
import hashlib
import json
import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from foretoken.core.errors import ConfigError
from foretoken.core.records import NodeOutcome, TreeTrace
from foretoken.files.bounded_reads import MIB, read_named
from foretoken.grammars.drafts import FORCED
from foretoken.report.trace_file import MOST_TRACE_BYTES, Iteration, Trace, is_trace, read_trace, tree_of

RESULTS = "results.jsonl"
_DARK = "-dark"
_MOST_PICTURE_BYTES = 16 * MIB  # a choice: the page holds its pictures, and browsers load it whole
# Columns of a table of a sweep's points: heading, keys in a line's `result`, and format.
_COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("point", ("name",), ""),
    ("batch", ("serving", "batch_size"), ""),
    ("temperature", ("serving", "temperature"), "g"),
    ("dtype", ("serving", "dtype"), ""),
    ("tau", ("tau",), ".2f"),
    ("nodes", ("nodes",), ".1f"),
    ("tokens/s", ("tokens_per_s", "median"), ".1f"),
    ("speed-up", ("speed_up", "median"), ".2f"),
    ("same text", ("num_identical",), ""),
    ("texts", ("num_texts",), ""),
)
NUM_COLOURS = 8  # of the page's style sheet; further drafters use them again
_KEPT = "\n\t\u200c\u200d"  # newline, tab, and the joiners that emoji and several scripts need
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp", "Co"}
_OUTCOMES = list(NodeOutcome)
BY_OUTCOME = {
    NodeOutcome.ROOT: "the last token of the text so far",
    NodeOutcome.ACCEPTED: "accepted",
    NodeOutcome.UNREACHED: "not tested: its parent was not accepted",
    NodeOutcome.ENDED: "not taken: the text ended before it",
    NodeOutcome.PROBE: "verified only to read the target's answer there",
}


def visible(text: str) -> str:
    """Returns a text with escapes for characters that a browser would obey or hide."""
    return "".join(
        char.encode("unicode_escape", "surrogatepass").decode("ascii")
        if char not in _KEPT and unicodedata.category(char) in _HIDDEN
        else char
        for char in text
    )


def label(text: str) -> str:
    """Returns a token in one line, with symbols for white space."""
    text = visible(text)
    if not text:
        return "(no text)"
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣" if not text.strip(" ") else " ")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture of the page, as data URLs for a light and perhaps a dark page."""

    name: str
    light: str
    dark: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepView:
    """Results of a sweep as a table: columns with at least one value, the fastest point first."""

    name: str
    headings: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The contents of one page."""

    title: str
    traces: list[TraceView]
    sweeps: list[SweepView]
    pictures: list[Picture]


def read_run(run: Path) -> RunView:
    """Reads a trace, or all traces, `results.jsonl` and SVG pictures of a directory.

    Raises `ConfigError` when there is none of these, or a file is damaged; `OSError` when a file cannot be read.
    """
    if not run.exists():
        raise ConfigError(f"there is no '{run}'. Expected a file of `foretoken generate --trace`, or a directory.")
    files = sorted(path for path in run.rglob("*") if path.is_file()) if run.is_dir() else [run]
    lines = [path for path in files if path.suffix == ".jsonl"] if run.is_dir() else files
    base = run if run.is_dir() else run.parent
    traces = [
        view_of(str(path.relative_to(base)), read_trace(path)) for path in lines if not run.is_dir() or is_trace(path)
    ]
    sweeps = [
        _sweep(path, str(path.parent.relative_to(base))) for path in lines if path.name == RESULTS and run.is_dir()
    ]
    pictures = _pictures([path for path in files if path.suffix == ".svg"], base)
    if not (traces or sweeps or pictures):
        raise ConfigError(
            f"'{run}' holds no trace of `foretoken generate --trace`, no results of `foretoken sweep` and no SVG "
            "picture. Name a directory that does."
        )
    title = run.resolve().name
    return RunView(title=visible(title), traces=traces, sweeps=sweeps, pictures=pictures)


def _pictures(files: Iterable[Path], base: Path) -> list[Picture]:
    by_name = {str(path.relative_to(base).with_suffix("")): path for path in files}
    return [
        Picture(
            name=visible(name),
            light=_data_url(path),
            dark=_data_url(by_name[name + _DARK]) if name + _DARK in by_name else None,
        )
        for name, path in by_name.items()
        if not (name.endswith(_DARK) and name.removesuffix(_DARK) in by_name)
    ]


def _data_url(path: Path) -> str:
    data = read_named(path, limit=_MOST_PICTURE_BYTES, error=ConfigError)
    return f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}"


def _sweep(path: Path, name: str) -> SweepView:
    points = []
    for number, line in enumerate(read_named(path, limit=MOST_TRACE_BYTES, error=ConfigError).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as err:
            raise ConfigError(f"line {number} of '{path}' is no JSON. Expected results of `foretoken sweep`.") from err
        if isinstance(value, dict) and isinstance(value.get("result"), dict):
            points.append(value["result"])
    points.sort(key=lambda point: -_number(_value_at(point, ("tokens_per_s", "median"))))
    used = [column for column in _COLUMNS if any(_value_at(point, column[1]) is not None for point in points)]
    rows = [[_cell(_value_at(point, keys), form) for _, keys, form in used] for point in points]
    return SweepView(name=visible(name), headings=[heading for heading, _, _ in used], rows=rows)


def _value_at(value: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _cell(value: Any, form: str) -> str:
    if isinstance(value, int | float) and form:
        return format(value, form)
    return "" if value is None else visible(str(value))


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


_COMMON = "foretoken.report"  # the package with the common style


def render_inlined(package: str, name: str, **values: Any) -> tuple[str, str]:
    """Renders NAME.html, NAME.css and NAME.js of a package's templates; returns HTML and its security policy."""
    environment = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, style = _asset(package, f"{name}.js"), _asset(_COMMON, "common.css") + _asset(package, f"{name}.css")
    policy = (
        f"default-src 'none'; img-src data:; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    page = environment.get_template(f"{name}.html").render(
        script=Markup(script), style=Markup(style), policy=policy, **values
    )
    return page, policy


def _asset(package: str, name: str) -> str:
    return (resources.files(package) / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def render(run: RunView) -> str:
    """Returns the page as HTML."""
    page, _ = render_inlined("foretoken.report", "report", run=run, embedded=embedded)
    return page


def embedded(value: Any) -> Markup:
    """Returns JSON for a script element: ASCII, without characters special to HTML."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)

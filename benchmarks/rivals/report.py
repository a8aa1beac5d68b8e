"""Turns runs into ratios, a Markdown table and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from benchmarks.rivals.contestants import FORETOKEN_PLAIN, HF_GENERATE, plain_of, references

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from benchmarks.rivals.compare import Comparison, Run
    from benchmarks.rivals.contestants import Contestant
    from benchmarks.rivals.messages import Generation

_NONE = "-"


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the smallest and largest value."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """The spread of the values that are known; None where none is."""
        known = [value for value in values if value is not None]
        return cls(median(known), min(known), max(known)) if known else None

    def show(self, digits: int, unit: str = "") -> str:
        """Median and, in brackets, the extremes."""
        return f"{self.median:.{digits}f}{unit} ({self.min:.{digits}f}-{self.max:.{digits}f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contestant's line in the table of requests; every spread is over prompts and rounds.

    Attributes:
        name: Of the contestant.
        title: Shown.
        decode_tokens_per_s: Tokens after the first chunk per second after the first chunk.
        request_tokens_per_s: All tokens per second of the whole request, prefill included.
        first_seconds: Seconds to the first chunk.
        decode_ratio: By reference: decoding rate over the reference's for the same prompt in the same round.
        request_ratio: By reference: the same of whole requests.
        tau: Mean tokens per target pass, the target's own token included; None where unknown.
        num_identical: Texts equal to HF `generate`'s; None without HF `generate`, and for sampled texts, for
            which every engine has its own random numbers.
        num_as_plain: Texts equal to those of plain decoding by the same engine with the same weights; None for plain
            decoding, without it, and for sampled texts.
        num_leading: Mean number of tokens before a text first differs from plain foretoken's; None without plain
            foretoken, and for sampled texts.
        num_texts: Texts.
        model_bytes: Of the target's weights as the engine prepared them; None where unknown.
        draft_bytes: The same of a draft model.
    """

    name: str
    title: str
    decode_tokens_per_s: Spread | None
    request_tokens_per_s: Spread | None
    first_seconds: Spread | None
    decode_ratio: dict[str, Spread | None]
    request_ratio: dict[str, Spread | None]
    tau: float | None
    num_identical: int | None
    num_as_plain: int | None
    num_leading: float | None
    num_texts: int
    model_bytes: int | None = None
    draft_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRow:
    """One contestant's line in the table of single passes.

    Attributes:
        name: Of the contestant.
        title: Shown.
        seconds: By width, over rounds.
        ratio: By width: foretoken's seconds over this contestant's in the same round; above 1 is faster than foretoken.
        growth: By width: median seconds over those of the narrowest pass.
    """

    name: str
    title: str
    seconds: dict[int, Spread]
    ratio: dict[int, Spread | None]
    growth: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenRow:
    """One contestant's line in the table of first tokens; spreads are over prompts and rounds.

    Attributes:
        name: Of the contestant.
        title: Shown.
        seconds: Of a request for a single token.
        ratio: Plain foretoken's seconds over this contestant's for the same prompt in the same round; above 1 is faster
            than foretoken.
    """

    name: str
    title: str
    seconds: Spread
    ratio: Spread | None


def decode_rate(generation: Generation) -> float | None:
    """Tokens per second after the first chunk; None where the rival does not tell or nothing followed."""
    if not generation.decode_tokens or not generation.decode_seconds:
        return None
    return generation.decode_tokens / generation.decode_seconds


def request_rate(generation: Generation) -> float:
    """Tokens per second of the whole request."""
    return len(generation.token_ids) / generation.seconds


def request_rows(comparison: Comparison) -> list[Row]:
    """The table of requests."""
    runs = {c.name: [run for run in comparison.runs if run.contestant == c.name] for c in comparison.contestants}
    compared = {reference.name: runs[reference.name] for reference in references(comparison.contestants)}
    ours, hf = _reference(comparison, FORETOKEN_PLAIN), _reference(comparison, HF_GENERATE)
    rows = []
    for contestant in comparison.contestants:
        own = runs[contestant.name]
        generations = [run.generation for run in own]
        passes = sum(g.decode_passes or 0 for g in generations)
        plain, loaded = plain_of(contestant, comparison.contestants), comparison.loaded[contestant.name]
        rows.append(
            Row(
                name=contestant.name,
                title=contestant.title,
                decode_tokens_per_s=Spread.of(decode_rate(g) for g in generations),
                request_tokens_per_s=Spread.of(request_rate(g) for g in generations),
                first_seconds=Spread.of(g.first_seconds for g in generations),
                decode_ratio={name: _ratios(own, theirs, decode_rate) for name, theirs in compared.items()},
                request_ratio={name: _ratios(own, theirs, request_rate) for name, theirs in compared.items()},
                tau=sum(g.decode_tokens or 0 for g in generations) / passes if passes else None,
                num_identical=_num_same(own, _greedy_texts(comparison, hf)),
                num_as_plain=_num_same(own, _greedy_texts(comparison, plain)),
                num_leading=_leading(own, _greedy_texts(comparison, ours)),
                num_texts=len(own),
                model_bytes=loaded.model_bytes,
                draft_bytes=loaded.draft_bytes,
            )
        )
    return rows


def _reference(comparison: Comparison, kind: Contestant) -> Contestant | None:
    """The contestant that speed and texts are compared with; None where it does not take part."""
    wanted = kind.rival, kind.mode
    return next((c for c in references(comparison.contestants) if (c.rival, c.mode) == wanted), None)


def _greedy_texts(comparison: Comparison, contestant: Contestant | None) -> dict[int, list[int]]:
    """A contestant's texts by prompt; none for sampled texts."""
    if contestant is None or not comparison.is_greedy:
        return {}
    return {run.prompt: run.generation.token_ids for run in comparison.runs if run.contestant == contestant.name}


def _num_same(own: Sequence[Run], texts: dict[int, list[int]]) -> int | None:
    """How many texts are equal to others, token for token; None without others."""
    return sum(run.generation.token_ids == texts[run.prompt] for run in own) if texts else None


def _leading(own: Sequence[Run], texts: dict[int, list[int]]) -> float | None:
    """Mean number of tokens before texts first differ from others; None without others."""
    pairs = [list(zip(run.generation.token_ids, texts[run.prompt], strict=False)) for run in own if texts]
    lengths = [next((i for i, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs]
    return mean(lengths) if lengths else None


def pass_rows(comparison: Comparison) -> list[PassRow]:
    """The table of single passes, empty where none were timed."""
    seconds = {(run.contestant, run.width, run.round): run.seconds for run in comparison.forwards}
    widths = sorted({run.width for run in comparison.forwards})
    ours = _reference(comparison, FORETOKEN_PLAIN)
    plain = "" if ours is None else ours.name
    rows = []
    for contestant in comparison.contestants:
        name = contestant.name
        own = {w: {r: s for (n, v, r), s in seconds.items() if n == name and v == w} for w in widths}
        spreads = {w: spread for w in widths if (spread := Spread.of(own[w].values())) is not None}
        if not spreads:
            continue
        rows.append(
            PassRow(
                name=name,
                title=contestant.title,
                seconds=spreads,
                ratio={
                    w: Spread.of(
                        seconds[plain, w, r] / s if (plain, w, r) in seconds else None for r, s in own[w].items()
                    )
                    for w in spreads
                },
                growth={w: spread.median / spreads[min(spreads)].median for w, spread in spreads.items()},
            )
        )
    return rows


def first_token_rows(comparison: Comparison) -> list[FirstTokenRow]:
    """The table of first tokens, empty where none were timed."""
    seconds = {(run.contestant, run.round, run.prompt): run.seconds for run in comparison.first_tokens}
    reference = _reference(comparison, FORETOKEN_PLAIN)
    plain = "" if reference is None else reference.name
    rows = []
    for contestant in comparison.contestants:
        own = {(number, prompt): s for (name, number, prompt), s in seconds.items() if name == contestant.name}
        spread = Spread.of(own.values())
        if spread is None:
            continue
        ours = {place: seconds.get((plain, *place)) for place in own}
        rows.append(
            FirstTokenRow(
                name=contestant.name,
                title=contestant.title,
                seconds=spread,
                ratio=Spread.of(mine / s if (mine := ours[place]) else None for place, s in own.items()),
            )
        )
    return rows


def as_markdown(comparison: Comparison, conditions: Sequence[str]) -> str:
    """The report.

    Args:
        comparison: What was measured.
        conditions: Sentences on how, shown above the tables.
    """
    parts = ["# foretoken beside its rivals", " ".join(conditions)]
    rows, passes, firsts = request_rows(comparison), pass_rows(comparison), first_token_rows(comparison)
    if rows:
        legend = _REQUEST_LEGEND if comparison.is_greedy else f"{_REQUEST_LEGEND} {_SAMPLED}"
        parts += ["## Requests", _request_table(rows, references(comparison.contestants)), legend]
    if firsts:
        parts += ["## First token", _first_token_table(firsts), _FIRST_TOKEN_LEGEND]
    if passes:
        parts += ["## One pass", _pass_table(passes), _PASS_LEGEND]
    notes = [note for c in comparison.contestants for note in comparison.loaded[c.name].notes]
    notes = [
        *(f"{note}." for note in dict.fromkeys(notes)),
        *comparison.skipped,
        *comparison.failures,
        *([comparison.disturbance.sentence()] if comparison.disturbance else []),
        *(["Versions: " + ", ".join(_versions(comparison)) + "."] if comparison.contestants else []),
    ]
    parts += ["## Notes", "\n".join(f"- {note}" for note in notes)] if notes else []
    return "\n\n".join(parts) + "\n"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Tables and every single run, JSON-ready."""
    return {
        "requests": [asdict(row) for row in request_rows(comparison)],
        "first_tokens": [asdict(row) for row in first_token_rows(comparison)],
        "passes": [asdict(row) for row in pass_rows(comparison)],
        "runs": [asdict(run) for run in comparison.runs],
        "first_token_runs": [asdict(run) for run in comparison.first_tokens],
        "pass_runs": [asdict(run) for run in comparison.forwards],
        "loaded": {c.name: asdict(comparison.loaded[c.name]) for c in comparison.contestants},
        "skipped": comparison.skipped,
        "failures": comparison.failures,
        "disturbance": asdict(comparison.disturbance) if comparison.disturbance else None,
    }


_REQUEST_LEGEND = (
    "Medians over prompts and rounds, extremes in brackets. *Decode*: tokens after the first chunk over the time since "
    "it. *x*: that rate over the reference's for the same prompt in the same round. tau: mean tokens per target pass, "
    "the target's own token included. *MB*: the prepared weights, in their file, or in memory for HF and foretoken; "
    "after the plus those of a draft model or head, where known. *As plain*: texts equal to those of plain "
    "decoding by the same engine with the same weights. *Leading*: mean number of tokens before a text first differs "
    "from plain foretoken's; engines that round differently write different texts. *Same text*: texts equal to HF "
    "generate's, token for token."
)
_SAMPLED = "Texts were sampled, with each engine's own random numbers: they differ, and tau goes with the text."
_FIRST_TOKEN_LEGEND = (
    "Milliseconds of a request for a single token, from the prompt's ids to that token's, medians over prompts and "
    "rounds, extremes in brackets; *x foretoken*: plain foretoken's time over this one (above 1 is faster)."
)
_PASS_LEGEND = (
    "Milliseconds of one pass over T new tokens behind the same context, logits for all of them, medians over rounds; "
    "in brackets its speed against foretoken's (above 1 is faster than foretoken)."
)


def _ratios(own: Sequence[Run], reference: Sequence[Run], rate: Callable[[Generation], float | None]) -> Spread | None:
    """Rates over the reference's, prompt by prompt and round by round."""
    theirs = {(run.round, run.prompt): rate(run.generation) for run in reference}
    pairs = [(rate(run.generation), theirs.get((run.round, run.prompt))) for run in own]
    return Spread.of(mine / other for mine, other in pairs if mine and other)


def _request_table(rows: Sequence[Row], compared: Sequence[Contestant]) -> str:
    """Requests as Markdown."""
    headings = ["", "decode tok/s", *(f"x {reference.title}" for reference in compared), "tau", "request tok/s"]
    headings += ["first chunk, ms", "MB", "as plain", "leading", "same text"]
    lines = []
    for row in rows:
        first = row.first_seconds
        lines.append(
            [
                row.title,
                row.decode_tokens_per_s.show(1) if row.decode_tokens_per_s else _NONE,
                *(spread.show(2) if spread else _NONE for spread in row.decode_ratio.values()),
                f"{row.tau:.2f}" if row.tau is not None else _NONE,
                row.request_tokens_per_s.show(1) if row.request_tokens_per_s else _NONE,
                f"{first.median * 1000:.1f}" if first else _NONE,
                " + ".join(f"{size / 1e6:.0f}" for size in (row.model_bytes, row.draft_bytes) if size) or _NONE,
                f"{row.num_as_plain}/{row.num_texts}" if row.num_as_plain is not None else _NONE,
                f"{row.num_leading:.1f}" if row.num_leading is not None else _NONE,
                f"{row.num_identical}/{row.num_texts}" if row.num_identical is not None else _NONE,
            ]
        )
    return _table(headings, lines)


def _first_token_table(rows: Sequence[FirstTokenRow]) -> str:
    """First tokens as Markdown."""
    lines = []
    for row in rows:
        ms = Spread(row.seconds.median * 1e3, row.seconds.min * 1e3, row.seconds.max * 1e3)
        lines.append([row.title, ms.show(1), row.ratio.show(2) if row.ratio else _NONE])
    return _table(["", "first token, ms", f"x {FORETOKEN_PLAIN.title}"], lines)


def _pass_table(rows: Sequence[PassRow]) -> str:
    """Single passes as Markdown."""
    widths = sorted({width for row in rows for width in row.seconds})
    lines = []
    for row in rows:
        cells = [row.title]
        for width in widths:
            spread, ratio = row.seconds.get(width), row.ratio.get(width)
            shown = f"{spread.median * 1000:.2f}" if spread else _NONE
            cells.append(f"{shown} ({ratio.median:.2f}x)" if ratio else shown)
        lines.append([*cells, f"{row.growth[max(row.growth)]:.2f}"])
    return _table(["", *(f"T={width}" for width in widths), f"T={widths[-1]} over T={widths[0]}"], lines)


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, ["---"] * len(headings), *lines])


def _versions(comparison: Comparison) -> list[str]:
    """Package versions by rival: two environments may hold two versions of one package."""
    rivals = {c.rival: comparison.loaded[c.name].versions for c in comparison.contestants}
    return [f"{rival} ({', '.join(f'{k} {v}' for k, v in found.items())})" for rival, found in rivals.items()]

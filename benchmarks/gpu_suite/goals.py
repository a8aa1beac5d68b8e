"""Compares the suite's measurements with its goals."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Record = dict[str, Any]
Row = dict[str, Any]
Verdict = Literal["met", "MISSED", "not measured"]

_VERIFY = {8: 1.03, 16: 1.05, 64: 1.10, 128: 1.35}  # a pass of that many tokens over a plain one, contexts up to 2k
_EFFICIENCY = {"n-gram": 0.95, "medusa": 0.82, "eagle": 0.70}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One goal.

    Attributes:
        what: What is measured, with its conditions.
        wanted: The goal.
        measured: What came out, "-" where nothing did.
        verdict: Whether it was met.
    """

    what: str
    wanted: str
    measured: str
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device can do at most; None where it was not measured.

    Attributes:
        copy: GB/s of a copy, bytes read and written.
        read: GB/s of the fastest of several ways to read.
        matmul: TFLOP/s of a large bfloat16 GEMM.
    """

    copy: float | None
    read: float | None
    matmul: float | None

    @classmethod
    def of(cls, record: Record) -> Ceilings:
        """Of a record."""
        rows = table(record, "ceilings", "ceilings")
        speed = {row["what"]: row.get("gb_per_s", row.get("tflop_per_s")) for row in rows}
        reads = [value for name, value in speed.items() if name.startswith("read") and value is not None]
        return cls(speed.get("copy"), max(reads, default=None), speed.get("matmul"))


def table(record: Record, section: str, name: str) -> list[Row]:
    """A section's table, empty where there is none."""
    rows: list[Row] = record["sections"].get(section, {}).get("tables", {}).get(name, [])
    return rows


def proofs(record: Record) -> list[Goal]:
    """What must hold for anything else to count."""
    cases = table(record, "parity", "cases")
    verdicts = [v for row in cases for name, v in row["kernels"].items() if name != "one lost key"]
    failed = sum(not verdict["passes"] for verdict in verdicts)
    timed = [cell for name in ("attention", "flex") for row in table(record, "attention", name)
             for cell in row["kernels"].values()]  # fmt: skip
    wrong_timed = sum("failure" in cell for cell in timed)
    checks = table(record, "lossless", "setups")
    bugs, ties = sum(row["bugs"] for row in checks), sum(row["near_ties"] for row in checks)
    broken = len(table(record, "lossless", "broken"))
    texts = f"{sum(row['prompts'] for row in checks)} texts" + (f", {broken} setups stopped the engine" * bool(broken))
    on_twin = twin_methods(record)
    twin_bugs, twin_ties = sum(row["bugs"] for row in on_twin), sum(row["near_ties"] for row in on_twin)
    twin_broken = len(table(record, "twin", "broken"))
    twin_texts = f"{sum(row['prompts'] for row in on_twin)} texts" + (
        f", {twin_broken} setups stopped the engine" * bool(twin_broken)
    )
    known = table(record, "step", "efficiency") + table(record, "step", "generate")
    wrong = sum(not row["is_expected_text"] for row in known)
    return [
        _goal("kernels within rounding of float64, repeatable", "all", f"{len(verdicts) - failed} of {len(verdicts)}",
              is_met=not failed if verdicts else None),
        _goal("kernels run and agree where they are timed", "all", f"{len(timed) - wrong_timed} of {len(timed)}",
              is_met=not wrong_timed if timed else None),
        _goal("texts of every drafter equal plain decoding's, near-ties apart", "0 bugs",
              f"{bugs} bugs, {ties} near-ties, {texts}",
              is_met=not bugs and not broken if checks or broken else None),
        _goal("texts of every drafter on the cost twin equal plain decoding's, near-ties apart", "0 bugs",
              f"{twin_bugs} bugs, {twin_ties} near-ties, {twin_texts}",
              is_met=not twin_bugs and not twin_broken if on_twin or twin_broken else None),
        _goal("the 8B-shaped target writes its known text", "all runs", f"{len(known) - wrong} of {len(known)}",
              is_met=not wrong if known else None),
    ]  # fmt: skip


def speeds(record: Record) -> list[Goal]:
    """The figures of PERFORMANCE 4.3 that this suite measures."""
    ceilings = Ceilings.of(record)
    return [*_attention_goals(record, ceilings), *_step_goals(record, ceilings), *_efficiency_goals(record),
            *_twin_goals(record)]  # fmt: skip


def is_proven(record: Record) -> bool:
    """Whether no proof failed and no section broke down."""
    broke_down = any(section["errors"] for section in record["sections"].values())
    return not broke_down and all(goal.verdict != "MISSED" for goal in proofs(record))


def plain_floor_us(record: Record, context: int, ceilings: Ceilings) -> float | None:
    """Microseconds that reading weights and keys and values takes at the measured bandwidth of reading."""
    models = table(record, "step", "model")
    if not models or ceilings.read is None:
        return None
    moved: float = models[0]["weight_bytes"] + context * models[0]["kv_bytes_a_token"]
    return moved / ceilings.read / 1e3


def passes_by_context(record: Record) -> dict[int, dict[int, Row]]:
    """Rows of passes by context and width."""
    result: dict[int, dict[int, Row]] = {}
    for row in table(record, "step", "passes"):
        result.setdefault(row["context"], {})[row["width"]] = row
    return result


def _attention_goals(record: Record, ceilings: Ceilings) -> list[Goal]:
    """Of the mask-free kernel."""
    rows = table(record, "attention", "attention")
    return [
        _share("attention, mask-free over dense SDPA, L >= 2048", 2.0, (
            ratio for row in rows if row["prefix"] >= 2048 and (ratio := _speed_up(row, "sdpa")) is not None)),
        _share("the same over the faster of both forms of SDPA", 2.0, (
            ratio for row in rows if row["prefix"] >= 2048 and (ratio := _best_speed_up(row)) is not None)),
        *(
            _share(f"attention, K+V bytes over copy bandwidth, N <= 32, B L >= 16384{note}", share, (
                of for row in rows if row["nodes"] <= 32 and row["batch"] * row["prefix"] >= 16384
                and (of := _of_copy(row, ceilings)) is not None))
            for share, note in ((0.6, ""), (0.8, " (stretch)"))
        ),
        _share("attention, arithmetic over a large GEMM's, N = 64, B L >= 16384", 0.5, (
            of for row in rows if row["nodes"] == 64 and row["batch"] * row["prefix"] >= 16384
            and (of := _of_matmul(row, ceilings)) is not None)),
    ]  # fmt: skip


def _step_goals(record: Record, ceilings: Ceilings) -> list[Goal]:
    """Of passes and of the host."""
    passes = passes_by_context(record)
    runners = sorted({row["runner"] for rows in passes.values() for row in rows.values()})
    goals = [
        _goal("passes of the 8B-shaped target are captured", "lean-graphs", ", ".join(runners),
              is_met=runners == ["lean-graphs"] if runners else None)
    ]  # fmt: skip
    for context in sorted(passes):
        if 1 not in passes[context]:
            continue
        plain = passes[context][1]["waited"]["median"]
        floor = plain_floor_us(record, context, ceilings)
        if floor is not None:
            goals.append(_above(f"plain pass, share of the read roofline, L = {context}", 0.85, floor / plain))
        limits = _VERIFY if context <= 2048 else {64: 1.25}
        goals += [
            _below(f"pass of {width} over a plain one, L = {context}", limit,
                   passes[context][width]["waited"]["median"] / plain)
            for width, limit in limits.items() if width in passes[context]
        ]  # fmt: skip
    for row in table(record, "step", "iterations"):
        if row["gap_us"] is not None:
            goals.append(_below(f"GPU idle in an iteration, us, {row['pattern']}", 50.0, row["gap_us"]))
    return goals


def _efficiency_goals(record: Record) -> list[Goal]:
    """Of speed-up over tau."""
    return [
        _above(f"efficiency, {row['title']}, scripted at tau {row['tau']:.2f}, drafting free",
               _EFFICIENCY[row["pattern"]], row["efficiency"])
        for row in table(record, "step", "efficiency") if row["pattern"] in _EFFICIENCY
    ]  # fmt: skip


def twin_methods(record: Record) -> list[Row]:
    """Rows of every method but plain decoding on the cost twin."""
    return [row for row in table(record, "twin", "methods") if row["setup"] != "plain"]


def _twin_goals(record: Record) -> list[Goal]:
    """Of trained drafters on the cost twin. Its Medusa heads have LM heads of their own, and it has no EAGLE head."""
    rows = twin_methods(record)
    return [
        *(
            _above(f"efficiency, prompt lookup on the cost twin, T={row['temperature']:g}, tau "
                   f"{row['mean_acceptance_length']:.2f}", _EFFICIENCY["n-gram"], row["efficiency"])
            for row in rows if row["setup"] == "ngram"
        ),
        _share("speed-up of any method on the cost twin, batch 1", 0.98, (row["speed_up"] for row in rows)),
    ]  # fmt: skip


def kernel_us(row: Row, kernel: str) -> float | None:
    """A kernel's median, None where it was not timed."""
    value: float | None = row["kernels"].get(kernel, {}).get("median")
    return value


def _speed_up(row: Row, over: str) -> float | None:
    """The mask-free kernel's speed over another's."""
    ours, theirs = kernel_us(row, "mask-free"), kernel_us(row, over)
    return None if ours is None or theirs is None else theirs / ours


def _best_speed_up(row: Row) -> float | None:
    """Over the faster of the two ways to call SDPA."""
    known = [ratio for name in ("sdpa", "sdpa-packed") if (ratio := _speed_up(row, name)) is not None]
    return min(known, default=None)


def _of_copy(row: Row, ceilings: Ceilings) -> float | None:
    """Share of the bandwidth of copying."""
    ours = kernel_us(row, "mask-free")
    return None if ours is None or ceilings.copy is None else row["kv_bytes"] / ours / 1e3 / ceilings.copy


def _of_matmul(row: Row, ceilings: Ceilings) -> float | None:
    """Share of the rate of a large GEMM."""
    ours = kernel_us(row, "mask-free")
    return None if ours is None or ceilings.matmul is None else row["flop"] / ours / 1e6 / ceilings.matmul


def _share(what: str, wanted: float, values: Iterable[float]) -> Goal:
    """A goal that every one of some cases is to reach."""
    known = sorted(values)
    if not known:
        return _goal(what, f">= {wanted:g}", "-", is_met=None)
    reached = sum(value >= wanted for value in known)
    shown = f"{reached} of {len(known)} cases; {known[0]:.2f} to {known[-1]:.2f}, median {known[len(known) // 2]:.2f}"
    return _goal(what, f">= {wanted:g}", shown, is_met=reached == len(known))


def _above(what: str, wanted: float, value: float) -> Goal:
    """A goal of at least so much."""
    return _goal(what, f">= {wanted:g}", f"{value:.3g}", is_met=value >= wanted)


def _below(what: str, wanted: float, value: float) -> Goal:
    """A goal of at most so much."""
    return _goal(what, f"<= {wanted:g}", f"{value:.3g}", is_met=value <= wanted)


def _goal(what: str, wanted: str, measured: str, *, is_met: bool | None) -> Goal:
    """A goal with its verdict; None where nothing was measured."""
    if is_met is None:
        return Goal(what=what, wanted=wanted, measured="-", verdict="not measured")
    return Goal(what=what, wanted=wanted, measured=measured, verdict="met" if is_met else "MISSED")

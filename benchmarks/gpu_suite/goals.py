"""Compares the suite's measurements with its goals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

Record = dict[str, Any]
Row = dict[str, Any]

_VERIFY = {8: 1.03, 16: 1.05, 64: 1.10, 128: 1.35}  # a pass of that many tokens over a plain one, contexts up to 2k
_EFFICIENCY = {"n-gram": 0.95, "medusa": 0.82, "eagle": 0.70}


class Goal(NamedTuple):
    """What is measured, with its conditions; the goal; what came out, "-" where nothing did; whether it was met."""

    what: str
    wanted: str
    measured: str
    verdict: Literal["met", "MISSED", "not measured"]


class Ceilings(NamedTuple):
    """GB/s of a copy (bytes read and written) and of the fastest way to read; TFLOP/s of a large bfloat16 GEMM."""

    copy: float | None
    read: float | None
    matmul: float | None

    @classmethod
    def of(cls, record: Record) -> Ceilings:
        """Of a record; None where nothing was measured."""
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
    timed = [cell for row in table(record, "attention", "attention") for cell in row["kernels"].values()]
    wrong = sum("failure" in cell for cell in timed)
    known = table(record, "step", "efficiency") + table(record, "step", "generate")
    other = sum(not row["is_expected_text"] for row in known)
    return [
        _goal("kernels run and agree where they are timed", "all", f"{len(timed) - wrong} of {len(timed)}",
              is_met=not wrong if timed else None),
        _texts("texts of every drafter", table(record, "lossless", "setups"), table(record, "lossless", "broken")),
        _texts("texts of every drafter on the cost twin", twin_methods(record), []),
        _goal("the 8B-shaped target writes its known text", "all runs", f"{len(known) - other} of {len(known)}",
              is_met=not other if known else None),
    ]  # fmt: skip


def speeds(record: Record) -> list[Goal]:
    """The figures that have goals."""
    ceilings = Ceilings.of(record)
    return [*_attention_goals(record, ceilings), *_step_goals(record, ceilings), *_drafting_goals(record)]


def is_proven(record: Record) -> bool:
    """Whether no proof failed and no section broke down."""
    broke_down = any(section["errors"] for section in record["sections"].values())
    return not broke_down and all(goal.verdict != "MISSED" for goal in proofs(record))


def twin_methods(record: Record) -> list[Row]:
    """Rows of every method but plain decoding on the cost twin."""
    return [row for row in table(record, "twin", "methods") if row["setup"] != "plain"]


def _attention_goals(record: Record, ceilings: Ceilings) -> list[Goal]:
    """Of the mask-free kernel; (row, its microseconds, those of the faster form of SDPA)."""
    timed = []
    for row in table(record, "attention", "attention"):
        us = {name: cell["median"] for name, cell in row["kernels"].items() if "median" in cell}
        if "mask-free" in us:
            timed.append((row, us["mask-free"], min((us[n] for n in ("sdpa", "sdpa-packed") if n in us), default=None)))
    large = [(row, us) for row, us, _ in timed if row["batch"] * row["prefix"] >= 16384]
    few, wide = [each for each in large if each[0]["nodes"] <= 32], [each for each in large if each[0]["nodes"] == 64]
    return [
        _share("attention, mask-free over the faster form of SDPA, L >= 2048", 2.0,
               (sdpa / us for row, us, sdpa in timed if sdpa is not None and row["prefix"] >= 2048)),
        _share("attention, K+V bytes over copy bandwidth, N <= 32, B L >= 16384", 0.6,
               (row["kv_bytes"] / us / 1e3 / ceilings.copy for row, us in few if ceilings.copy)),
        _share("attention, arithmetic over a large GEMM's, N = 64, B L >= 16384", 0.5,
               (row["flop"] / us / 1e6 / ceilings.matmul for row, us in wide if ceilings.matmul)),
    ]  # fmt: skip


def _step_goals(record: Record, ceilings: Ceilings) -> list[Goal]:
    passes: dict[int, dict[int, Row]] = {}
    for row in table(record, "step", "passes"):
        passes.setdefault(row["context"], {})[row["width"]] = row
    runners = sorted({row["runner"] for rows in passes.values() for row in rows.values()})
    goals = [_goal("passes of the 8B-shaped target are captured", "lean-graphs", ", ".join(runners),
                   is_met=runners == ["lean-graphs"] if runners else None)]  # fmt: skip
    models = table(record, "step", "model")
    for context, rows in sorted(passes.items()):
        if 1 not in rows:
            continue
        plain = rows[1]["waited"]["median"]
        if models and ceilings.read is not None:
            moved = models[0]["weight_bytes"] + context * models[0]["kv_bytes_a_token"]
            of_roofline = moved / ceilings.read / 1e3 / plain
            goals.append(_above(f"plain pass, share of the read roofline, L = {context}", 0.85, of_roofline))
        limits = _VERIFY if context <= 2048 else {64: 1.25}
        goals += [
            _below(f"pass of {width} over a plain one, L = {context}", limit, rows[width]["waited"]["median"] / plain)
            for width, limit in limits.items()
            if width in rows
        ]
    for row in table(record, "step", "iterations"):
        if row["gap_us"] is not None:
            goals.append(_below(f"GPU idle in an iteration, us, {row['pattern']}", 50.0, row["gap_us"]))
    return goals


def _drafting_goals(record: Record) -> list[Goal]:
    """Of scripted drafts on the 8B-shaped target, and of trained drafters on the cost twin."""
    on_twin = twin_methods(record)
    return [
        *(
            _above(f"efficiency, {row['title']}, scripted at tau {row['tau']:.2f}, drafting free",
                   _EFFICIENCY[row["pattern"]], row["efficiency"])
            for row in table(record, "step", "efficiency") if row["pattern"] in _EFFICIENCY
        ),
        *(
            _above(f"efficiency, prompt lookup on the cost twin, T={row['temperature']:g}, tau "
                   f"{row['mean_acceptance_length']:.2f}", _EFFICIENCY["n-gram"], row["efficiency"])
            for row in on_twin if row["setup"] == "ngram"
        ),
        _share("speed-up of any method on the cost twin, batch 1", 0.98, (row["speed_up"] for row in on_twin)),
    ]  # fmt: skip


def _texts(what: str, rows: list[Row], broken: list[Row]) -> Goal:
    """Of texts beside plain decoding's, and of setups that stopped the engine."""
    bugs, ties, count = (sum(row[key] for row in rows) for key in ("bugs", "near_ties", "prompts"))
    found = f"{bugs} bugs, {ties} near-ties, {count} texts, {len(broken)} setups stopped the engine"
    is_met = not bugs and not broken if rows or broken else None
    return _goal(f"{what} equal plain decoding's, near-ties apart", "0 bugs", found, is_met=is_met)


def _share(what: str, wanted: float, values: Iterable[float]) -> Goal:
    """A goal that every one of some cases is to reach."""
    known = sorted(values)
    if not known:
        return _goal(what, f">= {wanted:g}", "-", is_met=None)
    reached = sum(value >= wanted for value in known)
    shown = f"{reached} of {len(known)} cases; {known[0]:.2f} to {known[-1]:.2f}, median {known[len(known) // 2]:.2f}"
    return _goal(what, f">= {wanted:g}", shown, is_met=reached == len(known))


def _above(what: str, wanted: float, value: float) -> Goal:
    return _goal(what, f">= {wanted:g}", f"{value:.3g}", is_met=value >= wanted)


def _below(what: str, wanted: float, value: float) -> Goal:
    return _goal(what, f"<= {wanted:g}", f"{value:.3g}", is_met=value <= wanted)


def _goal(what: str, wanted: str, measured: str, *, is_met: bool | None) -> Goal:
    """A goal with its verdict; None where nothing was measured."""
    if is_met is None:
        return Goal(what, wanted, "-", "not measured")
    return Goal(what, wanted, measured, "met" if is_met else "MISSED")

"""Tables of drafting behind long texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.long_context.positions import BIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.long_context.positions import Line
    from benchmarks.long_context.sizes import Cell

FORMULA = (
    "Bytes of an emitted token: `(W + B*L*r + d*(Wd + B*Ld*rd)) / (B*tau)`. W: weights of the target; B: batch; L: "
    "rows of a text; r: bytes of a row of its KV cache; d: drafted levels a pass of the target; Wd, Ld, rd: the same "
    "of a draft's pass; tau: emitted tokens of a text a pass. Modelled speed-up: `tau*(W + B*L*r)` over the bracket, "
    "with the measured tau and d (MagicDec, arXiv 2408.11049). KV rows outweigh the weights from `B*L = W/r` on."
)


def title(setup: str) -> str:
    """Returns the name of a drafter in tables: `sparse_kv vegas, depth 4` for the words that `parse_setup` gives."""
    words = {
        "kv_selection=": "", " num_speculative_tokens=": ", depth ", " draft_window_size=": ", window ",
        " draft_retrieval=true": ", retrieval", ":chain": "",
    }  # fmt: skip
    for old, new in words.items():
        setup = setup.replace(old, new)
    return setup


def break_even(weights: float, row: int, batch: int) -> float:
    """Returns the rows of each text from which the KV rows of a batch outweigh the weights, in bytes of both."""
    return weights / (row * batch)


def sizes_table(cells: Sequence[Cell]) -> str:
    """Returns a line for each cell, the fastest drafter of each batch behind each number of rows in bold."""
    best: dict[tuple[int, int], float] = {}
    for cell in cells:
        best[cell.rows, cell.batch] = max(cell.speed_up, best.get((cell.rows, cell.batch), 1.0))
    heads = ("rows", "batch", "drafter", "plain tokens/s", "tokens/s", "speed-up (range)", "modelled", "tau", "levels",
             "same text", "MB a token", "plain MB")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for cell in sorted(cells, key=lambda cell: (cell.rows, cell.batch)):
        speed_up = f"{cell.speed_up:.2f}"
        if cell.speed_up == best[cell.rows, cell.batch]:
            speed_up = f"**{speed_up}**"
        read = cell.passes.of_token(cell.tau, cell.depth, cell.batch)
        row = (
            f"{cell.rows:,}", str(cell.batch), title(cell.setup), f"{_middle(cell.plain):.1f}",
            f"{_middle(cell.drafted):.1f}",
            f"{speed_up} ({min(cell.speed_ups):.2f}-{max(cell.speed_ups):.2f})",
            "" if cell.modelled is None else f"{cell.modelled:.2f}", f"{cell.tau:.2f}", f"{cell.depth:.2f}",
            f"{cell.num_same}/{cell.num_texts}", "" if read is None else f"{read / 1e6:.0f}",
            f"{cell.passes.plain / cell.batch / 1e6:.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def break_even_sentence(weights: float, row: int, batches: Sequence[int]) -> str:
    """Returns from which number of rows on the KV rows outweigh the weights, for each batch."""
    each = ", ".join(f"{break_even(weights, row, batch):,.0f} rows in a batch of {batch}" for batch in batches)
    return (
        f"Weights are {weights / 1e6:.0f} MB, a KV row {row / 1024:.0f} KiB. KV rows outweigh weights from B*L = "
        f"{weights / row:,.0f} rows on: {each}."
    )


def positions_table(lines: Sequence[Line]) -> str:
    """Returns tau by position in the output, a line for each drafter and temperature."""
    num_bins = len(lines[0].passes)
    shown = [place for place in range(num_bins) if place in (0, 1, num_bins - 1) or (place + 1) % 4 == 0]
    heads = ["T", "drafter", *(f"to {(place + 1) * BIN:,}" for place in shown), "least", "repeated 64-grams"]
    table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for line in lines:
        taus = [f"{line.taus[place]:.2f}" for place in shown]
        row = [f"{line.temperature:g}", title(line.setup), *taus, f"{line.least_share:.0%}", f"{line.repeated:.0%}"]
        table.append(f"| {' | '.join(row)} |")
    return "\n".join(table) + "\n"


def verdict(lines: Sequence[Line]) -> str:
    """Returns whether tau of any drafter falls below half of its value in the first bin; leaves out looping texts."""
    own = [line for line in lines if not line.is_looping]
    looping = sorted({line.temperature for line in lines if line.is_looping})
    said = [f"Texts at T {temperature:g} loop, and say nothing of drafters." for temperature in looping]
    if own:
        least = min(own, key=lambda line: line.least_share)
        falling = [title(line.setup) for line in own if line.least_share < 0.5]
        said.append(
            f"Tau falls below half of its first value with {', '.join(falling) or 'no drafter'}; the least share is "
            f"{least.least_share:.0%}, of {title(least.setup)} at T {least.temperature:g}."
        )
    return " ".join(said)


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]

"""What a training gives: the head, its loss and acceptance over the steps, and the picture of both."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from foretoken.bench.plots import LIGHT, distinct_look, load_matplotlib, page_style

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from foretoken.models.loading import LoadedModel

_SIZE = (8.4, 3.3)  # inches


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of `foretoken.train`.

    Attributes:
        directory: The head's directory, as `speculative_config` of `LLM` takes it.
        run_dir: Directory of the checkpoints and of `metrics.jsonl`.
        target: The target that the head belongs to; with `joint` the new one.
        losses: Training loss of each step, from step 1.
        acceptance: For each evaluated step, the acceptance rate at depths 1, 2, …: the share of drafts on held-out
            text whose first d tokens are all the target's choice at temperature 0.
        facts: What was measured on held-out prompts, and the head's size, as `foretoken train --json` prints them.
            Empty in every process but the first, as `losses` and `acceptance` are.
    """

    directory: Path
    run_dir: Path
    target: LoadedModel
    losses: list[float]
    acceptance: dict[int, list[float]]
    facts: dict[str, Any]

    @property
    def tau(self) -> dict[int, float]:
        """Acceptance length at each evaluated step: tokens a target pass of a chain, the target's own included."""
        return {step: 1.0 + sum(by_depth) for step, by_depth in self.acceptance.items()}

    def plot(self, file: str | os.PathLike[str] | IO[str] | None = None) -> Any:
        """Draws the training loss and the acceptance rate at each depth over the steps.

        Args:
            file: Where to write the picture, in the format of the name's suffix, or an open file for SVG; None to
                write nothing.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            ConfigError: When matplotlib is not installed (`pip install '.[report]'`).
        """
        mpl = load_matplotlib()
        from matplotlib.figure import Figure

        with mpl.rc_context({**page_style(LIGHT, "training"), "svg.fonttype": "none"}):  # text as text: a small file
            figure: Any = Figure(figsize=_SIZE, layout="constrained")
            loss, acceptance = figure.subplots(1, 2)
            loss.plot(range(1, len(self.losses) + 1), self.losses, color=distinct_look(1).light, lw=1.4)
            loss.set_title("training loss", loc="left")
            self._draw_acceptance(acceptance)
            for axes in (loss, acceptance):
                axes.set_xlabel("optimizer step")
                axes.spines[["top", "right"]].set_visible(False)
                axes.grid(visible=True, color=LIGHT.grid, lw=0.6)
                axes.set_xlim(0, 1.02 * max(len(self.losses), 1))
                axes.set_ylim(bottom=0)
            if file is not None:
                is_svg = hasattr(file, "write") or str(file).endswith(".svg")
                dateless = {"metadata": {"Date": None}, "format": "svg"} if is_svg else {}
                figure.savefig(file, **dateless)
        return figure

    def _repr_svg_(self) -> str:
        """Returns the picture for notebooks, which show it where a cell ends with the result."""
        picture = io.StringIO()
        self.plot(picture)
        return picture.getvalue()

    def _draw_acceptance(self, axes: Any) -> None:
        by_step = list(self.acceptance.values())
        for depth, rates in enumerate(zip(*by_step, strict=True)):
            look = distinct_look(depth)
            percents = [100 * rate for rate in rates]
            axes.plot(list(self.acceptance), percents, color=look.light, marker=look.marker, ms=4, label=depth + 1)
        taus = list(self.tau.values())
        ending = f", tau {taus[0]:.2f} to {taus[-1]:.2f}" if taus else ""
        axes.set_title(f"acceptance on held-out text{ending}", loc="left")
        axes.set_ylabel("drafts accepted, %")
        if taus:
            axes.legend(title="to depth", frameon=False)

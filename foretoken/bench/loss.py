"""Splits the speed that drafting loses against its ideal into causes, each with the next thing to do.

The ideal accepts every draft as a whole, drafts for nothing, computes a wide pass in the time of a plain one, and does
no more on the host than plain decoding. Knows measurements, neither models nor clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.bench.compare import Measurement

_OFTEN = 0.9  # share of passes with a draft; a choice: below, drafts that are missing cost more than wrong ones


class Cause(NamedTuple):
    """A part of the loss."""

    name: str
    seconds: float  # per token; below 0 where drafting saves time
    advice: str  # the next thing to do


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Seconds per token of one drafter above its ideal."""

    measured: float  # of the drafter, by the wall clock
    plain: float  # of plain decoding
    ideal: float  # `plain` divided by the tokens of a pass that accepts its whole draft
    causes: Sequence[Cause]  # the largest first

    @property
    def seconds(self) -> float:
        """The loss, by the wall clock alone."""
        return self.measured - self.ideal

    @property
    def unexplained(self) -> float:
        """Seconds per token that no cause has: before the first iteration and after the last one of a batch."""
        return self.seconds - sum(cause.seconds for cause in self.causes)

    def as_dict(self) -> dict[str, Any]:
        """Returns the loss JSON-ready, in milliseconds per token."""
        shares = {cause.name: cause.seconds / self.seconds for cause in self.causes}
        return {
            "ms_per_token": self.measured * 1e3,
            "plain_ms_per_token": self.plain * 1e3,
            "ideal_ms_per_token": self.ideal * 1e3,
            "loss_ms": self.seconds * 1e3,
            "unexplained_ms": self.unexplained * 1e3,
            "causes": [
                {"name": name, "ms": seconds * 1e3, "share": shares[name], "advice": advice}
                for name, seconds, advice in self.causes
            ],
        }


def split_loss(drafted: Measurement, plain: Measurement) -> Loss:
    """Splits the loss of a drafter, measured in turn with plain decoding of the same prompts.

    Letters, of the drafted run: N passes, summed over sequences; d, v and r seconds of drafting, of passes, and of the
    host between the ends of iterations, divided by N; x passes per token, which is 1 / tau; D levels of a draft, the
    mean over passes with a draft. Of plain decoding: p and h seconds of passes and of the host per token. The ideal
    makes y = 1 / (D + 1) passes per token.

        acceptance   (x - y) ((d + v + r) + (p + h)) / 2
        drafting     d (x + y) / 2
        wide passes  (v - p) (x + y) / 2
        host         (r - h) (x + y) / 2

    The parts sum to x (d + v + r) - y (p + h). Replacing the passes per token first and the seconds of a pass second
    gives other parts than the opposite order; each part is the mean of both. The loss itself comes from the wall
    clocks of both runs: S - y P, with S and P seconds per token. `Loss.unexplained` is the difference.

    Raises:
        ConfigError: If nothing was drafted, or a run has no pass after prefill.
    """
    metrics = drafted.metrics
    num_drafts = metrics.drafted_at_depth.get(1, 0)
    if not num_drafts or not plain.metrics.steps:
        raise ConfigError(
            f"'{drafted.setup}' drafted nothing, so no speed is lost to its drafts. Expected passes with drafts. Set "
            "num_speculative_tokens, which always drafts, or raise --max-tokens."
        )
    passes, most = metrics.steps, metrics.drafted_at_depth.total() / num_drafts + 1
    x, y = 1 / metrics.mean_acceptance_length, 1 / most
    d, v, r = (each / passes for each in (drafted.draft_seconds, drafted.verify_seconds, drafted.host_seconds))
    p, h = (each / plain.metrics.steps for each in (plain.verify_seconds, plain.host_seconds))
    causes = (
        Cause("acceptance", (x - y) * (d + v + r + p + h) / 2, _about_acceptance(drafted, most)),
        Cause("drafting", d * (x + y) / 2, _about_drafting(drafted, plain)),
        Cause("wide passes", (v - p) * (x + y) / 2, _about_passes(drafted, plain)),
        Cause("host", (r - h) * (x + y) / 2, _about_host(drafted, plain)),
    )
    measured, alone = (1 / each.tokens_per_s for each in (drafted, plain))
    return Loss(
        measured=measured,
        plain=alone,
        ideal=alone * y,
        causes=sorted(causes, key=lambda cause: cause.seconds, reverse=True),
    )


def _about_acceptance(drafted: Measurement, most: float) -> str:
    asked = drafted.metrics.drafted_at_depth[1] / drafted.metrics.steps
    said = f"{drafted.tau:.2f} of {most:.2f} tokens a pass"
    if asked < _OFTEN:
        return f"{said}; {asked:.0%} of the passes have a draft. Add a drafter that always proposes (-s ngram+hydra)."
    return f"{said}. Run `foretoken doctor MODEL HEAD`; if it finds no fault, train the head longer on such text."


def _about_drafting(drafted: Measurement, plain: Measurement) -> str:
    ratio = drafted.draft_seconds / drafted.iterations / _plain_pass(plain)
    return f"A draft takes {ratio:.2f} plain passes. Draft fewer levels (num_speculative_tokens)."


def _about_passes(drafted: Measurement, plain: Measurement) -> str:
    nodes = drafted.metrics.num_drafted / drafted.metrics.steps + 1
    ratio = drafted.verify_seconds / drafted.iterations / _plain_pass(plain)
    return (
        f"A pass over {nodes:.1f} tokens a sequence takes {ratio:.2f} plain passes. Draft fewer nodes (max_nodes, or "
        "the tree `chain`)."
    )


def _about_host(drafted: Measurement, plain: Measurement) -> str:
    ours, theirs = (each.host_seconds / each.iterations * 1e3 for each in (drafted, plain))
    return (
        f"An iteration takes {ours:.2f} ms outside of its pass and its draft, and {theirs:.2f} ms without drafts. "
        "Decode more sequences at once: they share this time."
    )


def _plain_pass(plain: Measurement) -> float:
    return plain.verify_seconds / plain.iterations

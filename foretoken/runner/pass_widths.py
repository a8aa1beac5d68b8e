"""How wide the passes of a runner will be, and which decoder makes these fastest, by measured costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foretoken.runner.costs import PassCosts

_TIE = 1.05  # costs nearer to each other are the same but for noise
_TREE_TOKENS = (
    2  # that a verification generates: published acceptance lengths are 2 to 4, and not every tree is drafted
)


class PassWidths(NamedTuple):
    """Passes that a runner is made for.

    Attributes:
        num_slots: Sequences decoded at once.
        max_nodes: Nodes of the widest tree of a sequence, root included; 1 for plain decoding.
        prompt_chunk: Prompt tokens fed in one pass.
    """

    num_slots: int
    max_nodes: int = 16
    prompt_chunk: int = 512

    def passes(self, costs: PassCosts) -> list[tuple[int, float]]:
        """Tokens and seconds of a step of plain decoding, of a verification of the widest trees, of a prompt's chunk.

        Args:
            costs: Of one decoder. There is no verification without trees.
        """
        num_tokens = self.num_slots * self.max_nodes
        step, prompt = costs.step(self.num_slots), costs.prompt(self.prompt_chunk)
        trees = [(num_tokens, costs.verification(self.num_slots, num_tokens))] if self.max_nodes > 1 else []
        return [(self.num_slots, step), *trees, (self.prompt_chunk, prompt)]

    def seconds(self, costs: PassCosts) -> float:
        """What a decoder is judged by: one step, one verification, and the prompt tokens that belong to both.

        The step generates one token a sequence, the verification about two, and a prompt is taken to be as long as
        what is generated from it. Without trees: one step, and one prompt token a sequence.

        Args:
            costs: Of the decoder.
        """
        *decoding, (_, chunk_seconds) = self.passes(costs)
        generated = self.num_slots * (1 if self.max_nodes == 1 else 1 + _TREE_TOKENS)
        return sum(seconds for _, seconds in decoding) + generated * chunk_seconds / self.prompt_chunk


def ranked(costs: Mapping[str, PassCosts], widths: PassWidths) -> list[tuple[str, str]]:
    """Decoders, the cheapest first, each with a sentence that says what its passes cost and those of the others.

    Args:
        costs: By decoder; of those that cost the same but for noise the first one comes first.
        widths: See `PassWidths.seconds`.
    """
    seconds = {name: widths.seconds(costs[name]) for name in costs}
    first = next((name for name in costs if seconds[name] <= _TIE * min(seconds.values())), None)
    order = sorted(costs, key=lambda name: (name != first, seconds[name]))
    return [(name, _comparison(name, costs, widths)) for name in order]


def _comparison(name: str, costs: Mapping[str, PassCosts], widths: PassWidths) -> str:
    """What passes of a decoder cost, and those of the others."""

    def milliseconds(each: str) -> str:
        values = [1e3 * seconds for _, seconds in widths.passes(costs[each])]
        return " / ".join(f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in values)

    if len(costs) == 1:
        return ""
    tokens = " / ".join(str(number) for number, _ in widths.passes(costs[name]))
    others = ", ".join(f"{other} {milliseconds(other)}" for other in costs if other != name)
    return f"{name} is used: passes of {tokens} tokens take {milliseconds(name)} ms ({others})"

"""Which drafter runs on which runner, in which batches, over which requests: few cases in which every two meet."""

from collections.abc import Iterable
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

from drafters.adversarial import BEHAVIOURS
from end_to_end.request_mix import request_mix
from end_to_end.tiny_heads import HEADS
from end_to_end.tiny_llms import RUNNERS, drafters

NAMES = list(drafters())
BATCHES = (8, 3, 1)
# The words that a name begins with, the first that fit, to what drafts. Names of heads stand for themselves.
_METHODS = {
    "draft, suffix": "several", "sampled draft": "several", "lookahead and": "several", "lookup and": "several",
    "two lookups": "several", "heads": "several",
    "draft text": "other vocabulary", "draft intersection": "other vocabulary",
    **{f"random {name}": name for name in sorted(HEADS, key=len, reverse=True)},
    **{name: name for name in sorted(HEADS, key=len, reverse=True)},
    **{name: name for name in (
        "none", "ngram", "suffix", "prediction", "rest", "lookahead", "recycling", "draft", "early exit", "sparse kv",
        "oracle",
    )},
    **dict.fromkeys(BEHAVIOURS, "adversarial"),
}  # fmt: skip
# Words of a name to the shape of its trees, and to what says how deep they are.
_SHAPES = {"dynamic": "dynamic", "tree": "static", "choices": "static", "widths": "static", "wide": "static"}
_DEPTHS = {"adaptive": "chosen by the engine", "pruned": "pruned", "stopped": "stopped"}
# Tokens a pass that a drafter must reach on the mix, so that commits and bonus tokens are known to have been tested.
# Measured on the generic runner over the whole mix: 10 % above these. The half of it that the largest batch has must
# bring half of what is above one token, on every runner.
AT_LEAST = {
    "draft": 1.75, "draft itself": 2.9, "draft tree": 2.1, "draft itself tree": 4.0, "draft choices": 2.0,
    "draft widths": 2.1, "draft intersection": 1.4, "draft intersection dynamic": 1.7, "draft text": 1.1,
    "oracle [2]": 2.2, "oracle [3, 0, 5]": 2.5, "oracle tree": 2.5, "ngram tree": 1.02, "suffix tree": 1.02,
    "medusa": 2.2, "hydra": 3.0, "hydra++": 3.6, "mlp_speculator": 3.0,
    "draft dynamic": 2.1, "draft itself dynamic": 2.8, "medusa dynamic": 1.9, "hydra dynamic": 3.0,
    "mlp_speculator dynamic": 2.9, "eagle": 3.0, "eagle3": 2.4, "eagle dynamic": 2.65, "eagle3 dynamic": 2.1,
    "falcon": 3.3, "falcon dynamic": 2.85, "eagle choices": 2.65, "eagle3 chain": 2.2,
    "lookahead": 1.02, "recycling": 1.2, "sampled draft and lookahead": 2.2,
    "prediction": 1.6, "rest": 2.3, "rest tree": 2.6,
}  # fmt: skip
# Drafters with rows of their own, and tokens a pass that they reach on the first half of the mix, less a tenth and
# more: one that read NaN would cost acceptance, not text.
WITH_OWN_ROWS = {
    "draft itself": 2.5, "draft itself tree": 2.5, "hydra++": 2.5, "eagle": 2.5, "eagle dynamic": 2.3, "eagle3": 2.1,
    "eagle3 dynamic": 1.9,
}  # fmt: skip


class Case(NamedTuple):
    """A drafter on a runner, in batches of a size, over some quarters of the mix."""

    drafter: str
    runner: str
    batch: int
    quarters: tuple[int, ...]

    def requests(self) -> list[int]:
        """Places in the mix."""
        return [place for place in range(len(request_mix())) if place % 4 in self.quarters]

    @property
    def accepts_at_least(self) -> float:
        """Tokens a pass."""
        if len(self.quarters) == 1:
            return 1.0
        own = WITH_OWN_ROWS.get(self.drafter, 1.0) if self.quarters == (0, 2) else 1.0
        return max(1 + (AT_LEAST.get(self.drafter, 1.0) - 1) / 2, own)


# The largest batch needs two quarters to have more sequences than slots.
PARTS: list[tuple[int, tuple[int, ...]]] = [
    *product(BATCHES[1:], [(quarter,) for quarter in range(4)]), *product(BATCHES[:1], [(0, 2), (1, 3)])
]  # fmt: skip


@cache
def kind_of(drafter: str) -> tuple[str, str, str]:
    """What drafts, in which shape, and what bounds the depth."""
    method = next(method for start, method in _METHODS.items() if drafter.startswith(start))
    words = drafter.replace(",", "").split()
    shape = next((shape for word, shape in _SHAPES.items() if word in words), "as the method's")
    return method, shape, next((depth for word, depth in _DEPTHS.items() if word in words), "named")


@cache
def met(case: Case, size: int = 2) -> frozenset[tuple[object, ...]]:
    """All pairs, or larger groups, of what meets in a case: of drafters it is their kind, of requests their quarter."""
    return frozenset(
        group
        for quarter in case.quarters
        for group in combinations(enumerate((*kind_of(case.drafter), case.runner, case.batch, quarter)), size)
    )


def product_of_all() -> list[Case]:
    """Every drafter on every runner in batches of every size over every part of the mix."""
    return [Case(*each, *part) for each in product(NAMES, reversed(RUNNERS)) for part in PARTS]


@cache
def chosen_cases() -> list[Case]:
    """Every drafter once, and more cases until every two have met that meet in any. Greedy: most new pairs first.

    Where acceptance is bounded, a drafter's one case is one of those with the highest bound.
    """
    everything = product_of_all()
    missing = {size: set[tuple[object, ...]]().union(*(met(case, size) for case in everything)) for size in (2, 3)}
    chosen: list[Case] = []

    def take(cases: Iterable[Case]) -> None:
        chosen.append(max(cases, key=lambda case: [len(missing[size] & met(case, size)) for size in missing]))
        for size in missing:
            missing[size] -= met(chosen[-1], size)

    for drafter in NAMES:
        own = [case for case in everything if case.drafter == drafter]
        most = max(case.accepts_at_least for case in own)
        take(case for case in own if case.accepts_at_least == most)
    while missing[2]:
        take(everything)
    return sorted(chosen, key=lambda case: NAMES.index(case.drafter))


def other_cases() -> list[Case]:
    """Every drafter on every runner, each in another of the three batch sizes, with all requests, less the chosen."""
    parts = [(BATCHES[0], (0, 2)), (BATCHES[1], (1,)), (BATCHES[2], (3,))]
    shifted = [(batch, tuple(sorted((quarter + 1) % 4 for quarter in quarters))) for batch, quarters in parts]
    latin = [
        Case(drafter, runner, *(shifted if index % 2 and drafter not in WITH_OWN_ROWS else parts)[(index + place) % 3])
        for index, drafter in enumerate(NAMES) for place, runner in enumerate(RUNNERS)
    ]  # fmt: skip
    return [case for case in latin if case not in chosen_cases()]

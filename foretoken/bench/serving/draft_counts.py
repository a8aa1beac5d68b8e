"""Reads a server's counts of speculative decoding from its /metrics page or its answers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LINE = re.compile(
    r"^(?P<origin>\w+):spec_decode_num_(?P<name>drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(_total)?"
    r"(\{(?P<labels>.*)\})?\s+(?P<value>[0-9.eE+-]+)(\s+\d+)?$"
)
_POSITION = re.compile(r'position="(\d+)"')
_ORIGINS = ("vllm", "foretoken")  # a server may show the same figures under both names


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counters of a server.

    Attributes:
        drafts: Verified drafts, or trees.
        draft_tokens: Drafted tokens, or nodes.
        accepted_tokens: Accepted drafted tokens, without the target's own.
        by_position: Accepted drafted tokens by depth.
    """

    drafts: float = 0
    draft_tokens: float = 0
    accepted_tokens: float = 0
    by_position: Mapping[int, float] = field(default_factory=dict)

    def since(self, before: DraftCounts) -> DraftCounts:
        """Returns the counts after `before`."""
        return DraftCounts(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            {place: count - before.by_position.get(place, 0) for place, count in self.by_position.items()},
        )

    def as_results(self) -> dict[str, Any]:
        """Returns vLLM's keys: rates in percent by token and as shares by position; no keys if nothing was drafted."""
        if not self.drafts or not self.draft_tokens:
            return {}
        return {
            "spec_decode_acceptance_rate": 100 * self.accepted_tokens / self.draft_tokens,
            "spec_decode_acceptance_length": 1 + self.accepted_tokens / self.drafts,
            "spec_decode_num_drafts": int(self.drafts),
            "spec_decode_draft_tokens": int(self.draft_tokens),
            "spec_decode_accepted_tokens": int(self.accepted_tokens),
            "spec_decode_per_position_acceptance_rates": [
                self.by_position[place] / self.drafts for place in sorted(self.by_position)
            ],
        }


async def server_counts(client: httpx.AsyncClient) -> DraftCounts | None:
    """Returns the counters at /metrics; None if the server shows none."""
    try:
        response = await client.get("/metrics", timeout=30)
    except httpx.HTTPError:
        return None
    return page_counts(response.text) if response.status_code == 200 else None


def page_counts(page: str) -> DraftCounts | None:
    """Returns the counters of a Prometheus page, summed over engines; None if it has none."""
    found = [match for match in map(_LINE.match, page.splitlines()) if match and match["origin"] in _ORIGINS]
    if not found:
        return None
    origin = found[0]["origin"]
    totals: dict[str, float] = {}
    by_position: dict[int, float] = {}
    for match in found:
        if match["origin"] != origin:
            continue
        value, position = float(match["value"]), _POSITION.search(match["labels"] or "")
        if match["name"] == "accepted_tokens_per_pos":
            if position:
                by_position[int(position[1])] = by_position.get(int(position[1]), 0) + value
        else:
            totals[match["name"]] = totals.get(match["name"], 0) + value
    return DraftCounts(**totals, by_position=by_position)


def answered_counts(figures: Iterable[Mapping[str, Any] | None]) -> DraftCounts | None:
    """Returns the sum of the figures in answers, in vLLM's form; None if no answer has any."""
    told = [each for each in figures if each]
    if not told:
        return None

    def total(name: str) -> float:
        return sum(each.get(name) or 0 for each in told)

    return DraftCounts(total("num_spec_steps"), total("num_draft_tokens"), total("num_accepted_draft_tokens"))

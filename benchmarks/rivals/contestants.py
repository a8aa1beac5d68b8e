"""Lists the ways to decode that are compared, under names such as `llama_cpp.plain` or `llama_cpp.Q4_0.plain`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foretoken.bench.plots import in_order, look_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Contestant:
    """One rival decoding in one way.

    Attributes:
        rival: Key of its environment, and its worker's module.
        mode: Which of the rival's ways to decode.
        title: Shown in tables.
        needs_draft: Whether it takes a draft model.
        weights: One of the rival's `FORMATS`, which its weights are rounded to; None for the model's own.
    """

    rival: str
    mode: str
    title: str
    needs_draft: bool = False
    weights: str | None = None

    @property
    def name(self) -> str:
        """Unique: `RIVAL.MODE`, or `RIVAL.WEIGHTS.MODE`."""
        return ".".join(part for part in (self.rival, self.weights, self.mode) if part)

    @property
    def selectors(self) -> list[str]:
        """Names that choose it, beginning with those that choose most."""
        format_name = [] if self.weights is None else [f"{self.rival}.{self.weights}"]
        return list(dict.fromkeys([self.rival, *format_name, f"{self.rival}.{self.mode}", self.name]))


# Formats of 4 and 8 bits, as the rivals call them. llama.cpp, OpenVINO and vLLM compute products of 8-bit inputs.
FORMATS = {
    8: {"llama_cpp": ("Q8_0",), "openvino": ("int8_asym",), "vllm": ("W8A8",), "foretoken": ("int8", "w8a8")},
    4: {
        "llama_cpp": ("Q4_0", "Q4_K_M"),
        "openvino": ("int4_asym",),
        "vllm": ("W4A16",),
        "foretoken": ("int4", "w4a8"),
    },
}
HF_GENERATE = Contestant("hf", "generate", "HF generate")
FORETOKEN_PLAIN = Contestant("foretoken", "plain", "foretoken, plain")
CONTESTANTS = (
    HF_GENERATE,
    Contestant("hf", "prompt_lookup", "HF prompt lookup"),
    Contestant("hf", "assisted", "HF assisted generation", needs_draft=True),
    Contestant("llama_cpp", "plain", "llama.cpp, plain"),
    Contestant("llama_cpp", "no_flash", "llama.cpp, plain, no flash attention"),
    Contestant("llama_cpp", "prompt_lookup", "llama.cpp, prompt lookup"),
    Contestant("llama_cpp", "draft_model", "llama.cpp, draft model", needs_draft=True),
    Contestant("openvino", "plain", "OpenVINO GenAI, plain"),
    Contestant("openvino", "prompt_lookup", "OpenVINO GenAI, prompt lookup"),
    Contestant("openvino", "draft_model", "OpenVINO GenAI, draft model", needs_draft=True),
    Contestant("vllm", "plain", "vLLM, plain"),
    Contestant("vllm", "ngram", "vLLM, n-gram"),
    Contestant("vllm", "draft_model", "vLLM, draft model", needs_draft=True),
    FORETOKEN_PLAIN,
    Contestant("foretoken", "ngram", "foretoken, n-gram"),
    Contestant("foretoken", "draft_model", "foretoken, draft model", needs_draft=True),
)
_EAGLE3_RIVALS = {"openvino": "OpenVINO GenAI", "vllm": "vLLM"}  # engines that draft with a head of ours
_PLAIN_MODES = ("no_flash", "plain", "generate")  # llama.cpp drafts without flash attention


def references(contestants: Sequence[Contestant]) -> list[Contestant]:
    """Plain decoding of foretoken and of HF, where they take part; everybody's speed is given against theirs.

    Where foretoken has several formats, the first one counts.
    """
    ways = [(c.rival, c.mode) for c in contestants]
    kinds = [(c.rival, c.mode) for c in (FORETOKEN_PLAIN, HF_GENERATE)]
    return [contestants[ways.index(kind)] for kind in kinds if kind in ways]


def plain_of(contestant: Contestant, contestants: Sequence[Contestant]) -> Contestant | None:
    """Plain decoding by the same engine with the same weights; None where it does not take part."""
    if contestant.mode in _PLAIN_MODES:
        return None
    own = {c.mode: c for c in contestants if (c.rival, c.weights) == (contestant.rival, contestant.weights)}
    return next((own[mode] for mode in _PLAIN_MODES if mode in own), None)


def heads_beside(model: Path) -> list[Contestant]:
    """Drafting with each head that lies beside a model, as `MODEL-eagle3`; none where none does.

    foretoken drafts with each of them, alone and merged with n-grams into one tree. OpenVINO and vLLM take EAGLE-3.
    """
    from benchmarks.speedup.sizes import methods_of  # torch and transformers take seconds to import

    names = [name for name in methods_of(model) if name not in ("ngram", "draft_model")]
    others = _EAGLE3_RIVALS if "eagle3" in names else {}
    titles = {name: look_of(name, names).title for name in in_order(names)}
    return [
        *(Contestant(rival, "eagle3", f"{engine}, EAGLE-3") for rival, engine in others.items()),
        *(Contestant("foretoken", name, f"foretoken, {title}") for name, title in titles.items()),
        *(Contestant("foretoken", f"ngram+{name}", f"foretoken, n-gram + {title}") for name, title in titles.items()),
    ]


def choose_contestants(
    only: Sequence[str], *, has_draft: bool, model: Path | None = None, bits: int | None = None
) -> list[Contestant]:
    """Those that can take part, in table order.

    Args:
        only: Names of rivals (all their ways), of their formats or modes, or of contestants; empty for everybody.
        has_draft: Whether there is a draft model; without one, those that need it are left out.
        model: Directory of the target, whose heads take part too; None for none.
        bits: 4 or 8 for the rivals' formats of so many bits; None for the model's own weights.

    Raises:
        ValueError: For an unknown name, or for a contestant asked for by name that needs a draft model.
    """
    everybody = [*CONTESTANTS, *(() if model is None else heads_beside(model))]
    everybody = [c for rival in dict.fromkeys(c.rival for c in everybody) for c in everybody if c.rival == rival]
    if bits is not None:
        everybody = _rounded(everybody, bits)
    known = list(dict.fromkeys(name for c in everybody for name in c.selectors))
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            where = "" if bits is None else f" in {bits} bits"
            raise ValueError(f"there is no contestant '{name}'{where}.{hint} Expected names among {', '.join(known)}.")
    chosen = [c for c in everybody if not only or not set(only).isdisjoint(c.selectors)]
    for contestant in chosen:
        wanted = set(only).intersection(contestant.selectors[1:])
        if contestant.needs_draft and not has_draft and any(name.endswith(contestant.mode) for name in wanted):
            raise ValueError(f"{contestant.name} needs a draft model. Pass --draft-model DIR.")
    return [c for c in chosen if has_draft or not c.needs_draft]


def _rounded(contestants: Sequence[Contestant], bits: int) -> list[Contestant]:
    """Every contestant once for each of its rival's formats, format by format; those without one are left out."""
    return [
        replace(c, weights=weights, title=f"{c.title}, {weights}")
        for rival, formats in FORMATS[bits].items()
        for weights in formats
        for c in contestants
        if c.rival == rival
    ]

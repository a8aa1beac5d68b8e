"""Lists the ways to decode that are compared, under names such as `llama_cpp.plain`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
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
    """

    rival: str
    mode: str
    title: str
    needs_draft: bool = False

    @property
    def name(self) -> str:
        """Unique, `RIVAL.MODE`."""
        return f"{self.rival}.{self.mode}"


HF_GENERATE = Contestant("hf", "generate", "HF generate")
FORETOKEN_PLAIN = Contestant("foretoken", "plain", "foretoken, plain")
CONTESTANTS = (
    HF_GENERATE,
    Contestant("hf", "prompt_lookup", "HF prompt lookup"),
    Contestant("hf", "assisted", "HF assisted generation", needs_draft=True),
    Contestant("llama_cpp", "plain", "llama.cpp, plain"),
    Contestant("llama_cpp", "no_flash", "llama.cpp, plain, no flash attention"),
    Contestant("openvino", "plain", "OpenVINO GenAI, plain"),
    Contestant("openvino", "prompt_lookup", "OpenVINO GenAI, prompt lookup"),
    Contestant("openvino", "draft_model", "OpenVINO GenAI, draft model", needs_draft=True),
    Contestant("vllm", "plain", "vLLM, plain"),
    Contestant("vllm", "ngram", "vLLM, n-gram"),
    FORETOKEN_PLAIN,
    Contestant("foretoken", "ngram", "foretoken, n-gram"),
    Contestant("foretoken", "draft_model", "foretoken, draft model", needs_draft=True),
)
REFERENCES = (FORETOKEN_PLAIN, HF_GENERATE)  # everybody's speed is given against theirs


def heads_beside(model: Path) -> list[Contestant]:
    """Drafting by foretoken with each head that lies beside a model, as `MODEL-eagle3`; none where none does."""
    from benchmarks.speedup.sizes import methods_of  # torch and transformers take seconds to import

    names = [name for name in methods_of(model) if name not in ("ngram", "draft_model")]
    return [Contestant("foretoken", name, f"foretoken, {look_of(name, names).title}") for name in in_order(names)]


def choose_contestants(only: Sequence[str], *, has_draft: bool, model: Path | None = None) -> list[Contestant]:
    """Those that can take part, in table order.

    Args:
        only: Names of rivals (all their ways) or of contestants; empty for everybody.
        has_draft: Whether there is a draft model; without one, those that need it are left out.
        model: Directory of the target, whose heads take part too; None for none.

    Raises:
        ValueError: For an unknown name, or for a contestant asked for by name that needs a draft model.
    """
    everybody = [*CONTESTANTS, *(() if model is None else heads_beside(model))]
    known = [*dict.fromkeys(c.rival for c in everybody), *(c.name for c in everybody)]
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"there is no contestant '{name}'.{hint} Expected names among {', '.join(known)}.")
    chosen = [c for c in everybody if not only or c.rival in only or c.name in only]
    for contestant in chosen:
        if contestant.needs_draft and not has_draft and contestant.name in only:
            raise ValueError(f"{contestant.name} needs a draft model. Pass --draft-model DIR.")
    return [c for c in chosen if has_draft or not c.needs_draft]

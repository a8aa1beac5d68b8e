"""Fetches a head by hub id: the files of the repository that belong to it, into huggingface_hub's own cache."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download

from foretoken.core.errors import ModelError, foreign_errors_as, one_line

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_PLAIN = ["*.json", "*.safetensors"]
# Fetched only where a repository has no safetensors; they are opened by torch's restricted reader, which runs no code.
_PICKLES = ["medusa_lm_head.pt", "hydra_lm_head.pt", "medusa_heads*.pt", "pytorch_model*.bin"]
_ELSEWHERE = ["*/*"]  # parts of training runs


def is_hub_id(name: str) -> bool:
    """Whether a name is meant for the hub: `owner/name`, where no such directory is here."""
    path = Path(name)
    # A path that is misspelt is one whose directory exists.
    return bool(_HUB_ID.fullmatch(name)) and not path.exists() and not path.parent.is_dir()


def local_head(name: str, revision: str | None = None, *, what: str = "head") -> Path:
    """Where a head lies on this machine, downloaded when it does not yet.

    Args:
        name: A directory, a file of weights, or a hub id `owner/name`. What exists here is never looked for there.
        revision: Branch, tag or commit of the hub repository; None for its main branch.
        what: What it is taken for, for messages.

    Raises:
        ModelError: When there is no such thing, or it cannot be downloaded; with `HF_HUB_OFFLINE=1` when it is not in
            the cache.
    """
    path = Path(name)
    if not is_hub_id(name):
        if revision is not None:
            raise ModelError(f"revision '{revision}' is of a hub repository, and '{name}' is none. Leave it out.")
        if not name or not path.exists():
            raise ModelError(
                f"there is no {what} '{name}'. Expected a directory with weights, a file of weights, or a hub id "
                "'owner/name'. Check the path."
            )
        return path
    snapshot = _download(name, revision, _PLAIN, what)
    if not any(snapshot.glob("*.safetensors")):
        snapshot = _download(name, revision, _PICKLES, what)
    return snapshot


def _download(name: str, revision: str | None, patterns: list[str], what: str) -> Path:
    """A snapshot with the files of some patterns."""
    at = "" if revision is None else f" at revision '{revision}'"
    with foreign_errors_as(  # no such repository, no right to read it, no network, no room: each has its own type
        ModelError,
        lambda err: (
            f"{what} '{name}'{at} cannot be fetched from the hub: {one_line(err)}. Expected a repository that may be "
            "read, or one in the cache. Check its name and the network, or pass a directory."
        ),
    ):
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_ELSEWHERE))

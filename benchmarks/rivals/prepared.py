"""Makes the checkpoints that rivals read and foretoken writes: rounded ones for vLLM, EAGLE-3 heads in others' layouts.

Other engines round and convert in their own environments, see `workers`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.rivals.workers.converted import converted_path

if TYPE_CHECKING:
    from benchmarks.rivals.contestants import Contestant

_ROOT = Path(__file__).resolve().parents[2]
_HEAD_FORMATS = {"openvino": ("eagle3", "--safetensors"), "vllm": ("speculators",)}
_WRITERS = ("foretoken/formats", "foretoken/models/quantization")  # a change there makes new checkpoints


class PreparationError(Exception):
    """A checkpoint that could not be made, in one sentence."""


def checkpoints(contestant: Contestant, model: str, draft_model: str | None, cache_dir: str) -> tuple[str, str | None]:
    """Directories of the target, and of the draft model or head, that a contestant loads; made where they are missing.

    Args:
        contestant: Who.
        model: Directory of the target.
        draft_model: Directory of the draft model, or None.
        cache_dir: Where checkpoints are kept.

    Raises:
        PreparationError: When foretoken cannot write one.
    """
    target, draft = model, draft_model
    if contestant.mode == "eagle3" and contestant.rival in _HEAD_FORMATS:
        form = _HEAD_FORMATS[contestant.rival]
        draft = _made(["convert"], f"{model}-eagle3", ["--to", *form, "--target", model], form[0], cache_dir)
    if contestant.rival == "vllm" and contestant.weights is not None:
        scheme = ["--scheme", contestant.weights, "--no-compare"]
        target = _made(["quantize"], model, scheme, contestant.weights, cache_dir)
        if contestant.needs_draft and draft is not None:
            draft = _made(["quantize"], draft, scheme, contestant.weights, cache_dir)
    return target, draft


def _made(command: list[str], source: str, options: list[str], form: str, cache_dir: str) -> str:
    """What `foretoken COMMAND SOURCE OUT OPTIONS` writes, made once."""
    recipe = " ".join([*command, *options, _writers_digest()])
    out = converted_path(cache_dir, source, form, "", recipe)
    if not out.exists():
        unfinished = out.with_name(f"{out.name}.tmp")
        called = [sys.executable, "-m", "foretoken", *command, source, str(unfinished), *options]
        result = subprocess.run(called, cwd=_ROOT, capture_output=True, text=True, check=False)
        if result.returncode:
            said = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
            why = said[0] if said else f"status {result.returncode}"
            raise PreparationError(f"`foretoken {' '.join(command)} {Path(source).name}` failed: {why}")
        unfinished.rename(out)
    return str(out)


def _writers_digest() -> str:
    """Changes with the code that writes checkpoints."""
    digest = hashlib.sha256()
    for folder in _WRITERS:
        for file in sorted((_ROOT / folder).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]

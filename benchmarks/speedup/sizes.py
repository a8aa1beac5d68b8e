"""Targets of several sizes that write the same text: a trained model and its cost twins, with all drafters."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.bench.cost_twin import TwinPlan, make_twin
from foretoken.core.errors import ConfigError
from foretoken.files.bounded_reads import read_json_object
from foretoken.formats.registry import holds_head
from foretoken.models.config import read_twin_record

if TYPE_CHECKING:
    import torch

_SIZE = re.compile(r"(\d+)x(\d+)(?::(\d+))?")
_MODEL_FREE = ("ngram",)


@dataclass(frozen=True, slots=True)
class Size:
    """One size of the target, and how many prompts are decoded at it."""

    num_layers: int
    hidden_size: int
    num_prompts: int

    @classmethod
    def parse(cls, text: str, num_prompts: int) -> Size:
        """Reads `LAYERSxHIDDEN`, or `LAYERSxHIDDEN:PROMPTS` for another number of prompts than `num_prompts`.

        Raises:
            ConfigError: When it is not of that form.
        """
        match = _SIZE.fullmatch(text)
        if match is None or "0" in match.groups():
            raise ConfigError(
                f"size '{text}' is not of the form LAYERSxHIDDEN or LAYERSxHIDDEN:PROMPTS, as 24x1024:16."
            )
        return cls(int(match[1]), int(match[2]), int(match[3] or num_prompts))

    def with_at_most(self, num_prompts: int) -> Size:
        """The same with no more prompts than there are."""
        return Size(self.num_layers, self.hidden_size, min(self.num_prompts, num_prompts))

    @property
    def name(self) -> str:
        """As in "24 x 1024"."""
        return f"{self.num_layers} x {self.hidden_size}"


def methods_of(target: Path) -> list[str]:
    """Everything that can draft for a target: methods without a model, its draft model, and the heads beside it.

    Heads go by the names that they lie under, which are their methods' or others': `TARGET-hass` holds EAGLE's head as
    HASS trains it.
    """
    beside = [path for path in sorted(target.parent.glob(f"{target.name}-*")) if path.is_dir()]
    draft_model = ["draft_model"] if target.with_name(f"{target.name}-draft").is_dir() else []
    heads = [path.name.removeprefix(f"{target.name}-") for path in beside if holds_head(path)]
    return [*_MODEL_FREE, *draft_model, *heads]


def prepare(
    target: Path, sizes: Sequence[Size], folder: Path, say: Callable[[str], None], dtype: torch.dtype
) -> dict[Size, Path]:
    """Makes the twins that are not there yet, or were made of other files than target and drafters are now.

    The target's own size is the target itself. `say` gets a line for each twin that is made in `folder`.
    """
    own = read_json_object(target / "config.json")
    digest = digest_of(target)
    places = {}
    for size in sizes:
        if (size.num_layers, size.hidden_size) == (own["num_hidden_layers"], own["hidden_size"]):
            places[size] = target
            continue
        place = folder / f"{target.name}-{size.num_layers}x{size.hidden_size}" / "twin"
        made_of = place.with_name("made_of.json")
        wanted = {"sha256": digest, "dtype": str(dtype)}
        if not (made_of.is_file() and read_json_object(made_of) == wanted):
            say(f"{size.name}: making the cost twin and those of the drafters in {place.parent}")
            place.parent.mkdir(parents=True, exist_ok=True)
            made_of.unlink(missing_ok=True)  # an interrupted making leaves no claim
            make_twin(
                TwinPlan(model=target, out=place, num_layers=size.num_layers, hidden_size=size.hidden_size, dtype=dtype)
            )
            made_of.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
        places[size] = place
    return places


def digest_of(target: Path) -> str:
    """SHA-256 over configurations and weights of a target and of everything beside it that is named after it."""
    digest = hashlib.sha256()
    for folder in [target, *sorted(target.parent.glob(f"{target.name}-*"))]:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.suffix in (".json", ".safetensors"):
                digest.update(f"{folder.name}/{path.name}".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def weights_bytes(place: Path) -> int:
    """Size of a model's weights."""
    return sum(file.stat().st_size for file in place.glob("*.safetensors"))


def twin_label(place: Path) -> str | None:
    """What a model is the cost twin of, as in "24 x 1024 of tinycode"; None for one that is no twin."""
    record = read_twin_record(read_json_object(place / "config.json"), str(place))
    return None if record is None else record.label

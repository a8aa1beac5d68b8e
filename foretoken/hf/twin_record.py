"""The record by which a cost twin names itself in its configuration; see `foretoken.bench.cost_twin`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from foretoken.core.errors import ModelError
from foretoken.core.validation import validated

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = "cost_twin"


class TwinRecord(BaseModel):
    """What a cost twin is of.

    Attributes:
        of: Name of the trained model whose function it has.
        layers: Layers of the twin that it belongs to; of the target where it is a draft model or a head.
        hidden_size: Likewise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    of: str = Field(min_length=1)
    layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)

    @property
    def label(self) -> str:
        """As in "24 x 1024 of tinycode"."""
        return f"{self.layers} x {self.hidden_size} of {self.of}"

    def __str__(self) -> str:
        return f"cost twin {self.label}"


def read_twin_record(values: Mapping[str, Any], name: str) -> TwinRecord | None:
    """The record of a configuration, or of a head's notes; None where there is none.

    Args:
        values: With our key or without.
        name: Of the model, for the message.

    Raises:
        ModelError: When it makes no sense.
    """
    if values.get(KEY) is None:
        return None
    return validated(
        TwinRecord, values[KEY], f"'{KEY}' in the config.json of '{name}'", error=ModelError, advice="Make it again."
    )

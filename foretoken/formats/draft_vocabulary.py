"""The file of a draft vocabulary, as `foretoken data vocab` writes it: the tokens that a head or draft model drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretoken.core.checks import validated
from foretoken.core.errors import ConfigError
from foretoken.files.atomic_files import told_as, write_file
from foretoken.files.bounded_reads import read_json_object

_ADVICE = "Make it with `foretoken data vocab`."


class DraftVocabulary(BaseModel):
    """Ascending tokens of a draft vocabulary, their share of the data's labels, and hashes of tokenizer and data."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: Literal["foretoken-draft-vocabulary"] = "foretoken-draft-vocabulary"
    version: Literal[1] = 1
    token_ids: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = Field(min_length=1)
    coverage: float = Field(ge=0, le=1)
    tokenizer_sha: str
    tokens_sha256: str

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        if any(one >= other for one, other in zip(self.token_ids, self.token_ids[1:], strict=False)):
            raise ValueError("token_ids are not ascending. Expected each id once, the lowest first")
        return self

    @classmethod
    def read(cls, path: Path) -> DraftVocabulary:
        """Reads a file of `write`; raises `ConfigError` when the file is missing or damaged, or holds other data."""
        if not path.exists():
            raise ConfigError(f"there is no file '{path}'. Expected a draft vocabulary. {_ADVICE}")
        values = read_json_object(path, error=ConfigError, advice=_ADVICE)
        if values.get("format") != (wanted := cls.model_fields["format"].default):
            raise ConfigError(f"'{path}' holds no draft vocabulary. Expected the format '{wanted}'. {_ADVICE}")
        return validated(cls, values, f"the draft vocabulary '{path}'", advice=_ADVICE)

    def write(self, path: Path) -> None:
        """Writes a file, whole or not at all; raises `ConfigError` if that fails."""
        with told_as(ConfigError, f"'{path}'", "Expected a new file in a directory that may be written to."):
            write_file(path, json.dumps(self.model_dump(mode="json")) + "\n")

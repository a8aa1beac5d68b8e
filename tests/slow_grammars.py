"""Forms that take long to compile."""

from typing import Any

# Nearly as large as a schema may be.
_NAMES = [f"p{index}" for index in range(1_450)]
LARGE = {
    "json": {
        "type": "object",
        "properties": {name: {"type": "string"} for name in _NAMES},
        "required": _NAMES,
        "additionalProperties": False,
    }
}
# Within every limit of sizes, and compiled in minutes.
HOSTILE = {
    "json": {"type": "object", "patternProperties": {f"^a{i}.*b{i}$": {"type": "string"} for i in range(500)}}
}  # fmt: skip
# Converted to Lark in minutes, by one regular expression of Python's.
BLANK = {"grammar": "\n" * 65_536}


def structured(form: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Fields of a request for a form."""
    return {"structured_outputs": form, "max_tokens": 8, "temperature": 0.0, **more}

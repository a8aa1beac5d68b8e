"""Reads the axes of a sweep and makes the points of their product that the methods' options allow."""

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from foretoken.core.checks import check_integer, check_number, check_text, shown
from foretoken.core.errors import ConfigError, ForetokenError, one_line
from foretoken.entrypoints.config import PLAIN, Setup, check_setup, parse_setup
from foretoken.files.bounded_reads import MIB, read_named

SETUP_AXIS = "setup"  # whole drafters, as -s takes them
_MOST_BYTES = 16 * MIB  # largest file with axes; a choice
_OPENING, _CLOSING = "[{", "]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The settings that comparable points share; the names of the fields are axes of a grid."""

    dtype: str = "auto"
    runner: str = "auto"
    batch_size: int = 1
    temperature: float = 0.0

    def __post_init__(self) -> None:
        """Raises `ConfigError` for an invalid value."""
        check_text("dtype", self.dtype, error=ConfigError)
        check_text("runner", self.runner, error=ConfigError)
        check_integer("batch_size", self.batch_size, 1, 1 << 16, error=ConfigError)
        check_number("temperature", self.temperature, 0.0, 100.0, error=ConfigError)


SERVING_AXES = tuple(Serving.__dataclass_fields__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of a grid: settings of decoding, and a drafter."""

    serving: Serving
    setup: Setup  # the drafter; its name is unique in the grid
    method: str  # the drafter before the axes changed it, such as "medusa" or "eagle3:dynamic"
    changes: Mapping[str, Any] = field(default_factory=dict)  # values that axes set in the drafter, by dotted key

    def as_dict(self) -> dict[str, Any]:
        """Returns the point JSON-ready; equal for equal points only."""
        return {"serving": asdict(self.serving), "speculative_config": self.setup.config}

    @property
    def key(self) -> str:
        """The point as text, equal for equal points alone."""
        return json.dumps(self.as_dict(), sort_keys=True)


@dataclass(frozen=True, slots=True)
class Refused:
    """A point that cannot be measured, and the reason in a sentence."""

    point: Point
    reason: str


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """Reads one axis from the command line, `KEY=VALUE,VALUE`; raises `ConfigError` for another form.

    Values are JSON or text; commas inside brackets, braces and quotation marks do not separate values.
    """
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise ConfigError(f"--sweep {shown(text)} is not of the form KEY=VALUE,VALUE, as num_speculative_tokens=2,4,8.")
    return key.strip(), [_value(part) for part in _split(values)]


def read_grid(path: Path) -> dict[str, list[Any]]:
    """Reads axes from a file.

    Args:
        path: `.toml`, or else JSON: an object of axes. A list holds the values of an axis, a scalar is its only value;
            an object holds axes of inner keys, as `{"pruning": {"path_probability": [0, 0.05]}}`.

    Raises:
        ConfigError: When the file cannot be read or has another form.
    """
    try:
        text = read_named(path, limit=_MOST_BYTES, error=ConfigError).decode("utf-8")
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as err:
        raise ConfigError(f"'{path}' cannot be read: {err.strerror}. Expected a grid as JSON or TOML.") from err
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"'{path}' is not valid JSON or TOML: {one_line(err)}. Expected a grid.") from err
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"'{path}' holds no axes. Expected for example {{\"num_speculative_tokens\": [2, 4]}}.")
    return dict(_axes(found, ""))


def joined_axes(*parts: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Joins axes from several sources; raises `ConfigError` for a key that occurs twice, or an axis without a value."""
    axes: dict[str, list[Any]] = {}
    for part in parts:
        for key, values in part.items():
            if key in axes:
                raise ConfigError(f"'{key}' is swept twice. Expected each axis once: give all its values together.")
            if not values:
                raise ConfigError(f"'{key}' has no values. Expected at least one.")
            axes[key] = list(values)
    return axes


def expand(axes: Mapping[str, Sequence[Any]], target: str) -> tuple[list[Point], list[Refused]]:
    """Returns the points of a grid that can be measured, in the order of its axes without duplicates, and the refused.

    Args:
        axes: Values by key: fields of `Serving`, "setup" for whole drafters, and dotted keys of `speculative_config`,
            which change the drafters. Without "setup" there must be a "method".
        target: The target's directory; drafters without a `model` lie beside it.

    Raises:
        ConfigError: When an axis fits no point, its key is also set by a drafter, or there is no drafter.
    """
    servings = [_serving(values) for values in _product({k: v for k, v in axes.items() if k in SERVING_AXES})]
    changes = {key: values for key, values in axes.items() if key not in (*SERVING_AXES, SETUP_AXIS)}
    bases = [_base(setup, target) for setup in axes.get(SETUP_AXIS, [])]
    if not bases and "method" not in changes:
        raise ConfigError("no drafter is swept. Expected --sweep method=NAME,NAME or a drafter with -s.")
    named = [key for key, values in changes.items() if len(values) > 1 and key != "method"]
    setups: dict[str, tuple[Setup, str, dict[str, Any], str | None]] = {}
    names: Counter[str] = Counter()
    for base in bases or [Setup("", {})]:
        for change in _product(changes):
            config = dict(base.config or {})
            for key, value in change.items():
                config = _with(config, key.split("."), value, key)
            method = base.name or str(change["method"])
            key = json.dumps(config, sort_keys=True)
            if key in setups:
                continue
            name = " ".join([method, *(f"{short_name(key, changes)}={spelled(change[key])}" for key in named)])
            names[name] += 1
            setup = Setup(name if names[name] == 1 else f"{name} ({names[name]})", config)
            setups[key] = setup, method, change, _refusal(setup, target)
    points, refused = [], []
    for serving in dict.fromkeys(servings):
        for setup, method, change, reason in setups.values():
            point = Point(serving=serving, setup=setup, method=method, changes=change)
            if reason is None:
                points.append(point)
            elif serving == servings[0]:  # once, not for every serving
                refused.append(Refused(point, reason))
    return points, refused


def short_name(key: str, keys: Iterable[str]) -> str:
    """Returns the last part of a dotted key, or the whole key if another key ends in the same way."""
    last = key.rpartition(".")[2]
    return last if sum(each.rpartition(".")[2] == last for each in keys) == 1 else key


def spelled(value: Any) -> str:
    """Returns a value as text: text as it is, else JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _serving(values: Mapping[str, Any]) -> Serving:
    """Makes a serving from values of axes; 0 and 0.0 are the same temperature."""
    serving = Serving(**values)
    return replace(serving, temperature=float(serving.temperature))


def _base(setup: Any, target: str) -> Setup:
    parsed = parse_setup(setup if isinstance(setup, str) else json.dumps(setup), target=target)
    if parsed.config is None:
        raise ConfigError(f"'{PLAIN}' drafts nothing to sweep. Leave it out: it is measured beside every point.")
    return parsed


def _refusal(setup: Setup, target: str) -> str | None:
    try:
        check_setup(setup, target=target)
    except ForetokenError as err:
        return str(err)
    return None


def _with(config: Mapping[str, Any], path: Sequence[str], value: Any, key: str) -> dict[str, Any]:
    name, *rest = path
    if not rest:
        if name in config:
            raise ConfigError(f"'{key}' is set by a drafter and swept too. Leave it out of one of them.")
        return {**config, name: value}
    inner = config.get(name, {})
    if not isinstance(inner, Mapping):
        raise ConfigError(f"'{key}' is swept, but '{name}' is {shown(inner)}. Expected keys and values there.")
    return {**config, name: _with(inner, rest, value, key)}


def _product(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yields every choice of one value an axis; the last axis changes fastest."""
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _axes(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, list[Any]]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _axes(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner if isinstance(inner, list) else [inner]


def _split(text: str) -> list[str]:
    """Splits at commas outside of brackets and quotation marks."""
    parts, depth, is_quoted = [""], 0, False
    for before, character in zip(f" {text}", text, strict=False):
        if character == '"' and before != "\\":
            is_quoted = not is_quoted
        depth += 0 if is_quoted else (character in _OPENING) - (character in _CLOSING)
        if character == "," and not depth and not is_quoted:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()

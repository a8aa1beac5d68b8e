"""`speculative_config`: vLLM's keys and ours, split between engine and drafter, with nothing ignored in silence."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.acceptance.select import AcceptancePolicy
from foretoken.core.checks import as_python, shown
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.drafters.registry import drafter_options, known_methods
from foretoken.engine.model_arguments import checked_path
from foretoken.formats.registry import holds_head, method_of

if TYPE_CHECKING:
    from foretoken.drafters.options import DrafterOptions

_REJECTION_METHODS = {"standard": "sequential", "block": "block"}  # vLLM's names
_POLICY_KEYS = tuple(each.name for each in fields(AcceptancePolicy) if each.name != "rule")
# Keys of vLLM that ask for nothing here as long as they hold one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "draft_tensor_parallel_size": (None, 1),
    "max_model_len": (None,),
    "code_revision": (None,),
    "parallel_drafting": (None, False),
    "num_speculative_tokens_per_batch_size": (None,),
    "enable_adaptive_verification": (None, False, True),
    "enforce_eager": (None, False, True),
}
# Keys of some methods that vLLM also gives to the others, with a value that asks for nothing.
_UNSET: dict[str, tuple[Any, ...]] = {
    "revision": (None,), "quantization": (None,), "use_heterogeneous_vocab": (None, False),
}  # fmt: skip
_MOST_DRAFTERS = 16
_NAME_OF_HEAD = re.compile(r"[\w+-]+")
ENGINE_KEYS = frozenset({"acceptance", "drafters", "rejection_sample_method", *_POLICY_KEYS, *_NEUTRAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """A checked `speculative_config`.

    Attributes:
        options: The part of each drafter, one at least.
        policy: The acceptance rule.
    """

    options: Sequence[DrafterOptions]
    policy: AcceptancePolicy


def parse_speculative_config(config: Mapping[str, Any] | str, *, target: str) -> SpeculativeConfig:
    """Checks a configuration and fills in the bundled drafter where no model is named.

    Args:
        config: vLLM's keys and ours, or the same as JSON text. Without a `method` it is told from the files of `model`,
            or from keys that only prompt lookup has.
        target: The target's directory; a drafter without a model is looked for beside it, as `TARGET-METHOD`
            (`TARGET-draft` for a draft model). A method that does not exist may be the name of a head there: "hass"
            means the head in `TARGET-hass`, whose files tell its method.

    Raises:
        ConfigError: For unknown keys (the nearest one is named), values out of range or keys asking for what is not
            supported.
    """
    config = _mapping(config)
    for key, values in _NEUTRAL.items():
        if key in config and not _is_one_of(config[key], values):
            raise ConfigError(f"'{key}' = {shown(config[key])} is not supported. Leave it out.")
    each = [config] if config.get("drafters") is None else _drafters(config)
    return SpeculativeConfig(options=[_options(one, target) for one in each], policy=_policy(config))


def _drafters(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The configurations of several drafters; the name of a method alone stands for one that says nothing else.

    Raises:
        ConfigError: When they are none, too many, or mixed with the keys of a single one.
    """
    drafters = config["drafters"]
    is_list = isinstance(drafters, list | tuple) and all(isinstance(one, Mapping | str) for one in drafters)
    if not is_list or not 0 < len(drafters) <= _MOST_DRAFTERS:
        raise ConfigError(
            f"'drafters' is {shown(drafters)}. Expected a list of 1 to {_MOST_DRAFTERS} methods or configurations, as "
            '["ngram", {"method": "draft_model"}].'
        )
    drafters = [{"method": one} if isinstance(one, str) else one for one in drafters]
    others = sorted(set(config) - ENGINE_KEYS)
    if others:
        raise ConfigError(f"'{others[0]}' stands beside 'drafters'. Put it into the configuration of one of them.")
    for one in drafters:
        wrong = sorted(set(map(str, one)) & ENGINE_KEYS)
        if wrong:
            raise ConfigError(f"'{wrong[0]}' is not a single drafter's. Put it beside 'drafters'.")
    return [_mapping(one) for one in drafters]


def _options(config: Mapping[str, Any], target: str) -> DrafterOptions:
    """One drafter's options, the bundled model filled in."""
    config = {**config, "method": _method(config)}
    beside = _head_beside(target, config["method"]) if config.get("model") is None else None
    if beside is not None:
        config = {**config, "method": method_of(beside), "model": str(beside)}
    own = {
        key: value
        for key, value in config.items()
        if key not in ENGINE_KEYS and not _is_one_of(value, _UNSET.get(key, ()))
    }
    if own.get("model") is None and isinstance(own["method"], str) and own["method"] in known_methods():
        bundled = Path(f"{target}-{'draft' if own['method'] == 'draft_model' else own['method']}")
        if _is_directory(bundled):
            own["model"] = str(bundled)
    if isinstance(own.get("model"), str):
        checked_path("'model' of speculative_config", own["model"])
    return drafter_options(own, other_keys=ENGINE_KEYS)


def _head_beside(target: str, name: Any) -> Path | None:
    """The head that lies beside a target under a name that is no method's, as `TARGET-hass`; None where there is none.

    Args:
        target: The target's directory.
        name: What stands for a method.
    """
    if not isinstance(name, str) or not _NAME_OF_HEAD.fullmatch(name) or name in known_methods():
        return None
    place = Path(f"{target}-{name}")
    return place if _is_directory(place) and holds_head(place) else None


def _is_directory(name: str | os.PathLike[str]) -> bool:
    """Whether there is such a directory; False also for what no path can be, such as a name that is too long."""
    return os.path.isdir(name)  # noqa: PTH112 - pathlib raises for such names


def _mapping(config: Any) -> Mapping[str, Any]:
    """A configuration that may be JSON text."""
    example = 'Expected for example {"method": "ngram"}.'
    if isinstance(config, str):
        method, _, tree = config.partition(":")
        if method in known_methods():  # as the command line takes it
            full = json.dumps({"method": method, **({"tree": tree} if tree else {})})
            raise ConfigError(f"speculative_config is {shown(config)}. Expected a dictionary: {full}.")
        try:
            config = json.loads(config)
        except (ValueError, RecursionError) as err:
            raise ConfigError(f"speculative_config is not valid JSON: {err}. {example}") from err
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise ConfigError(f"speculative_config is {shown(config)}. {example}")
    return config


def _method(config: Mapping[str, Any]) -> Any:
    """The method asked for, or told from what else is there."""
    if config.get("method") is not None:
        return config["method"]
    if config.get("model") is not None:
        model = config["model"]
        if not isinstance(model, str | os.PathLike):
            raise ConfigError(f"'model' is {shown(model)}. Expected a directory or a hub id.")
        is_head = _is_directory(model) and holds_head(Path(model))
        return method_of(Path(model)) if is_head else "draft_model"
    if any(key.startswith("prompt_lookup_") for key in config):
        return "ngram"
    raise ConfigError("speculative_config has no 'method'. Expected for example {'method': 'ngram'}.")


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a value of any type is among some simple ones; 1 and True are apart."""
    return any(type(value) is type(each) and value == each for each in values)


def _policy(config: Mapping[str, Any]) -> AcceptancePolicy:
    """The acceptance rule that the configuration asks for."""
    rule = config.get("acceptance", "auto")
    method = config.get("rejection_sample_method")
    if method is not None:
        if not isinstance(method, str) or method not in _REJECTION_METHODS:
            hint = nearest_name_hint(shown(method), _REJECTION_METHODS)
            raise ConfigError(f"rejection_sample_method {shown(method)} is not supported. {hint}")
        rule = config.get("acceptance", _REJECTION_METHODS[method])
    return AcceptancePolicy(rule=rule, **{key: as_python(config[key]) for key in _POLICY_KEYS if key in config})

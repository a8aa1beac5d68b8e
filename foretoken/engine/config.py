"""Checks `speculative_config`: vLLM's keys and ours, split into options of the engine and of each drafter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.acceptance.select import AcceptancePolicy
from foretoken.core.checks import as_python, check_text, shown
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.drafters.registry import drafter_options, is_method, known_methods, offered_methods, unknown_method
from foretoken.engine.drafter_files import beside, check_model_of, exists, head_beside, names_beside, what_lies_at
from foretoken.engine.model_arguments import checked_path
from foretoken.engine.setups import Setup, parse_setup
from foretoken.formats.registry import holds_head, method_of

if TYPE_CHECKING:
    from foretoken.drafters.options import DrafterOptions

_REJECTION_METHODS = {"standard": "sequential", "block": "block"}  # vLLM's names
_POLICY_KEYS = tuple(each.name for each in fields(AcceptancePolicy) if each.name != "rule")
# Keys of vLLM that have no effect here; other values than these are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "draft_tensor_parallel_size": (None, 1),
    "max_model_len": (None,),
    "code_revision": (None,),
    "parallel_drafting": (None, False),
    "num_speculative_tokens_per_batch_size": (None,),
    "enable_adaptive_verification": (None, False, True),
    "enforce_eager": (None, False, True),
    "disable_padded_drafter_batch": (None, False, True),
}
# Keys that only some methods have. vLLM passes them to every method; these values mean "not set".
_UNSET: dict[str, tuple[Any, ...]] = {
    "revision": (None,), "quantization": (None,), "use_heterogeneous_vocab": (None, False),
}  # fmt: skip
_MOST_DRAFTERS = 16
_PREDICTION = "prediction"  # the method that drafts from what requests bring
_EXAMPLE = 'Expected for example "ngram", "ngram+hass", a directory, or {"method": "ngram"}.'
ENGINE_KEYS = frozenset({"acceptance", "drafters", "rejection_sample_method", *_POLICY_KEYS, *_NEUTRAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """A checked `speculative_config`.

    Attributes:
        options: The part of each drafter; none for plain decoding.
        policy: The acceptance rule.
        for_predictions: Of the drafter that is asked besides while requests bring predictions; None where one of
            `options` reads them.
    """

    options: Sequence[DrafterOptions]
    policy: AcceptancePolicy

    @property
    def for_predictions(self) -> DrafterOptions | None:
        """See above."""
        return (
            None if any(each.reads_predictions for each in self.options) else drafter_options({"method": _PREDICTION})
        )


def parse_speculative_config(
    given: Mapping[str, Any] | str | os.PathLike[str] | None, *, target: str | None
) -> SpeculativeConfig:
    """Checks a configuration; looks for the drafter beside the target if no model is named. Uses no network.

    Args:
        given: vLLM's keys and ours, text as `foretoken.engine.setups` reads it, a directory or file of weights, or None
            for plain decoding. Without a `method` it is told from the files of `model`, or from keys that only prompt
            lookup has.
        target: The target's directory; a drafter without a model is looked for beside it, as `TARGET-METHOD`
            (`TARGET-draft` for a draft model). A method that does not exist may be the name of a head there: "hass"
            means the head in `TARGET-hass`, whose files tell its method. None where the target is in memory alone.

    Raises:
        ConfigError: For unknown keys and methods (the nearest one is named), values out of range, keys asking for what
            is not supported, or weights that are missing beside the target or are not the method's.
    """
    if isinstance(given, str | os.PathLike):
        check_text("speculative_config", os.fspath(given), error=ConfigError)
        given = parse_setup(given, target=target, reads_files=False).config
    if given is None:
        return SpeculativeConfig(options=[], policy=AcceptancePolicy())
    config = _mapping(given)
    for key, values in _NEUTRAL.items():
        if key in config and not _is_one_of(config[key], values):
            raise ConfigError(f"'{key}' = {shown(config[key])} is not supported. Leave it out.")
    each = [config] if config.get("drafters") is None else _drafters(config)
    return SpeculativeConfig(options=[_options(one, target) for one in each], policy=_policy(config))


def checked_setup(text: str, *, target: str) -> Setup:
    """Parses and checks a setup of the command line; raises what `parse_setup` and `check_setup` raise."""
    setup = parse_setup(text, target=target)
    check_setup(setup, target=target)
    return setup


def check_setup(setup: Setup, *, target: str) -> None:
    """Checks the configuration of a setup; raises what `parse_speculative_config` raises."""
    config = setup.config
    if setup.needs_references and config is not None:  # plain decoding makes them later
        config = {**config, "references": []}
    parse_speculative_config(config, target=target)


def _drafters(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the configurations of several drafters; a method's name alone is a configuration too.

    Raises:
        ConfigError: When the list is empty, too long, or mixed with the keys of a single drafter.
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
        hint = nearest_name_hint(others[0], ENGINE_KEYS)
        if not hint.startswith("Did"):  # no near engine key: it is a drafter's key
            hint = "Put it into the configuration of one of them."
        raise ConfigError(f"{shown(others[0])} stands beside 'drafters'. {hint}")
    for one in drafters:
        wrong = sorted(set(map(str, one)) & ENGINE_KEYS)
        if wrong:
            raise ConfigError(f"'{wrong[0]}' is not a single drafter's. Put it beside 'drafters'.")
    return [_mapping(one) for one in drafters]


def _options(config: Mapping[str, Any], target: str | None) -> DrafterOptions:
    """Returns the options of one drafter, with the weights beside the target if no model is named."""
    own = {
        key: value
        for key, value in {**config, "method": _method(config)}.items()
        if key not in ENGINE_KEYS and not _is_one_of(value, _UNSET.get(key, ()))
    }
    method, model = own["method"], own.get("model")
    if isinstance(model, os.PathLike):
        model = own["model"] = os.fspath(model)
    if isinstance(model, str):
        checked_path("'model' of speculative_config", model)
    elif model is None and isinstance(method, str):
        place = beside(target, method) if method in known_methods() else head_beside(target, method)
        if place is not None:
            own["model"] = str(place)
            own["method"] = method if method in known_methods() else method_of(place)
        elif not is_method(method):
            raise _no_method(method, target)
    options = drafter_options(own, other_keys=ENGINE_KEYS)
    check_model_of(options.method, options.model, target)
    return options


def _no_method(name: str, target: str | None) -> ConfigError:
    """Returns the error for a name that is neither a method nor a head beside the target."""
    found = what_lies_at(name) if exists(name) else None
    if found is not None:
        return ConfigError(f"{shown(name)} is {found.name}, not a method. Write {{'model': {shown(name)}}}.")
    heads = [each for each in names_beside(target) if head_beside(target, each) is not None]
    return ConfigError(unknown_method(name, also=heads))


def _mapping(config: Any) -> Mapping[str, Any]:
    """Returns the configuration; raises `ConfigError` unless it is a mapping with text keys."""
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise ConfigError(f"speculative_config is {shown(config)}. {_EXAMPLE}")
    return config


def _method(config: Mapping[str, Any]) -> Any:
    """Returns the method: the key `method`, else the one that the files or the other keys imply."""
    if config.get("method") is not None:
        return config["method"]
    model = config.get("model")
    if model is not None:
        if not isinstance(model, str | os.PathLike):
            raise ConfigError(f"'model' is {shown(model)}. Expected a directory or a hub id.")
        if exists(model):
            return method_of(Path(model)) if holds_head(Path(model)) else "draft_model"
        if isinstance(model, str) and "/" not in model:  # a hub id has a slash, so this is a misspelt method
            raise ConfigError(
                f"there is no directory {shown(model)}, and without a 'method' it is no hub id, which is owner/name. "
                f"{nearest_name_hint(model, offered_methods())}"
            )
        return "draft_model"
    if any(key.startswith("prompt_lookup_") for key in config):
        return "ngram"
    raise ConfigError("speculative_config has no 'method'. Expected for example {'method': 'ngram'}.")


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a value is among `values`; 1 and True differ."""
    return any(type(value) is type(each) and value == each for each in values)


def _policy(config: Mapping[str, Any]) -> AcceptancePolicy:
    """Returns the acceptance rule of the configuration."""
    rule = config.get("acceptance", "auto")
    method = config.get("rejection_sample_method")
    if method is not None:
        if not isinstance(method, str) or method not in _REJECTION_METHODS:
            hint = nearest_name_hint(shown(method), _REJECTION_METHODS)
            raise ConfigError(f"rejection_sample_method {shown(method)} is not supported. {hint}")
        rule = config.get("acceptance", _REJECTION_METHODS[method])
    return AcceptancePolicy(rule=rule, **{key: as_python(config[key]) for key in _POLICY_KEYS if key in config})

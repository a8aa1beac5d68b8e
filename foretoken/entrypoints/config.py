"""Checks `speculative_config`: vLLM's keys and ours, split into options of the engine and of each drafter."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.acceptance.select import AcceptancePolicy, joint_rates
from foretoken.core.checks import as_python, check_text, shown
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.drafters.registry import drafter_options, is_method, known_methods, offered_methods, unknown_method
from foretoken.drafters.vocabularies import DraftModelFiles
from foretoken.drafting.policies import THRESHOLD, BatchTable, check_batch_table, check_control, check_threshold
from foretoken.entrypoints.drafter_files import (
    DRAFT_MODEL,
    beside,
    check_model_of,
    exists,
    head_beside,
    names_beside,
    spelled,
    what_lies_at,
)
from foretoken.entrypoints.model_arguments import checked_path
from foretoken.entrypoints.vllm_arguments import OTHER_KEYS, is_one_of
from foretoken.files.bounded_reads import MIB, read_named
from foretoken.formats.registry import holds_head, holds_own_head, method_of
from foretoken.models.names import TAG, is_gguf, local_model
from foretoken.trees.stopping import STOP_CONTROLS, TRAINED, StopRule, read_rule, rule_file

if TYPE_CHECKING:
    from foretoken.core.results import RequestOutput
    from foretoken.drafters.base import DrafterOptions

PLAIN = "plain"
_BEFORE_KEY = re.compile(r":(?=[A-Za-z_]\w*=)")
_LONGEST_PATH = 4096  # characters; PATH_MAX of Linux
_MOST_BYTES = 16 * MIB  # largest JSON file; references of the method `oracle` are whole texts


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to decode: a name for tables, and a `speculative_config`, or None for plain decoding."""

    name: str
    config: Mapping[str, Any] | None

    @property
    def needs_references(self) -> bool:
        """Whether the drafter is an `oracle` that still needs the output of plain decoding."""
        return self.config is not None and self.config.get("method") == "oracle" and "references" not in self.config

    def with_references(self, outputs: Iterable[RequestOutput]) -> Mapping[str, Any] | None:
        """Returns the configuration; an `oracle` without references gets the outputs of plain decoding."""
        if not self.needs_references or self.config is None:
            return self.config
        texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
        return {**self.config, "references": texts}

    @property
    def is_synthetic(self) -> bool:
        """Whether drafts are accepted at given rates, so that texts are not the target's."""
        return self.config is not None and "synthetic" in (
            self.config.get("acceptance"), self.config.get("rejection_sample_method"),
        )  # fmt: skip

    def with_synthetic_acceptance(self, given: str | None) -> Setup:
        """Returns the setup with drafts accepted at given rates; plain decoding and None change nothing.

        Args:
            given: `0.8,0.7,0.6`, each P(the drafted token is accepted | all before it are accepted); or one number
                above 1, the mean acceptance length.

        Raises:
            ConfigError: When the text is neither, or the setup has another acceptance rule.
        """
        if given is None or self.config is None:
            return self
        try:
            values = [float(part) for part in given.split(",")]
        except ValueError:
            values = []
        is_length = len(values) == 1 and values[0] > 1
        if not values or not (is_length or all(0 <= value <= 1 for value in values)):
            raise ConfigError(
                f"synthetic acceptance is {shown(given)}. Expected conditional acceptance rates from 0 to 1, as "
                "0.8,0.7,0.6, or one mean acceptance length above 1, as 2.9."
            )
        for key in ("acceptance", "rejection_sample_method"):
            if self.config.get(key, "synthetic") != "synthetic":
                raise ConfigError(f"synthetic acceptance is lossy, and '{self.name}' sets {key}. Pass one of them.")
        key, value = ("length", values[0]) if is_length else ("rates", joint_rates(values))
        config = {**self.config, "rejection_sample_method": "synthetic", f"synthetic_acceptance_{key}": value}
        return Setup(f"{self.name} synthetic {given}", config)


def parse_setup(given: str | os.PathLike[str], *, target: str | None = None, reads_files: bool = True) -> Setup:
    """Parses one way to decode; `foretoken.entrypoints.config` checks whether the drafter exists.

    Args:
        given: `DRAFTER[:TREE][:KEY=VALUE]...`, or several of these joined by `+` for one merged tree, or a JSON object,
            or `@FILE` with a JSON object; `plain` for plain decoding. DRAFTER is a method, a name such as `hass` for
            the head in `TARGET-hass`, a directory or file of weights, or a hub id (with a slash). VALUE is JSON, text,
            or `@FILE` with JSON.
        target: The target's directory or hub id; None if it is unknown yet.
        reads_files: Whether `@FILE` is allowed; only the command line allows it.

    Raises:
        ConfigError: When the text does not follow this syntax, or a file cannot be read.
    """
    if isinstance(given, os.PathLike):
        return Setup(Path(given).name, {"model": os.fspath(given)})
    text = given.strip()
    if text == PLAIN:
        return Setup(PLAIN, None)
    if text.startswith(("@", "{", "[", '"')):
        return _from_json(_read(text, reads_files) if text.startswith("@") else text)
    parts = [_from_words(part.strip(), target, reads_files) for part in _between_drafters(text, target)]
    if len(parts) == 1:
        return parts[0]
    return Setup("+".join(part.name for part in parts), {"drafters": [part.config for part in parts]})


def _between_drafters(text: str, target: str | None) -> list[str]:
    names = {*known_methods(), *names_beside(target)}
    parts: list[str] = []
    for piece in text.split("+"):
        word = piece.partition(":")[0].strip()
        before = re.split("[:=]", parts[-1])[-1] if parts else ""
        is_start = word in names or exists(word)
        if parts and (exists(f"{before}+{word}") or (_BEFORE_KEY.search(parts[-1]) and not is_start)):
            parts[-1] += f"+{piece}"
        else:
            parts.append(piece)
    return parts


def _from_words(text: str, target: str | None, reads_files: bool) -> Setup:
    drafter = _drafter_of(text)
    tree, *pairs = _BEFORE_KEY.split(text[len(drafter) :])
    tree = tree.removeprefix(":")
    is_name = drafter in known_methods() or head_beside(target, drafter) is not None
    is_path = not is_name and ("/" in drafter or exists(drafter) or is_gguf(drafter))
    tag, _, rest = tree.partition(":")
    if is_path and TAG.fullmatch(tag):  # one of several GGUF files
        drafter, tree = f"{drafter}:{tag}", rest
    config: dict[str, Any] = {"model" if is_path else "method": drafter, **({"tree": tree} if tree else {})}
    if not is_name and not is_path and local_model(drafter) is not None:
        config |= {"method": DRAFT_MODEL, "model": drafter}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key in config:
            raise ConfigError(f"{shown(text)} gives {shown(key)} twice. Expected it once.")
        config[key] = _value(value, reads_files)
    found = what_lies_at(tree) if tree else None
    if found is not None:
        raise ConfigError(
            f"'{tree}' is {found.name}, and {shown(text)} takes it for a tree. Write {spelled(found, tree)}."
        )
    name = ":".join([Path(drafter).name, *([tree] if tree else [])])
    return Setup(" ".join([name, *(pair for pair in pairs if not pair.startswith("model="))]), config)


def _drafter_of(text: str) -> str:
    """Returns DRAFTER: the longest existing path at the start, which may hold colons, else the text up to a colon."""
    ends = [*(colon.start() for colon in re.finditer(":", text[:_LONGEST_PATH])), len(text)]
    return text[: next((end for end in reversed(ends) if exists(text[:end])), ends[0])]


def _value(text: str, reads_files: bool) -> Any:
    is_file = text.startswith("@")
    try:
        return json.loads(_read(text, reads_files) if is_file else text)
    except (ValueError, RecursionError) as err:
        if not is_file:
            return text
        raise ConfigError(
            f"'{text[1:]}' is not valid JSON: {err}. Expected a value such as [[0], [1], [0, 0]]."
        ) from err


def _from_json(text: str) -> Setup:
    example = """Expected for example ngram or {"method": "ngram"}."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"speculative_config is not valid JSON: {err}. {example}") from err
    if not isinstance(config, dict):
        raise ConfigError(f"speculative_config is {shown(config)}. {example}")
    if config.get("drafters") is not None:
        return Setup(_names(config["drafters"]), config)
    details = [f"{key}={json.dumps(value)}" for key, value in config.items() if key not in ("method", "model")]
    return Setup(" ".join([_name(config), *details]), config)


def _name(config: Mapping[str, Any]) -> str:
    if config.get("method") is None and isinstance(config.get("model"), str):
        return Path(config["model"]).name
    return str(config.get("method", "ngram"))


def _names(drafters: Any) -> str:
    each = drafters if isinstance(drafters, list) else []
    names = [one if isinstance(one, str) else _name(one) if isinstance(one, dict) else "?" for one in each]
    return "+".join(names) or "drafters"


def _read(text: str, reads_files: bool) -> str:
    path = Path(text[1:])
    if not reads_files:
        raise ConfigError(
            f"{shown(text)} names a file, which only the command line reads. Expected what the file holds."
        )
    if not path.exists():
        raise ConfigError(f"there is no file '{path}'. Expected a file with JSON after '@'.")
    try:
        return read_named(path, limit=_MOST_BYTES, error=ConfigError).decode("utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"'{path}' cannot be read: {err}. Expected JSON as UTF-8 text.") from err


_REJECTION_METHODS = {"standard": "sequential", "block": "block", "synthetic": "synthetic"}  # vLLM's names
_POLICY_KEYS = tuple(each.name for each in fields(AcceptancePolicy) if each.name != "rule")
# Keys that only some methods have. vLLM passes them to every method; these values mean "not set".
_UNSET: dict[str, tuple[Any, ...]] = {
    "revision": (None,), "quantization": (None,), "use_heterogeneous_vocab": (None, False),
}  # fmt: skip
_MOST_DRAFTERS = 16
_PREDICTION = "prediction"  # the method that drafts from predictions of requests
_EXAMPLE = 'Expected for example "ngram", "ngram+hass", a directory, or {"method": "ngram"}.'
_BATCH_TABLE = "num_speculative_tokens_per_batch_size"  # vLLM's name
ENGINE_KEYS = frozenset(
    {
        "acceptance",
        "control",
        THRESHOLD,
        "drafters",
        "rejection_sample_method",
        _BATCH_TABLE,
        *_POLICY_KEYS,
        *OTHER_KEYS,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """A checked `speculative_config`.

    Attributes:
        options: Of each drafter; none for plain decoding.
        policy: The acceptance rule.
        control: How much is drafted, see `choose_controller`.
    """

    options: Sequence[DrafterOptions]
    policy: AcceptancePolicy
    control: str | BatchTable = "goodput"

    @property
    def for_predictions(self) -> DrafterOptions | None:
        """Options of the extra drafter for requests with predictions; None if one of `options` reads predictions."""
        if any(each.reads_predictions for each in self.options):
            return None
        return drafter_options({"method": _PREDICTION})

    def located(self, target: str | None) -> SpeculativeConfig:
        """Returns the configuration with the paths of draft models, see `resolve_model`; reads no weights.

        `target` is a path, or None for a target in memory. Raises `ModelError` if there is no such draft model,
        `ConfigError` if its vocabulary has to be the target's and is not.
        """
        options = []
        for each in self.options:
            if each.method == DRAFT_MODEL and each.model is not None:
                files = DraftModelFiles(each.model, getattr(each, "revision", None))
                files.check_vocabulary(target, getattr(each, "matching", None))
                each = each.model_copy(update={"model": files.name})  # noqa: PLW2901
            options.append(each)
        return replace(self, options=options)


def parse_speculative_config(
    given: Mapping[str, Any] | str | os.PathLike[str] | None, *, target: str | None
) -> SpeculativeConfig:
    """Checks a configuration; looks for the drafter beside the target if no model is named. Uses no network.

    Args:
        given: vLLM's keys and ours, text as `parse_setup` reads it, a directory or file of weights, or None for plain
            decoding. Without `method`, the files of `model` or keys of prompt lookup alone imply the method.
        target: The target's directory; None for a target in memory. The weights of a drafter without `model` are
            looked for in `TARGET-METHOD` (`TARGET-draft` for a draft model). A name that is no method may be that of a
            head there: "hass" means the head in `TARGET-hass`.

    Raises:
        ConfigError: For unknown keys and methods (the error names the nearest), values out of range, unsupported
            features, or weights that are missing or belong to another method.
    """
    if isinstance(given, str | os.PathLike):
        check_text("speculative_config", os.fspath(given), error=ConfigError)
        given = parse_setup(given, target=target, reads_files=False).config
    if given is None:
        return SpeculativeConfig(options=[], policy=AcceptancePolicy())
    config = _mapping(given)
    for key, other in OTHER_KEYS.items():
        if key in config:
            other.check(f"'{key}' = {shown(config[key])}", config[key])
    each = [config] if config.get("drafters") is None else _drafters(config)
    control = _control(config)
    threshold = check_threshold(config.get(THRESHOLD), control)
    options = [_options(one, target, control, threshold) for one in each]
    return SpeculativeConfig(options=options, policy=_policy(config), control=control)


def _control(config: Mapping[str, Any]) -> str | BatchTable:
    name, table = config.get("control"), config.get(_BATCH_TABLE)
    if name is not None and table is not None:
        raise ConfigError(f"'control' stands beside '{_BATCH_TABLE}'. Expected one of them.")
    if table is not None:
        return check_batch_table(table)
    return "goodput" if name is None else check_control(name)


def checked_setup(text: str, *, target: str) -> Setup:
    """Parses and checks a setup of the command line; raises what `parse_setup` and `check_setup` raise."""
    setup = parse_setup(text, target=target)
    check_setup(setup, target=target)
    return setup


def checked_setups(texts: Sequence[str], *, target: str) -> list[Setup]:
    """Parses and checks setups of one table, each text once; raises what `checked_setup` raises.

    Setups that would share a name, such as two heads of one method, are named by their whole texts.
    """
    given = {text: checked_setup(text, target=target) for text in texts}
    counts = Counter(setup.name for setup in given.values())
    return [setup if counts[setup.name] == 1 else Setup(text, setup.config) for text, setup in given.items()]


def check_setup(setup: Setup, *, target: str) -> None:
    """Checks the configuration of a setup; raises what `parse_speculative_config` and its `located` raise."""
    config = setup.config
    if setup.needs_references and config is not None:  # plain decoding makes them later
        config = {**config, "references": []}
    parse_speculative_config(config, target=target).located(target)


def _drafters(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
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


def _options(
    config: Mapping[str, Any], target: str | None, control: str | BatchTable, threshold: float
) -> DrafterOptions:
    own = {
        key: value
        for key, value in {**config, "method": _method(config)}.items()
        if key not in ENGINE_KEYS and not is_one_of(value, _UNSET.get(key, ()))
    }
    method, model = own["method"], own.get("model")
    if isinstance(model, os.PathLike):
        model = own["model"] = os.fspath(model)
    if isinstance(model, str):
        checked_path("'model' of speculative_config", model)
    elif model is None and isinstance(method, str):
        path = beside(target, method) if method in known_methods() else head_beside(target, method)
        if path is None and target is not None and holds_own_head(Path(target), method):
            path = Path(target)
        if path is not None:
            own["model"] = str(path)
            own["method"] = method if method in known_methods() else method_of(path)
        elif not is_method(method):
            raise _no_method(method, target)
    if control in STOP_CONTROLS:
        own = {**_stopping(str(control), threshold, own, target), **own}
    options = drafter_options(own, other_keys=ENGINE_KEYS)
    check_model_of(options.method, options.model, target)
    return options


def _stopping(control: str, threshold: float, own: Mapping[str, Any], target: str | None) -> dict[str, Any]:
    """Returns a drafter's options under a stop rule; raises `ConfigError` without a trained rule."""
    if control not in TRAINED:
        return {"tree": "chain", "stop": StopRule.of(control, threshold)}
    method, model = own["method"], own.get("model")
    if model is None:
        raise ConfigError(f"control '{control}' is kept with a drafter's weights, and method '{method}' has none.")
    path = rule_file(Path(model), control)
    if not path.exists():
        raise ConfigError(
            f"control '{control}' needs a trained rule, and there is no '{path}'. Train it: foretoken tune stop "
            f"{target or 'TARGET'} -s {method}:model={model}"
        )
    rule = read_rule(path, control)
    return {"tree": "chain", "num_speculative_tokens": rule.max_depth, "stop": rule}


def _no_method(name: str, target: str | None) -> ConfigError:
    found = what_lies_at(name) if exists(name) else None
    if found is not None:
        return ConfigError(f"{shown(name)} is {found.name}, not a method. Write {{'model': {shown(name)}}}.")
    heads = [each for each in names_beside(target) if head_beside(target, each) is not None]
    return ConfigError(unknown_method(name, also=heads))


def _mapping(config: Any) -> Mapping[str, Any]:
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise ConfigError(f"speculative_config is {shown(config)}. {_EXAMPLE}")
    return config


def _method(config: Mapping[str, Any]) -> Any:
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


def _policy(config: Mapping[str, Any]) -> AcceptancePolicy:
    rule = config.get("acceptance", "auto")
    method = config.get("rejection_sample_method")
    if method is not None:
        if not isinstance(method, str) or method not in _REJECTION_METHODS:
            hint = nearest_name_hint(shown(method), _REJECTION_METHODS)
            raise ConfigError(f"rejection_sample_method {shown(method)} is not supported. {hint}")
        rule = config.get("acceptance", _REJECTION_METHODS[method])
        if method == "synthetic" != rule:
            raise ConfigError(
                f"rejection_sample_method 'synthetic' is lossy, and acceptance is {shown(rule)}. Pass one of them."
            )
    return AcceptancePolicy(rule=rule, **{key: as_python(config[key]) for key in _POLICY_KEYS if key in config})

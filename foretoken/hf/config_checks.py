"""Checks sizes and end tokens of a model's configuration."""

from __future__ import annotations

import logging
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError
from foretoken.hf.sizes import LARGEST_SIZE, SIZES, is_size

_log = logging.getLogger(__name__)


def check_sizes(config: Any, name: str) -> None:
    """Refuses sizes that no model has.

    Args:
        config: The text configuration of a transformers model.
        name: Of the model, for the message.

    Raises:
        ModelError: Naming the first field that is no positive integer of a sane order.
    """
    for field in SIZES:
        value = getattr(config, field, None)
        for one in value if isinstance(value, list | tuple) and value else [value]:  # some models give one a layer
            if one is not None and not is_size(one):
                raise ModelError(
                    f"{field} in the configuration of '{name}' is {shown(value)}. Expected a whole number from 1 to "
                    f"{LARGEST_SIZE}. Copy or download config.json again."
                )


def check_quantization(config: Any, name: str) -> None:
    """Refuses quantised weights that transformers has no code for; it would take them for ordinary ones.

    Args:
        config: The configuration of a transformers model.
        name: Of the model, for the message.

    Raises:
        ModelError: Naming the method.
    """
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        settings = getattr(part, "quantization_config", None)
        if settings is None:
            continue
        method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
        known = sorted(AUTO_QUANTIZATION_CONFIG_MAPPING)
        if getattr(method, "value", method) not in known and not _is_bitsandbytes(settings):
            raise ModelError(
                f"the weights of '{name}' are quantised by the method {shown(method)}, which transformers does not "
                f"know. Expected one of {', '.join(known)}, or a model that is not quantised."
            )


def end_tokens(generation_config: Any, config: Any, *, vocab_size: int, name: str) -> tuple[int, ...]:
    """The end-of-sequence tokens of a model: of its generation configuration, else of its configuration.

    Args:
        generation_config: Of the transformers model, or None.
        config: Its text configuration.
        vocab_size: Width of the logits. Tokens past it, which models have whose vocabulary was cut, are left out with
            a warning: they are never written.
        name: Of the model, for the message.

    Raises:
        ModelError: When they are anything but token ids.
    """
    given = getattr(generation_config, "eos_token_id", None)
    given = getattr(config, "eos_token_id", None) if given is None else given
    tokens = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in tokens):
        raise ModelError(
            f"eos_token_id of '{name}' is {shown(given)}. Expected a token id, or a list of these. Correct it in "
            "generation_config.json or config.json."
        )
    unknown = [token for token in tokens if token >= vocab_size]
    if unknown:
        _log.warning(
            "%s: end-of-sequence tokens %s are not in its vocabulary of %d and are left out.", name, unknown, vocab_size
        )
    return tuple(dict.fromkeys(token for token in tokens if token < vocab_size))


def _is_bitsandbytes(settings: Any) -> bool:
    """Whether it is of the time before configurations named their method."""
    return isinstance(settings, dict) and bool(settings.get("load_in_8bit") or settings.get("load_in_4bit"))

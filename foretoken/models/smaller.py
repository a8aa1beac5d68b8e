"""Makes another causal LM of a target's architecture: a smaller one as a draft model, or one without integers.

The new model has the target's vocabulary and special tokens, and float32 weights on the target's device.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import transformers

from foretoken.core.errors import ConfigError, foreign_errors_as, nearest_name_hint, one_line
from foretoken.models.generic import find_blocks
from foretoken.models.loading import wrap_model
from foretoken.models.recurrent import WITHOUT_KEYS
from foretoken.models.stored.building import unpacked

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel

_LAYERS = "num_hidden_layers"


def kept_layers(num_layers: int, count: int) -> list[int]:
    """Returns `count` layers of `num_layers`, evenly spaced, the first and the last among them; one: the first."""
    if not 1 <= count <= num_layers:
        raise ConfigError(f"num_layers is {count}. Expected 1 to {num_layers}, the layers of the target.")
    return [round(index * (num_layers - 1) / max(count - 1, 1)) for index in range(count)]


def with_attention(layers: list[int], config: Any) -> list[int]:
    """Returns layers of a model, one of attention among them if it has any: transformers runs none without."""
    kinds = enumerate(getattr(config, "layer_types", None) or ())
    attention = [layer for layer, kind in kinds if kind.endswith("attention") and kind not in WITHOUT_KEYS]
    if not attention or {*attention} & {*layers}:
        return layers
    pairs = ((abs(own - layer), place, layer) for place, own in enumerate(layers) for layer in attention)
    _, place, nearest = min(pairs)
    return [*layers[:place], nearest, *layers[place + 1 :]]


def pruned_model(target: LoadedModel, layers: Sequence[int]) -> LoadedModel:
    """Returns a model of some of the target's layers, with copies of its embeddings, final norm and LM head.

    Raises `ConfigError` if the architecture has no layers that fit into other places.
    """
    module: Any = target.module
    names = {id(part): name for name, part in module.named_modules()}
    blocks = [f"{names[id(block)]}." for block in find_blocks(module, target.num_layers)]
    new_names = {blocks[layer]: blocks[index] for index, layer in enumerate(layers)}
    weights = {}
    for key, value in module.state_dict().items():
        block = next((name for name in blocks if key.startswith(name)), None)
        if block is None:
            weights[key] = value
        elif block in new_names:
            weights[new_names[block] + key.removeprefix(block)] = value
    with _told(target):
        model = _new(target, _config(target, {}, layers))
        model.load_state_dict(weights, strict=True)
    return _ready(model, target)


def unpacked_model(model: LoadedModel) -> LoadedModel:
    """Returns a model with the weights that the integers of another one stand for; a model without integers itself.

    Training and copies need weights that are no integers. The model takes the memory of all weights in float32. Raises
    `ConfigError` if the architecture cannot be made anew.
    """
    if model.quantization is None:
        return model
    with _told(model):
        made = unpacked(model.module, torch.float32)
    return replace(_ready(made, model), name=model.name, stored=model)


def fresh_model(target: LoadedModel, sizes: Mapping[str, int], *, seed: int) -> LoadedModel:
    """Returns a model with random weights and the target's configuration, except for some sizes.

    `sizes` has names of the target's `config.json`. Raises `ConfigError` for unknown names and wrong values.
    """
    known = target.config.to_dict()
    names = {key for key, value in known.items() if type(value) is int and "token" not in key} - {"vocab_size"}
    names |= {"head_dim"} & known.keys() | target.config.attribute_map.keys() & {_LAYERS, "num_attention_heads"}
    for key, value in sizes.items():
        if key not in names:
            raise ConfigError(f"the draft model has no size '{key}'. {nearest_name_hint(key, sorted(names))}")
        if type(value) is not int or value < 1:
            raise ConfigError(f"{key} is {value!r}. Expected a number of at least 1.")
    heads, given = sizes.get("num_attention_heads"), dict(sizes)
    kv_heads = known.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        given.setdefault("num_key_value_heads", heads)
    count = sizes.get(_LAYERS, target.num_layers)
    with _told(target), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = with_attention([index % target.num_layers for index in range(count)], target.config)
        model = _new(target, _config(target, given, layers))
    return _ready(model, target)


def _config(target: LoadedModel, sizes: Mapping[str, int], layers: Sequence[int]) -> Any:
    """Returns the target's configuration with other sizes; lists with an entry a layer keep those of `layers`."""
    config = target.config
    values = config.to_dict()
    for key, value in values.items():
        if isinstance(value, list) and len(value) == target.num_layers and "token" not in key:
            values[key] = [value[layer] for layer in layers]
    changes = {**sizes, _LAYERS: len(layers)}
    values |= {config.attribute_map.get(key, key): value for key, value in changes.items()}
    return type(config).from_dict(values)


def _new(target: LoadedModel, config: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    if getattr(target.module, "generation_config", None) is not None:
        model.generation_config = copy.deepcopy(target.module.generation_config)
    return model


def _ready(model: Any, target: LoadedModel) -> LoadedModel:
    return wrap_model(model.to(target.device), name=f"a draft model of {target.name}")


def _told(target: LoadedModel) -> Any:
    return foreign_errors_as(
        ConfigError,
        lambda err: (
            f"a smaller model like '{target.name}' cannot be made: {one_line(err)}. Expected sizes that fit each "
            "other, and layers of one kind. Begin from a model with --init."
        ),
    )

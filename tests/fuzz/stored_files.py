"""Damaging checkpoints with matrices in integers: their settings, the tensors of a matrix, and the index of files."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fuzz import files
from fuzz.engines import shown

# Last parts of names of tensors that only matrices in integers have.
_PARTS = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point",
          "weight_g_idx")  # fmt: skip
# Of these settings another value is another model that cannot be told from a damaged one.
_MEANINGS = ("checkpoint_format", "input_activations", "quant_method")
_VALUES: dict[str, tuple[Any, ...]] = {
    "bits": (2, 3, 4, 8, 16, 0, -4, 10**30, "4", "four", 4.0, 4.5, True, None, [4]),
    "w_bit": (8, 0, "x", None),
    "num_bits": (2, 4, 8, 0, -8, "x", None, 10**30),
    "group_size": (-1, 0, 16, 32, 48, 64, 96, 128, 1 << 40, -2, "32", 32.5, None, [32], True),
    "quant_method": ("gptq", "awq", "compressed-tensors", "exl2", "foretoken", "GPTQ", "bitsandbytes", "fp8", "", None,
                     4, ["gptq"], {}),
    "desc_act": (True, False, None, "yes", 3),
    "sym": (True, False, None, "x"),
    "symmetric": (True, False, None, "x", []),
    "zero_point": (True, False, None, "x"),
    "version": ("gemm", "GEMM", "gemv", "exllama", None, 3),
    "checkpoint_format": ("gptq", "gptq_v2", "marlin", None, 3),
    "format": ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "marlin-24", "dense", None, 3),
    "strategy": ("tensor", "channel", "group", "block", "token", None, 3),
    "actorder": ("group", "weight", "static", "dynamic", None, True, "x", 3),
    "type": ("int", "float", "INT", None, 3),
    "dynamic": (True, False, None, "local", {}, {"-:.*down.*": {}}, {"+:.*": {"bits": 8}}, {"-:(": {}}, 3),
    "targets": (["Linear"], [], ["re:.*"], ["re:(["], ["Conv1d"], "Linear", [3], None),
    "ignore": ([], ["lm_head"], ["re:.*"], "lm_head", None, 3),
    "config_groups": ({}, None, [], {"a": None}, {"a": {"targets": ["Linear"]}}, 3),
    "modules_to_not_convert": (None, ["lm_head"], "x", 3, ["down_proj"]),
    "kv_cache_scheme": ({"num_bits": 8}, {}, None, 3),
    "sparsity_config": ({"format": "dense"}, {"format": "sparse-24-bitmask"}, {"format": []}, {}, None, 3),
    "quantization_status": ("compressed", "frozen", None, 3),
}  # fmt: skip
_OTHERS: tuple[Any, ...] = (None, True, 0, -1, 10**30, 0.5, float("nan"), "x", "\ud800", [], {}, [[]], {"a": 1})


class Damage(NamedTuple):
    """What was done.

    Attributes:
        kind: For counts.
        text: For people.
        keeps_logits: Whether a model that loads must have the logits of the undamaged one.
    """

    kind: str
    text: str
    keeps_logits: bool


def damage(rng: random.Random, directory: Path, settings_file: str) -> Damage:
    """Damages the settings, a tensor, the index, or any file of a checkpoint."""
    kind = rng.choice(["settings", "settings", "tensor", "tensor", "tensor", "names", "files"])
    if kind == "settings":
        path = directory / settings_file
        whole = json.loads(path.read_text())
        text, keys = _damage_settings(rng, whole if settings_file != "config.json" else whole["quantization_config"])
        path.write_text(json.dumps(whole), encoding="utf-8", errors="replace")
        return Damage(kind, f"{settings_file}: {text}", not set(_MEANINGS) & set(map(str, keys)))
    if kind == "tensor":
        path = rng.choice(sorted(directory.glob("*.safetensors")))
        tensors = load_file(path)
        name = rng.choice(sorted(key for key in tensors if key.endswith(_PARTS) or tensors[key].dtype == torch.int8))
        change = rng.choice(sorted(_CHANGES))
        made, keeps = _CHANGES[change](rng, tensors[name]), change not in _NEW_NUMBERS
        same = made.dtype == tensors[name].dtype and torch.equal(made, tensors[name])
        save_file(tensors | {name: made.contiguous().clone()}, path, {"format": "pt"})
        return Damage(kind, f"{path.name}: {name} {change}{', as it was' if same else ''}", keeps)
    if kind == "names":
        return Damage(kind, _damage_names(rng, directory), keeps_logits=True)
    return Damage(kind, files.damage(rng, directory), keeps_logits=False)


def _damage_settings(rng: random.Random, settings: dict[str, Any]) -> tuple[str, list[Any]]:
    """Changes, removes or adds one of them."""
    place, keys = settings, []
    while True:
        key = rng.choice([*place, *([] if keys else ["dynamic", "sparsity_config", "transform_config", "bits"])])
        keys.append(key)
        if not isinstance(place.get(key), dict) or not place[key] or rng.random() < 0.2:
            break
        place = place[key]
    if rng.random() < 0.15 and key in place:
        del place[key]
        return f"{keys} deleted", keys
    place[key] = value = rng.choice(_VALUES.get(key, _OTHERS) if rng.random() < 0.8 else _OTHERS)
    return f"{keys} = {shown(value, 60)}", keys


def _damage_names(rng: random.Random, directory: Path) -> str:
    """Removes, renames, repeats or moves a tensor, or spoils the index."""
    index = directory / "model.safetensors.index.json"
    paths = sorted(directory.glob("*.safetensors"))
    path = rng.choice(paths)
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    other = rng.choice(sorted(key for key in tensors if key.endswith(_PARTS)))
    kind = rng.choice(["gone", "gone", "renamed", "extra", "extra", "swapped", "index", "index", "moved", "cut"])
    if kind == "index" and index.is_file():
        whole = json.loads(index.read_text())
        place = whole["weight_map"]
        value = rng.choice(["nowhere.safetensors", "../x", "", None, 3, [], *(each.name for each in paths)])
        if rng.random() < 0.3:
            del place[name]
            value = "deleted"
        else:
            place[name] = value
        index.write_text(json.dumps(whole))
        return f"index: {name} {shown(value)}"
    if kind == "swapped" and len(paths) > 1:
        first, second = (each.read_bytes() for each in paths[:2])
        paths[0].write_bytes(second)
        paths[1].write_bytes(first)
        return "two files swapped"
    if kind == "cut":
        content = path.read_bytes()
        path.write_bytes(content[: rng.randrange(len(content))])
        return f"{path.name} cut"
    if kind == "gone":
        del tensors[other]
    elif kind == "renamed":
        tensors[
            rng.choice([f"{other}.x", other.replace(".layers.1.", ".layers.9."), other.rpartition(".")[0], "x"])
        ] = tensors.pop(other)
    elif kind == "moved" and len(paths) > 1:
        target = next(each for each in paths if each != path)
        save_file(load_file(target) | {name: tensors[name]}, target, {"format": "pt"})
        return f"{name} in {target.name} too"
    else:
        owner, _, _ = other.rpartition(".")
        part = rng.choice(
            ["weight", "bias", "g_idx", "weight_g_idx", "weight_zero_point", "input_scale", "qzeros", "x"]
        )
        if f"{owner}.{part}" not in tensors:
            made = [
                torch.ones(160),
                torch.arange(96).int(),
                torch.zeros(160, 96),
                torch.full((160, 3), 3, dtype=torch.int8),
            ]
            tensors[f"{owner}.{part}"] = rng.choice(made)
        save_file(tensors, path, {"format": "pt"})
        return f"{path.name}: {owner}.{part} besides"
    save_file(tensors, path, {"format": "pt"})
    return f"{path.name}: {other} {kind}"


def _filled(value: float) -> Callable[[random.Random, Tensor], Tensor]:
    """Sets one number, or all."""

    def change(rng: random.Random, tensor: Tensor) -> Tensor:
        made = tensor.clone()
        if not made.is_floating_point() and value != value // 1:
            made = made.float()
        places = made.view(-1)
        places[:] = places if rng.random() < 0.5 else value
        places[rng.randrange(len(places)) if len(places) else slice(0)] = value
        return made

    return change


_NEW_NUMBERS = ("scaled", "negated", "float8", "one more", "zero", "minus one", "permuted")
_CHANGES: dict[str, Callable[[random.Random, Tensor], Tensor]] = {
    "flat": lambda rng, each: each.flatten(),
    "transposed": lambda rng, each: each.T if each.dim() == 2 else each[None],
    "cut": lambda rng, each: each[: rng.randrange(each.shape[0])] if each.dim() else each,
    "cut in the last dimension": lambda rng, each: each[..., : rng.randrange(each.shape[-1])] if each.dim() else each,
    "twice": lambda rng, each: torch.cat([each, each]),
    "empty": lambda rng, each: each[:0],
    "scalar": lambda rng, each: each.flatten()[0],
    "in three dimensions": lambda rng, each: each[None],
    "float32": lambda rng, each: each.float(),
    "float16": lambda rng, each: each.half(),
    "int64": lambda rng, each: each.long(),
    "int32": lambda rng, each: each.int(),
    "int8": lambda rng, each: each.to(torch.int8),
    "bool": lambda rng, each: each.bool(),
    "float8": lambda rng, each: each.float().to(torch.float8_e4m3fn),
    "NaN": _filled(float("nan")),
    "infinite": _filled(float("inf")),
    "minus one": _filled(-1),
    "zero": _filled(0),
    "one more": lambda rng, each: each + 1,
    "scaled": lambda rng, each: (each.float() * 1e4).to(each.dtype),
    "negated": lambda rng, each: -each,
    "permuted": lambda rng, each: each.flatten()[torch.randperm(each.numel())].view(each.shape),
}

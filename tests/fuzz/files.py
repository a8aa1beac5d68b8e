"""Damaging the files of a directory: values of JSON files, headers and bytes of weights, and whole files."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from fuzz.engines import shown

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 10**6, 2**31, 2**63, 10**30, -(10**12), 0.5, -1.5, 1e308, float("nan"),
    float("inf"), "", "x", "7", "float33", "bfloat16", "../x", "é" * 400, "a\nb", "\ud800", [],
    [None], [0], [[1]], ["x"] * 3, [1, 2, 3], {}, {"a": []}, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "x"},
    {"quant_method": "gptq"},
)  # fmt: skip
_EXTRA_KEYS = ("quantization_config", "rope_scaling", "auto_map", "layer_types", "sliding_window", "dtype",
               "attn_implementation", "head_dim", "pruned_heads", "text_config", "vision_config", "id2label",
               "transformers_version", "_name_or_path", "use_cache", "output_hidden_states", "return_dict")  # fmt: skip
_HEADER_VALUES: tuple[Any, ...] = ("F16", "I8", "F64", "BOOL", "F8_E4M3", [0, 4], [4, 0], [2**63, 2**63], [3, -1])
_TEXTS = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"3",
    b'"x"',
    b"\xff\xfe{}",
    b"[" * 100_000,
    b'{"a":' * 5000,
    b"{}",
    b"\x00" * 100,
    b"NaN",
)


def damage(rng: random.Random, directory: Path) -> str:
    """Damages one file of a directory; says how."""
    path = rng.choice(sorted(path for path in directory.rglob("*") if path.is_file()))
    finer = {".json": _damage_json, ".safetensors": _damage_tensors}.get(path.suffix, _damage_bytes)
    try:
        return f"{path.name}: {rng.choice([finer, finer, finer, _damage_bytes])(rng, path)}"
    except (ValueError, RecursionError):  # damaged before, so that its parts cannot be told
        return f"{path.name}: {_damage_bytes(rng, path)}"


def _damage_json(rng: random.Random, path: Path) -> str:
    """Changes one value somewhere in a JSON file."""
    whole = json.loads(path.read_text())
    place, keys = whole, []
    while True:
        if isinstance(place, dict):
            key: Any = rng.choice([*place, *([] if keys else _EXTRA_KEYS), "new"])
            inner = place.get(key)
        elif isinstance(place, list) and place:
            key = rng.randrange(len(place))
            inner = place[key]
        else:
            return "nothing to change"
        keys.append(key)
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.4:
            break
        place = inner
    if rng.random() < 0.2 and inner is not None:
        del place[key]
        change = "deleted"
    else:
        place[key] = value = rng.choice(_VALUES)
        change = f"= {shown(value, 60)}"
    path.write_text(json.dumps(whole), encoding="utf-8", errors="replace")
    return f"{keys} {change}"


def _damage_tensors(rng: random.Random, path: Path) -> str:
    """Changes the header of a safetensors file, or numbers in its tensors."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    name = rng.choice(sorted(header))
    if rng.random() < 0.3 and data:
        start = rng.randrange(len(data))
        part = rng.choice([b"\xff" * 4, b"\x7f\x80\x00\x00" * 8, b"\x00" * 64, b"\xff\xff\x7f\x7f"])
        data[start : start + len(part)] = part[: len(data) - start]
        change = f"bytes at {start} = {part!r}"
    elif rng.random() < 0.4:
        del header[name]
        change = f"without {name}"
    elif rng.random() < 0.3:
        header[f"{name}.x"] = header.pop(name)
        change = f"{name} renamed"
    else:
        entry = rng.choice([header, header[name]])
        key = name if entry is header else rng.choice(sorted(entry))
        entry[key] = rng.choice([*_VALUES, *_HEADER_VALUES])
        change = f"{name} {key} = {shown(entry[key], 60)}"
    text = json.dumps(header).encode()
    length = rng.choice([len(text)] * 9 + [0, len(text) - 1, len(text) + 9, 2**63, 2**64 - 1])
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return f"{change}, header of {length}"


def _damage_bytes(rng: random.Random, path: Path) -> str:
    """Cuts, replaces, removes or repeats a file."""
    content = path.read_bytes()
    kind = rng.choice(["cut", "flip", "text", "gone", "folder", "twice"])
    if kind == "cut":
        at = rng.randrange(len(content) + 1)
        path.write_bytes(content[:at])
        return f"cut at {at}"
    if kind == "flip":
        places = [rng.randrange(len(content)) for _ in range(rng.choice([1, 8]))] if content else []
        changed = bytearray(content)
        for place in places:
            changed[place] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        return f"bits flipped at {places}"
    if kind == "text":
        text = rng.choice(_TEXTS)
        path.write_bytes(text)
        return f"holds {text[:20]!r}"
    if kind == "twice":
        path.write_bytes(content * 2)
        return "twice"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    return kind


def copied(source: Path, directory: Path) -> Path:
    """A copy of a directory to damage."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    return directory

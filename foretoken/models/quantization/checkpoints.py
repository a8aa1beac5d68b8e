"""Opens checkpoints of compressed-tensors, GPTQ and AWQ: safetensors with a `quantization_config`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from safetensors import safe_open

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError, listed
from foretoken.files.bounded_reads import tensor_headers
from foretoken.models.quantization import compressed_tensors, gptq
from foretoken.models.quantization.stored import StoredModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

    from foretoken.models.quantization.stored import Layout

_LAYOUTS: dict[str, Callable[[Mapping[str, Any], str], Layout]] = {
    "compressed-tensors": compressed_tensors.layout,
    "gptq": gptq.gptq_layout,
    "awq": gptq.awq_layout,
}


def format_label(config: Any, name: str) -> str | None:
    """Returns `Layout.label` of a configuration, or None; raises `ModelError` as `open_checkpoint` does."""
    settings = _settings(config)
    return _LAYOUTS[settings["quant_method"]](settings, name).label if is_stored(config) else None


def is_stored(config: Any) -> bool:
    """Decides whether a configuration names a format that `open_checkpoint` reads."""
    return _settings(config).get("quant_method") in _LAYOUTS


def _settings(config: Any) -> Mapping[str, Any]:
    found = getattr(config, "quantization_config", None)
    return found if isinstance(found, dict) else {}


def open_checkpoint(name: str, config: Any, revision: str | None = None) -> StoredModel:
    """Opens the safetensors of a directory or hub id as they are stored.

    Args:
        name: Directory or hub id.
        config: Of transformers, for which `is_stored` holds; its `quantization_config` is taken away.
        revision: Of the hub id.

    Raises:
        ModelError: If the settings name what cannot be read, or no layer is stored that way.
    """
    settings = dict(_settings(config))
    layout = _LAYOUTS[settings["quant_method"]](settings, name)
    del config.quantization_config
    patterns = ["*.safetensors", "*.json"]
    directory = (
        Path(name) if Path(name).is_dir() else Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    )
    files = _Files(directory, name)
    linears = frozenset(files.owners(layout.marker))
    if not linears:
        raise ModelError(
            f"the config.json of '{name}' says that its weights are in {layout.label}, but no tensor is called "
            f"'*.{layout.marker}'. Copy or download the model again."
        )
    parts = {f"{linear}.{part}" for linear in linears for part in (*layout.parts, *layout.optional)}
    odd = sorted(
        key for key in files.paths
        if key not in parts and key.rpartition(".")[0] in linears and not key.endswith(".bias")
    )  # fmt: skip
    if odd:
        raise ModelError(
            f"'{name}' has tensors beside its matrices in {layout.label} that mean something else: {listed(odd)}. "
            f"Expected {', '.join((*layout.parts, *layout.optional))}. Such checkpoints cannot be read."
        )

    def matrix(linear: str, dtype: torch.dtype) -> Any:
        found = {part: f"{linear}.{part}" for part in (*layout.parts, *layout.optional)}
        missing = [key for part, key in found.items() if part in layout.parts and key not in files.paths]
        if missing:
            raise ModelError(f"'{name}' lacks {listed(missing)}. Copy or download the model again.")
        tensors = {part: files.read(key) for part, key in found.items() if key in files.paths}
        return layout.matrix(linear, tensors, dtype)

    def dense(_: torch.dtype) -> dict[str, Tensor]:
        return {key: files.read(key) for key in files.paths if key not in parts}

    return StoredModel(config=config, label=layout.label, linears=linears, matrix=matrix, dense=dense)


class _Files:
    """The tensors of a directory's safetensors, which stay open."""

    def __init__(self, directory: Path, name: str) -> None:
        self._open: dict[Path, Any] = {}
        self.paths: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            for key in tensor_headers(path):
                if key in self.paths:
                    raise ModelError(
                        f"'{name}' has {shown(key)} in two files, {self.paths[key].name} and {path.name}. Expected it "
                        "once. Remove the file that the index does not name."
                    )
                self.paths[key] = path

    def owners(self, part: str) -> list[str]:
        """Returns the modules that have a tensor of a name."""
        return [owner for owner, _, own in (key.rpartition(".") for key in self.paths) if own == part and owner]

    def read(self, key: str) -> Tensor:
        path = self.paths[key]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        tensor: Tensor = self._open[path].get_tensor(key)
        return tensor

"""Opens checkpoints of compressed-tensors, GPTQ and AWQ: safetensors with a `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from safetensors import safe_open

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError, foreign_errors_as, listed, one_line
from foretoken.files.bounded_reads import TensorHeader, tensor_headers
from foretoken.models.stored import StoredModel, linear_shapes, name_in_transformers
from foretoken.models.stored.layouts import Layout, awq_layout, compressed_tensors_layout, gptq_layout
from foretoken.models.weight_files import check_fit, meta_model, model_files, untied_shapes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from foretoken.decoder.quantized import QuantizedMatrix

_LAYOUTS: dict[str, Callable[[Mapping[str, Any], str], Layout]] = {
    "compressed-tensors": compressed_tensors_layout,
    "gptq": gptq_layout,
    "awq": awq_layout,
}

# Tensors that are no weights of an architecture and change a model unless they are 0: biases that GPTQ adds to every
# layer, scales of activations and inputs.
_CHANGES = (".bias", "scales", "scale", "zero_point", "smooth")


def format_label(config: Any, name: str) -> str | None:
    """Returns `Layout.label` of a configuration, or None; raises `ModelError` as `open_checkpoint` does."""
    settings = _settings(config)
    return _LAYOUTS[settings["quant_method"]](settings, name).label if is_stored(config) else None


def is_stored(config: Any) -> bool:
    """Decides whether a configuration names a format that `open_checkpoint` reads."""
    method = _settings(config).get("quant_method")
    return isinstance(method, str) and method in _LAYOUTS


def _settings(config: Any) -> Mapping[str, Any]:
    found = getattr(config, "quantization_config", None)
    return found if isinstance(found, dict) else {}


def open_checkpoint(name: str, config: Any, revision: str | None = None) -> StoredModel:
    """Opens the safetensors of a directory or hub id as they are stored.

    Takes the `quantization_config` away from a configuration for which `is_stored` holds. Raises `ModelError` if it
    names what cannot be read, no layer is stored that way, or other weights are missing or of another shape.
    """
    settings = dict(_settings(config))
    layout = _LAYOUTS[settings["quant_method"]](settings, name)
    del config.quantization_config
    directory = Path(name)
    if not directory.is_dir():
        with foreign_errors_as(ModelError, lambda err: f"'{name}' cannot be downloaded: {one_line(err)}."):
            patterns = ["*.safetensors", "*.json"]
            directory = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    files = _Files(directory, name, config.model_type)
    marker = layout.parts[0]
    linears = frozenset(files.owners(marker))
    if not linears:
        raise ModelError(
            f"the settings of '{name}' say that its weights are in {layout.label}, but no tensor is called "
            f"'*.{marker}'. Copy or download the model again."
        )
    if "lm_head" in linears:
        config.tie_word_embeddings = False
    names = (*layout.parts, *layout.optional)
    parts = {f"{linear}.{part}" for linear in linears for part in names}
    unused = _check_others(files, config, linears, parts, name)

    def matrix(linear: str, dtype: torch.dtype) -> QuantizedMatrix:
        found = {part: f"{linear}.{part}" for part in names}
        missing = [key for part, key in found.items() if part in layout.parts and key not in files.headers]
        if missing:
            raise ModelError(f"'{name}' lacks {listed(missing)}. Copy or download the model again.")
        tensors = {part: files.read(key) for part, key in found.items() if key in files.headers}
        own_name = files.own_names[found[marker]].removesuffix(f".{marker}")
        return layout.matrix(own_name, tensors, dtype)

    def dense(_: torch.dtype) -> dict[str, Tensor]:
        for key in unused:
            if key.endswith(_CHANGES) and files.read(key).any():
                raise ModelError(
                    f"{key} of '{name}' would change the model, but its architecture has no such weight. Such "
                    "checkpoints cannot be read."
                )
        return {key: files.read(key) for key in files.headers if key not in parts}

    return StoredModel(config=config, label=layout.label, linears=linears, matrix=matrix, dense=dense)


def _check_others(files: _Files, config: Any, linears: frozenset[str], parts: set[str], name: str) -> list[str]:
    """Checks all tensors but those of matrices in integers; returns those that the architecture does not use."""
    module = meta_model(config)
    if module is None:
        raise ModelError(f"the architecture of '{name}' cannot be built. Expected a causal LM of transformers.")
    own = {f"{linear}.weight" for linear in linears}
    shapes = linear_shapes(untied_shapes(module), len(files.headers), name)
    check_fit(files.headers, {key: shape for key, shape in shapes.items() if key not in own}, name)
    return sorted(files.headers.keys() - parts - set(module.state_dict()))


class _Files:
    """The tensors of a model's safetensors, which stay open, by the names of transformers."""

    def __init__(self, directory: Path, name: str, model_type: str) -> None:
        self._open: dict[Path, Any] = {}
        self._paths: dict[str, Path] = {}
        self.headers: dict[str, TensorHeader] = {}
        self.own_names: dict[str, str] = {}
        for path in model_files(directory):
            for own_name, header in tensor_headers(path).items():
                key = name_in_transformers(own_name, model_type)
                if key in self.headers:
                    raise ModelError(
                        f"'{name}' has {shown(own_name)} in two files, {self._paths[key].name} and {path.name}. "
                        "Expected it once. Copy or download the model again."
                    )
                self.headers[key], self._paths[key], self.own_names[key] = header, path, own_name

    def owners(self, part: str) -> list[str]:
        """Returns the modules that have a tensor called `part`."""
        return [owner for owner, _, own in (key.rpartition(".") for key in self.headers) if own == part and owner]

    def read(self, key: str) -> Tensor:
        path = self._paths[key]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        tensor: Tensor = self._open[path].get_tensor(self.own_names[key])
        return tensor

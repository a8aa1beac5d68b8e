"""Finds the format of a checkpoint by its contents, and reads and writes heads by format name.

Modules of this package name their formats in `FORMATS`, see `Format`. Our own format is `native`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError, ModelError, nearest_name_hint, one_line
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint, TargetInfo, TargetWeights, with_dtype
from foretoken.formats.conversion import Format, Reader, WriteOptions
from foretoken.formats.files import HeadFiles, holds_further_tokens, holds_pickles, open_files, whole_files
from foretoken.formats.speculators import KINDS
from foretoken.models.names import is_gguf

if TYPE_CHECKING:
    import torch


# Names of vllm-project/speculators.
_SPECULATORS = {"peagle": "P-EAGLE", "dflash": "DFlash", "dspark": "DSpark", "mtp": "multi-token prediction"}


def unserved_head(files: HeadFiles) -> str | None:
    """Returns a short description of a head that no drafter here uses; None for other checkpoints."""
    kind = files.config.get("speculators_model_type")
    if not isinstance(kind, str) or kind in KINDS:
        return None
    name = _SPECULATORS.get(kind, f"'{kind}'")
    layer: Any = files.config.get("transformer_layer_config")
    whole = layer.get("vocab_size") if isinstance(layer, dict) else None
    drafted = files.config.get("draft_vocab_size") or whole
    facts = "format speculators"
    if drafted:
        facts += f", draft vocabulary {drafted}" + (f" of {whole}" if whole and whole != drafted else "")
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name} head ({facts})"


# A module comes before those that would recognise its files too.
_MODULES = ("native", "speculators", "eagle3", "eagle", "tensorrt_llm", "hydra", "mlp_speculator", "medusa", "mtp")
MODELS_OWN = "mtp"  # the format of heads in the files of their targets
_NONSENSE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)


def _formats() -> Iterator[Format]:
    for name in _MODULES:  # imported only if no module before it recognises a file
        yield from import_module(f"foretoken.formats.{name}").FORMATS


def _format(name: str) -> Format | None:
    return next((each for each in _formats() if each.name == name), None)


def known_formats(*, writable: bool = False) -> list[str]:
    """Returns the names of formats; writable: only of those that can be written."""
    return sorted(each.name for each in _formats() if not writable or each.write is not None)


def format_of(files: HeadFiles) -> Format | None:
    """Returns the format of a checkpoint, by its tensors and configuration; None for unknown checkpoints."""
    return next((each for each in _formats() if each.recognises(files)), None)


def holds_head(path: Path) -> bool:
    """Decides whether a directory or file is meant to hold a head.

    Heads of families that are not served count as well: `read_head` names them. A model with a head for multi-token
    prediction is a model, see `holds_own_head`. Raises `ModelError` for damaged files that only a head can have: a
    target is never read from pickles.
    """
    directory = path if path.is_dir() else path.parent
    if is_gguf(path):
        return False
    if not path.is_file() and not any(directory.glob("*.safetensors")) and not holds_pickles(directory):
        return False
    try:
        files = open_files(path)
        form = format_of(files)
        is_head = form is not None and (path.is_file() or form.name != MODELS_OWN)
        return is_head or unserved_head(files) is not None
    except ModelError:
        if path.is_file() or not any(directory.glob("*.safetensors")):
            raise
        return False  # the loader of models reports it


def holds_own_head(model: Path, method: str) -> bool:
    """Decides whether the files of a model hold a head of a method too, for `read_head`.

    Raises `ModelError` for damaged files: nobody can say what they hold.
    """
    if method != MODELS_OWN or not (holds_further_tokens(model) or any(model.glob("*.safetensors"))):
        return False
    form = format_of(open_files(model))
    return form is not None and form.name == MODELS_OWN


def method_of(path: Path) -> str:
    """Returns the method of a head, such as "medusa"; raises `ModelError` as `read_head`."""
    return str(read_head(path)[1].config.method)


def read_head(
    directory: Path,
    *,
    target: TargetFingerprint | None = None,
    base_config: Any | None = None,
    weights: Callable[[], TargetWeights] | None = None,
) -> tuple[str, HeadCheckpoint]:
    """Reads a head of any format.

    Args:
        target: The target that the caller assumes; the result has it if the file names none.
        base_config: The target's transformers text configuration, for sizes that files leave out.
        weights: Returns the target's tensors, for formats that compare theirs with them.

    Returns:
        The format's name and the head.

    Raises:
        ModelError: If it is no head, damaged, incomplete, or has unknown entries.
        ConfigError: If it was made for another target.
    """
    files = open_files(directory)
    other = unserved_head(files)
    form = format_of(files) if other is None else None
    if form is None:
        found = "no draft head of a known format." if other is None else f"{other}: foretoken does not serve it yet."
        raise ModelError(f"'{directory}' holds {found} Expected one of {', '.join(known_formats())}.")
    try:
        return form.name, form.read(files, TargetInfo(fingerprint=target, config=base_config, load=weights))
    except _NONSENSE as err:  # a value of a wrong type in a configuration can fail anywhere
        raise ModelError(f"the config.json of '{directory}' makes no sense: {one_line(err)}. Copy it again.") from err


def write_head(
    name: str,
    checkpoint: HeadCheckpoint,
    directory: Path,
    *,
    target: TargetInfo | None = None,
    dtype: torch.dtype | None = None,
    tp_size: int = 1,
    as_safetensors: bool = False,
    replaces: bool = False,
) -> None:
    """Writes a head: all of its files, or none and an error.

    Args:
        directory: Created if missing.
        dtype: Of the weights; None keeps theirs.
        tp_size: Ranks, for formats that split tensors.
        as_safetensors: Whether to write safetensors if the format's own file is a pickle.
        replaces: Whether to delete everything else in the directory; otherwise only files of the same names are
            replaced.

    Raises:
        ConfigError: For an unknown format, one that cannot hold this head, or files that cannot be written.
    """
    form, method = _format(name), checkpoint.config.method
    if form is None or form.write is None:
        hint = nearest_name_hint(name, known_formats(writable=True))
        raise ConfigError(f"heads cannot be written in format '{name}'. {hint}")
    if tp_size < 1 or (tp_size > 1 and name != "tensorrt_llm"):
        raise ConfigError(f"tp_size is {tp_size}. Expected 1, or more for format 'tensorrt_llm'.")
    if dtype is not None:
        checkpoint = with_dtype(checkpoint, dtype)
    if method not in form.methods:
        expected = " or ".join(form.methods)
        raise ConfigError(f"format '{name}' cannot hold a head of method '{method}'. Expected {expected}.")
    options = WriteOptions(target=target or TargetInfo(), tp_size=tp_size, as_safetensors=as_safetensors)
    with whole_files(directory, replaces=replaces) as new:
        form.write(checkpoint, new, options)


def head_readers(
    name: str,
    checkpoint: HeadCheckpoint,
    *,
    target: TargetInfo | None = None,
    tp_size: int = 1,
    as_safetensors: bool = False,
) -> list[Reader]:
    """Returns the programs that read the result of `write_head` with the same arguments; foretoken comes first."""
    ours = Reader("foretoken", True, f"speculative_config with method '{checkpoint.config.method}' and its directory")
    form = _format(name)
    if form is None or form.readers is None:
        return [ours]
    options = WriteOptions(target=target or TargetInfo(), tp_size=tp_size, as_safetensors=as_safetensors)
    return [ours, *form.readers(checkpoint, options)]

"""The bytes that passes of the target and of drafters read, and the speed-up that they promise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.speedup.sizes import weights_bytes
from foretoken.core.backend import runs_cpu_kernels
from foretoken.drafters import sparse_kv
from foretoken.drafters.head_drafter import HeadOptions, drafting_dtype
from foretoken.drafters.sparse_kv import DraftBytes
from foretoken.drafters.windows import WindowOptions
from foretoken.entrypoints.config import parse_speculative_config
from foretoken.files.bounded_reads import read_json_object
from foretoken.heads.spire import SpireConfig

if TYPE_CHECKING:
    from foretoken.entrypoints.config import Setup
    from foretoken.entrypoints.llm import LLM
    from foretoken.models.loading import LoadedModel

_ONE_LAYER = ("eagle", "eagle3")  # heads of one layer with a KV cache, below the target's LM head
_NO_WEIGHTS = ("ngram", "suffix", "lookahead", "recycling", "rest")


class PassBytes(NamedTuple):
    """Bytes of one iteration's parts.

    Attributes:
        plain: Of a pass of the target: its weights, and the KV rows of all sequences.
        draft: Of one level of a draft; None where the drafter's passes are not modelled.
    """

    plain: float
    draft: float | None

    def of_token(self, tau: float, levels: float, batch: int) -> float | None:
        """Returns the bytes of an emitted token: `(plain + levels * draft) / (batch * tau)`."""
        return None if self.draft is None else (self.plain + levels * self.draft) / (batch * tau)

    def speed_up(self, tau: float, levels: float) -> float | None:
        """Returns `tau * plain / (plain + levels * draft)`, the speed-up if bytes alone cost time.

        `levels` are drafted levels, and `tau` emitted tokens of a sequence, for each pass of the target.

        Source: MagicDec (arXiv 2408.11049), section 3, with measured values of tau and levels.
        """
        return None if self.draft is None else tau * self.plain / (self.plain + levels * self.draft)


def row_bytes(model: LoadedModel) -> int:
    """Returns the bytes of one row of the target's KV cache, in all layers."""
    return _row_bytes(model.config.get_text_config().to_dict(), model.dtype.itemsize)


def bytes_of(setup: Setup, llm: LLM, *, rows: int, batch: int) -> PassBytes:
    """Returns the bytes of passes behind `rows` rows of each sequence, see `DraftBytes`.

    `llm` has the setup's drafter, with weights in files of the target's dtype.
    """
    model, lengths = llm.handle.model, [rows] * batch
    module: Any = model.module
    own = DraftBytes.of(model, llm.target.cache, model.num_layers, quantization=None)
    (weights, row), listed = (0.0, 0.0), lengths
    (options,) = parse_speculative_config(setup.config, target=model.name).options
    if isinstance(options, sparse_kv.Options) and options.draft_with is None:
        layers = options.exit_layer or model.num_layers
        rounded = options.quantization if options.quantization in ("int4", "int8") else None
        drafts = DraftBytes.of(model, llm.target.cache, layers, quantization=rounded)
        (weights, row), listed = (drafts.weights[1], drafts.row[1]), [options.budget(rows)] * batch
    elif options.method == "draft_model" and options.model is not None:
        place = Path(options.model)
        config = read_json_object(place / "config.json")
        weights, row = weights_bytes(place), _row_bytes(config, model.dtype.itemsize)
    elif options.method in _ONE_LAYER and options.model is not None:
        weights = weights_bytes(Path(options.model)) + module.get_output_embeddings().weight.nbytes
        row = own.row[0] / model.num_layers
    elif options.method == "spire" and options.model is not None:
        sizes = SpireConfig.model_validate(read_json_object(Path(options.model) / "config.json")["config"])
        weights = weights_bytes(Path(options.model)) + module.get_output_embeddings().weight.nbytes
        row = own.row[0] / model.num_layers * (1 if sizes.has_feedback else sizes.num_layers)
        row *= drafting_dtype(model).itemsize / model.dtype.itemsize
        listed = [min(rows, sizes.sinks + sizes.window - 1)] * batch
    elif options.method not in _NO_WEIGHTS:
        return PassBytes(own.plain(lengths), None)
    if isinstance(options, HeadOptions) and options.quantization != "none" and runs_cpu_kernels(model.device):
        weights /= model.dtype.itemsize  # "auto" is int8 there, for the LM head too
    if isinstance(options, WindowOptions) and options.partial_rows is not None:
        listed = [min(rows, options.partial_rows)] * batch
    drafts = DraftBytes(weights=(own.weights[0], weights), row=(own.row[0], row))
    return PassBytes(own.plain(lengths), drafts.draft(listed))


def _row_bytes(config: dict[str, Any], itemsize: int) -> int:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * int(size) * itemsize

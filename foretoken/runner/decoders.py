"""The decoders by name, and what proves them on a model.

A decoder proves itself by the self-test (`foretoken.runner.self_test`). What was proven with the same files is
remembered for a month.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.backend import has_cuda_runtime
from foretoken.core.errors import ModelError
from foretoken.decoder.base import Decoder, UnsuitableError
from foretoken.decoder.cuda_graphs import GraphDecoder
from foretoken.decoder.library import kernels_version
from foretoken.decoder.native import NativeDecoder
from foretoken.decoder.native_linear import HeadRows
from foretoken.decoder.native_states import block_bytes
from foretoken.decoder.native_states import state_bytes as native_state_bytes
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.decoder.torch_blocks import StockDecoder
from foretoken.decoder.torch_mixers import MixerSizes
from foretoken.files.user_cache import KeptEntries
from foretoken.models.generic import GenericDecoder, run_plain
from foretoken.models.lean_weights import read_weights
from foretoken.runner.self_test import check_tree_attention, refusing

if TYPE_CHECKING:
    from foretoken.core.passes import Tap
    from foretoken.decoder.blocks import LeanWeights
    from foretoken.decoder.quantized import Quantization
    from foretoken.models.loaded import LoadedModel

_SMALL = 10_000_000  # weights of a model that is always tested; a choice: that takes some 0.1 s
_PROOF_FORMAT = 1
_PROOFS = KeptEntries(file="foretoken-proofs.json", mark="foretoken_proofs", holder="proofs", what="passed self-tests")


def layer_shapes(model: LoadedModel) -> list[LayerShape]:
    """Returns the sizes of each layer's keys and values; runs the model only if its architecture is unknown.

    Raises `ModelError` as `probe_layer_shapes`.
    """
    try:
        layers = read_weights(model, 1).layers
    except UnsuitableError:
        return probe_layer_shapes(model.module)
    if layers.mixers:
        return probe_layer_shapes(model.module)
    specs = [block.spec for block in layers.attention]
    return [LayerShape(spec.num_kv_heads, spec.head_dim, spec.head_dim) for spec in specs]


def probe_layer_shapes(model: Any) -> list[LayerShape]:
    """Returns the sizes of each layer's keys, values and states, from the cache of an ordinary forward.

    Raises `ModelError` if the model cannot run, or a layer keeps anything else.
    """
    from foretoken.models.recurrent import state_of  # imports transformers' models

    with refusing(type(model).__name__, "cannot run two tokens", "Check its config.json."):
        output = run_plain(model, torch.zeros(1, 2, dtype=torch.int64), use_cache=True)
    layers = getattr(getattr(output, "past_key_values", getattr(output, "cache_params", None)), "layers", None)
    if not layers:
        raise ModelError(
            f"{type(model).__name__} keeps no keys and values between passes, or keeps them in a way of its own. "
            "Expected a causal LM with a KV cache. It cannot be used as a target."
        )
    shapes, kinds = [], dict(enumerate(getattr(model.config.get_text_config(), "layer_types", None) or ()))
    for index, layer in enumerate(layers):
        key, value, state = getattr(layer, "keys", None), getattr(layer, "values", None), state_of(layer)
        num_heads, widths = 0, (0, 0)
        if isinstance(key, Tensor) and isinstance(value, Tensor):
            num_heads, widths = key.shape[1], (key.shape[3], value.shape[3])
        elif state is None and kinds.get(index) not in {"mlp", "moe"}:
            raise ModelError(
                f"layer {index} of {type(model).__name__} keeps {type(layer).__name__}, neither keys and values nor a "
                "recurrent state. Rejected drafts cannot be undone there. Use another model."
            )
        shapes.append(LayerShape(num_heads, *widths, state))
    return shapes


class StateBytes(NamedTuple):
    """Bytes of the states of recurrent layers: of all slots, and of a snapshot."""

    slots: int = 0
    snapshot: int = 0


def state_bytes(
    model: LoadedModel, shapes: Sequence[LayerShape], runner: str, *, num_slots: int, max_nodes: int,
    feeds_again: bool = False,
) -> StateBytes:  # fmt: skip
    """Returns what the states of a model take, before its decoder is made.

    Lean decoders make states of each tree's root and store the inputs of its nodes; `generic` has a state of every
    node. `runner`: a decoder, or a way to choose one; `feeds_again`: see `Runner`.
    """
    kept = 3 if feeds_again else 2  # of a slot: before its last token, committed, and that of the pass
    parts = [part for shape in shapes for part in shape.state or () if part is not None]
    if not parts:
        return StateBytes()
    if runner != GenericDecoder.name:
        with suppress(UnsuitableError):
            mixers = read_weights(model, 1).layers.mixers
            if runner != StockDecoder.name and NativeDecoder.runs(model.device, model.dtype):
                return StateBytes(native_state_bytes(mixers, kept * num_slots, max_nodes), block_bytes(mixers, 1))
            sizes = MixerSizes.of(mixers, model.dtype, model.device)
            if sizes is not None:
                return StateBytes(kept * num_slots * sizes.block_bytes(max_nodes), sizes.block_bytes(1))
    state = sum(part.nbytes for part in parts)
    return StateBytes(num_slots * (max_nodes + kept) * state, state)


LEAN: dict[str, Callable[[LeanWeights, SlotCache, Sequence[Tap]], Decoder]] = {
    kind.name: kind for kind in (NativeDecoder, GraphDecoder, StockDecoder)
}


def _of_weights(name: str) -> Callable[[LoadedModel, SlotCache, Sequence[Tap]], Decoder]:
    return lambda model, cache, taps: LEAN[name](read_weights(model, cache.num_positions), cache, taps)


DECODERS: dict[str, Callable[[LoadedModel, SlotCache, Sequence[Tap]], Decoder]] = {
    **{name: _of_weights(name) for name in LEAN},
    "generic": GenericDecoder,
}
EXACT = frozenset(
    kind.name for kind in (NativeDecoder, GraphDecoder, StockDecoder, GenericDecoder) if kind.is_exact
)  # see `Decoder`


def decoders_for(model: LoadedModel) -> list[str]:
    """Returns the decoders for a model's device and dtype; at equal costs an earlier one is preferred."""
    if has_cuda_runtime(model.device):
        return ["lean-graphs", "lean-stock", "generic"]
    native = ["lean-native"] if NativeDecoder.runs(model.device, model.dtype) else []
    return [*native, "lean-stock", "generic"]


def kernels_need_dtype(model: LoadedModel) -> bool:
    """Decides whether the native kernels would run a model in another dtype."""
    if NativeDecoder.runs(model.device, model.dtype) or not NativeDecoder.runs(model.device, torch.bfloat16):
        return False
    with suppress(UnsuitableError):
        read_weights(model, 1)
        return True
    return False


def check_architecture(name: str, model: LoadedModel) -> None:
    """Raises `UnsuitableError` for what a decoder does not know, before anything is copied, compiled or timed."""
    _check_rows(name, is_rounded=model.kv_cache_dtype == "int8")
    if name != "generic":
        read_weights(model, 1)


def _check_rows(name: str, *, is_rounded: bool) -> None:
    if is_rounded and name != NativeDecoder.name:
        raise UnsuitableError(f"it has no kernels for a KV cache in int8, only {NativeDecoder.name} has.")


def make_decoder(name: str, model: LoadedModel, cache: SlotCache, taps: Sequence[Tap]) -> Decoder:
    """Makes a decoder, one of `DECODERS`, without a self-test.

    Raises `ModelError` if the decoder does not know the model or cannot run here, has no kernels for quantized KV rows,
    or a tap cannot be read.
    """
    _check_rows(name, is_rounded=cache.is_rounded)
    return DECODERS[name](model, cache, taps)


def proven_decoder(
    name: str, model: LoadedModel, cache: SlotCache, taps: Sequence[Tap], *, context_len: int
) -> Decoder:
    """Makes a decoder, one of `DECODERS`, and proves on the model that it computes trees correctly.

    What was proven with the same files is remembered.
    No sequence is in the cache. The first rows of its first and last slot are written, see `check_tree_attention`.
    Raises `ModelError` as `make_decoder` does, and if the model ignores the attention plug-in.
    """
    decoder = make_decoder(name, model, cache, taps)
    with_taps = None if name == GenericDecoder.name else partial(DECODERS[name], model, cache)
    key = key_of_proof(model, name, cache, context_len=context_len)
    if key is None or _PROOFS.read(key) is None:
        check_tree_attention(model, decoder, cache, context_len=context_len, with_taps=with_taps)
        if key is not None:
            _PROOFS.keep(key, {})
    return decoder


def drafting_decoder(
    name: str,
    model: LoadedModel,
    cache: SlotCache,
    taps: Sequence[Tap],
    *,
    quantization: Quantization | None = None,
    head_tokens: Tensor | None = None,
) -> tuple[Decoder, HeadRows | None]:
    """Returns a decoder of a draft model with quantized copies of its matrices, or a part of its LM head, or both.

    The self-test does not run: the logits are those of other weights. The decoder passed it with the original ones.

    Args:
        quantization: Of the matrices; None for the original ones.
        head_tokens: (R,) int64, all different: logits of other tokens are -inf. None for the whole LM head.

    Returns:
        The decoder, and the rows of its LM head if they are a part.

    Raises:
        UnsuitableError: If the decoder has no kernels for the format, or the weights cannot be quantized; or it has no
            rows of the LM head of its own.
    """
    if quantization is not None and name != NativeDecoder.name:
        raise UnsuitableError(f"the {name} runner has no kernels for {quantization}, only {NativeDecoder.name} has.")
    if name not in LEAN:
        raise UnsuitableError(f"the {name} runner computes the whole LM head.")
    weights, rows = read_weights(model, cache.num_positions), None
    if head_tokens is not None:
        rows = HeadRows(weights.head, head_tokens.to(model.device), quantization)
        weights = rows.within(weights)
    if quantization is None:
        return LEAN[name](weights, cache, taps), rows
    return NativeDecoder(weights, cache, taps, quantization=quantization), rows


def facts_of_passes(model: LoadedModel, decoder: str) -> dict[str, Any]:
    """Returns the machine, the kernels, and the model's architecture and sizes, JSON-ready; weights do not count."""
    return {
        "torch": torch.__version__,
        "processor": sorted((name, str(value)) for name, value in torch.cpu.get_capabilities().items()),
        "device": torch.cuda.get_device_name(model.device) if has_cuda_runtime(model.device) else str(model.device),
        "threads": torch.get_num_threads(),
        "runner": decoder,
        "kernels": kernels_version(),
        "sanitizers": os.environ.get("FORETOKEN_SANITIZE", "0") != "0",
        "architecture": model.architecture,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "kv_cache_dtype": model.kv_cache_dtype,
        "sizes": sorted(model.sizes.items()),
    }


def as_key(facts: dict[str, Any]) -> str:
    """Returns a digest of facts."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def key_of_proof(model: LoadedModel, decoder: str, cache: SlotCache, *, context_len: int) -> str | None:
    """Returns what names the self-test of a decoder on a model; None if it is not remembered.

    Models in memory are not, as their weights may be any, nor are small ones.
    """
    if model.files is None or model.num_weights < _SMALL:
        return None
    facts = facts_of_passes(model, decoder) | {
        "proof": _PROOF_FORMAT,
        "files": model.files,
        "code": code_version(),
        "transformers": version("transformers"),
        "rows": [cache.is_rounded, cache.num_slots > 1, cache.num_positions, context_len],
    }
    return as_key(facts)


@cache
def code_version() -> str:
    """Returns a digest of this package's Python files."""
    root = Path(__file__).parents[1]
    parts = [
        each
        for path in sorted(root.rglob("*.py"))
        for each in (str(path.relative_to(root)).encode(), path.read_bytes())
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]

"""The decoders by name, and one of them made for a model and proven on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.core.backend import has_cuda_graphs
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.graph_decoder import GraphDecoder
from foretoken.decoder.lean.native import NativeDecoder
from foretoken.decoder.lean.stock import StockDecoder
from foretoken.models.generic import GenericDecoder
from foretoken.models.lean_weights import read_weights
from foretoken.runner.self_test import check_tree_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.core.passes import Tap
    from foretoken.decoder.base import Decoder
    from foretoken.decoder.lean.int8 import Quantization
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.models.loading import LoadedModel

DECODERS: dict[str, Callable[[LoadedModel, SlotCache, Sequence[Tap]], Decoder]] = {
    "lean-native": lambda model, cache, taps: NativeDecoder(read_weights(model, cache.capacity), cache, taps),
    "lean-graphs": lambda model, cache, taps: GraphDecoder(read_weights(model, cache.capacity), cache, taps),
    "lean-stock": lambda model, cache, taps: StockDecoder(read_weights(model, cache.capacity), cache, taps),
    "generic": GenericDecoder,
}
EXACT = frozenset(
    kind.name for kind in (NativeDecoder, GraphDecoder, StockDecoder, GenericDecoder) if kind.is_exact
)  # see `Decoder`


def decoders_for(model: LoadedModel) -> list[str]:
    """Decoders made for a model's device and dtype, the one that is preferred where costs are equal first."""
    if has_cuda_graphs(model.device):
        return ["lean-graphs", "lean-stock", "generic"]
    native = ["lean-native"] if NativeDecoder.runs(model.device, model.dtype) else []
    return [*native, "lean-stock", "generic"]


def check_architecture(name: str, model: LoadedModel) -> None:
    """Refuses a model that a decoder does not know, before anything is copied or compiled for it.

    Args:
        name: One of `DECODERS`.
        model: A loaded causal LM.

    Raises:
        UnsuitableError: Naming what is foreign.
    """
    if name != "generic":
        read_weights(model, 1)


def proven_decoder(
    name: str, model: LoadedModel, cache: SlotCache, taps: Sequence[Tap], *, context_len: int
) -> Decoder:
    """Makes a decoder and proves on the model itself that it attends to trees correctly.

    Args:
        name: One of `DECODERS`.
        model: A loaded causal LM.
        cache: For the decoder; no sequence is in it. The first rows of its first and last slot are written.
        taps: Features to read.
        context_len: Most tokens a sequence may reach.

    Raises:
        ModelError: When the decoder does not know the model or cannot run here, a tap cannot be read, or the model
            ignores the attention plug-in.
    """
    decoder = DECODERS[name](model, cache, taps)
    check_tree_attention(model, decoder, cache, context_len=context_len)
    return decoder


def quantized_decoder(
    name: str, model: LoadedModel, cache: SlotCache, taps: Sequence[Tap], *, quantization: Quantization
) -> Decoder:
    """A decoder of a draft model whose matrices are copied: a byte a weight beside the model's own.

    It is not proven on the model again: its logits are those of other weights.

    Args:
        name: The decoder that runs the model as it is stored, and was proven.
        model: A loaded causal LM that drafts.
        cache: See `proven_decoder`.
        taps: Likewise.
        quantization: Of the copies.

    Raises:
        UnsuitableError: When that decoder has no kernels for it, or the weights cannot be quantised.
    """
    if name != NativeDecoder.name:
        raise UnsuitableError(f"the {name} runner has no kernels for {quantization}, only {NativeDecoder.name} has.")
    return NativeDecoder(read_weights(model, cache.capacity), cache, taps, quantization=quantization)

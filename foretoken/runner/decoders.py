"""The decoders by name, and the self-test: a decoder's tree logits must equal those of ordinary forwards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from foretoken.core.backend import has_cuda_graphs
from foretoken.core.errors import ForetokenError, ModelError, foreign_errors_as, one_line
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.cuda_graphs import GraphDecoder
from foretoken.decoder.native import NativeDecoder
from foretoken.decoder.quantized import QuantizedLinear
from foretoken.decoder.slot_cache import LayerShape
from foretoken.decoder.torch_blocks import StockDecoder
from foretoken.models.generic import GenericDecoder, run_plain
from foretoken.models.lean_weights import read_weights
from foretoken.models.plugin import current_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from foretoken.core.passes import Tap
    from foretoken.decoder.base import Decoder
    from foretoken.decoder.quantized import Quantization
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.models.loading import LoadedModel

_PROMPT_LENS = (2, 5)  # of two slots; different, so that a decoder that mixes up slots or lengths fails
_PARENTS = ((-1, 0, 0, 1, 2, 2), (-1, 0, 1, 1))  # two branches, the first one forks; one branch that forks late
_PATHS = (((0, 1, 3), (0, 2, 4), (0, 2, 5)), ((0, 1, 2), (0, 1, 3)))  # from the root to every leaf, all three long
_PATH_LEN = 3  # levels of both trees
NUM_ROWS = max(_PROMPT_LENS) + max(map(len, _PARENTS))  # cache rows of the self-test


def probe_layer_shapes(model: nn.Module) -> list[LayerShape]:
    """Returns the sizes of each layer's keys and values, from the cache of an ordinary forward.

    Raises `ModelError` if the model cannot run, or a layer keeps anything but keys and values.
    """
    with _refusing(model, "cannot run two tokens", "Check its config.json."):
        output = run_plain(model, torch.zeros(1, 2, dtype=torch.int64), use_cache=True)
    layers = getattr(getattr(output, "past_key_values", None), "layers", None)
    if not layers:
        raise ModelError(
            f"{type(model).__name__} keeps no keys and values between passes, or keeps them in a way of its own. "
            "Expected a causal LM with a KV cache. It cannot be used as a target."
        )
    shapes = []
    for index, layer in enumerate(layers):
        key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(key, Tensor) or not isinstance(value, Tensor):
            raise ModelError(
                f"layer {index} of {type(model).__name__} keeps {type(layer).__name__} instead of keys and values, "
                "which cannot be rolled back after a rejected draft. Use a model with attention in every layer."
            )
        shapes.append(LayerShape(key.shape[1], key.shape[3], value.shape[3]))
    return shapes


def check_tree_attention(model: LoadedModel, decoder: Decoder, cache: SlotCache, *, context_len: int) -> None:
    """Compares a batch of small trees with their paths; writes the first rows of the first and the last slot.

    Both slots are free; the cache has `NUM_ROWS` rows or more. Raises `ModelError` if the logits differ by more than
    rounding, or sliding windows are lost.
    """
    if model.context_len <= _PATH_LEN:
        raise ModelError(
            f"the context of '{model.name}' is {model.context_len} tokens. Expected at least {_PATH_LEN + 1}."
        )
    slots = [slot for slot in dict.fromkeys((cache.num_slots - 1, 0)) if cache.reserve(slot, NUM_ROWS)]
    try:
        _check(_Tested(model, decoder, cache.places(slots), min(model.context_len, cache.capacity) - 1, context_len))
    finally:
        for slot in slots:
            cache.trim(slot, 0)


def _check(tested: _Tested) -> None:
    model, decoder = tested.model, tested.decoder
    if decoder.name == "generic":  # other decoders read windows from the configuration
        _check_windows(tested)
    # Measured on tiny random models: float32 reaches 4e-6, bfloat16 5e-2. A lost mask gives at least 1e-3 in float32
    # (weights of scale 0.02), and 0.2 on the trained models here.
    # In narrow dtypes rounding may also send a token to another expert (errors up to 0.7), but hardly with three sets
    # of tokens. Inputs or KV rows of 8 bits differ by a step where they differ by rounding before: inputs by 0.1 on a
    # random model of a billion weights in bfloat16.
    rounds = model.kv_cache_dtype == "int8" or any(
        isinstance(part, QuantizedLinear) and part.matrix.digits == 1 for part in model.module.modules()
    )
    is_wide = model.dtype in (torch.float32, torch.float64)
    tolerance, attempts = (2e-4, 1) if is_wide else (5e-2, 3)
    if rounds:
        tolerance, attempts = (2e-2 if is_wide else 0.15, 3)
    least = [math.inf] * len(tested.slots)
    for attempt in range(attempts):
        errors = _errors(tested, first_token=3 + 11 * attempt)
        least = [min(pair) for pair in zip(least, errors, strict=True)]
        if max(least) <= tolerance:
            break
    else:
        raise ModelError(
            f"{type(model.module).__name__} gives wrong logits for a token tree (relative error {max(least):.1e}"
            f", expected at most {tolerance:.0e}): it ignores the attention plug-in or keeps state outside the KV "
            "cache. It cannot be used as a target."
        )


class _Tested(NamedTuple):
    model: LoadedModel
    decoder: Decoder
    slots: Sequence[int]
    last_position: int
    context_len: int

    def prefill(self, slot: int, tokens: Sequence[int]) -> None:
        self.decoder.run(Pass.of_chains([tokens], slots=[slot], prefix_lens=[0], device=self.model.device))

    def verify(self, slots: Sequence[int], lengths: Sequence[int], tree: TokenTree) -> Tensor:
        """Returns (M, V) logits at the nodes of the trees, one tree after another, without padding."""
        work = Pass.of_tree(tree, slots=slots, prefix_lens=lengths, last_position=self.last_position)
        logits = self.decoder.run(work).logits
        assert logits is not None, "a verification gives all logits"
        return logits


def _errors(tested: _Tested, first_token: int) -> list[float]:
    """Returns each sequence's largest relative error of a node's logits against an ordinary forward of the node's path.

    A cache of a single slot is tested with one sequence. Raises `ModelError` for logits that are not finite.
    """
    model, slots = tested.model, tested.slots
    module = model.module
    tokens = [(7 * i + first_token) % model.vocab_size for i in range(2 * NUM_ROWS)]
    prompts, rows = [], []
    for row in range(len(slots)):
        length = min(_PROMPT_LENS[row], tested.context_len, model.context_len - _PATH_LEN)
        own = tokens[row * NUM_ROWS :]
        prompts.append(own[:length])
        rows.append(TreeRow(own[length : length + len(_PARENTS[row])], _PARENTS[row]))
    with _refusing(module, "cannot run a batch of token trees", "It cannot be used as a target."):
        for slot, prompt in zip(slots, prompts, strict=True):
            tested.prefill(slot, prompt)
        tree = TokenTree.from_rows(rows, device=model.device)
        logits = tested.verify(slots, [len(prompt) for prompt in prompts], tree)
        ours = _comparable(logits).split(tree.node_counts())
    errors = []
    for row, prompt in enumerate(prompts):
        paths = [[*prompt, *(rows[row].tokens[node] for node in path)] for path in _PATHS[row]]
        with _refusing(module, f"cannot run {len(paths[0])} tokens", "Check its config.json."):
            theirs = _comparable(run_plain(module, torch.tensor(paths)).logits[:, len(prompt) :].float())
        difference = (ours[row][torch.tensor(_PATHS[row])] - theirs).norm(dim=-1)
        errors.append(float((difference / theirs.norm(dim=-1).clamp_min(1e-9)).max()))
    if any(map(math.isnan, errors)):
        raise ModelError(
            f"{type(module).__name__} gives logits that are not numbers in {model.dtype}. Expected finite "
            "logits. Its weights are damaged, or the dtype is too narrow for it: load it in float32."
        )
    return errors


def _refusing(model: nn.Module, what: str, advice: str) -> AbstractContextManager[None]:
    return foreign_errors_as(
        ModelError,
        lambda err: f"{type(model).__name__} {what} ({one_line(err)}). {advice}",
        passing=(ForetokenError, torch.OutOfMemoryError, MemoryError),
    )


def _comparable(logits: Tensor) -> Tensor:
    """Drops entries of about -inf, by which a model forbids tokens: their norm would hide all others."""
    return logits.masked_fill(logits < -1e4, 0.0)


def _check_windows(tested: _Tested) -> None:
    """Checks that every sliding layer hands its window to attention: test trees are too short to show a lost one."""
    config: Any = tested.model.config
    seen: dict[int, int | None] = {}

    def watch(*_: Any) -> None:
        forward_pass = current_pass()
        if forward_pass is not None:
            seen.update(forward_pass.windows)

    handle = tested.model.module.register_forward_hook(watch)
    try:
        with _refusing(tested.model.module, "cannot run on a slot cache", "It cannot be used as a target."):
            tested.verify(tested.slots[:1], [0], TokenTree.roots([0], device=tested.model.device))
    finally:
        handle.remove()
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        lost = [i for i, kind in enumerate(layer_types) if kind == "sliding_attention" and seen.get(i) is None]
    else:
        # Without layer types a window is for every layer, unless `use_sliding_window` is false.
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        is_lost = window is not None and window < tested.context_len and not any(seen.values())
        lost = list(seen) if is_lost else []
    if lost:
        raise ModelError(
            f"layers {lost} of {type(tested.model.module).__name__} slide a window but do not say which to the "
            "attention function. It cannot be used as a target."
        )


DECODERS: dict[str, Callable[[LoadedModel, SlotCache, Sequence[Tap]], Decoder]] = {
    "lean-native": lambda model, cache, taps: NativeDecoder(read_weights(model, cache.num_positions), cache, taps),
    "lean-graphs": lambda model, cache, taps: GraphDecoder(read_weights(model, cache.num_positions), cache, taps),
    "lean-stock": lambda model, cache, taps: StockDecoder(read_weights(model, cache.num_positions), cache, taps),
    "generic": GenericDecoder,
}
EXACT = frozenset(
    kind.name for kind in (NativeDecoder, GraphDecoder, StockDecoder, GenericDecoder) if kind.is_exact
)  # see `Decoder`


def decoders_for(model: LoadedModel) -> list[str]:
    """Returns the decoders for a model's device and dtype; at equal costs an earlier one is preferred."""
    if has_cuda_graphs(model.device):
        return ["lean-graphs", "lean-stock", "generic"]
    native = ["lean-native"] if NativeDecoder.runs(model.device, model.dtype) else []
    return [*native, "lean-stock", "generic"]


def check_architecture(name: str, model: LoadedModel) -> None:
    """Raises `UnsuitableError` for a model that a decoder does not know, before anything is copied or compiled."""
    if name != "generic":
        read_weights(model, 1)


def proven_decoder(
    name: str, model: LoadedModel, cache: SlotCache, taps: Sequence[Tap], *, context_len: int
) -> Decoder:
    """Makes a decoder, one of `DECODERS`, and proves on the model that it computes trees correctly.

    No sequence is in the cache. The first rows of its first and last slot are written, see `check_tree_attention`.
    Raises `ModelError` if the decoder does not know the model or cannot run here, has no kernels for rounded KV rows, a
    tap cannot be read, or the model ignores the attention plug-in.
    """
    if cache.is_rounded and name != NativeDecoder.name:
        raise UnsuitableError(f"it has no kernels for a KV cache in int8, only {NativeDecoder.name} has.")
    decoder = DECODERS[name](model, cache, taps)
    check_tree_attention(model, decoder, cache, context_len=context_len)
    return decoder


def quantized_decoder(
    name: str, model: LoadedModel, cache: SlotCache, taps: Sequence[Tap], *, quantization: Quantization
) -> Decoder:
    """Returns a decoder of a draft model with rounded copies of its matrices.

    The self-test does not run: the logits are those of other weights. The decoder passed it with the original ones.
    Raises `UnsuitableError` if the decoder has no kernels for the format, or the weights cannot be quantised.
    """
    if name != NativeDecoder.name:
        raise UnsuitableError(f"the {name} runner has no kernels for {quantization}, only {NativeDecoder.name} has.")
    return NativeDecoder(read_weights(model, cache.num_positions), cache, taps, quantization=quantization)

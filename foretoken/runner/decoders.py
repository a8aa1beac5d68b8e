"""The decoders by name, what proves them on a model, and the choice of the fastest one.

A decoder proves itself by the self-test (`foretoken.runner.self_test`). What was proven with the same files is
remembered for a month. Among the decoders that fit, measured times at the widths of the engine's passes decide.

"auto" promises that a token's logits have the same bits in every pass if an exact decoder fits the model (see
`Decoder`). It then compares exact decoders only. "fastest" compares all decoders. Where two tokens score nearly the
same, plain and speculative decoding may then choose differently; `foretoken verify` shows such cases. "lean" is "auto"
without the transformers model. Nothing is measured if only one decoder is left.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from foretoken.core.backend import has_cuda_graphs, has_cuda_runtime, is_out_of_memory
from foretoken.core.errors import ConfigError, ModelError, PassError, nearest_name_hint
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.cuda_graphs import GraphDecoder
from foretoken.decoder.head_rows import HeadRows
from foretoken.decoder.library import kernels_version
from foretoken.decoder.native import NativeDecoder
from foretoken.decoder.slot_cache import LayerShape
from foretoken.decoder.torch_blocks import StockDecoder
from foretoken.files.user_cache import KeptEntries
from foretoken.models.generic import GenericDecoder, run_plain
from foretoken.models.lean_weights import read_weights
from foretoken.runner.self_test import check_tree_attention, refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from foretoken.core.passes import Tap
    from foretoken.decoder.base import Decoder
    from foretoken.decoder.blocks import LeanWeights
    from foretoken.decoder.quantized import Quantization
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.models.loading import LoadedModel
    from foretoken.runner.costs import PassCosts

_SMALL = 10_000_000  # weights of a model that is always tested; a choice: that takes some 0.1 s
_PROOF_FORMAT = 1
_PROOFS = KeptEntries(file="foretoken-proofs.json", mark="foretoken_proofs", holder="proofs", what="passed self-tests")
_log = logging.getLogger(__name__)


def layer_shapes(model: LoadedModel) -> list[LayerShape]:
    """Returns the sizes of each layer's keys and values; runs the model only if its architecture is unknown.

    Raises `ModelError` as `probe_layer_shapes`.
    """
    try:
        specs = [block.spec for block in read_weights(model, 1).layers.blocks]
    except UnsuitableError:
        return probe_layer_shapes(model.module)
    return [LayerShape(spec.num_kv_heads, spec.head_dim, spec.head_dim) for spec in specs]


def probe_layer_shapes(model: nn.Module) -> list[LayerShape]:
    """Returns the sizes of each layer's keys and values, from the cache of an ordinary forward.

    Raises `ModelError` if the model cannot run, or a layer keeps anything but keys and values.
    """
    with refusing(type(model).__name__, "cannot run two tokens", "Check its config.json."):
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
    if has_cuda_graphs(model.device):
        return ["lean-graphs", "lean-stock", "generic"]
    native = ["lean-native"] if NativeDecoder.runs(model.device, model.dtype) else []
    return [*native, "lean-stock", "generic"]


def check_architecture(name: str, model: LoadedModel) -> None:
    """Raises `UnsuitableError` for a model that a decoder does not know, before anything is copied or compiled."""
    if name != "generic":
        read_weights(model, 1)


def make_decoder(name: str, model: LoadedModel, cache: SlotCache, taps: Sequence[Tap]) -> Decoder:
    """Makes a decoder, one of `DECODERS`, without a self-test.

    Raises `ModelError` if the decoder does not know the model or cannot run here, has no kernels for quantized KV rows,
    or a tap cannot be read.
    """
    if cache.is_rounded and name != NativeDecoder.name:
        raise UnsuitableError(f"it has no kernels for a KV cache in int8, only {NativeDecoder.name} has.")
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


_TIE = 1.05  # costs within this ratio differ by noise alone; a choice, as repeated bursts scatter by a few percent
_TREE_TOKENS = 2  # of a verification; a choice: published acceptance lengths are 2 to 4, but not every tree is drafted


class PassWidths(NamedTuple):
    """The widths of a runner's passes.

    `max_nodes`: nodes of the widest tree of a sequence, root included; 1 for plain decoding.
    """

    num_slots: int
    max_nodes: int = 16
    prompt_chunk: int = 512

    def passes(self, costs: PassCosts) -> list[tuple[int, float]]:
        """Returns tokens and seconds of a plain step, of the widest verification (if any), and of a prompt chunk."""
        num_tokens = self.num_slots * self.max_nodes
        step, prompt = costs.step(self.num_slots), costs.prompt(self.prompt_chunk)
        trees = [(num_tokens, costs.verification(self.num_slots, num_tokens))] if self.max_nodes > 1 else []
        return [(self.num_slots, step), *trees, (self.prompt_chunk, prompt)]

    def seconds(self, costs: PassCosts) -> float:
        """Returns the cost by which decoders are compared: one step, one verification, and prompt tokens for both.

        The step generates one token a sequence and the verification about two. The prompt is assumed as long as the
        generated text. Without trees: one step, and one prompt token a sequence.
        """
        *decoding, (_, chunk_seconds) = self.passes(costs)
        generated = self.num_slots * (1 if self.max_nodes == 1 else 1 + _TREE_TOKENS)
        return sum(seconds for _, seconds in decoding) + generated * chunk_seconds / self.prompt_chunk


def ranked(costs: Mapping[str, PassCosts], widths: PassWidths) -> list[tuple[str, str]]:
    """Returns decoders, the fastest first, each with a sentence that compares pass times.

    Of costs that differ by noise alone, the earlier key comes first.
    """
    seconds = {name: widths.seconds(costs[name]) for name in costs}
    first = next((name for name in costs if seconds[name] <= _TIE * min(seconds.values())), None)
    order = sorted(costs, key=lambda name: (name != first, seconds[name]))
    return [(name, _comparison(name, costs, widths)) for name in order]


def _comparison(name: str, costs: Mapping[str, PassCosts], widths: PassWidths) -> str:
    def milliseconds(each: str) -> str:
        values = [1e3 * seconds for _, seconds in widths.passes(costs[each])]
        return " / ".join(f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in values)

    if len(costs) == 1:
        return ""
    tokens = " / ".join(str(number) for number, _ in widths.passes(costs[name]))
    others = ", ".join(f"{other} {milliseconds(other)}" for other in costs if other != name)
    return f"{name} is used: passes of {tokens} tokens take {milliseconds(name)} ms ({others})"


RUNNERS = ("auto", "fastest", "lean", *DECODERS)
_said: set[str] = set()


class ChosenDecoder(NamedTuple):
    """The chosen decoder, and the reason as a sentence."""

    decoder: Decoder
    reason: str


def choose_decoder(
    model: LoadedModel,
    cache: SlotCache,
    taps: Sequence[Tap],
    *,
    runner: str,
    widths: PassWidths,
    context_len: int,
    costs: Callable[[str], PassCosts],
) -> ChosenDecoder:
    """Makes the fastest decoder that fits, and proves it on the model; says why others do not fit.

    Args:
        cache: For the decoder; no sequence is in it. Measured candidates have caches of their own.
        costs: Returns pass costs by decoder, see `pass_costs`; called only if there is a choice.

    Raises:
        ConfigError: If `runner` does not exist.
        ModelError: If no requested decoder fits the model.
    """
    candidates = _Candidates(model, runner, widths, costs)
    for name, reason in candidates.in_order():
        try:
            decoder = proven_decoder(name, model, cache, taps, context_len=context_len)
        except ModelError as err:
            candidates.refuse(name, err)
            continue
        if candidates.reasons:
            _say_once(logging.WARNING, f"{model.name} runs on the {name} runner. {candidates.refusals()}")
        if reason:
            _say_once(logging.INFO, f"{model.name}: {reason}")
        return ChosenDecoder(decoder, reason or f"{name} is used: {_why_alone(name, runner)}")
    raise candidates.failure()


def likely_decoder(model: LoadedModel, runner: str, widths: PassWidths, *, costs: Callable[[str], PassCosts]) -> str:
    """Returns what `choose_decoder` will probably choose, before a cache exists; arguments and errors are the same."""
    candidates = _Candidates(model, runner, widths, costs)
    for name, _ in candidates.in_order():
        try:
            costs(name)
        except ModelError as err:
            candidates.refuse(name, err)
            continue
        return name
    raise candidates.failure()


class _Candidates:
    """The decoders that may be used; `reasons` says why others may not, each with their names."""

    def __init__(self, model: LoadedModel, runner: str, widths: PassWidths, costs: Callable[[str], PassCosts]) -> None:
        if runner not in RUNNERS:
            raise ConfigError(f"runner '{runner}' does not exist. {nearest_name_hint(runner, RUNNERS)}")
        self._model, self._runner, self._widths, self._costs = model, runner, widths, costs
        self.reasons: dict[str, list[str]] = {}
        self._generic_error: ModelError | None = None

    def in_order(self) -> Iterator[tuple[str, str]]:
        for group in self._groups():
            fitting = [name for name in group if len(group) == 1 or self._is_known(name)]
            costs, unmeasured = {}, []
            for name in fitting if len(fitting) > 1 else []:
                try:
                    costs[name] = self._costs(name)
                except ModelError as err:
                    self.refuse(name, err)
                except (PassError, MemoryError, RuntimeError) as err:
                    if not isinstance(err, PassError) and not is_out_of_memory(err):
                        raise
                    _log.warning("passes of the %s runner cannot be timed: %s", name, err)
                    unmeasured.append(name)
            yield from ranked(costs, self._widths)
            yield from ((name, "") for name in fitting if len(fitting) == 1)
            yield from ((name, f"{name} is used: its passes could not be timed") for name in unmeasured)

    def refuse(self, name: str, err: ModelError) -> None:
        self.reasons.setdefault(str(err), []).append(name)
        if name == "generic":
            self._generic_error = err.with_traceback(None)  # the frames hold the decoder and its cache

    def refusals(self) -> str:
        return " ".join(f"{', '.join(names)}: {reason}" for reason, names in self.reasons.items())

    def failure(self) -> ModelError:
        return self._generic_error or ModelError(
            f"runner '{self._runner}' cannot run '{self._model.name}'. {self.refusals()}"
        )

    def _groups(self) -> list[list[str]]:
        """Returns names that are compared with each other; a later group only serves if no earlier decoder does."""
        if self._runner in DECODERS:
            return [[self._runner]]
        names = [name for name in decoders_for(self._model) if name != "generic" or self._runner != "lean"]
        if self._runner == "fastest":
            return [names]
        return [[name for name in names if name in EXACT], [name for name in names if name not in EXACT]]

    def _is_known(self, name: str) -> bool:
        try:
            check_architecture(name, self._model)
        except ModelError as err:
            self.refuse(name, err)
            return False
        return True


def _why_alone(name: str, runner: str) -> str:
    if name == runner:
        return "it was asked for"
    is_promised = name in EXACT and runner != "fastest"
    return "no other one gives a token the same bits in every pass" if is_promised else "no other one fits the model"


def _say_once(level: int, message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.log(level, "%s", message)

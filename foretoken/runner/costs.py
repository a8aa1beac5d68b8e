"""What passes of a decoder cost: measured once a machine and model, kept for a month.

The costs decide which decoder is used, how deep chains are drafted and how many nodes a tree has by default. They
differ by machine and dtype: with matrix units or plenty of memory-bound weights 16 tokens cost what one does, in
float32 on a small cache they do not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import TYPE_CHECKING, NamedTuple

import torch

from foretoken.core.backend import has_cuda_runtime
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.lean.build import kernels_version
from foretoken.decoder.memory import affordable_rows
from foretoken.decoder.slot_cache import SlotCache
from foretoken.runner.cost_curve import LIMIT_S, CostCurve
from foretoken.runner.cost_file import keep_points, read_points
from foretoken.runner.decoders import proven_decoder
from foretoken.runner.self_test import NUM_ROWS, probe_layer_shapes

if TYPE_CHECKING:
    from foretoken.decoder.base import Decoder
    from foretoken.models.loading import LoadedModel

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)  # nodes of a tree
_PROMPT_WIDTHS = (1, 32, 128, 512)  # tokens of a chunk of a prompt
_STEP_WIDTHS = (1, 4)  # sequences
_CURVES = {"tree": WIDTHS, "step": _STEP_WIDTHS, "prompt": _PROMPT_WIDTHS}
_PREFIX = 128  # committed rows while trees and steps are timed
_LONGEST_PROMPT_S = 0.5  # wider chunks are not timed after one that took longer
_FORMAT = 4
_log = logging.getLogger(__name__)


class PassCosts(NamedTuple):
    """Costs of the passes that a runner makes.

    Attributes:
        tree: By the nodes of one sequence's tree, with the logits of all of them.
        step: Of one token of each sequence, by the number of sequences.
        prompt: By the tokens of a chunk of one sequence's prompt, without logits.
    """

    tree: CostCurve
    step: CostCurve
    prompt: CostCurve

    def verification(self, num_sequences: int, num_tokens: int) -> float:
        """Seconds of a verification of trees that have so many nodes together."""
        further_sequences = max(self.step(num_sequences) - self.tree(num_sequences), 0.0)  # beyond their tokens
        return self.tree(num_tokens) + further_sequences


def pass_costs(model: LoadedModel, decoder: str, *, is_refreshed: bool = False) -> PassCosts:
    """What passes of a model cost on this machine, with torch's present number of threads.

    Measured the first time, which is logged; later read from `foretoken-costs.json` in the cache directory, for a
    month.

    Args:
        model: A loaded causal LM.
        decoder: One of `DECODERS`.
        is_refreshed: Whether to measure anew, whatever is known.

    Raises:
        ModelError: When the decoder has to be measured and does not fit the model.
        PassError: When there is no memory for the passes; torch.OutOfMemoryError likewise.
    """
    key = _key(model, decoder)
    known = None if is_refreshed else read_points(key, _CURVES)
    if known is not None:
        return PassCosts(**{name: CostCurve(*zip(*pairs, strict=True)) for name, pairs in known.items()})
    _log.info("timing passes of the %s runner once on this machine (a few seconds)", decoder)
    costs = measure_costs(model, decoder)
    keep_points(key, {name: getattr(costs, name).points for name in _CURVES})
    return costs


def measure_costs(model: LoadedModel, decoder: str, *, limit_s: float = LIMIT_S) -> PassCosts:
    """Times passes of a decoder that is made for it, on KV slots of its own; both are freed at the end.

    Args:
        model: A loaded causal LM.
        decoder: One of `DECODERS`.
        limit_s: See `CostCurve.measure`; of trees; steps and prompts get a sixth of it each.

    Raises:
        ModelError, PassError: See `pass_costs`.
    """
    shapes = probe_layer_shapes(model.module)
    num_slots = _STEP_WIDTHS[-1]
    rows = affordable_rows(shapes, dtype=model.dtype, device=model.device) // num_slots
    needed = max(_PREFIX + WIDTHS[-1], min(_PROMPT_WIDTHS[-1], model.context_len))
    rows = max(NUM_ROWS, min(rows, needed))
    cache = SlotCache(shapes, num_slots=num_slots, capacity=rows, dtype=model.dtype, device=model.device)
    made = proven_decoder(decoder, model, cache, (), context_len=min(rows, model.context_len))
    passes = _Passes(model, cache, made)
    return PassCosts(
        tree=CostCurve.measure(passes.tree, passes.tree_widths, limit_s=limit_s),
        step=CostCurve.measure(passes.step, _STEP_WIDTHS, limit_s=limit_s / 6),
        prompt=CostCurve.measure(passes.prompt, passes.prompt_widths, limit_s=limit_s / 6, longest_s=_LONGEST_PROMPT_S),
    )


class _Passes:
    """Passes to be timed, made as the engine makes them; tokens differ, so that a mixture of experts uses many.

    Attributes:
        tree_widths: Nodes of the trees that fit the cache.
        prompt_widths: Tokens of the chunks that fit cache and model.
    """

    def __init__(self, model: LoadedModel, cache: SlotCache, decoder: Decoder) -> None:
        """Takes trees that are chains: a mask is made for them as for any tree.

        Args:
            model: What is run.
            cache: All of it is scratch.
            decoder: Made for the cache.
        """
        self._cache, self._decoder, self._device = cache, decoder, model.device
        self._prefix = min(_PREFIX, model.context_len // 2, cache.capacity // 2)
        self._last_position = min(model.context_len, cache.capacity) - 1
        self.tree_widths = [width for width in WIDTHS if width <= cache.capacity - self._prefix]
        self.prompt_widths = [width for width in _PROMPT_WIDTHS if width <= self._last_position + 1]
        self._tokens = [(7 * i + 3) % model.vocab_size for i in range(max(WIDTHS + _PROMPT_WIDTHS))]
        self._chains = {width: self._chain(width) for width in self.tree_widths}
        self._roots = {width: TokenTree.roots(self._tokens[:width], device=self._device) for width in _STEP_WIDTHS}

    def tree(self, width: int) -> None:
        """One sequence's tree."""
        self._verify(self._chains[width])

    def step(self, width: int) -> None:
        """One token of each sequence."""
        self._verify(self._roots[width])

    def prompt(self, width: int) -> None:
        """The beginning of one sequence's prompt."""
        tokens = self._tokens[:width]
        self._run(Pass.of_chains([tokens], slots=[0], prefix_lens=[0], device=self._device))

    def _chain(self, width: int) -> TokenTree:
        """One sequence's tree of so many nodes."""
        return TokenTree.from_rows([TreeRow(self._tokens[:width], range(-1, width - 1))], device=self._device)

    def _verify(self, tree: TokenTree) -> None:
        """A verification."""
        slots, prefix_lens = range(tree.batch_size), [self._prefix] * tree.batch_size
        self._run(Pass.of_tree(tree, slots=slots, prefix_lens=prefix_lens, last_position=self._last_position))

    def _run(self, work: Pass) -> None:
        """A pass, to its end."""
        self._decoder.run(work)
        self._cache.values[-1][0, 0, 0, 0].item()  # waits for an accelerator


def _key(model: LoadedModel, decoder: str) -> str:
    """Names what the costs depend on: machine, threads, versions, decoder and the sizes of the model."""
    sizes = {name: value for name, value in model.config.to_dict().items() if isinstance(value, int)}
    facts = {
        "format": _FORMAT,
        "torch": torch.__version__,
        "processor": sorted((name, str(value)) for name, value in torch.cpu.get_capabilities().items()),
        "device": torch.cuda.get_device_name(model.device) if has_cuda_runtime(model.device) else str(model.device),
        "threads": torch.get_num_threads(),
        "runner": decoder,
        "kernels": kernels_version(),
        "sanitizers": os.environ.get("FORETOKEN_SANITIZE", "0") != "0",
        "architecture": type(model.module).__name__,
        "dtype": str(model.dtype),
        "sizes": sorted(sizes.items()),
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]

"""The target drafts for itself and reads a part of its KV cache: sinks and recent rows, or those that attention reads.

Listed rows are copied from the target's cache into small slots of their own, where drafts run as ordinary passes: every
decoder, tree and CUDA graph serves them, and rows that were far apart are read one after another. Keys keep their true
positions. Rows of new tokens are appended to a slot; a new list, or a full slot, is copied anew.

- "vegas": verification says which rows matter. The importance of a row is its attention weight from the first and the
  last verified token, averaged over heads; each layer keeps the most important ones.
- "snapkv": the last 32 tokens of the prompt say it once, for each KV head; a row's weight is averaged with those beside
  it.
- "streaming_llm": the first rows of the text and the last ones.

Sources: Vegas (arXiv 2602.07223); SnapKV (2404.14469) and StreamingLLM (2309.17453) as drafters of MagicDec
(2408.11049). Letters: B sequences, L layers, Hk KV heads, n rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from foretoken.core.backend import reads_are_free
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import TokenTree
from foretoken.decoder.quantized import Quantization, bytes_per_weight
from foretoken.decoder.quantized_modules import QuantizedModule
from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle, TargetReads, by_depth
from foretoken.drafters.partial_reads import PartialRows, QuantizationOption, draft_runner
from foretoken.drafters.self_drafts import Guesses, Lookups, ModelGuesses, SelfDrafts, SelfOptions, runner_of
from foretoken.trees.choices import TreeShape

if TYPE_CHECKING:
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.models.loaded import LoadedModel
    from foretoken.trees.dynamic import AnyShape

_LEAST_BUDGET = 256  # rows; Vegas
_ROOM = 512  # rows behind the listed ones for newer tokens, before a slot is filled anew; a choice
_LEAST_SPEEDUP = 1.1  # modelled; a choice: below it the model's error is larger than the gain
_USUAL_ACCEPTANCE = 0.9  # of drafts in that model; NOTES, "Drafting with a part of the KV cache"
_PASSES_A_TOKEN = 0.5  # of drafts with guesses, in that model: NOTES, "Guesses under the drafts"
_OBSERVED = {"vegas": 1, "snapkv": 32, "streaming_llm": 0}  # last tokens of a prompt that select; Vegas and MagicDec
_POOLED = 5  # rows, a row and those beside it, whose weights SnapKV averages; MagicDec
KvSelection = Literal["vegas", "snapkv", "streaming_llm"]


class Options(SelfOptions):
    """Options of drafting with a part of the KV cache.

    Attributes:
        kv_selection: "vegas", "snapkv" or "streaming_llm", see the module.
        kv_budget: Rows of each sequence that are selected, beside at most 512 newer ones; for "streaming_llm" the most
            rows that a draft reads. None for `kv_ratio`.
        kv_ratio: Rows as a part of the text, at least 256.
        kv_sinks: First rows of a text that "streaming_llm" always reads.
        draft_with: What guesses tokens of a chain, so that a pass drafts several: "ngram" for earlier text, or the
            directory or hub id of a draft model with the target's vocabulary; None for one pass a token.
        quantization: As for `draft_model`; int8 copies take one more byte a weight of the target.
    """

    kv_selection: KvSelection = "vegas"
    kv_budget: int | None = Field(default=None, ge=2, le=1 << 20)
    kv_ratio: float = Field(default=0.07, gt=0, le=1)
    kv_sinks: int = Field(default=16, ge=0, le=1024)
    draft_with: str | None = Field(default=None, min_length=1)
    quantization: QuantizationOption = "none"

    @model_validator(mode="after")
    def _guesses_chains(self) -> Self:
        if self.draft_with is not None and self.tree != "chain":
            raise ConfigError(
                f"'tree' is {self.tree!r}, but 'draft_with' drafts chains. Pass 'tree': 'chain', or omit 'draft_with'."
            )
        return self

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        least, budget = _OBSERVED["snapkv"], self.kv_budget
        if self.kv_selection == "snapkv" and budget is not None and budget <= least:
            raise ConfigError(f"kv_budget is {budget}, and SnapKV keeps the last {least} rows anyway. Expected more.")
        if self.kv_selection == "streaming_llm" and self.kv_sinks >= (budget or _LEAST_BUDGET):
            raise ConfigError(
                f"kv_sinks are {self.kv_sinks} of {budget or _LEAST_BUDGET} rows, which leaves no recent ones. "
                "Expected fewer."
            )
        return self

    def budget(self, length: int) -> int:
        """Returns the rows that are listed of a text of so many rows."""
        return min(length, self.kv_budget or max(_LEAST_BUDGET, math.ceil(self.kv_ratio * length)))

    def num_recent(self, length: int) -> int:
        """Returns the last rows of a text that are listed beside its first ones.

        "streaming_llm" lists an eighth less than the budget, so that newer rows fit into it.
        """
        budget = self.budget(length)
        later = budget // 8 if self.kv_selection == "streaming_llm" and budget < length else 0
        return max(budget - min(self.kv_sinks, length) - later, 1)

    def most_rows(self, length: int) -> int:
        """Returns the most rows that a draft reads of a text: the budget, and newer rows if rows were selected."""
        return self.budget(length) + (0 if self.kv_selection == "streaming_llm" else _ROOM)


class SparseKvDrafter:
    """Drafts with the target on a part of its KV rows."""

    name = "sparse_kv"

    def __init__(self, options: Options) -> None:
        self._options = options
        observed = _OBSERVED[options.kv_selection]
        self.reads = TargetReads(
            is_last_enough=True, attention_tokens=observed, attention_every=int(options.kv_selection == "vegas")
        )
        self._take_shape(options.language_model_shape())
        self._guesses: Guesses | None = None

    def attach(self, target: TargetHandle) -> None:
        """Allocates slots and, for quantized drafts, copies of weights.

        Raises `ConfigError` if the target has fewer blocks than `exit_layer`, or as `draft_runner`.
        """
        options, model = self._options, target.model
        if (options.exit_layer or 1) > model.num_layers:
            raise ConfigError(
                f"exit_layer is {options.exit_layer}, and '{target.name}' has {model.num_layers} blocks. Expected at "
                f"most {model.num_layers}."
            )
        self._target, self._num_layers = target, options.exit_layer or model.num_layers
        self._take_shape(shape := options.language_model_shape(lambda: target.costs))
        most_fed = 1 + (shape.num_nodes if isinstance(shape, TreeShape) else shape.num_expanded)
        rows = options.budget(target.context_len) + _ROOM
        cache, runner = runner_of(target).cache, draft_runner(model, target, most_fed, options.quantization, rows)
        self._rows = PartialRows(
            runner.cache, most_fed + 1, options.kv_sinks, options.num_recent, cache, is_copy=True,
            most=options.most_rows,
        )  # fmt: skip
        if options.draft_with is not None:
            self._guesses = Lookups() if options.draft_with == "ngram" else ModelGuesses(options.draft_with, target)
        self._drafts = SelfDrafts(target, runner, self._rows, options, self._num_layers, self._guesses)
        self._runner = runner
        self._costs = DraftBytes.of(model, cache, self._num_layers, quantization=runner.quantization)

    def _take_shape(self, shape: AnyShape) -> None:
        self._shapes = by_depth(shape)
        self.nodes_by_depth: Sequence[int] = [each.num_nodes for each in self._shapes]

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Starts without a selection: until the target has read the prompt, drafts read sinks and recent rows."""
        self._rows.begin(slot)
        if self._guesses is not None:
            self._guesses.begin(slot, request)

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns trees; roots alone if the engine chooses the depth and the modelled speed-up is below 1.1."""
        if self._options.is_adaptive:
            lengths = [len(tokens) - 1 for tokens in context.tokens]
            if self.modelled_speedup(lengths) < _LEAST_SPEEDUP:
                return TokenTree.roots(context.roots, device=self._target.device)
        if self._runner.follow_weights():
            self._rows.forget()
        return self._drafts.propose(context, self._shapes)

    def commit(self, committed: Committed) -> None:
        """Selects rows by the attention weights of a prompt or a verification, if there are any."""
        is_once = self._options.kv_selection == "snapkv"
        for slot, weights in zip(committed.slots, committed.attention or (), strict=False):
            if weights is None or (is_once and committed.verified is not None):
                continue
            length, observed = weights.shape[2], _OBSERVED["snapkv"] if is_once else 0
            end, budget = length - observed, self._options.budget(length) - observed
            if 0 < budget < end:
                importance = self._importance(weights[: self._num_layers, :, :end])
                self._rows.choose(slot, greatest(importance, budget), end)

    def _importance(self, weights: Tensor) -> Tensor:
        """Returns the importance of C rows, (L, C) or (L, Hk, C), from their attention weights (L, Hk, C)."""
        if self._options.kv_selection == "vegas":
            return weights.mean(1)
        return torch.nn.functional.avg_pool1d(weights, _POOLED, stride=1, padding=_POOLED // 2)

    def release(self, slot: int) -> None:
        """Forgets nothing: `begin` starts anew."""

    def modelled_speedup(self, lengths: Sequence[int]) -> float:
        """Returns the best speed-up over plain decoding of B texts, if bytes alone cost time, see `DraftBytes`.

        Source: MagicDec (arXiv 2408.11049), section 3, with an acceptance rate of 0.9.
        """
        listed = [self._options.budget(length) for length in lengths]
        share = self._costs.draft(listed) / self._costs.plain(lengths)
        if self._guesses is not None:
            share *= _PASSES_A_TOKEN
        taus = [(1 - _USUAL_ACCEPTANCE ** (depth + 1)) / (1 - _USUAL_ACCEPTANCE) for depth in range(len(self._shapes))]
        return max(tau / (depth * share + 1) for depth, tau in enumerate(taus))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBytes:
    """The bytes that passes of one token a sequence read.

    Attributes:
        weights: Of a pass through all blocks, and of a draft's pass.
        row: Of one KV row, in all blocks and in a draft's.
    """

    weights: tuple[float, float]
    row: tuple[float, float]

    @classmethod
    def of(
        cls, model: LoadedModel, cache: SlotCache, num_layers: int, *, quantization: Quantization | None
    ) -> DraftBytes:
        """Returns the bytes of a model on a cache, and of drafts through its first blocks."""
        module: Any = model.module
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        total = _num_bytes(each for each in module.modules() if each is not embedding)  # with a tied LM head's weight
        top = 0 if head is None else _num_bytes(head.modules())
        draft = top + (total - top) * num_layers / model.num_layers
        if quantization is not None and model.quantization is None:
            draft *= bytes_per_weight(quantization) / model.dtype.itemsize
        sizes = [part.shape[1] * part.shape[3] * part.itemsize for part in (*cache.keys, *cache.values)]
        return cls(weights=(total, draft), row=(sum(sizes), sum(sizes) * num_layers / model.num_layers))

    def plain(self, lengths: Sequence[int]) -> float:
        """Returns the bytes of a step of plain decoding behind so many rows of each sequence."""
        return self.weights[0] + self.row[0] * sum(lengths)

    def draft(self, listed: Sequence[int]) -> float:
        """Returns the bytes of one drafted token of each sequence that reads so many rows."""
        return self.weights[1] + self.row[1] * sum(listed)


def _num_bytes(modules: Iterable[nn.Module]) -> int:
    """Returns the bytes of the weights that the modules themselves have."""
    found: dict[int, int] = {}
    for part in modules:
        integers = part.buffers(recurse=False) if isinstance(part, QuantizedModule) else ()
        found |= {id(each): each.nbytes for each in (*part.parameters(recurse=False), *integers)}
    return sum(found.values())


def greatest(weights: Tensor, count: int) -> Tensor:
    """Returns (…, count) int64, ascending: the indices of the greatest of (…, C) weights, which may be equal."""
    if not reads_are_free(weights.device):
        return weights.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    size = weights.shape[-1]
    found = np.argpartition(weights.numpy(), size - count, axis=-1)[..., size - count :]  # five times as fast as topk
    return torch.from_numpy(np.sort(found, axis=-1))


create: Callable[[Options], Drafter] = SparseKvDrafter  # see `foretoken.drafters.registry`

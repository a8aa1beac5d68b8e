"""Drafters over trained heads: features, the choice of a tree and its construction.

A method derives from `HeadDrafter` and adds its own parts.

Letters: B sequences, E hidden size, W width of a head's state, K heads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from foretoken.core.backend import has_cuda_runtime, runs_cpu_kernels
from foretoken.core.errors import ConfigError
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import TokenTree
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.block_stack import BlockStack
from foretoken.drafters.base import TargetReads, TreeOption, by_depth
from foretoken.drafters.head_features import LastFeatures, WaitingFeatures
from foretoken.drafters.levels import CapturedExpansion, KeptDraws
from foretoken.drafters.native.heads import HeadKernels
from foretoken.drafters.partial_reads import DraftTokens, PartialRows, WeightOptions, with_quantization
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.formats.files import local_head
from foretoken.formats.registry import read_head
from foretoken.heads.base import Head, StepHead
from foretoken.models.parts import TargetParts, target_parts
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees.choices import PUBLISHED, TreeShape, best_shape

if TYPE_CHECKING:
    from foretoken.decoder.quantized import Quantization
    from foretoken.drafters.base import Committed, DraftContext, DraftRequest, TargetHandle
    from foretoken.heads.decoder_layer import DecoderLayer
    from foretoken.models.loaded import LoadedModel
    from foretoken.trees.dynamic import AnyShape, ShapedExpansion
    from foretoken.trees.expansion import Expansion


class HeadOptions(WeightOptions):
    """Options of all drafters over heads.

    Attributes:
        model: Directory or hub id of the head, in any format that `foretoken convert` knows.
        tree: As for every method. "tree" is the static tree that pays most on this machine by the acceptance stored
            with the head, or else the head's published tree; in each iteration as deep as pays, down to no draft at
            all.
        quantization: Also of a copy of the target's LM head if the head shares it. "none" drafts in the target's
            precision: float32, or bfloat16 if the target is.
        allow_other_target: Accept a head that was trained for another target of the same sizes.
    """

    large_vocabulary: ClassVar[int] = 1 << 15  # a choice: the target's LM head is most of what such heads read

    tree: TreeOption = "tree"
    allow_other_target: bool = False


def checked_head(options: HeadOptions, model: LoadedModel) -> HeadCheckpoint:
    """Returns the checkpoint that the options name; raises `ConfigError` for another method or target.

    A missing model also raises `ConfigError`. A checkpoint that is missing or damaged raises `ModelError`.
    """
    method = options.method
    if options.model is None:
        raise ConfigError(f"method '{method}' needs a trained head. Expected its directory or hub id. Set 'model'.")
    fingerprint = TargetFingerprint.of(model)
    path = local_head(options.model, options.revision)
    _, checkpoint = read_head(path, target=fingerprint, base_config=model.config)
    if checkpoint.config.method != method:
        raise ConfigError(
            f"'{options.model}' holds a head of method '{checkpoint.config.method}'. Expected one of '{method}'. "
            f"Set 'method' to '{checkpoint.config.method}'."
        )
    if options.allow_other_target:
        fingerprint = fingerprint.model_copy(update={"weights": None, "architecture": None, "num_layers": None})
    checkpoint.check_target(fingerprint, what=options.model)
    return checkpoint


_FALLBACK_TREE = "mc_sim_7b_63"
_TIMED_CALLS = 5  # the first ones warm up


class HeadDrafter:
    """Drafts with a trained head, evaluated at every node that has children.

    A method overrides `fill` if its head works differently, `state_of` if steps do not start from the feature itself,
    and `features_for` if features are encoded first.

    Attributes:
        reads_last: Whether only the feature of the last position is read.
        read_share: See `SparingReader`; nothing of heads that read the last feature alone.
        has_window: Whether the head has a decoder block that `draft_window_size` narrows.
        checkpoint: The head's files; without weights after `attach`.
        head: The network, after `attach`, like the next three.
        parts: Modules that it shares with the target.
        dtype: Of its features.
        quantization: Of its matrices; None if they are as stored.
        shape: The tree that is drafted, cut off at the allowed depth.
    """

    reads_last: ClassVar[bool] = True
    read_share: float = 0.0
    has_window: bool = False
    head: Head

    def __init__(self, options: HeadOptions, model: LoadedModel) -> None:
        """Reads the head's files; `attach` makes the network. Raises the errors of `checked_head`."""
        self.name, self.options = options.method, options
        self.checkpoint = checked_head(options, model)
        reads = TargetReads(taps=self.checkpoint.config.taps, is_last_enough=self.reads_last)
        self.reads = options.with_attention(reads)
        self.shape: AnyShape = TreeShape(())
        self.nodes_by_depth: Sequence[int] = (1, options.max_nodes)
        self._draws = KeptDraws(options.draft_sample_method, options.pruning, options.stop)
        self._drafted: DraftTokens | None = None  # a part of the target's vocabulary

    def attach(self, target: TargetHandle) -> None:
        """Makes the network, and chooses the tree by the measured seconds of passes and drafts."""
        self._target = target
        self._features = with_quantization(self.options.quantization, self._prepared)
        self.checkpoint = replace(self.checkpoint, weights={})  # the network has its own
        self._kernels = self._native_kernels()
        self._expansion = self._expansions()
        self.shape = self._chosen_shape()
        self._shapes = by_depth(self.shape)
        self.nodes_by_depth = [shape.num_nodes for shape in self._shapes]

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Starts without features, except those of a prefix. If weights of the target changed, all slots start anew."""
        self.parts.follow_weights()
        self._learn_tokens([request.prompt])
        self._features.begin(slot, request.prefix)

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> TokenTree:
        """Returns the shape for sequences with known features, the root alone for others."""
        room = [
            depth if self._features.is_known(slot, len(tokens) - 1) else 0
            for slot, tokens, depth in zip(context.slots, context.tokens, context.max_depth, strict=True)
        ]
        rows = [row for row, depth in enumerate(room) if depth > 0]
        if not rows:
            return TokenTree.roots(context.roots, device=self._target.device)
        expansion = self._expanded(context, rows, self._shapes[min(max(room), len(self._shapes) - 1)])
        return expansion.finish(rows, room, context.roots)

    def commit(self, committed: Committed) -> None:
        """Takes the features."""
        if committed.verified is not None:
            self._learn_tokens(committed.tokens)
        self._features.learn(committed)

    def release(self, slot: int) -> None:
        """Stores the features of committed positions."""

    def reusable(self, slot: int, length: int) -> int:
        """See `PrefixKeeper`."""
        return self._features.reusable(slot, length)

    @property
    def expected_acceptance(self) -> list[float]:
        """See `MeasuredDrafter`: below the best node of each level, by the table stored with the head."""
        table, shape = self.checkpoint.acceptance, self.shape
        if table is None or not isinstance(shape, TreeShape):
            return []
        widths = [sum(choice[:-1] == (0,) * depth for choice in shape.choices) for depth in range(shape.depth)]
        return [min(sum(row[:width]), 1.0) for row, width in zip(table, widths, strict=False)]

    def features_for(self, target: TargetHandle) -> LastFeatures | WaitingFeatures:
        """Returns the store of the target's features: the last feature of each slot."""
        return LastFeatures(target.num_slots, self.head.config.hidden_size, device=target.device, dtype=self.dtype)

    def stack_of(self, layer: DecoderLayer, num_scratch: int = 0) -> BlockStack:
        """Returns the head's decoder block with a KV cache for the context or a window, and drafted positions."""
        most, rows = self._target.context_len + num_scratch, self.options.partial_rows
        return BlockStack(
            layer.as_blocks(most), num_slots=self._target.num_slots, num_positions=most,
            capacity=most if rows is None else min(rows + num_scratch, most), quantization=self.quantization,
        )  # fmt: skip

    def rows_of(self, stack: BlockStack, num_scratch: int = 0) -> PartialRows:
        """Returns which rows of that KV cache drafts read."""
        return PartialRows.own(stack.cache, num_scratch, self.options, self._target.context_len)

    def state_of(self, features: Tensor) -> Tensor:
        """Returns the first state of the steps, (B, W), from (B, E) features."""
        return features

    def fill(self, expansion: Expansion, state: Tensor) -> None:
        """Fills a tree of roots in place, level by level, from the first state, (B, W), without reading any tensor."""
        assert isinstance(self.head, StepHead), "other heads have a `fill` of their own"
        fill_by_steps(self.head, self.parts, expansion, state)

    def _prepared(self, quantization: Quantization | None) -> LastFeatures | WaitingFeatures:
        target, is_on_cpu = self._target, runs_cpu_kernels(self._target.device)
        if self.options.draft_window_size is not None and not self.has_window:
            raise ConfigError(
                f"'{self.options.model}' has no decoder block that a window could narrow. Expected draft_window_size "
                "for heads of EAGLE, EAGLE-3 and Hydra++ alone. Leave it out."
            )
        if quantization is not None and not is_on_cpu:
            raise UnsuitableError(f"only CPUs have kernels for {quantization}, not {target.device}.")
        self.dtype = drafting_dtype(target.model)
        self.head, self.quantization = self.checkpoint.module(device=target.device, dtype=self.dtype), quantization
        if is_on_cpu:
            # bfloat16 rounds inputs, as int8 and a target in bfloat16 do.
            compacts = quantization is not None or target.dtype == torch.bfloat16
            self.head.optimize_for_inference(quantization, compacts=compacts)
        self.parts = self._shared_parts()
        return self.features_for(target)

    def _shared_parts(self) -> TargetParts:
        """Returns the target's parts; of the LM head the rows of the draft vocabulary, if it is a part."""
        options, head, model = self.options, self.head, self._target.model
        if not head.has_target_lm_head:
            if options.draft_vocab is not None or options.draft_vocab_size not in ("auto", "all"):
                raise ConfigError(
                    f"'{options.model}' has an LM head of its own, which drafts its own tokens. Expected a draft "
                    "vocabulary for heads that share the target's. Leave 'draft_vocab_size' and 'draft_vocab' out."
                )
            return target_parts(model, dtype=self.dtype, is_inference=True)
        shared: dict[str, Any] = {"dtype": self.dtype, "is_inference": True, "quantization": self.quantization}
        self._drafted = options.drafted_tokens(model, self.checkpoint.draft_vocab)
        if self._drafted is not None:
            try:
                parts = target_parts(model, **shared, head_tokens=torch.tensor(self._drafted.ids))
            except UnsuitableError:
                if self._drafted.is_required:
                    raise
                self._drafted = None
            else:
                assert parts.head_rows is not None, "it was asked for"
                head.token_map = parts.head_rows.tokens
                return parts
        return target_parts(model, **shared)

    def _learn_tokens(self, texts: Iterable[Sequence[int]]) -> None:
        """Lets texts' tokens into the draft vocabulary."""
        if self._drafted is not None and self.parts.head_rows is not None:
            for tokens in texts:
                self._drafted.learn(tokens, self.parts.head_rows)

    def _expansions(self) -> CapturedExpansion[None]:
        return CapturedExpansion(self._fill, self._target.device)

    def _native_kernels(self) -> HeadKernels | None:
        if not isinstance(self.head, StepHead) or not runs_cpu_kernels(self._target.device):
            return None
        steps = self.head.native_steps(self.parts)
        try:
            return None if steps is None else HeadKernels(steps)
        except UnsuitableError:
            return None

    def _fill(self, expansion: ShapedExpansion, features: Tensor) -> None:
        kernels = self._kernels
        if kernels is not None and kernels.can_fill(expansion):
            kernels.fill(expansion, features)
        else:
            self.fill(expansion, self.state_of(features))

    def _expanded(self, context: DraftContext, rows: Sequence[int], shape: AnyShape) -> Expansion:
        slots, texts = [context.slots[row] for row in rows], [context.tokens[row] for row in rows]
        features = self._features.of(slots, texts)
        roots, draws = self._draws.of(context, rows, self._target.device)
        return self._expansion.expand(shape, roots, draws, [features])[0]

    def trial(self, shape: TreeShape, roots: Tensor, draws: DraftDraws) -> None:
        """Drafts a tree of one sequence without content, to time it; before any sequence has begun."""
        size = self.head.config.hidden_size
        features = torch.zeros(1, size, device=roots.device, dtype=self.dtype)
        self._expansion.expand(shape, roots, draws, [features])

    def _chosen_shape(self) -> AnyShape:
        options, depth = self.options, self.head.config.max_depth
        if depth is None:
            return self._asked_shape()
        if options.num_speculative_tokens is not None and options.num_speculative_tokens > depth:
            raise ConfigError(
                f"num_speculative_tokens is {options.num_speculative_tokens}, but '{options.model}' has {depth} "
                f"heads, which draft a token each. Expected at most {depth}."
            )
        shape = self._asked_shape()
        if shape.depth > depth and not isinstance(options.tree, str):
            raise ConfigError(
                f"the tree is {shape.depth} deep, but '{options.model}' has {depth} heads. Expected choices no longer "
                "than that."
            )
        return shape.truncated(depth)

    def _asked_shape(self) -> AnyShape:
        options = self.options
        if options.tree == "dynamic":
            depth = options.num_speculative_tokens or self.head.config.steps
            return options.dynamic_shape(depth, lambda: self._target.costs)
        return options.shape(self._best_shape)

    def _best_shape(self) -> TreeShape:
        checkpoint, max_nodes = self.checkpoint, self.options.max_nodes
        if checkpoint.acceptance is None:
            choices = PUBLISHED[_FALLBACK_TREE] if checkpoint.choices is None else checkpoint.choices
            shape = TreeShape.from_choices(tuple(choice) for choice in choices)
            return TreeShape(shape.choices[: max_nodes - 1])
        table = checkpoint.acceptance[: self.options.num_speculative_tokens]
        level_s = self._chain_seconds(len(table)) / len(table)
        return best_shape(table, self._target.costs, level_seconds=level_s, max_nodes=max_nodes)

    @torch.inference_mode()
    def _chain_seconds(self, depth: int) -> float:
        """Returns the seconds of the fastest of a few drafts of a chain, device included."""
        device = self._target.device
        request = SamplingRequest(params=SamplingParams(temperature=0.0), seed=0)
        batch = SamplingBatch.build([request], self._target.vocab_size, device)
        draws = DraftDraws.build(batch, [False], torch.zeros(1, dtype=torch.int64, device=device))
        roots = torch.zeros(1, dtype=torch.int64, device=device)
        best = float("inf")
        for _ in range(_TIMED_CALLS):
            begin = time.perf_counter()
            self.trial(TreeShape.chain(depth), roots, draws)
            if has_cuda_runtime(device):
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - begin)
        return best


def drafting_dtype(target: LoadedModel) -> torch.dtype:
    """Returns the dtype in which heads draft for a target: drafts need not be exact."""
    return torch.float32 if runs_cpu_kernels(target.device) else target.dtype


def fill_by_steps(head: StepHead, parts: TargetParts, expansion: Expansion, state: Tensor) -> None:
    """Fills a tree of roots in place from (B, W); evaluates the head at every node that has children."""
    states = state.unsqueeze(1)
    for depth in expansion.levels():
        frontier = expansion.frontier(depth)
        states, hidden = head.step(depth, frontier.inherited(states), frontier.tokens, parts)
        expansion.grow(depth, head.logits(depth, hidden, parts).float())

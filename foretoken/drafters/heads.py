"""What the drafters over trained heads share: options, loading, the tree that pays, and growing it with a head.

Letters: B sequences, E hidden size, W width of a head's state, K heads.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from foretoken.core.backend import has_cuda_runtime, runs_cpu_kernels
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import DrafterOptions, TargetFacts, TreeOption
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.formats.hub import local_head
from foretoken.formats.registry import read_head
from foretoken.hf.parts import TargetParts, target_parts
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees.choices import TreeShape
from foretoken.trees.published import PUBLISHED
from foretoken.trees.search import best_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.drafters.base import Committed, DraftContext
    from foretoken.drafters.captured_growth import CapturedGrowth
    from foretoken.heads.base import Head
    from foretoken.trees.growth import TreeGrowth


_FALLBACK_TREE = "mc_sim_7b_63"


class HeadOptions(DrafterOptions):
    """Options of all drafters over heads.

    Attributes:
        model: Directory or hub id of the head, in any format that `foretoken convert` knows.
        revision: Of the hub, where `model` is a hub id; None for its main branch.
        tree: As for every method; "tree" is the static tree that pays most on this machine by the acceptance stored
            with the head, or the head's published one where none is stored; as deep in each iteration as pays, down to
            no draft at all.
        draft_sample_method: "probabilistic" draws drafts from the head's warped distribution for sampled requests
            without a seed; "greedy" always takes its most probable tokens.
        allow_other_target: Accept a head that was trained for another target of the same sizes.
    """

    is_trusted: ClassVar[bool] = True
    can_adapt_tree: ClassVar[bool] = True

    revision: str | None = None
    tree: TreeOption = "tree"
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    allow_other_target: bool = False


class LoadedHead(NamedTuple):
    """A head ready to draft with, what it shares with the target, and where it came from."""

    head: Head
    parts: TargetParts
    checkpoint: HeadCheckpoint


def load_head(options: HeadOptions, target: TargetFacts, method: str) -> LoadedHead:
    """Loads the head that the options name.

    Raises:
        ConfigError: Without a model, or when the head is of another method or for another target.
        ModelError: When the checkpoint is missing or damaged, or cannot be downloaded.
    """
    if options.model is None:
        raise ConfigError(f"method '{method}' needs a trained head. Expected its directory or hub id. Set 'model'.")
    if target.model is None:
        raise ConfigError(f"method '{method}' reads the target's own weights. Expected a target that is loaded.")
    fingerprint = TargetFingerprint.of(target.model)
    path = local_head(options.model, options.revision)
    _, checkpoint = read_head(path, target=fingerprint, base_config=target.model.config)
    if checkpoint.config.method != method:
        raise ConfigError(
            f"'{options.model}' holds a {checkpoint.config.method} head. Expected a {method} head. "
            f"Set 'method' to '{checkpoint.config.method}'."
        )
    if options.allow_other_target:
        fingerprint = fingerprint.model_copy(update={"weights": None, "architecture": None, "num_layers": None})
    checkpoint.check_target(fingerprint, what=options.model)
    is_on_cpu = runs_cpu_kernels(target.device)
    dtype = torch.float32 if is_on_cpu else target.dtype  # drafts need no exactness: neither does it widen any weight
    head = checkpoint.module(device=target.device, dtype=dtype)
    if is_on_cpu:
        head.optimize_for_inference()
    return LoadedHead(head, target_parts(target.model, dtype=dtype, is_inference=True), checkpoint)


def head_shape(
    options: HeadOptions, loaded: LoadedHead, target: TargetFacts, draft_seconds: Callable[[TreeShape], float]
) -> TreeShape:
    """The tree that the options ask for, no deeper than there are heads.

    Args:
        options: Of the drafter.
        loaded: The head.
        target: Tells what passes cost.
        draft_seconds: Seconds that drafting a shape takes.
    """

    def branching() -> TreeShape:
        checkpoint = loaded.checkpoint
        if checkpoint.acceptance is not None:
            table = checkpoint.acceptance[: options.num_speculative_tokens]
            level_s = draft_seconds(TreeShape.chain(len(table))) / len(table)
            return best_shape(table, target.pass_seconds, level_seconds=level_s, max_nodes=options.max_nodes)
        choices = PUBLISHED[_FALLBACK_TREE] if checkpoint.choices is None else checkpoint.choices
        shape = TreeShape.from_choices(tuple(choice) for choice in choices)
        return TreeShape(shape.choices[: options.max_nodes - 1])

    depth = loaded.head.config.num_heads
    if options.num_speculative_tokens is not None and options.num_speculative_tokens > depth:
        raise ConfigError(
            f"num_speculative_tokens is {options.num_speculative_tokens}, but '{options.model}' has {depth} heads, "
            f"which draft a token each. Expected at most {depth}."
        )
    shape = options.shape(branching)
    if shape.depth > depth and not isinstance(options.tree, str):
        raise ConfigError(
            f"the tree is {shape.depth} deep, but '{options.model}' has {depth} heads. Expected choices no longer "
            "than that."
        )
    return shape.truncated(depth)


@torch.inference_mode()
def chain_seconds(shape: TreeShape, loaded: LoadedHead, state: Tensor) -> float:
    """Seconds that a head evaluated step by step takes for a chain as deep as a shape.

    Args:
        shape: Tells the depth.
        loaded: The head.
        state: (1, W), what steps start from.
    """

    def draft() -> None:
        states, tokens = state.unsqueeze(1), torch.zeros(1, 1, dtype=torch.int64, device=state.device)
        for depth in range(shape.depth):
            states, hidden = loaded.head.step(depth, states, tokens, loaded.parts)
            tokens = loaded.head.logits(depth, hidden, loaded.parts).float().topk(10, dim=2).indices[:, :, 0]

    return timed(draft, state.device)


def timed(draft: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few calls, until the device is done: the first ones warm up."""
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        draft()
        if has_cuda_runtime(device):
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best


class Proposal:
    """One call of `propose` in the making: for which sequences of the batch, and how their trees are to grow.

    Attributes:
        rows: The sequences that are drafted for, by their place in the batch; none when the tree is roots alone.
    """

    def __init__(
        self, context: DraftContext, shape: TreeShape, is_ready: Callable[[int, int], bool], options: HeadOptions,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Begins a proposal.

        Args:
            context: What the engine tells.
            shape: The tree to grow.
            is_ready: Slot and number of committed positions to whether the drafter knows the features up to there.
            options: Of the drafter.
            device: Where trees lie.
        """
        self._context, self._device = context, device
        self._room = [
            depth if is_ready(slot, len(tokens) - 1) else 0
            for slot, tokens, depth in zip(context.slots, context.tokens, context.max_depth, strict=True)
        ]
        self.rows = [row for row, depth in enumerate(self._room) if depth > 0]
        if not self.rows:
            return
        is_everyone = len(self.rows) == len(self._room)
        self._draws = DraftDraws.build(
            context.sampling if is_everyone else context.sampling.select(torch.tensor(self.rows, device=device)),
            [context.is_coupled[row] for row in self.rows],
            torch.tensor([len(context.tokens[row]) - 1 for row in self.rows], device=device),
            greedy=options.draft_sample_method == "greedy",
        )
        self._roots = torch.tensor([context.roots[row] for row in self.rows], device=device)
        self._shape = shape.truncated(max(self._room))

    @property
    def slots(self) -> list[int]:
        """Slots of the sequences that are drafted for."""
        return [self._context.slots[row] for row in self.rows]

    def without_drafts(self) -> TokenTree:
        """Roots alone."""
        return TokenTree.roots(self._context.roots, device=self._device)

    def grown(self, grower: CapturedGrowth, state: Tensor) -> TokenTree:
        """The trees of the whole batch.

        Args:
            grower: Grows them.
            state: (rows, W), what its steps start from.
        """
        growth = grower.grow(self._shape, self._roots, self._draws, state)
        return growth.finish(self.rows, self._room, self._context.roots)


def grow(head: Head, parts: TargetParts, growth: TreeGrowth, state: Tensor) -> None:
    """Fills a tree with a head that is evaluated at every node that has children.

    Args:
        head: Takes a token a step.
        parts: What it shares with the target.
        growth: A tree of roots; changed.
        state: (B, W), what its steps start from.
    """
    level, states = [0], state.unsqueeze(1)
    for depth in range(growth.shape.depth):
        states, hidden = head.step(depth, states, growth.tokens_at(level), parts)
        growth.expand(level, head.logits(depth, hidden, parts).float())
        following = growth.parents_at(depth + 1)
        origins = [level.index(parent) for parent in growth.parents_of(following)]
        if origins != list(range(len(level))):
            states = states[:, origins]
        level = following


class LastFeatures:
    """The target's feature at the last committed position of every slot."""

    def __init__(self, num_slots: int, hidden_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._features = torch.zeros(num_slots, hidden_size, device=device, dtype=dtype)
        self._known = [0] * num_slots  # positions whose last feature is here

    def is_known(self, slot: int, length: int) -> bool:
        """Whether the feature of position `length - 1` is here."""
        return length > 0 and self._known[slot] == length

    def learn(self, committed: Committed) -> None:
        """Takes what entered the target's KV."""
        assert committed.features is not None, "the drafter taps features"
        features = committed.features[:, :, 0]
        if features.shape[1] == 1:
            latest = features[:, 0]
        else:
            last = torch.tensor([length - 1 for length in committed.lengths], device=features.device)
            latest = features[torch.arange(len(last), device=last.device), last]
        self._features[torch.tensor(list(committed.slots), device=features.device)] = latest.to(self._features.dtype)
        for slot, start, length in zip(committed.slots, committed.starts, committed.lengths, strict=True):
            self._known[slot] = start + length

    def of(self, slots: Sequence[int]) -> Tensor:
        """(B, E), of some slots."""
        return self._features[torch.tensor(list(slots), device=self._features.device)]

    def forget(self, slot: int) -> None:
        """The slot's sequence is over."""
        self._known[slot] = 0

"""Drafts a chain or a tree with a smaller language model, on its own KV cache.

The draft model has the target's vocabulary, or one that shares tokens with it (`foretoken.drafters.vocabularies`).
With `vocab_match="text"` it drafts text (`foretoken.drafters.text_draft`).

Sources: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (2302.01318) for chains; sampled trees draw
children without replacement as Sequoia does (2402.12374). Coupled requests draft with the target's noise (2408.07978).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from pydantic import model_validator
from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle, TargetReads, by_depth
from foretoken.drafters.levels import DraftLevels, KeptDraws
from foretoken.drafters.partial_reads import PartialRows, WeightOptions, draft_runner
from foretoken.drafters.text_draft import TextDraftDrafter
from foretoken.drafters.vocabularies import (
    DraftModelFiles,
    Translation,
    VocabMatch,
    VocabularyMap,
    vocabularies,
    vocabulary_map,
)
from foretoken.trees.choices import TreeShape

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel
    from foretoken.trees.dynamic import AnyShape


class Options(WeightOptions):
    """Options of a draft model.

    Attributes:
        quantization: Matrices that are stored in integers stay as they are; except for "none" their inputs are
            quantized to 8 bits.
        vocab_match: How a draft model with another tokenizer drafts. "same" refuses it, "intersection" drafts tokens
            that both vocabularies have, "text" drafts text (chains of the most probable tokens). "auto" means "same"
            for equal vocabularies, else "intersection" if most of the target's tokens are shared. None means
            "intersection" with `use_heterogeneous_vocab`, else "same". The draft model's context counts its own tokens.
            With "intersection" CPUs draft one pass per level: the kernels that draft a tree in one call know one
            vocabulary.
        use_heterogeneous_vocab: vLLM's name for `vocab_match="intersection"`.
    """

    vocab_match: VocabMatch | None = None
    use_heterogeneous_vocab: bool = False

    @property
    def matching(self) -> VocabMatch:
        """The way to match vocabularies, by `vocab_match` and `use_heterogeneous_vocab`."""
        return self.vocab_match or ("intersection" if self.use_heterogeneous_vocab else "same")

    @model_validator(mode="after")
    def _vocabularies(self) -> Self:
        if self.use_heterogeneous_vocab and self.matching not in ("auto", "intersection"):
            raise ConfigError(
                "use_heterogeneous_vocab asks for a vocab_match of 'intersection', and vocab_match is "
                f"'{self.vocab_match}'. Leave one of them out."
            )
        if self.matching == "text" and self.tree != "chain":
            raise ConfigError(
                "'vocab_match' is 'text', which drafts chains, and 'tree' is something else. Expected 'chain'. Leave "
                "'tree' out, or set vocab_match to 'intersection'."
            )
        if self.matching == "text" and self.draft_window_size is not None:
            raise ConfigError(
                "'vocab_match' is 'text', and its draft model reads whole texts. Leave 'draft_window_size' out, or "
                "set vocab_match to 'intersection'."
            )
        if self.matching == "text" and (self.pruning is not None or self.stop is not None):
            what, key = ("not pruned", "pruning") if self.stop is None else ("not stopped by a rule", "control")
            raise ConfigError(
                f"'vocab_match' is 'text', and its drafts are {what}. Leave '{key}' out, or set vocab_match to "
                "'intersection'."
            )
        return self


class DraftModelDrafter:
    """Drafts with a language model, level by level."""

    name = "draft_model"

    def __init__(
        self,
        options: Options,
        load: Callable[[TargetHandle], LoadedModel],
        match: Callable[[TargetHandle, LoadedModel], VocabularyMap | None] | None = None,
    ) -> None:
        """Makes a drafter; `attach` loads the model. `match` compares vocabularies; None if they are the same."""
        self._options, self._load, self._match = options, load, match
        self.reads = options.with_attention(TargetReads(is_last_enough=True))
        self._take_shape(options.language_model_shape())
        self._texts: dict[int, Translation] = {}  # by slot, if vocabularies differ
        self._draws = KeptDraws(options.draft_sample_method, options.pruning, options.stop)

    def attach(self, target: TargetHandle) -> None:
        """Loads the model, and allocates its KV cache.

        Raises `ConfigError` when its vocabulary does not fit the target's, `ModelError` when it cannot be loaded.
        """
        self._target = target
        model = self._load(target)
        self._mapping = None if self._match is None else self._match(target, model)
        self._take_shape(shape := self._options.language_model_shape(lambda: target.costs))
        most_fed = shape.num_nodes if isinstance(shape, TreeShape) else shape.num_expanded
        if self._options.draft_retrieval and self._mapping is not None:
            raise ConfigError(
                "draft_retrieval reads the target's attention by position, and the draft model has another vocabulary. "
                "Leave it out."
            )
        rows = self._options.partial_rows
        drafted = self._options.drafted_tokens(model)
        self._runner = draft_runner(model, target, most_fed, self._options.quantization, rows, drafted)
        self._context_len = self._runner.context_len if rows is None else model.context_len
        self._rows = PartialRows.own(self._runner.cache, most_fed, self._options, target.context_len)
        self._levels = DraftLevels(
            self._runner, self._rows, vocab_size=target.vocab_size, mapping=self._mapping, drafted=drafted
        )

    @property
    def model(self) -> LoadedModel:
        """The attached model."""
        return self._runner.model

    @property
    def has_same_vocabulary(self) -> bool:
        """Whether the attached model has the target's tokens."""
        return self._mapping is None

    @property
    def follows_floors(self) -> bool:
        """See `FloorsFollower`."""
        return self._options.may_end_anywhere

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copies weights into the model in place, between two iterations; the next draft reads each text again.

        `weights`: every parameter by its name in the module, with the same shape. Texts do not change, because all
        drafts and their draft distributions then come from the new weights.
        """
        with torch.no_grad():
            for name, parameter in self.model.module.named_parameters():
                parameter.copy_(weights[name])
        self._levels.follow_weights()

    def _take_shape(self, shape: AnyShape) -> None:
        self._shapes = by_depth(shape)
        self.nodes_by_depth: Sequence[int] = [each.num_nodes for each in self._shapes]
        self._shapes_with_floors = by_depth(self._options.shape_with_floors) if self.follows_floors else []

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Reuses the rows of a text with the same prefix; the first proposal reads the rest."""
        if self._mapping is not None:
            self._texts[slot] = Translation(self._mapping, len(request.prompt))
        if request.prefix is None:
            self._levels.begin(slot)
        else:
            ids = request.prompt if self._mapping is None else self._texts[slot].of(request.prompt)
            self._levels.begin(slot, request.prefix.slot, ids)

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns trees, expanded level by level in the shape of the options."""
        tokens = context.tokens
        if self._mapping is not None:
            tokens = [self._texts[slot].of(ids) for slot, ids in zip(context.slots, context.tokens, strict=True)]
        room = [min(depth, self._context_len - len(ids)) for depth, ids in zip(context.max_depth, tokens, strict=True)]
        active = [row for row, depth in enumerate(room) if depth > 0]
        if not active:
            return TokenTree.roots(context.roots, device=self._target.device)
        roots, draws = self._draws.of(context, active, self._runner.device)
        # A drawn candidate is verified at any cost, so none is drawn beside the chain.
        has_second_candidates = context.floors is not None and not draws.has_sampled
        shapes = self._shapes_with_floors if has_second_candidates else self._shapes
        shape = shapes[min(max(room), len(shapes) - 1)]
        slots, texts = [context.slots[row] for row in active], [tokens[row] for row in active]
        return self._levels.draft(slots, texts, shape, roots, draws).finish(active, room, context.roots)

    def commit(self, committed: Committed) -> None:
        """Learns what to retrieve; the next proposal reads the accepted path from the committed tokens."""
        self._rows.retrieve(committed)

    def release(self, slot: int) -> None:
        """Forgets the sequence, except its KV rows."""
        self._texts.pop(slot, None)


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`; raises `ConfigError` without a model."""
    if options.model is None:
        raise ConfigError("method 'draft_model' needs a model. Expected the draft model's directory. Set 'model'.")
    files = DraftModelFiles(options.model, options.revision, rounds_inputs=options.quantization != "none")
    return drafter_of(options, files.model, files.tokenizer)


def drafter_of(
    options: Options, load: Callable[[TargetHandle], LoadedModel], load_tokenizer: Callable[[], Any | None]
) -> Drafter:
    """Returns the drafter that options ask for, over any model; `load_tokenizer` may return None."""
    if options.matching == "text":
        return TextDraftDrafter(options, load, lambda target, model: vocabularies(target, model, load_tokenizer()))
    return DraftModelDrafter(
        options, load, lambda target, model: vocabulary_map(options.matching, target, model, load_tokenizer())
    )

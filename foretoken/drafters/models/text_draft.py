"""A draft model of any tokenizer drafts text, which the target's tokenizer makes a chain of.

The draft model reads the committed text in its own tokens and goes on greedily; what it wrote is encoded as the target
would encode it behind what is committed. Every node is chosen, none is drawn, so any rule accepts them without bias at
any temperature (string-level exact match). Texts are bytes throughout; special tokens go from one vocabulary to the
other by their role or content.

Source: Timor et al. 2025 (arXiv 2502.05202), algorithm 2 (SLEM).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import (
    Committed,
    DraftContext,
    DraftRequest,
    TargetHandle,
    TargetReads,
)
from foretoken.drafters.models.draft_levels import DraftLevels
from foretoken.drafters.models.retokenized import DraftText, Retokenizer
from foretoken.drafters.shared.kept_draws import KeptDraws
from foretoken.drafters.shared.quantization import QuantizationOption, with_quantization
from foretoken.runner.runner import Runner
from foretoken.trees.choices import TreeShape
from foretoken.trees.expansion import TreeExpansion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.decoder.lean.int8 import Quantization
    from foretoken.drafters.models.token_bytes import Vocabulary
    from foretoken.models.loading import LoadedModel


class TextDraftDrafter:
    """Drafts chains by text."""

    name = "draft_model"
    reads = TargetReads(is_last_enough=True)

    def __init__(
        self,
        load: Callable[[TargetHandle], LoadedModel],
        vocabularies: Callable[[TargetHandle, LoadedModel], tuple[Vocabulary, Vocabulary]],
        *,
        chain_len: int,
        quantization: QuantizationOption,
    ) -> None:
        """A drafter whose model is not loaded yet.

        Args:
            load: Gives the draft model for a target.
            vocabularies: Gives the tokens of the target and of the draft model.
            chain_len: Most tokens of a chain, of either vocabulary.
            quantization: Of the draft model.
        """
        self._load, self._vocabularies, self._quantization = load, vocabularies, quantization
        self._chain_len = chain_len
        self.nodes_by_depth: Sequence[int] = range(1, chain_len + 2)
        self._texts: dict[int, DraftText] = {}
        self._draws = KeptDraws(greedy=True)

    def attach(self, target: TargetHandle) -> None:
        """Loads the model, and allocates its KV cache.

        Raises:
            ConfigError: When a tokenizer does not tell the bytes of its tokens.
            ModelError: When the model cannot be loaded.
        """
        model = self._load(target)
        self._retokenizer = Retokenizer(*self._vocabularies(target, model))
        self._device = target.device
        self._runner = Runner(
            model, num_slots=target.num_slots, context_len=target.context_len, max_nodes=self._chain_len + 2,
            runner=target.runner,
        )  # fmt: skip
        with_quantization(self._quantization, self._quantize)
        self._levels = DraftLevels(self._runner, vocab_size=self._runner.vocab_size)

    def _quantize(self, quantization: Quantization | None) -> None:
        """Quantises the model, or leaves it as it is stored.

        Raises:
            UnsuitableError: When it cannot be quantised; it is as it was.
        """
        if quantization is not None:
            self._runner.quantize(quantization)

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Starts with what another text left that begins alike; the rest is read when the first draft is asked for."""
        text = self._texts[slot] = DraftText(self._retokenizer)
        if request.prefix is None:
            self._levels.begin(slot)
        else:
            text.read(request.prompt)
            self._levels.begin(slot, request.prefix.slot, text.ids)

    def propose(self, context: DraftContext) -> TokenTree:
        """What the draft model goes on with, in the target's tokens."""
        room = []
        for slot, tokens, depth in zip(context.slots, context.tokens, context.max_depth, strict=True):
            self._levels.crop(slot, self._texts[slot].read(tokens))
            room.append(min(depth, self._chain_len, self._runner.context_len - len(self._texts[slot].ids)))
        active = [row for row, depth in enumerate(room) if depth > 0]
        if not active:
            return TokenTree.roots(context.roots, device=self._device)
        slots = [context.slots[row] for row in active]
        drafts = self._written(context, active, slots, max(room))
        rows, scores = [TreeRow([root], [-1]) for root in context.roots], [[0.0] for _ in context.roots]
        for row, draft in zip(active, drafts, strict=True):
            chain = self._retokenizer.chain(context.tokens[row], draft.tokens[: room[row]])
            kept = chain[: min(context.max_depth[row], self._chain_len)]
            rows[row] = TreeRow([context.roots[row], *(node.token for node in kept)], range(-1, len(kept)))
            scores[row] += (draft.scores[node.num_drafted - 1] for node in kept)
        return _with_scores(TokenTree.from_rows(rows, device=self._device), scores)

    def commit(self, committed: Committed) -> None:
        """Nothing to learn: the next proposal reads the committed tokens."""

    def release(self, slot: int) -> None:
        """Forgets the sequence, but for its rows."""
        self._texts.pop(slot, None)

    def _written(self, context: DraftContext, rows: Sequence[int], slots: Sequence[int], depth: int) -> list[_Written]:
        """What the draft model writes behind some sequences of the batch; synchronises once.

        Args:
            context: Of the batch.
            rows: The sequences.
            slots: Theirs.
            depth: Tokens that it writes.
        """
        texts = [self._texts[slot].ids for slot in slots]
        _, draws = self._draws.of(context, rows, self._runner.device)
        roots = torch.tensor([ids[-1] for ids in texts], device=self._runner.device)
        expansion = TreeExpansion(TreeShape.chain(depth), roots, draws)
        self._levels.fill(slots, texts, expansion)
        tree = expansion.finish(range(len(rows)), [depth] * len(rows), [ids[-1] for ids in texts])
        assert tree.scores is not None, "expansions score"
        both = torch.stack([tree.tokens.double(), tree.scores.double()], dim=1)[:, :, 1:].tolist()
        return [_Written([int(token) for token in tokens], scores) for tokens, scores in both]


class _Written(NamedTuple):
    """Tokens of a draft model behind a text.

    Attributes:
        tokens: Its ids.
        scores: Log-probability of each and all before it.
    """

    tokens: list[int]
    scores: list[float]


def _with_scores(tree: TokenTree, scores: Sequence[Sequence[float]]) -> TokenTree:
    """A tree with the scores of its nodes, 0 at padding."""
    padded = [[*row, *[0.0] * (tree.width - len(row))] for row in scores]
    return replace(tree, scores=torch.tensor(padded, dtype=torch.float32, device=tree.tokens.device))

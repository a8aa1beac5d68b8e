"""Drafts a chain or a tree with a smaller language model, on its own KV cache.

The draft model has the target's vocabulary, or one that shares tokens with it (`foretoken.drafters.vocabularies`).
With `vocab_match="text"` a draft model of any tokenizer drafts text, which the target's tokenizer turns into a chain.
The draft model reads the committed text in its own tokens and continues greedily. Its text is encoded as the target
would encode it after the committed text. Every node is chosen, none is drawn, so any rule accepts the nodes without
bias at any temperature (string-level exact match). Texts are bytes. Special tokens are translated by role or content.

Sources: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (2302.01318) for chains; sampled trees draw
children without replacement as Sequoia does (2402.12374). Coupled requests draft with the target's noise (2408.07978).
Drafts of text are algorithm 2 (SLEM) of Timor et al. 2025 (2502.05202).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle, TargetReads, by_depth
from foretoken.drafters.levels import DraftLevels, KeptDraws
from foretoken.drafters.partial_reads import PartialRows, WeightOptions, draft_runner
from foretoken.drafters.vocabularies import (
    DraftModelFiles,
    Piece,
    Translation,
    VocabMatch,
    Vocabulary,
    VocabularyMap,
    shared_specials,
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


_LOOK_BEHIND = 12  # tokens before new text that are encoded again with it


class TextNode(NamedTuple):
    """A token of the target in a draft's text; `num_drafted` counts the draft's tokens that it takes."""

    token: int
    num_drafted: int


class Retokenizer:
    """Translates between the vocabularies of target and draft model."""

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self.target, self.draft = target, draft
        self.specials = shared_specials(target, draft)
        self._back = {theirs: ours for ours, theirs in self.specials.items()}

    def chain(self, committed: Sequence[int], drafted: Sequence[int]) -> list[TextNode]:
        """Returns the target's tokens for the text of a draft model.

        The last token is left out if the text may continue inside it, unless it is the only one.
        """
        data, end = b"", None
        ends: list[int] = []
        for token in drafted:
            spelling = self.draft.spellings[token]
            if spelling is None:
                end = self._back.get(token)
                break
            data += spelling
            ends.append(len(data))
        nodes: list[TextNode] = []
        position = num_drafted = 0
        data = _whole_characters(data) if end is None else data
        for token, part in self._behind(committed, data):
            if self.target.spellings[token] != part:
                return nodes  # bytes without a token of the target
            position += len(part)
            while ends[num_drafted] < position:
                num_drafted += 1
            nodes.append(TextNode(token, num_drafted + 1))
        if end is not None and position == len(data):
            return [*nodes, TextNode(end, len(ends) + 1)]
        return nodes[:-1] if len(nodes) > 1 and _may_go_on(data) else nodes

    def _behind(self, committed: Sequence[int], data: bytes) -> list[Piece]:
        before = b""
        for token in reversed(committed[-_LOOK_BEHIND:]):
            spelling = self.target.spelling(token)
            if spelling is None:
                break
            before = spelling + before
        pieces, position = self.target.encode(before + data), 0
        for index, piece in enumerate(pieces):
            if position >= len(before):
                return pieces[index:] if position == len(before) else self.target.encode(data)
            position += len(piece.data)
        return self.target.encode(data) if position > len(before) else []


class DraftText:
    """A growing sequence of the target's tokens, as the draft model's `ids` of its text."""

    def __init__(self, retokenizer: Retokenizer) -> None:
        self._retokenizer = retokenizer
        self.ids: list[int] = []
        self._parts: list[bytes | None] = []  # bytes of each id; None for special tokens
        self._num_read = 0

    def read(self, tokens: Sequence[int]) -> int:
        """Reads new tokens of the target, which continue the last call's; returns how many ids stay the same."""
        if self._num_read > len(tokens):
            self.ids, self._parts, self._num_read = [], [], 0
        if self._num_read == len(tokens):
            return len(self.ids)
        target, draft = self._retokenizer.target, self._retokenizer.draft
        start = self._window()
        earlier, data = self.ids[start:], b"".join(part or b"" for part in self._parts[start:])
        new: list[tuple[int, bytes | None]] = []
        for token in tokens[self._num_read :]:
            spelling = target.spelling(token)
            if spelling is None:
                new += draft.encode(data)
                data = b""
                new.append((self._retokenizer.specials.get(token, draft.stand_in), None))
            else:
                data += spelling
        new += draft.encode(data)
        del self.ids[start:], self._parts[start:]
        self.ids += (token for token, _ in new or [(draft.stand_in, None)])
        self._parts += (part for _, part in new or [(draft.stand_in, None)])
        self._num_read = len(tokens)
        pairs = enumerate(zip(earlier, self.ids[start:], strict=False), start)
        return next((i for i, (old, now) in pairs if old != now), min(start + len(earlier), len(self.ids)))

    def _window(self) -> int:
        """Returns the first id that is encoded again with new text; no special token follows it."""
        start = len(self._parts)
        while start and len(self._parts) - start < _LOOK_BEHIND and self._parts[start - 1] is not None:
            start -= 1
        return start


def _whole_characters(data: bytes) -> bytes:
    for back in range(1, min(3, len(data)) + 1):
        lead = data[-back]
        if lead >= 0xC0:
            length = 2 + (lead >= 0xE0) + (lead >= 0xF0)
            return data[:-back] if back < length else data
        if lead < 0x80:
            break
    return data


def _may_go_on(data: bytes) -> bool:
    """Whether a text may end within a word: it ends in a letter, a digit or a part of a character."""
    return data[-1:].isalnum() or data[-1:] >= b"\x80"


class TextDraftDrafter:
    """Drafts chains with a draft model of any tokenizer, see the module."""

    name = "draft_model"
    reads = TargetReads(is_last_enough=True)

    def __init__(
        self,
        options: WeightOptions,
        load: Callable[[TargetHandle], LoadedModel],
        vocabularies: Callable[[TargetHandle, LoadedModel], tuple[Vocabulary, Vocabulary]],
    ) -> None:
        """Makes a drafter; `attach` loads the model."""
        self._options, self._load, self._vocabularies = options, load, vocabularies
        self._chain_len = options.chain_len  # of each vocabulary
        self.nodes_by_depth: Sequence[int] = range(1, self._chain_len + 2)
        self._texts: dict[int, DraftText] = {}
        self._draws = KeptDraws("greedy")

    def attach(self, target: TargetHandle) -> None:
        """Loads the model, and allocates its KV cache.

        Raises `ConfigError` when a tokenizer does not list the bytes of its tokens, `ModelError` when the model cannot
        be loaded.
        """
        model = self._load(target)
        self._retokenizer = Retokenizer(*self._vocabularies(target, model))
        self._device = target.device
        drafted = self._options.drafted_tokens(model)
        self._runner = draft_runner(model, target, self._chain_len + 1, self._options.quantization, drafted=drafted)
        rows = PartialRows.own(self._runner.cache, self._chain_len + 1)
        self._levels = DraftLevels(self._runner, rows, vocab_size=self._runner.vocab_size, drafted=drafted)

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Reuses the rows of a text with the same prefix; the first proposal reads the rest."""
        text = self._texts[slot] = DraftText(self._retokenizer)
        if request.prefix is None:
            self._levels.begin(slot)
        else:
            text.read(request.prompt)
            self._levels.begin(slot, request.prefix.slot, text.ids)

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns the draft model's continuation, in the target's tokens."""
        room = []
        for slot, tokens, depth in zip(context.slots, context.tokens, context.max_depth, strict=True):
            self._levels.crop(slot, self._texts[slot].read(tokens))
            room.append(min(depth, self._chain_len, self._runner.context_len - len(self._texts[slot].ids)))
        active = [row for row, depth in enumerate(room) if depth > 0]
        if not active:
            return TokenTree.roots(context.roots, device=self._device)
        drafts = self._written(context, active, max(room))
        rows, scores = [TreeRow([root], [-1]) for root in context.roots], [[0.0] for _ in context.roots]
        for row, (written, log_probs) in zip(active, drafts, strict=True):
            chain = self._retokenizer.chain(context.tokens[row], written[: room[row]])
            kept = chain[: min(context.max_depth[row], self._chain_len)]
            rows[row] = TreeRow([context.roots[row], *(node.token for node in kept)], range(-1, len(kept)))
            scores[row] += (log_probs[node.num_drafted - 1] for node in kept)
        return TokenTree.from_rows(rows, scores=scores, device=self._device)

    def commit(self, committed: Committed) -> None:
        """Learns nothing: the next proposal reads the committed tokens."""

    def release(self, slot: int) -> None:
        """Forgets the sequence, except its KV rows."""
        self._texts.pop(slot, None)

    def _written(self, context: DraftContext, rows: Sequence[int], depth: int) -> list[tuple[list[int], list[float]]]:
        """Returns what the draft model writes after some sequences, `depth` tokens each; synchronises once.

        With the log-probability of each token and all before it.
        """
        slots = [context.slots[row] for row in rows]
        texts = [self._texts[slot].ids for slot in slots]
        _, draws = self._draws.of(context, rows, self._runner.device)
        roots = torch.tensor([ids[-1] for ids in texts], device=self._runner.device)
        expansion = self._levels.draft(slots, texts, TreeShape.chain(depth), roots, draws)
        tree = expansion.finish(range(len(rows)), [depth] * len(rows), [ids[-1] for ids in texts])
        assert tree.scores is not None, "expansions score"
        both = torch.stack([tree.tokens.double(), tree.scores.double()], dim=1)[:, :, 1:].tolist()
        return [([int(token) for token in tokens], scores) for tokens, scores in both]


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

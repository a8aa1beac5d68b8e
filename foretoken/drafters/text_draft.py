"""A draft model of any tokenizer drafts text, which the target's tokenizer turns into a chain.

The draft model reads the committed text in its own tokens and continues greedily. Its text is encoded as the target
would encode it after the committed text. Every node is chosen, none is drawn, so any rule accepts the nodes without
bias at any temperature (string-level exact match). Texts are bytes. Special tokens are translated by role or content.

Source: Timor et al. 2025 (arXiv 2502.05202), algorithm 2 (SLEM).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import Committed, DraftContext, DraftRequest, TargetHandle, TargetReads
from foretoken.drafters.levels import DraftLevels, KeptDraws
from foretoken.drafters.partial_reads import PartialRows, WeightOptions, draft_runner
from foretoken.drafters.vocabularies import Piece, Vocabulary, shared_specials
from foretoken.trees.choices import TreeShape

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel

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

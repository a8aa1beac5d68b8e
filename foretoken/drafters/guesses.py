"""A drafter for a drafter: cheap guesses of a chain, and a pass of the model that drafts checks several at once.

A pass over the last token and guesses behind it gives the draft distribution after each. The next token of each is
chosen as without guesses: the most probable one, or the draw of the same noise. What lies behind a wrong guess is
dropped. So guesses change the number of passes and no draft.

Source: Sun et al. 2024, TriForce (arXiv 2404.11912), here with sample and match at the inner level.

Letters: B sequences, D depth of chains, R tokens fed, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from foretoken.core.backend import integers_on
from foretoken.core.errors import ConfigError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import common_prefix_len
from foretoken.drafters.levels import DraftLevels, draft_runner
from foretoken.drafters.ngram import NgramDrafter, Options
from foretoken.drafters.vocabularies import DraftModelFiles, vocabulary_map
from foretoken.drafters.windows import PartialRows
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees.choices import TreeShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from foretoken.drafters.base import DraftRequest, TargetHandle
    from foretoken.trees.expansion import Expansion

_MOST_GUESSES = 4  # in a pass; a choice, more pay where all are right: NOTES, "Guesses under the drafts"


class Guesses(Protocol):
    """An inner drafter."""

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Starts a sequence in a slot."""

    def after(self, chains: Sequence[Chain], counts: Sequence[int], draws: DraftDraws) -> list[list[int]]:
        """Returns at most `counts` tokens behind each chain; draws: of the same sequences."""


class Chain:
    """The chain of one sequence under construction.

    Attributes:
        slot: Of the KV cache of drafts.
        row: The root's row there.
        text: All committed tokens, the root last.
        path: Drafted tokens.
        depth: Tokens to draft.
    """

    def __init__(self, slot: int, row: int, text: Sequence[int], depth: int) -> None:
        self.slot, self.row, self.text, self.depth = slot, row, text, depth
        self.path: list[int] = []

    def take(self, guesses: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes the tokens drafted after the last one and after each guess, up to the first that is not guessed."""
        self.path += tokens[: common_prefix_len(guesses, tokens) + 1]


def fill_chains(
    expansion: Expansion, draws: DraftDraws, chains: Sequence[Chain], guesses: Guesses, run: Callable[[Pass], Tensor]
) -> None:
    """Fills an expansion of chains in place; synchronises once a pass.

    run: Returns (R, V) float32, the logits after all tokens of a pass.
    """
    table: Tensor | None = None  # (B, D, V) logits after the nodes of each chain
    for depth in expansion.levels():
        while any(len(each.path) <= depth < each.depth for each in chains):
            rows = [row for row, each in enumerate(chains) if len(each.path) < each.depth]
            logits, nodes = _passed([chains[row] for row in rows], rows, draws, guesses, run)
            if table is None:
                table = logits.new_zeros(len(chains), expansion.depth, logits.shape[1])
            table[nodes[0], nodes[1]] = logits
        assert table is not None, "a chain has a token"
        expansion.grow(depth, table[:, depth : depth + 1])


def _passed(
    chains: Sequence[Chain], rows: Sequence[int], draws: DraftDraws, guesses: Guesses, run: Callable[[Pass], Tensor]
) -> tuple[Tensor, Tensor]:
    """Extends chains by a pass; returns the (R, V) logits, and (2, R) the row and the depth of each node fed."""
    device = draws.root_positions.device
    counts = [min(_MOST_GUESSES, each.depth - len(each.path) - 1) for each in chains]
    own = draws.select(integers_on(rows, device))
    guessed = guesses.after(chains, counts, own)
    fed = [[(each.path or each.text)[-1], *found] for each, found in zip(chains, guessed, strict=True)]
    before = [len(each.path) for each in chains]
    logits = run(
        Pass.of_chains(
            fed, slots=[each.slot for each in chains],
            prefix_lens=[each.row + num for each, num in zip(chains, before, strict=True)],
            first_positions=[len(each.text) - 1 + num for each, num in zip(chains, before, strict=True)],
            device=device,
        ).with_all_logits()
    )  # fmt: skip
    places = [
        (row, num + index) for row, num, ids in zip(rows, before, fed, strict=True) for index in range(len(ids))
    ]  # fmt: skip
    nodes = integers_on(list(zip(*places, strict=True)), device)
    drafted = iter(draws.along_chains(logits, *nodes).tolist())
    for each, found in zip(chains, guessed, strict=True):
        each.take(found, list(islice(drafted, len(found) + 1)))
    return logits, nodes


class Lookups:
    """Guesses what followed the last tokens earlier in the text."""

    def __init__(self) -> None:
        self._lookup = NgramDrafter(Options(method="ngram"))

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Indexes the prompt without its last token: roots count as drafted."""
        self._lookup.begin(slot, replace(request, prompt=request.prompt[:-1]))

    def after(self, chains: Sequence[Chain], counts: Sequence[int], draws: DraftDraws) -> list[list[int]]:
        """See `Guesses`."""
        del draws
        return [
            self._lookup.continue_from(each.slot, each.text[:-1], [each.text[-1], *each.path], count) if count else []
            for each, count in zip(chains, counts, strict=True)
        ]


class ModelGuesses:
    """Guesses the most probable tokens of a draft model, on its own KV cache."""

    def __init__(self, name: str, target: TargetHandle) -> None:
        """Loads the model; raises `ModelError`, or `ConfigError` if it has another vocabulary than the target."""
        files = DraftModelFiles(name, None)
        model = files.model(target)
        try:
            vocabulary_map("same", target, model, files.tokenizer())
        except ConfigError as err:
            raise ConfigError(
                f"draft_with is '{name}', a model with another vocabulary than '{target.name}'. Expected a model with "
                'the same tokenizer, or "ngram".'
            ) from err
        runner = draft_runner(model, target, _MOST_GUESSES, "auto")
        rows = PartialRows.own(runner.cache, _MOST_GUESSES)
        self._levels = DraftLevels(runner, rows, vocab_size=target.vocab_size)
        self._context_len = runner.context_len

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Starts with an empty cache: the first guesses read the prompt."""
        del request
        self._levels.begin(slot)

    def after(self, chains: Sequence[Chain], counts: Sequence[int], draws: DraftDraws) -> list[list[int]]:
        """See `Guesses`."""
        texts = [[*each.text, *each.path] for each in chains]
        room = [min(count, self._context_len - len(text)) for count, text in zip(counts, texts, strict=True)]
        active = [row for row, count in enumerate(room) if count > 0]
        if not active:
            return [[] for _ in chains]
        slots, read = [chains[row].slot for row in active], [texts[row] for row in active]
        for slot, text in zip(slots, read, strict=True):
            self._levels.crop(slot, self._levels.common_len(slot, text))
        device = draws.root_positions.device
        own = draws.select(integers_on(active, device))
        greedy = DraftDraws.build(own.batch, [False] * len(active), own.root_positions, greedy=True)
        roots = integers_on([text[-1] for text in read], device)
        begun = self._levels.draft(slots, read, TreeShape.chain(max(room)), roots, greedy)
        tree = begun.finish(active, room, [text[-1] for text in texts])
        return [tokens[1 : 1 + max(count, 0)] for tokens, count in zip(tree.tokens.tolist(), room, strict=True)]

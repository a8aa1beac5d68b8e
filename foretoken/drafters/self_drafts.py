"""Drafts of the target for itself: through all of its blocks or the first ones, on its whole KV cache or a part of it.

Chains may have a drafter for the drafter: cheap guesses. A pass of the model that drafts checks several guesses at
once. It reads the last token and the guesses behind it, and gives the draft distribution after each. The next token of
each is chosen as without guesses: the most probable one, or the draw of the same noise. What lies behind a wrong guess
is dropped. So guesses change the number of passes and no draft.

Source: Sun et al. 2024, TriForce (arXiv 2404.11912), here with sample and match at the inner level.

Letters: B sequences, D depth of chains, R tokens fed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Protocol

from pydantic import Field

from foretoken.core.backend import integers_on
from foretoken.core.errors import ConfigError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, common_prefix_len
from foretoken.drafters.base import DraftContext, DrafterOptions, DraftRequest, TargetHandle
from foretoken.drafters.levels import DraftLevels, KeptDraws, Prefixes, TreeDrafts
from foretoken.drafters.ngram import NgramDrafter, Options
from foretoken.drafters.partial_reads import PartialRows, SampleMethod, draft_runner
from foretoken.drafters.vocabularies import DraftModelFiles, vocabulary_map
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees.choices import TreeShape
from foretoken.trees.dynamic import AnyShape, begin_expansion
from foretoken.trees.merge import Pruning

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.runner.runner import Runner
    from foretoken.trees.expansion import Expansion

_MOST_GUESSES = 4  # in a pass; a choice, more pay where all are right: NOTES, "Guesses under the drafts"


class SelfOptions(DrafterOptions):
    """Options of targets that draft for themselves.

    Attributes:
        exit_layer: Number of the target's blocks that draft; None for the method's default.
        draft_sample_method: As for `draft_model`.
    """

    is_trusted: ClassVar[bool] = True
    has_dynamic_trees: ClassVar[bool] = True
    prunable_by: ClassVar[frozenset[str]] = frozenset(Pruning.model_fields)

    exit_layer: int | None = Field(default=None, ge=1, le=1000)
    draft_sample_method: SampleMethod = "probabilistic"


def runner_of(target: TargetHandle) -> Runner:
    """Returns the target's runner; raises `ConfigError` for drafters that do not get it, and for recurrent targets."""
    if target.target_runner is None:
        raise ConfigError("the drafter runs the target itself, and it is not trusted. Set trust_drafter.")
    if target.target_runner.cache.states is not None:
        raise ConfigError(recurrent_refusal(target.name))
    return target.target_runner


def recurrent_refusal(target: str) -> str:
    """Returns why a target with recurrent layers does not draft for itself."""
    return (
        f"'{target}' has recurrent layers, whose states a part of the model or of its KV rows does not give. Expected "
        "attention in every layer. Use a lookup, a draft model or a head."
    )


class SelfDrafts:
    """Drafts below the roots of a batch."""

    def __init__(
        self,
        target: TargetHandle,
        runner: Runner,
        rows: PartialRows,
        options: SelfOptions,
        num_layers: int,
        guesses: Guesses | None = None,
    ) -> None:
        """Prepares for passes of `runner` through the first `num_layers` blocks.

        `rows`: of its cache. `guesses`: for chains; None drafts level by level.
        """
        self._target, self._rows, self._guesses = target, rows, guesses
        is_whole = num_layers == runner.model.num_layers
        self._trees = TreeDrafts(runner, vocab_size=target.vocab_size, num_layers=None if is_whole else num_layers)
        self._draws = KeptDraws(options.draft_sample_method, options.pruning, options.stop)

    def propose(self, context: DraftContext, shapes: Sequence[AnyShape]) -> TokenTree:
        """Returns trees as deep as there is room; shapes: by depth."""
        target, lengths = self._target, [len(tokens) - 1 for tokens in context.tokens]
        room = [
            min(depth, target.context_len - 1 - length)
            for depth, length in zip(context.max_depth, lengths, strict=True)
        ]
        active = [row for row, depth in enumerate(room) if depth > 0]
        if not active:
            return TokenTree.roots(context.roots, device=target.device)
        slots, positions = [context.slots[row] for row in active], [lengths[row] for row in active]
        held = [self._rows.make_room(slot, length) for slot, length in zip(slots, positions, strict=True)]
        roots, draws = self._draws.of(context, active, target.device)
        shape = shapes[min(max(room), len(shapes) - 1)]
        if self._guesses is not None:
            chains = [
                Chain(slot, first, context.tokens[row], min(room[row], shape.depth))
                for slot, first, row in zip(slots, held, active, strict=True)
            ]
            begun = begin_expansion(shape, roots, draws)
            fill_chains(begun, draws, chains, self._guesses, self._trees.logits)
            return begun.finish(active, room, context.roots)
        work = Pass.of_chains(
            [context.tokens[row][-1:] for row in active],
            slots=slots, prefix_lens=held, first_positions=positions, device=target.device, has_last_logits=True,
        )  # fmt: skip
        prefixes = Prefixes(slots, [rows + 1 for rows in held], positions=[length + 1 for length in positions])
        expansion, _ = self._trees.draft(work, prefixes, shape, roots, draws)
        return expansion.finish(active, room, context.roots)


@dataclass(slots=True)
class Chain:
    """The chain of one sequence under construction.

    Attributes:
        slot: Of the KV cache of drafts.
        row: The root's row there.
        text: All committed tokens, the root last.
        depth: Tokens to draft.
        path: Drafted tokens.
    """

    slot: int
    row: int
    text: Sequence[int]
    depth: int
    path: list[int] = field(default_factory=list)

    def take(self, guesses: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes the tokens drafted after the last one and after each guess, up to the first that is not guessed."""
        self.path += tokens[: common_prefix_len(guesses, tokens) + 1]


class Guesses(Protocol):
    """An inner drafter."""

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Starts a sequence in a slot."""

    def after(self, chains: Sequence[Chain], counts: Sequence[int], draws: DraftDraws) -> list[list[int]]:
        """Returns at most `counts` tokens behind each chain; draws: of the same sequences."""


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
    guessed = guesses.after(chains, counts, draws.select(integers_on(rows, device)))
    fed = [[(each.path or each.text)[-1], *found] for each, found in zip(chains, guessed, strict=True)]
    work = Pass.of_chains(
        fed, slots=[each.slot for each in chains], prefix_lens=[each.row + len(each.path) for each in chains],
        first_positions=[len(each.text) - 1 + len(each.path) for each in chains], device=device,
    )  # fmt: skip
    logits = run(work.with_all_logits())
    nodes = [
        (row, len(each.path) + index)
        for row, each, ids in zip(rows, chains, fed, strict=True)
        for index in range(len(ids))
    ]
    fed_nodes = integers_on(list(zip(*nodes, strict=True)), device)
    drafted = iter(draws.along_chains(logits, *fed_nodes).tolist())
    for each, found in zip(chains, guessed, strict=True):
        each.take(found, list(islice(drafted, len(found) + 1)))
    return logits, fed_nodes


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

"""Measures how often each candidate of each depth is the target's token: the table for the search of static trees.

Counted on the target's own continuations of prompts, by default half of them greedy, with the text itself as the
drafter's input. Entry d, r is the probability that candidate r is right if all tokens before it were. A draft model
reads the same tokens at any depth, so one row serves all depths.

Letters: S positions, M of them counted, K depths, R ranks, E hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretoken.bench.workload import TokenProgress, no_progress
from foretoken.core.errors import ConfigError
from foretoken.entrypoints.llm import LLM
from foretoken.heads.base import Head
from foretoken.models.parts import target_parts
from foretoken.training.teacher import Teacher
from foretoken.trees.choices import TreeShape
from foretoken.trees.search import best_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from foretoken.bench.workload import Workload
    from foretoken.models.loading import LoadedModel

_NUM_RANKS = 10
_AT_ONCE = 4


def measured_acceptance(
    drafter: Head | LoadedModel,
    target: LoadedModel,
    tokenizer: Any,
    workload: Workload,
    *,
    progress: TokenProgress | None = None,
) -> list[list[float]]:
    """Returns how often each candidate of each depth is the target's token.

    Args:
        drafter: A head in float32, which is moved to the target's device, or a draft model.
        target: The drafter's target.
        tokenizer: The target's tokenizer.
        workload: Prompts and sampling parameters.
        progress: Counts every iteration and every run.

    Returns:
        K rows of R shares: entry i, r is P(candidate r of head i is the token | the tokens before were given); one row
        for a draft model.
    """
    progress = progress or TokenProgress(workload, len(workload.temperatures), report=no_progress)
    llm = LLM(target, tokenizer=tokenizer, max_num_seqs=_AT_ONCE, on_step=progress.add)
    texts = []
    for temperature in workload.temperatures:
        for output in llm.generate(list(workload.prompts), workload.params(temperature)):
            texts.append((len(output.prompt_token_ids), [*output.prompt_token_ids, *output.outputs[0].token_ids]))
        progress.end_run()
    guess = _head_guesses(drafter, target) if isinstance(drafter, Head) else _model_guesses(drafter, target.vocab_size)
    num_rows = drafter.config.steps if isinstance(drafter, Head) else 1
    hits = torch.zeros(num_rows, _NUM_RANKS, dtype=torch.float64)
    counts = torch.zeros(num_rows, 1, dtype=torch.float64)
    for num_prompt, text in texts:
        with torch.inference_mode():
            for index, (logits, labels) in enumerate(guess(torch.tensor([text], device=target.device), num_prompt)):
                own = logits.gather(1, labels.unsqueeze(1))
                # A label outside the draft vocabulary has no rank.
                ranks = (logits > own).sum(1).masked_fill(own[:, 0].isneginf(), _NUM_RANKS).cpu()
                hits[index] += torch.bincount(ranks, minlength=_NUM_RANKS)[:_NUM_RANKS]
                counts[index] += len(labels)
    shares: list[list[float]] = (hits / counts.clamp_min(1)).tolist()
    return [[round(share, 5) for share in row] for row in shares]


def _head_guesses(head: Head, target: LoadedModel) -> Callable[[Tensor, int], Iterator[tuple[Tensor, Tensor]]]:
    """Returns a function of (1, S) tokens and the prompt's length that yields (M, V) logits and (M,) labels a step."""
    head = head.to(target.device)
    parts, teacher = target_parts(target, dtype=torch.float32), Teacher(target, head.config.taps)
    width = head.config.hidden_size * len(head.config.taps)

    def guess(tokens: Tensor, num_prompt: int) -> Iterator[tuple[Tensor, Tensor]]:
        features = teacher.read(tokens)[..., :width].float()
        for index, hidden in enumerate(head.teacher_forced(features, tokens, parts)):
            # The first draft is made when the last prompt token is the root: head i then guesses position
            # num_prompt + i from the feature of position num_prompt - 2.
            first = max(num_prompt - 2, 0)
            labels = tokens[0, first + 2 + index :]
            yield head.logits(index, hidden[0, first : first + len(labels)], parts), labels

    return guess


def _model_guesses(model: LoadedModel, vocab_size: int) -> Callable[[Tensor, int], Iterator[tuple[Tensor, Tensor]]]:
    """Returns the same function as `_head_guesses` for a draft model, with one step; vocab_size: V, the target's."""
    parts, teacher = target_parts(model, dtype=torch.float32), Teacher(model)
    missing = vocab_size - model.vocab_size

    def guess(tokens: Tensor, num_prompt: int) -> Iterator[tuple[Tensor, Tensor]]:
        features = teacher.read(tokens.clamp_max(model.vocab_size - 1))[0, num_prompt - 1 : -1].float()
        logits = parts.lm_head(features)
        yield torch.nn.functional.pad(logits, (0, missing), value=float("-inf")), tokens[0, num_prompt:]

    return guess


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTree:
    """The best static tree of an acceptance table.

    Attributes:
        shape: The tree.
        tokens_by_nodes: Expected tokens of a target pass, its own included, for the best trees of some sizes, root
            included. A size with too few candidates in the table stands for all of them.
    """

    shape: TreeShape
    tokens_by_nodes: dict[int, float]


def tuned_tree(acceptance: Sequence[Sequence[float]], *, max_nodes: int, sizes: Sequence[int] = ()) -> TunedTree:
    """Returns the tree with the most expected tokens a pass, see `foretoken.trees.search`.

    Args:
        acceptance: K rows, the most levels of the tree.
        max_nodes: Most nodes, root included, at least 2; the tree omits candidates that were never right.
        sizes: Further sizes for `tokens_by_nodes`.

    Raises:
        ConfigError: When no first candidate was ever right, or when `best_nodes` refuses the arguments.
    """
    wanted = sorted({*sizes, max_nodes})
    bought = best_nodes(acceptance, wanted[-1])
    choices = [choice for choice, value in bought[: max_nodes - 1] if value > 0]
    if not choices:
        raise ConfigError("no candidate was right even once, so no tree is worth a pass. Measure on more text.")
    tokens = {size: 1.0 + sum(value for _, value in bought[: size - 1]) for size in wanted}
    return TunedTree(shape=TreeShape.from_choices(choices), tokens_by_nodes=tokens)

"""Measures on held-out text how often candidates of each depth are accepted, and how long drafts would be.

Letters: B texts, S positions, K steps of a draft, R ranks, M labels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foretoken.bench.workload import TokenProgress, Workload, no_progress
from foretoken.core.errors import ConfigError
from foretoken.entrypoints.llm import LLM
from foretoken.heads.base import Head
from foretoken.models.parts import TargetParts, target_parts, taught_parts
from foretoken.training.draft_model import Writer, read_features, written_windows
from foretoken.training.objective_base import Examples, first_candidates, portions
from foretoken.training.teacher import Teacher
from foretoken.trees.choices import TreeShape, best_nodes

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel
    from foretoken.training.data.packed import PackedTokens

_NUM_RANKS = 10  # ranks that are counted; the published trees of Medusa and EAGLE use no candidate past the tenth
_AT_ONCE = 4  # sequences decoded together; a choice
_WINDOWS = 8  # of held-out tokens for each point of the curve; a choice: less noise against more time
CHAIN = 5  # tokens of a draft model's chains in evaluations; DistillSpec's gamma is 3 to 7
_PROMPT_SHARE = 0.25  # of a window, in evaluations of draft models; a choice
TEMPERATURES = (0.0, 0.8)  # of stored acceptance: greedy decoding, and a usual temperature of sampling; a choice


def measured_acceptance(
    drafter: Head | LoadedModel,
    target: LoadedModel,
    tokenizer: Any,
    workload: Workload,
    *,
    progress: TokenProgress | None = None,
) -> list[list[float]]:
    """Returns how often each candidate of each depth is the target's token.

    The result has K rows of R shares: entry i, r is P(candidate r of head i is the token | the tokens before were
    given); one row for a draft model. `drafter` is a head in float32, which is moved to the target's device, or a draft
    model.
    """
    texts = target_texts(target, tokenizer, workload, progress=progress)
    guess = guesses_of(drafter, target)
    num_rows = drafter.config.steps if isinstance(drafter, Head) else 1
    hits = torch.zeros(num_rows, _NUM_RANKS, dtype=torch.float64)
    counts = torch.zeros(num_rows, 1, dtype=torch.float64)
    for _, num_prompt, text in texts:
        with torch.inference_mode():
            for index, (logits, labels) in enumerate(guess(torch.tensor([text], device=target.device), num_prompt)):
                own = logits.gather(1, labels.unsqueeze(1))
                # A label outside the draft vocabulary has no rank.
                ranks = (logits > own).sum(1).masked_fill(own[:, 0].isneginf(), _NUM_RANKS).cpu()
                hits[index] += torch.bincount(ranks, minlength=_NUM_RANKS)[:_NUM_RANKS]
                counts[index] += len(labels)
    shares: list[list[float]] = (hits / counts.clamp_min(1)).tolist()
    return [[round(share, 5) for share in row] for row in shares]


def target_texts(
    target: LoadedModel, tokenizer: Any, workload: Workload, *, progress: TokenProgress | None = None
) -> list[tuple[float, int, list[int]]]:
    """Returns what the target writes: for each text its temperature, the prompt's tokens, and the ids of the whole."""
    progress = progress or TokenProgress(workload, len(workload.temperatures), report=no_progress)
    llm = LLM(target.stored or target, tokenizer=tokenizer, max_num_seqs=_AT_ONCE, on_step=progress.add)
    texts = []
    for temperature in workload.temperatures:
        for output in llm.generate(list(workload.prompts), workload.params(temperature)):
            ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            texts.append((temperature, len(output.prompt_token_ids), ids))
        progress.end_run()
    return texts


Guess = Callable[[Tensor, int], Iterator[tuple[Tensor, Tensor]]]


def guesses_of(drafter: Head | LoadedModel, target: LoadedModel) -> Guess:
    """Returns a function of (1, S) tokens and the prompt's length that yields logits and labels of every step.

    Step i of a head has (M - i, V) logits and (M - i,) labels: row s is a draft from position s of the output.
    A draft model has the first step alone, and row s + i serves step i.
    """
    return _head_guesses(drafter, target) if isinstance(drafter, Head) else _model_guesses(drafter, target.vocab_size)


def _head_guesses(head: Head, target: LoadedModel) -> Guess:
    head = head.to(target.device)
    parts = taught_parts(target_parts(target, dtype=torch.float32), head.draft_vocab)
    teacher = Teacher(target, head.config.taps)
    width = head.config.hidden_size * len(head.config.taps)

    def guess(tokens: Tensor, num_prompt: int) -> Iterator[tuple[Tensor, Tensor]]:
        features = teacher.read_features(tokens)[..., :width].float()
        for index, hidden in enumerate(head.teacher_forced(features, tokens, parts)):
            # The first draft is made when the last prompt token is the root: head i then guesses position
            # num_prompt + i from the feature of position num_prompt - 2.
            first = max(num_prompt - 2, 0)
            labels = tokens[0, first + 2 + index :]
            yield head.logits(index, hidden[0, first : first + len(labels)], parts), labels

    return guess


def _model_guesses(model: LoadedModel, vocab_size: int) -> Guess:
    parts, teacher = target_parts(model, dtype=torch.float32), Teacher(model)
    missing = vocab_size - model.vocab_size

    def guess(tokens: Tensor, num_prompt: int) -> Iterator[tuple[Tensor, Tensor]]:
        features = teacher.read_features(tokens.clamp_max(model.vocab_size - 1))[0, num_prompt - 1 : -1].float()
        logits = parts.lm_head(features)
        yield torch.nn.functional.pad(logits, (0, missing), value=float("-inf")), tokens[0, num_prompt:]

    return guess


class TunedTree(NamedTuple):
    """The best static tree of an acceptance table.

    `tokens_by_nodes`: expected tokens of a target pass, its own included, for the best trees of some sizes, root
    included. A size with too few candidates in the table stands for all of them.
    """

    shape: TreeShape
    tokens_by_nodes: dict[int, float]


def tuned_tree(acceptance: Sequence[Sequence[float]], *, max_nodes: int, sizes: Sequence[int] = ()) -> TunedTree:
    """Returns the tree with the most expected tokens a pass, see `foretoken.trees.choices`.

    It has at most K levels and `max_nodes` nodes, root included, and omits candidates that were never right. `sizes`
    are further sizes for `tokens_by_nodes`. Raises `ConfigError` when no first candidate was ever right, or when
    `best_nodes` refuses the arguments.
    """
    wanted = sorted({*sizes, max_nodes})
    selected = best_nodes(acceptance, wanted[-1])
    choices = [choice for choice, value in selected[: max_nodes - 1] if value > 0]
    if not choices:
        raise ConfigError("no candidate was right even once, so no tree is worth a pass. Measure on more text.")
    tokens = {size: 1.0 + sum(value for _, value in selected[: size - 1]) for size in wanted}
    return TunedTree(shape=TreeShape.from_choices(choices), tokens_by_nodes=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """The interval, in steps, and the text of evaluations, (B, S) int64; `supervised`: which are labels."""

    every: int
    tokens: Tensor
    supervised: Tensor

    @classmethod
    def of_held_out(cls, held_out: PackedTokens, *, every: int, length: int) -> EvaluationConfig:
        """Takes a few windows of packed tokens, always the same ones; length: most tokens of a window."""
        length = min(length, len(held_out.tokens))
        count = min(_WINDOWS, held_out.num_windows(max(length, 1)))
        tokens, supervised = held_out.batch(0, batch_size=count, length=length, seed=0)
        return cls(every=every, tokens=tokens, supervised=supervised)

    def starts(self, num_steps: int) -> Tensor:
        """Returns (B, S) bool: positions from which all K steps have a label; raises `ConfigError` without any."""
        length = self.tokens.shape[1]
        found = torch.zeros_like(self.supervised)
        if length >= num_steps + 2:
            # Step i of a draft from position t has the label t + 2 + i.
            found[:, : length - 1 - num_steps] = self.supervised[:, 2:].unfold(1, num_steps, 1).all(-1)
        if not bool(found.any()):
            raise ConfigError(
                f"no window of the evaluation data has {num_steps} labels in a row, one for each step of the head. "
                "Expected longer documents, or more of them. Pass other --eval-data, or leave --eval-every out."
            )
        return found

    def evaluator(
        self, target: LoadedModel, head: Head, parts: TargetParts, *, precision: torch.dtype
    ) -> Callable[[], dict[str, Any]]:
        """Returns a function that evaluates a float32 head in training; GEMMs are computed in `precision`.

        The function returns fields of `StepReport`: K shares of drafts with d right first steps, from d = 1, and the
        acceptance length. It draws no random number and leaves the head in evaluation mode. Raises
        `ConfigError` when the windows are too short for the head.
        """
        teacher, device, vocab_size = Teacher(target, head.config.taps), target.device, head.config.vocab_size
        tokens, supervised = self.tokens.to(device), self.supervised.to(device)
        row, begin = self.starts(head.config.steps).to(device).nonzero().unbind(1)
        taught = taught_parts(parts, head.draft_vocab)

        @torch.no_grad()
        def measured() -> dict[str, Any]:
            head.eval()
            counts: list[int] = []
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == torch.bfloat16):
                read = teacher.read_features(tokens).float()
                examples = Examples(tokens, supervised, read, read).of_head(head.config)
                choices = first_candidates(parts.lm_head, examples.final.flatten(0, 1), vocab_size).view(tokens.shape)
                is_right = torch.ones_like(row, dtype=torch.bool)
                for index, hidden in enumerate(head.teacher_forced(examples.features, tokens, taught)):
                    logits = partial(head.draft_logits, index, parts=taught)
                    said = first_candidates(logits, hidden[row, begin], vocab_size)
                    if head.token_map is not None:
                        said = head.token_map[said]
                    is_right &= said == choices[row, begin + 1 + index]
                    counts.append(int(is_right.sum()))
            shares = [count / len(row) for count in counts]
            return {"held_out_acceptance": shares, "held_out_tau": 1.0 + sum(shares)}

        return measured


def model_evaluator(
    evaluation: EvaluationConfig, student: LoadedModel, target: LoadedModel, *, precision: torch.dtype
) -> Callable[[], dict[str, Any]]:
    """Returns a function that measures the draft model in training on what the target writes to held-out prompts.

    The prompts are the first parts of the held-out windows. The function returns fields of `StepReport`. It draws no
    random number. Raises `ConfigError` if the texts are too short for a chain.
    """
    given, count = evaluation.tokens, len(evaluation.tokens)
    writer, labels = Writer(target, length=given.shape[1], at_once=count), torch.ones_like(evaluation.supervised)
    greedy, sampled = (
        written_windows(writer, given, labels, range(count), temperature=temperature, prompt_share=_PROMPT_SHARE)
        for temperature in (0.0, 1.0)
    )
    starts = greedy[1][:, 1:].unfold(1, CHAIN, 1).all(-1)
    if not bool(starts.any()):
        raise ConfigError(
            f"no text of the target has {CHAIN} tokens in a row. Expected longer windows. Raise --length, or pass "
            "--eval-every 0."
        )
    device, width = target.device, min(student.vocab_size, target.vocab_size)
    lm_head = target_parts(student).lm_head

    @torch.no_grad()
    def measured() -> dict[str, Any]:
        student.module.eval()
        tokens, is_label = (each.to(device) for each in greedy)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == torch.bfloat16):
            features = read_features(student, tokens)[:, :-1].flatten(0, 1)
            best = first_candidates(lambda rows: lm_head(rows)[:, :width], features, width)
            is_right = best.view(len(tokens), -1) == tokens[:, 1:]
            first = float(is_right[is_label[:, 1:]].double().mean())
            runs = is_right.unfold(1, CHAIN, 1)[starts.to(device)].cumprod(-1)
            shares = runs.double().mean(0).tolist()
        _, drawn = acceptance_rates(student, target, *sampled, dtype=precision)
        return {"held_out_acceptance": shares, "held_out_tau": 1.0 + sum(shares), "held_out_alpha": [first, drawn]}

    return measured


@torch.no_grad()
def acceptance_rates(
    student: LoadedModel, target: LoadedModel, tokens: Tensor, is_label: Tensor, *, dtype: torch.dtype
) -> tuple[float, float]:
    """Returns the acceptance rates of a draft model behind given text, at temperatures 0 and 1.

    At 0 the rate is the share of labels at which both models have the same most probable token, at 1 the mean of
    `sum(min(p, q))`: expected values, so texts need not be drawn anew. `tokens` are (B, S) int64, `is_label` (B, S)
    bool with at least one label behind the first column. `dtype`: of GEMMs, and of the target's LM head.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), corollary 3.6.
    """
    student.module.eval()
    device, width = target.device, min(student.vocab_size, target.vocab_size)
    tokens, is_label = tokens.to(device), is_label.to(device)
    target_head, lm_head = target_parts(target, dtype=dtype).lm_head, target_parts(student).lm_head
    row, place = is_label[:, 1:].nonzero().unbind(1)
    same, overlap = torch.zeros((2,), dtype=torch.float64, device=device).unbind()
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        features = read_features(student, tokens)[row, place]
        given = Teacher(target).features(tokens)[row, place].float()
        for part in portions(len(features), width, device):
            p = target_head(given[part])[:, :width].float().softmax(1)
            q = lm_head(features[part])[:, :width].float().softmax(1)
            same += (p.argmax(1) == q.argmax(1)).sum()
            overlap += torch.minimum(p, q).sum().double()
    return float(same) / len(features), float(overlap) / len(features)

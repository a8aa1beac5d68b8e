"""Checks that the engine drafts the head's predictions on the same text, pass by pass.

Letters: K heads, B texts, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.entrypoints.llm import LLM
from foretoken.training.doctor.readings import AT_ONCE, Texts, greedy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from foretoken.core.records import StepRecord
    from foretoken.core.results import RequestOutput
    from foretoken.models.loading import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingFigures:
    """The engine's acceptance, and the expected one from the head's predictions at the same positions.

    Attributes:
        accepted: Share of passes that accepted at least d drafted tokens, from d = 1.
        expected: The same, from the head with the text as input.
        num_passes: Passes after prefill.
        num_errors: Passes whose draft was dropped because the drafter failed.
    """

    accepted: Sequence[float]
    expected: Sequence[float]
    num_passes: int
    num_errors: int

    @property
    def drop(self) -> float:
        """Greatest difference of the two at any depth."""
        return max((want - got for want, got in zip(self.expected, self.accepted, strict=True)), default=0.0)


def draft(
    target: LoadedModel, config: Mapping[str, Any], texts: Texts, said: Tensor, *, tokenizer: Any, runner: str
) -> DraftingFigures:
    """Drafts the continuations with chains in the engine, and compares pass by pass.

    Args:
        target: The target.
        config: `speculative_config` with the head.
        texts: Prompts and their plain continuations.
        said: (K, B, S), the head's predictions with the right feature.
        tokenizer: The target's tokenizer.
        runner: See `LLM`.

    Raises:
        ForetokenError: When the head cannot be loaded as a drafter.
    """
    records: list[StepRecord] = []
    lengths = {len(text) - len(prompt) for prompt, text in zip(texts.prompts, texts.texts, strict=True)}
    llm = LLM(  # drafts with the head as trained: int8 copies would differ from the prediction
        target,
        speculative_config={**config, "tree": "chain", "num_speculative_tokens": len(said), "quantization": "none"},
        tokenizer=tokenizer,
        max_num_seqs=AT_ONCE,
        max_model_len=min(max(map(len, texts.texts)) + 1, target.context_len),
        runner=runner,
        on_step=records.append,
    )
    outputs = llm.generate([list(prompt) for prompt in texts.prompts], greedy(max(lengths)))
    rows = {output.request_id: row for row, output in enumerate(outputs)}
    accepted, expected = _by_depth(records, rows, _followed(outputs, texts), texts, said.tolist())
    passes = sum(not step.ends_prompt for record in records for step in record.sequences)
    errors = sum(record.draft_error is not None for record in records)
    return DraftingFigures(accepted=accepted, expected=expected, num_passes=passes, num_errors=errors)


def _followed(outputs: Sequence[RequestOutput], texts: Texts) -> list[int]:
    """Returns how far each text was repeated; less than all of it only if two tokens tie within rounding."""
    found = []
    for output, prompt, text in zip(outputs, texts.prompts, texts.texts, strict=True):
        pairs = zip(output.outputs[0].token_ids, text[len(prompt) :], strict=False)
        same = next((index for index, (got, want) in enumerate(pairs) if got != want), len(text) - len(prompt))
        found.append(len(prompt) + same)
    return found


def _by_depth(
    records: Sequence[StepRecord],
    rows: Mapping[str, int],
    followed: Sequence[int],
    texts: Texts,
    said: list[list[list[int]]],
) -> tuple[list[float], list[float]]:
    """Returns shares of passes by depth: accepted by the engine, and expected from predictions (K, B, S)."""
    accepted, expected, counts = ([0] * len(said) for _ in range(3))
    roots = [len(prompt) - 1 for prompt in texts.prompts]
    for record in records:
        for step in record.sequences:
            row = rows[step.request_id]
            root = roots[row]
            roots[row] += step.num_emitted
            depth = min(step.tree_depth, len(said))
            if root + depth >= followed[row]:
                continue
            hits = [said[d][row][root - 1] == texts.texts[row][root + 1 + d] for d in range(depth)]
            right = next((d for d, hit in enumerate(hits) if not hit), depth)
            for d in range(depth):
                counts[d] += 1
                accepted[d] += step.num_accepted > d
                expected[d] += right > d
    kept = [d for d, count in enumerate(counts) if count]
    return [accepted[d] / counts[d] for d in kept], [expected[d] / counts[d] for d in kept]

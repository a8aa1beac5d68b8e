"""The objective of Falcon: the features of the next block and the target's distributions, with glances at the answers.

A text is read as blocks of K pairs; each of the rows r learns feature r + K and the token after it. Rows are predicted
once without a gradient. Then a share of the wrong rows, which falls during training, gets the answers (feature and
token) in place of their own pair. The other rows of the block learn from these.

Source: Gao et al. 2024 (arXiv 2412.12639), coupled sequential glancing distillation, after glancing training (Qian et
al. 2020, 2008.07905). Weights and noise are those of the released code. That code draws the tokens of the cross-entropy
from the target, where this one takes the text's own, and sharpens a part of the divergence by a temperature of 0.95.

Letters: B sequences, S positions, N rows that learn, K size of a block, E hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from foretoken.heads.falcon import FalconConfig, FalconHead
from foretoken.training.objectives.base import Fed, Objective, layer_like

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foretoken.heads.base import Head, HeadConfig
    from foretoken.models.loading import LoadedModel
    from foretoken.models.parts import TargetParts
    from foretoken.training.objectives.base import Examples

_WINDOW = 512  # window length of the published noise
_PORTION_VALUES = 1 << 24  # logits made at once


class FalconObjective(Objective):
    """Published weights; step i is row i of the blocks.

    Attributes:
        noise: Uniform noise on features, within noise * 512 / S; 0 for none.
        glancing: Initial share of the wrong rows that get their answers; falls linearly to 0.
        glancing_floor: Constant added to that share; the released code has 0.35 and 0.1.
    """

    ce_weight: float = Field(default=0.01, ge=0)
    kl_weight: float = Field(default=0.09, ge=0)
    feature_weight: float = Field(default=1.0, ge=0)
    noise: float = Field(default=0.1, ge=0)
    glancing: float = Field(default=0.4, ge=0, le=1)
    glancing_floor: float = Field(default=0.0, ge=0, le=1)

    @override
    def steps(self, config: HeadConfig) -> int:
        """Returns K."""
        assert isinstance(config, FalconConfig), "`CONFIG` says so"
        return config.block

    @override
    def noise_bound(self, num_positions: int, size: int) -> float:
        """See `Objective`."""
        return self.noise * _WINDOW / num_positions

    @override
    def fed(self, head: Head, given: Examples, parts: TargetParts) -> Iterator[Fed]:
        """Yields the steps of the text as blocks; the first block begins at position 0."""
        assert isinstance(head, FalconHead), "`CONFIG` says so"
        block = head.config.block
        following = parts.embed(given.tokens).to(given.features.dtype).roll(-1, dims=1)
        share = self.glancing_floor + self.glancing * (1 - given.progress)
        if share:
            rows = learning_rows(given.supervised, block)
            with torch.no_grad():
                outputs = head.block_outputs(given.features, following)
                is_wrong = _are_wrong(head, outputs, rows, given, parts)
            chosen = glanced(rows, is_wrong, share, block)
            given = replace(given, features=with_answers(given.features, given.final, chosen, block))
            following = with_answers(following, following, chosen, block)
        outputs = head.block_outputs(given.features, following)
        for index in range(block):  # row i of a block is step i of the draft that begins at the block's last position
            yield Fed(outputs[:, index::block], block - 1, block)


class Rows(NamedTuple):
    """Rows of texts: (N,) int64 sequences, and positions in them."""

    sequence: Tensor
    row: Tensor


def learning_rows(supervised: Tensor, block: int) -> Rows:
    """Returns the rows r, in order, that learn token r + K + 1; supervised: (B, S) bool, tokens that are labels."""
    return Rows(*supervised[:, block + 1 :].nonzero().unbind(1))


def glanced(rows: Rows, is_wrong: Tensor, share: float, block: int) -> Rows:
    """Draws the rows that get their answers, with torch's global generator.

    In each sequence every K-th learning row may be drawn. The number of draws is `share` of its wrong rows, rounded
    down. For K above 2 one draw stands for K of these: the first of a run of 1 to K - 1 learning rows.

    Args:
        rows: (N,) learning rows, sequence by sequence in order.
        is_wrong: (N,) bool.
        share: Share of the wrong rows.
        block: K.
    """
    chosen: list[tuple[int, int]] = []
    for sequence in rows.sequence.unique().tolist():
        is_own = rows.sequence == sequence
        own, num_wrong = rows.row[is_own].tolist(), int(is_wrong[is_own].sum())
        starts, known = own[::block], set(own)
        count = int(share * num_wrong) // (1 if block == 2 else block)
        for place in torch.randperm(len(starts))[:count].tolist():
            run = 1 + int(torch.randint(block - 1, ()))
            chosen += [(sequence, row) for row in range(starts[place], starts[place] + run) if row in known]
    table = torch.tensor(sorted(set(chosen)), dtype=torch.int64, device=rows.row.device).view(-1, 2)
    return Rows(table[:, 0], table[:, 1])


def with_answers(values: Tensor, answers: Tensor, chosen: Rows, block: int) -> Tensor:
    """Returns (B, S, E) values, with `answers` from K positions later at the chosen rows."""
    changed = values.clone()
    changed[chosen.sequence, chosen.row] = answers[chosen.sequence, chosen.row + block].to(values.dtype)
    return changed


def _are_wrong(head: FalconHead, outputs: Tensor, rows: Rows, given: Examples, parts: TargetParts) -> Tensor:
    """Returns (N,) bool: whether the head's first candidate differs from the target's."""
    found = [torch.empty(0, dtype=torch.bool, device=outputs.device)]
    size = max(1, _PORTION_VALUES // head.config.vocab_size)
    for sequence, row in zip(*(part.split(size) for part in rows), strict=True):
        said = head.draft_logits(0, outputs[sequence, row], parts).argmax(1)
        found.append(said != parts.lm_head(given.final[sequence, row + head.config.block]).argmax(1))
    return torch.cat(found)


def default_sizes(target: LoadedModel) -> dict[str, Any]:
    """Returns values of `FalconConfig`: a decoder block like the target's."""
    return {"layer": layer_like(target)}


CONFIG, OBJECTIVE = FalconConfig, FalconObjective

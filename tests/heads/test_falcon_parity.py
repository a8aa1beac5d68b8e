"""Falcon's network against its formulas in float64, position by position; and training's passes against drafting."""

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from head_formulas import SAME, E, V, decoder_block, numbers, shared_parts, tokens
from heads.tiny_falcon import LAYER, falcon
from torch import Tensor

from foretoken.heads.base import IN_PLACE, WindowPositions
from foretoken.heads.falcon import FalconHead, paired, relaxed_mask

MODES = ("recurrent", "per_position")
S = 9


def fused(state: Mapping[str, Tensor], mode: str, pairs: Sequence[Tensor]) -> list[Tensor]:
    """What two LSTM layers give at each of the pairs, number by number."""

    def sigmoid(value: float) -> float:
        return 1 / (1 + math.exp(-value))

    xs = list(pairs)
    for layer in range(2):
        of_input, of_hidden = (state[f"lstm.weights.weight_{kind}_l{layer}"] for kind in ("ih", "hh"))
        bias = sum(state.get(f"lstm.weights.bias_{kind}_l{layer}", torch.zeros(4 * E)) for kind in ("ih", "hh"))
        h, c = torch.zeros(E, dtype=torch.float64), [0.0] * E
        for place, x in enumerate(xs):
            if mode == "per_position":
                h, c = torch.zeros(E, dtype=torch.float64), [0.0] * E
            gates = (of_input @ x + of_hidden @ h + bias).tolist()  # type: ignore[union-attr]
            take, keep, new, show = (gates[part * E : (part + 1) * E] for part in range(4))
            c = [sigmoid(f) * old + sigmoid(i) * math.tanh(g) for i, f, g, old in zip(take, keep, new, c, strict=True)]
            h = torch.tensor([sigmoid(o) * math.tanh(v) for o, v in zip(show, c, strict=True)], dtype=torch.float64)
            xs[place] = h
    return xs


def block_output(state: Mapping[str, Tensor], xs: Sequence[Tensor], own: int, end: int) -> Tensor:
    """What the decoder block gives at position `own`, which sees positions 0 … `end` - 1."""
    return decoder_block(state, LAYER, xs[own], xs[:end], own)


def drafted(head: FalconHead, features: Tensor, text: Tensor, position: int) -> list[Tensor]:
    """What a draft that begins at a position of a (S, E) text estimates, block after block, fed with the text."""
    config, table = head.config, shared_parts().embed(torch.arange(V))
    known = [torch.cat([table[text[j + 1]], features[j]]) for j in range(position + 1)]
    found: list[Tensor] = []
    while len(known) - 1 + config.block <= position + config.steps and position + 1 + len(found) < S:
        xs = fused(head.state_dict(), config.lstm_mode, known)
        new = [block_output(head.state_dict(), xs, j, len(xs)) for j in range(len(xs) - config.block, len(xs))]
        begin = position + 1 + len(found)
        known += [torch.cat([table[text[(begin + o + 1) % S]], f]) for o, f in enumerate(new)]
        found += new
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [2, 3])
def test_text_as_blocks(block: int, mode: str) -> None:
    """Training's pass: every row sees all rows up to the end of its own block."""
    head = falcon(block=block, lstm_mode=mode, has_bias=block == 2)
    features, text = numbers(2, S, E, seed=9), tokens(2, S)
    following = shared_parts().embed(text.roll(-1, dims=1))
    found = head.block_outputs(features, following)
    for b in range(2):
        xs = fused(head.state_dict(), mode, list(paired(features[b], following[b])))
        for row in range(S):
            end = min(block * (row // block + 1), S)
            torch.testing.assert_close(found[b, row], block_output(head.state_dict(), xs, row, end), **SAME)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [2, 3])
def test_unrolled_equals_drafting(block: int, mode: str) -> None:
    """All drafts of a text side by side, each against one that knows nothing after its position but what is fed."""
    head, features, text = falcon(block=block, lstm_mode=mode), numbers(2, S, E, seed=9), tokens(2, S)
    unrolled = list(head.teacher_forced(features, text, shared_parts()))
    assert len(unrolled) == head.config.steps == 3 * block
    for b in range(2):
        for position in range(block - 1, S - 1):
            for step, feature in enumerate(drafted(head, features[b], text[b], position)):
                if position + 1 + step < S:  # else the text has no token for this step
                    torch.testing.assert_close(unrolled[step][b, position], feature, **SAME)


@pytest.mark.parametrize("positions", [IN_PLACE, WindowPositions(torch.tensor([[1], [4]]), torch.tensor([[9], [700]]))])
@pytest.mark.parametrize("mode", MODES)
def test_training_learns_what_drafts_begin_with(mode: str, positions: WindowPositions) -> None:
    """Row j of training is the step of the draft that begins where j's block ends."""
    head, features, text = falcon(block=3, lstm_mode=mode), numbers(2, S, E, seed=9), tokens(2, S)
    rows = head.block_outputs(features, shared_parts().embed(text.roll(-1, dims=1)), positions)
    unrolled = list(head.teacher_forced(features, text, shared_parts(), positions))
    for row in range(S - 1):
        step = row % 3
        torch.testing.assert_close(rows[:, row], unrolled[step][:, row - step + 2], **SAME)


def test_relaxed_mask() -> None:
    seen = [[j < 3 * (i // 3 + 1) for j in range(8)] for i in range(8)]
    assert relaxed_mask(8, 3, torch.device("cpu")).tolist() == seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_lstm_piece_by_piece(mode: str, has_bias: bool) -> None:
    """Whole, from a state carried over, and split into linear layers; per position is each pair from zero state."""
    pairs, lstm = numbers(2, 7, 2 * E, seed=4), falcon(lstm_mode=mode, has_bias=has_bias).lstm
    whole = lstm(pairs)
    first, states = lstm.feed_pairs(pairs[:, :3])
    rest, _ = lstm.feed_pairs(pairs[:, 3:], states[:, -1])
    torch.testing.assert_close(torch.cat([first, rest], dim=1), whole, **SAME)
    alone = lstm.feed_pairs(pairs.flatten(0, 1).unsqueeze(1))[0].view_as(whole)
    assert torch.allclose(alone, whole, **SAME) == (mode == "per_position")
    lstm.split()
    torch.testing.assert_close(lstm.feed_pairs(pairs)[0], whole, **SAME)
    assert not [name for name, _ in lstm.named_parameters() if "weights" in name]


@pytest.mark.parametrize("has_bias", [True, False])
def test_learns_through_every_weight(has_bias: bool) -> None:
    head, features = falcon(has_bias=has_bias).train(), numbers(1, S, E, seed=9)
    head.block_outputs(features, numbers(1, S, E, seed=8)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())

"""Falcon's objective row by row, what is given away of the answers, and runs that are interrupted."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from heads.head_formulas import E, numbers, shared_parts, tokens
from heads.tiny_falcon import falcon
from training_runs import StopError, metrics, same_weights, stop_after, trained

from foretoken.heads.falcon import FalconHead
from foretoken.training import objectives
from foretoken.training.objective_base import Examples, accumulate, label_counts
from foretoken.training.objectives import FalconObjective, Rows, glanced, learning_rows

B, S = 3, 13


def examples(progress: float = 0.0) -> Examples:
    """Text of which most positions count, and one that has no label."""
    generator = torch.Generator().manual_seed(3)
    supervised = torch.rand(B, S, generator=generator) < 0.8
    supervised[1] = False
    features = numbers(B, S, E, seed=9)
    return Examples(tokens(B, S), supervised, features, features, progress)


@pytest.mark.parametrize("block", [2, 3])
def test_rows_one_by_one(block: int) -> None:
    """Row r learns feature r + K and what the target says there, each row of a block for itself."""
    objective = FalconObjective(noise=0.0, glancing=0.0, ce_weight=0.3, kl_weight=0.7, head_decay=0.6)
    head, naive, given, parts = falcon(block=block), falcon(block=block), examples(), shared_parts()
    counts = label_counts(given.supervised, block)
    found = accumulate(objective, head, given, parts, counts=counts)
    outputs = naive.block_outputs(given.features, parts.embed(given.tokens.roll(-1, dims=1)))
    total, sums, matches = torch.zeros(()), [0.0] * block, [0] * block
    for b in range(B):
        for row in range(S - block - 1):
            slot, place = row % block, row + block
            if not given.supervised[b, place + 1]:
                continue
            q, p = (parts.lm_head(x).softmax(0) for x in (outputs[b, row], given.features[b, place]))
            apart = (outputs[b, row] - given.features[b, place]).abs()
            loss = (
                -0.3 * q[given.tokens[b, place + 1]].log()
                + 0.7 * (p * (p / q).log()).sum()
                + torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
            )
            # Every K-th position has a row i: its mean stands for all of them.
            total = total + 0.6**slot * block * loss / counts[slot]
            sums[slot] += block * float(loss.detach())
            matches[slot] += block * int(q.argmax() == p.argmax())
    total.backward()
    assert found.loss.tolist() == pytest.approx(sums, rel=1e-9)
    assert found.matches.tolist() == matches
    for ours, theirs in zip(head.parameters(), naive.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-11)


def is_wrong_by_loop(head: FalconHead, given: Examples, block: int) -> tuple[list[tuple[int, int]], list[bool]]:
    """The rows that learn, and whether their first candidate is another than the target's."""
    parts = shared_parts()
    outputs = head.block_outputs(given.features, parts.embed(given.tokens.roll(-1, dims=1)))
    rows = [(b, r) for b in range(B) for r in range(S - block - 1) if given.supervised[b, r + block + 1]]
    wrong = [
        bool(parts.lm_head(outputs[b, r]).argmax() != parts.lm_head(given.features[b, r + block]).argmax())
        for b, r in rows
    ]
    return rows, wrong


@pytest.mark.parametrize("block", [2, 3])
def test_answers_that_are_given_away(block: int) -> None:
    """What is fed is the text with some pairs replaced by those that stand K positions on, in a loop."""
    head, given, parts = falcon(block=block), examples(), shared_parts()
    rows, wrong = is_wrong_by_loop(head, given, block)
    torch.manual_seed(5)
    chosen = glanced(Rows(*torch.tensor(rows).T), torch.tensor(wrong), 0.9, block)
    assert len(chosen.row) > 2
    features, following = given.features.clone(), parts.embed(given.tokens.roll(-1, dims=1))
    for b, r in zip(chosen.sequence.tolist(), chosen.row.tolist(), strict=True):
        features[b, r] = given.features[b, r + block]
        following[b, r] = parts.embed(given.tokens[b, r + block + 1])
    expected = head.block_outputs(features, following)
    torch.manual_seed(5)
    fed = list(FalconObjective(glancing=0.9).fed(head, given, parts))
    assert len(fed) == block
    for index, step in enumerate(fed):
        assert torch.equal(step.hidden, expected[:, index::block])
        assert (step.offset, step.stride) == (block - 1, block)
    plain = head.block_outputs(given.features, parts.embed(given.tokens.roll(-1, dims=1)))
    assert not torch.equal(plain, expected)


@pytest.mark.parametrize("block", [2, 3, 4])
def test_rows_that_are_drawn(block: int) -> None:
    """Every K-th learning row may be drawn, as many as the share of the wrong ones; runs only where K is above 2."""
    supervised = torch.rand(4, 60, generator=torch.Generator().manual_seed(1)) < 0.7
    rows = learning_rows(supervised, block)
    is_wrong = torch.rand(len(rows.row), generator=torch.Generator().manual_seed(2)) < 0.6
    seen: set[int] = set()
    for seed in range(40):
        torch.manual_seed(seed)
        chosen = glanced(rows, is_wrong, 0.45, block)
        for sequence in range(4):
            own = rows.row[rows.sequence == sequence].tolist()
            got = chosen.row[chosen.sequence == sequence].tolist()
            wanted = int(0.45 * int(is_wrong[rows.sequence == sequence].sum()))
            assert set(got) <= set(own)
            assert len(set(got)) == len(got)
            starts = set(own[::block])
            if block == 2:
                assert len(got) == wanted
                assert set(got) <= starts
            else:
                assert wanted // block <= len(got) <= wanted // block * (block - 1)
            seen |= {got.index(row) for row in got if row in starts}
        assert not len(glanced(rows, is_wrong & False, 0.45, block).row)
    assert len(seen) > 3


def test_share_falls_to_none() -> None:
    """The published schedule, and that of the released code by its keys."""
    head, parts = falcon(), shared_parts()
    for objective, shares in (
        (FalconObjective(), [0.4, 0.3, 0.0]),
        (FalconObjective(glancing=0.35, glancing_floor=0.1), [0.45, 0.3625, 0.1]),
    ):
        with mock.patch.object(objectives, "glanced", side_effect=glanced) as drawn:
            for progress in (0.0, 0.25, 1.0):
                list(objective.fed(head, examples(progress), parts))
        used = [call.args[2] for call in drawn.call_args_list]
        assert used == pytest.approx([share for share in shares if share])


@pytest.mark.parametrize("mode", ["recurrent", "per_position"])
def test_learns_and_goes_on_where_it_stopped(mode: str, tmp_path: Path) -> None:
    """The loss falls; an interrupted run has the same weights, with dropout and what is drawn."""
    changes = {"sizes": {"lstm_mode": mode, "num_steps": 4}, "schedule": {"num_steps": 30}, "length": 24}
    whole = trained(tmp_path / "whole", "falcon", **changes)
    losses = [line["loss"] for line in metrics(tmp_path / "whole")]
    assert len(metrics(tmp_path / "whole")[0]["head_losses"]) == 2
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    with pytest.raises(StopError):
        trained(tmp_path / "parted", "falcon", save_every_s=-1.0, on_step=stop_after(11), **changes)
    same_weights(whole.weights, trained(tmp_path / "parted", "falcon", **changes).weights)

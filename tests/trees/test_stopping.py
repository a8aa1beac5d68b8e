"""Stop rules: chains and trees against a plain loop, what the networks read, and files of trained rules."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from end_to_end.stop_rules import NUM_STATISTICS, stop_rule
from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.core.sampling_params import SamplingParams
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees import expansion
from foretoken.trees.choices import TreeShape
from foretoken.trees.expansion import TreeExpansion
from foretoken.trees.stopping import (
    STOP_CONTROLS,
    TRAINED,
    StopRule,
    acceptance_network,
    read_rule,
    rule_file,
    statistics,
    write_rule,
)

VOCAB = 11
SHAPES = {"chain": TreeShape.chain(6), "tree": TreeShape.cartesian((2, 2, 1))}


def logits_after(path: tuple[int, ...]) -> Tensor:
    """(V,) float32, which depend on all tokens before; they are sharp after some paths."""
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    return 6 * torch.rand(1, generator=generator) * torch.randn(VOCAB, generator=generator)


def drafted(shape: TreeShape, rule: StopRule | None, temperature: float) -> tuple[set[tuple[int, ...]], int]:
    """The paths of a drafted tree, and the number of levels that were evaluated."""
    request = SamplingRequest(params=SamplingParams(temperature=temperature), seed=3)
    draws = DraftDraws.build(SamplingBatch.build([request], VOCAB), [False], torch.tensor([9]))
    made, above, levels = TreeExpansion(shape, torch.tensor([7]), replace(draws, stop=rule)), [()], 0
    for depth in made.levels():
        frontier = made.frontier(depth)
        origins = range(len(above)) if frontier.origins is None else frontier.origins[0].tolist()
        tokens = frontier.tokens[0].tolist()
        above = [(*above[o], t) for o, t in zip(origins, tokens, strict=True)] if depth else [()]
        made.grow(depth, torch.stack([logits_after(path) for path in above]).unsqueeze(0))
        levels += 1
    (row,) = made.finish([0], [99], [7]).rows()
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(row.tokens, row.parents, strict=True):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return set(paths), levels


def goes_on(path: tuple[int, ...], rule: StopRule, temperature: float) -> bool:
    """Whether every token of a path passes, in plain Python."""
    estimates = []
    for depth, token in enumerate(path):
        log_probs = (logits_after(path[:depth]) / (temperature or 1.0)).log_softmax(0)
        estimate = log_probs[token].exp().item()
        if rule.network is not None:
            probs = log_probs.exp()
            entropy = -(probs * log_probs).sum().item() / math.log(VOCAB)
            odds = [math.log(p / (1 - p)) for p in (estimate, *probs.sort(descending=True).values[:10].tolist())]
            odds = [min(max(each, math.log(1e-6)), -math.log(1e-6)) for each in odds]
            values = torch.tensor([*odds, entropy, depth / 16])
            estimate = rule.network(values).sigmoid().item()
        estimates.append(estimate)
    threshold = rule.thresholds
    return min(estimates, default=1.0) >= (threshold.token_probability or 0.0) and math.prod(estimates) >= (
        threshold.path_probability or 0.0
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("control", STOP_CONTROLS)
def test_a_draft_ends_after_the_first_token_that_falls_short(
    control: str, shape: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token itself stays. Where the host does not read the device, all levels are evaluated and then cut."""
    rule, (whole, deepest) = stop_rule(control), drafted(SHAPES[shape], None, temperature)
    expected = {path for path in whole if goes_on(path[:-1], rule, temperature)}
    found, levels = drafted(SHAPES[shape], rule, temperature)
    assert found == expected
    assert levels <= max(map(len, found))
    monkeypatch.setattr(expansion, "reads_are_free", lambda device: False)
    assert drafted(SHAPES[shape], rule, temperature) == (expected, deepest)


def test_some_drafts_end_early_and_some_do_not() -> None:
    lengths = {
        len(drafted(SHAPES["chain"], stop_rule(control), temperature)[0])
        for control in STOP_CONTROLS
        for temperature in (0.0, 0.8)
    }
    assert len(lengths) > 1


def test_statistics_of_a_level() -> None:
    """Rows of parents go to their children; one row serves a whole level; few tokens and NaN do no harm."""
    log_probs = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]]).log()
    own = torch.tensor([[0.25, 0.5, 0.0]]).log()
    found = statistics(log_probs, torch.tensor([0, 0, 1]), own, 8)
    assert found.shape == (1, 3, NUM_STATISTICS)
    assert found[0, :, -1].tolist() == [0.5] * 3
    assert torch.allclose(found[0, :2, 0], torch.tensor([1 / 3, 1.0]).log())
    assert found[0, 0, -2].item() == pytest.approx(1.5 * math.log(2) / math.log(3))
    assert found[0, 2, -2].item() == 0.0
    assert found.isfinite().all()
    shared = statistics(log_probs[:, :1], torch.tensor([0, 1, 1]), own, 8)
    assert torch.equal(shared[0, :, 1:], found[0, :1, 1:].expand(3, -1))
    broken = stop_rule("disco").log_estimates(torch.full((1, 1, 3), math.nan), torch.tensor([0]), own[:, :1], 0)
    assert not stop_rule("disco").thresholds.token_passes(broken, None).any()


@pytest.mark.parametrize("control", TRAINED)
def test_a_trained_rule_is_kept_beside_the_weights(control: str, tmp_path: Path) -> None:
    network = acceptance_network(control)
    (weights := tmp_path / "model.safetensors").touch()
    write_rule(StopRule.of(control, 0.3, network, 5), weights, control)
    assert rule_file(weights, control) == rule_file(tmp_path, control)
    rule = read_rule(rule_file(tmp_path, control), control)
    assert rule.max_depth == 5
    assert rule.threshold == pytest.approx(0.3)
    assert rule.thresholds == StopRule.of(control, 0.3).thresholds
    assert rule.network is not None
    values = torch.randn(4, NUM_STATISTICS)
    assert torch.equal(rule.network(values), network(values))


def test_files_that_hold_no_rule(tmp_path: Path) -> None:
    write_rule(StopRule.of("disco", 0.3, acceptance_network("disco"), 5), tmp_path, "disco")
    path = rule_file(tmp_path, "disco")
    with pytest.raises(ConfigError, match=r"is no trained rule of control 'specdec_pp': .*Train it again\."):
        read_rule(path, "specdec_pp")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"is no trained rule of control 'disco': .*Train it again\."):
        read_rule(path, "disco")

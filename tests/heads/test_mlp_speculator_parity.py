"""The MLP speculator against its recurrence, and its published constant."""

import itertools

import pytest
import torch
from head_formulas import SAME, E, V, mlp_speculator, numbers, random_weights, rms, shared_parts, tokens

from foretoken.heads.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorHead, RmsNormWithBias

S = 6


def head(stages: int = 3, **sizes: object) -> MlpSpeculatorHead:
    config = MlpSpeculatorConfig(
        **{"hidden_size": E, "vocab_size": V, "num_heads": stages, "inner_dim": 8, **sizes}  # type: ignore[arg-type]
    )
    module = MlpSpeculatorHead(config, dtype=torch.float64)
    random_weights(module)
    return module


@pytest.mark.parametrize(
    ("stages", "inner", "alpha"), [(3, 4096, 23.0720), (5, 4096, 17.4509), (7, 4096, 14.6005), (4, 3072, 17.0476)]
)
def test_published_alpha(stages: int, inner: int, alpha: float) -> None:
    config = MlpSpeculatorConfig(hidden_size=E, vocab_size=V, num_heads=stages, inner_dim=inner)
    assert config.alpha == pytest.approx(alpha, abs=5e-5)  # published with four decimals


@pytest.mark.parametrize(("scale_input", "epsilon"), [(False, 1e-6), (True, 1e-6), (True, 0.5)])
@pytest.mark.parametrize(("stages", "is_tied"), [(1, True), (2, True), (3, True), (1, False), (3, False)])
def test_every_position_and_stage(stages: int, is_tied: bool, scale_input: bool, epsilon: float) -> None:
    module, parts = head(stages, tie_weights=is_tied, scale_input=scale_input, rms_norm_eps=epsilon), shared_parts()
    features, text, state = 3 * numbers(2, S, E, seed=9), tokens(2, S), module.state_dict()
    with torch.no_grad():
        found = list(module.teacher_forced(features, text, parts))
        assert len(found) == stages
        for i, b in itertools.product(range(stages), range(2)):
            for t in range(S - 1 - i):
                drafted = text[b, t + 1 : t + 2 + i].tolist()
                expected = mlp_speculator(state, module.config, features[b, t], drafted)
                torch.testing.assert_close(module.logits(i, found[i][b, t], parts), expected, **SAME)


def test_norm_subtracts_no_mean_and_adds_a_bias() -> None:
    norm = RmsNormWithBias(5, 1e-6, dtype=torch.float64)
    x, weight, bias = numbers(5, seed=1) + 4, numbers(5, seed=2), numbers(5, seed=3)
    with torch.no_grad():
        norm.weight.copy_(weight)
        norm.bias.copy_(bias)
        torch.testing.assert_close(norm(x), rms(x) * weight + bias, **SAME)
        # A tiny input shows the epsilon, which large ones hide.
        torch.testing.assert_close(norm(1e-3 * x), rms(1e-3 * x) * weight + bias, **SAME)


def test_tied_stages_share_and_untied_do_not() -> None:
    tied, untied = head(4, tie_weights=True), head(4, tie_weights=False)
    assert [len(part) for part in (tied.embeddings, tied.lm_heads, tied.norms, tied.projections)] == [1, 1, 1, 2]
    assert [len(part) for part in (untied.embeddings, untied.lm_heads, untied.norms, untied.projections)] == [4] * 4
    inner, width = 8, E
    count = sum(p.numel() for p in tied.parameters())
    assert count == 2 * V * inner + width * inner + inner**2 + 2 * inner
    count = sum(p.numel() for p in untied.parameters())
    assert count == 2 * 4 * V * inner + width * inner + 3 * inner**2 + 2 * 4 * inner


def test_initial_spread() -> None:
    """Normal with 1 / sqrt(D): estimated from 64 x 300 numbers, whose own error is below 1 %."""
    config = MlpSpeculatorConfig(hidden_size=E, vocab_size=300, num_heads=1, inner_dim=64)
    module = MlpSpeculatorHead(config, dtype=torch.float64)
    torch.manual_seed(0)
    module.initialize(shared_parts())
    assert float(module.embeddings.get_parameter("0.weight").detach().std()) == pytest.approx(1 / 8, rel=0.03)
    assert float(module.lm_heads.get_parameter("0.weight").detach().std()) == pytest.approx(1 / 8, rel=0.03)
    assert torch.equal(module.norms.get_parameter("0.weight"), torch.ones(64, dtype=torch.float64))
    assert torch.equal(module.norms.get_parameter("0.bias"), torch.zeros(64, dtype=torch.float64))

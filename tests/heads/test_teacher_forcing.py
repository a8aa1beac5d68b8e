"""Training's parallel pass over a text equals drafting step by step when drafting is fed the same tokens."""

import pytest
import torch
from head_formulas import SAME, E, V, numbers, random_weights, shared_parts, tokens

from foretoken.heads.base import HeadConfig, build_head
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.hydra import HydraConfig
from foretoken.heads.medusa import MedusaConfig
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig

K, S = 4, 9
PREFIX = LayerConfig(num_attention_heads=2, num_key_value_heads=1, head_dim=4, intermediate_size=7)
CONFIGS: dict[str, HeadConfig] = {
    "medusa": MedusaConfig(hidden_size=E, vocab_size=V, num_heads=K),
    "hydra": HydraConfig(hidden_size=E, vocab_size=V, num_heads=K, num_layers=2),
    "hydra prefix": HydraConfig(hidden_size=E, vocab_size=V, num_heads=K, num_layers=2, prefix=PREFIX),
    "mlp": MlpSpeculatorConfig(hidden_size=E, vocab_size=V, num_heads=K, inner_dim=8),
    "mlp untied": MlpSpeculatorConfig(hidden_size=E, vocab_size=V, num_heads=K, inner_dim=8, tie_weights=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_drafting_of_the_same_tokens(name: str) -> None:
    head = random_weights(build_head(CONFIGS[name], dtype=torch.float64))
    parts, features, text = shared_parts(), numbers(3, S, E, seed=9), tokens(3, S)
    with torch.no_grad():
        trained = list(head.teacher_forced(features, text, parts))
        for t in range(S - 1):
            state = head.encode(features[:, : t + 1])[:, -1]  # nothing after position t is known while drafting
            for i in range(min(K, S - 1 - t)):
                state, hidden = head.step(i, state, text[:, t + 1 + i], parts)
                torch.testing.assert_close(trained[i][:, t], hidden, **SAME)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "medusa"])
def test_later_heads_read_the_tokens_between(name: str) -> None:
    """The control of the test above: with another token in between, the heads after it say something else."""
    head = random_weights(build_head(CONFIGS[name], dtype=torch.float64))
    parts, features, text = shared_parts(), numbers(1, S, E, seed=9), tokens(1, S)
    changed = text.clone()
    changed[0, 3] = (changed[0, 3] + 1) % V
    with torch.no_grad():
        before, after = (list(head.teacher_forced(features, ids, parts)) for ids in (text, changed))
    for i in range(K):
        differs = [t for t in range(S - 1 - i) if not torch.equal(before[i][0, t], after[i][0, t])]
        assert differs == [t for t in range(S - 1 - i) if t + 1 <= 3 <= t + 1 + i]

"""Hydra heads against their formula; widths, the changed residual of the first block, tied blocks, dropout."""

import itertools

import pytest
import torch
from head_formulas import SAME, E, V, hydra, numbers, prefix_layer, random_weights, shared_parts, tokens

from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.hydra import HydraConfig, HydraHeads

K, S = 3, 6
PREFIX = LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=4, intermediate_size=9)


def heads(*, prefix: LayerConfig | None = None, **sizes: object) -> HydraHeads:
    config = HydraConfig(hidden_size=E, vocab_size=V, num_heads=K, prefix=prefix, **sizes)  # type: ignore[arg-type]
    head = HydraHeads(config, dtype=torch.float64)
    random_weights(head)
    return head


@pytest.mark.parametrize("own_lm_head", [False, True])
@pytest.mark.parametrize(("layers", "is_tied"), [(1, False), (2, False), (4, False), (4, True)])
@pytest.mark.parametrize("prefix", [None, PREFIX], ids=["plain", "prefix"])
def test_every_position_and_head(prefix: LayerConfig | None, layers: int, is_tied: bool, own_lm_head: bool) -> None:
    head = heads(prefix=prefix, num_layers=layers, tied_blocks=is_tied, own_lm_head=own_lm_head)
    parts, features, text = shared_parts(), numbers(2, S, E, seed=9), tokens(2, S)
    state = head.state_dict()
    block = {key.removeprefix("prefix."): value for key, value in state.items() if key.startswith("prefix.")}
    starts = features if prefix is None else torch.stack([prefix_layer(block, prefix, text_) for text_ in features])
    with torch.no_grad():
        found = list(head.teacher_forced(features, text, parts))
        assert len(found) == K
        for i, b in itertools.product(range(K), range(2)):
            for t in range(S - 1 - i):
                drafted = text[b, t + 1 : t + 2 + i].tolist()
                expected = hydra(state, head.config, starts[b, t], drafted, parts)
                torch.testing.assert_close(head.logits(i, found[i][b, t], parts), expected, **SAME)


def test_widths() -> None:
    head = heads(num_layers=3)
    assert [tuple(p.shape) for name, p in head.named_parameters() if name.endswith("linear.weight")] == [
        (E, 2 * E), (E, 3 * E), (E, 4 * E)
    ]  # fmt: skip
    assert head.weight.shape == (K, 2, E, E)
    assert heads(num_layers=4, tied_blocks=True).weight.shape == (K, 1, E, E)
    assert heads(num_layers=1, tied_blocks=True).weight.shape == (K, 0, E, E)
    assert sum("residual" in name for name, _ in head.named_parameters()) == 2 * K  # in first blocks alone


@pytest.mark.parametrize("own_lm_head", [False, True])
def test_new_plain_heads_are_the_targets_own_prediction(own_lm_head: bool) -> None:
    head, parts = heads(num_layers=3, own_lm_head=own_lm_head), shared_parts()
    head.initialize(parts)
    features = numbers(2, S, E, seed=9)
    own = features @ parts.lm_head_weight.T if own_lm_head else parts.lm_head(features)
    with torch.no_grad():
        for i, hidden in enumerate(head.teacher_forced(features, tokens(2, S), parts)):
            torch.testing.assert_close(head.logits(i, hidden, parts), own, **SAME)


def test_new_heads_with_a_prefix_layer_have_the_targets_best_token() -> None:
    head, parts = heads(prefix=PREFIX, num_layers=3), shared_parts()
    head.initialize(parts)
    features = numbers(4, S, E, seed=9)
    best = parts.lm_head(features).argmax(-1)
    with torch.no_grad():
        for i, hidden in enumerate(head.teacher_forced(features, tokens(4, S), parts)):
            assert torch.equal(head.logits(i, hidden, parts).argmax(-1), best)


def test_dropout_only_while_training() -> None:
    head, parts = heads(num_layers=2, dropout=0.4), shared_parts()
    features, text = numbers(1, S, E, seed=9), tokens(1, S)
    plain = [hidden.detach() for hidden in head.eval().teacher_forced(features, text, parts)]
    again = [hidden.detach() for hidden in head.eval().teacher_forced(features, text, parts)]
    dropped = [hidden.detach() for hidden in head.train().teacher_forced(features, text, parts)]
    for one, two, three in zip(plain, again, dropped, strict=True):
        assert torch.equal(one, two)
        assert not torch.allclose(one, three)


def test_dropout_keeps_the_state_whole() -> None:
    """What a head drops must not be missing from what the next one reads."""
    head, parts = heads(dropout=0.9), shared_parts()
    head.train()
    features = numbers(1, S, E, seed=9)
    state, _ = head.step(0, features, tokens(1, S), parts)
    assert torch.equal(state, torch.cat([features, parts.embed(tokens(1, S))], dim=-1))

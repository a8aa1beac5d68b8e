"""EAGLE's and EAGLE-3's heads against their formulas: every option, every step, and what must not be the same."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from head_formulas import SAME, E, V, decoder_block, numbers, random_weights, rms, shared_parts, tokens
from torch import Tensor

from foretoken.heads.base import AutoregressiveHead, build_head
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.eagle import EagleConfig
from foretoken.heads.eagle3 import Eagle3Config

State = Mapping[str, Tensor]


def slow_draft(state: State, config: Any, features: Tensor, ids: Sequence[int], parts: Any, begin: int) -> list[Tensor]:
    """What the LM head reads at each step of the draft that begins at a position, the text itself being fed.

    `features` are (S, F E), `ids` S tokens; of the head only parameters and configuration are known.
    """
    step = _eagle if config.method == "eagle" else _eagle3
    states = [_first(state, config, row) for row in features[: begin + 1]]
    found = []
    for index in range(config.num_steps):
        position = begin + index
        if position + 1 >= len(ids):
            break
        pairs = [(states[p], _embedded(state, ids[p + 1], parts)) for p in range(position + 1)]
        output, read = step(state, config, pairs)
        states.append(output)
        found.append(read)
    return found


def _embedded(state: State, token: int, parts: Any) -> Tensor:
    return state["embedding"][token] if "embedding" in state else parts.embed(torch.tensor(token))


def _first(state: State, config: Any, features: Tensor) -> Tensor:
    """What stands at a committed position."""
    if config.method == "eagle":
        return features
    eps = config.layer.rms_norm_eps
    if config.norm_before_fc:
        features = rms(features, eps) * state["feature_norm"]
    if config.fc_norms:
        taps = features.split(config.hidden_size)
        features = torch.cat([rms(tap, eps) * state["feature_norms"][i] for i, tap in enumerate(taps)])
    return state["fc.weight"] @ features


def _eagle(state: State, config: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The last pair's output, twice: no norm follows the block."""
    inputs = [state["fc.weight"] @ torch.cat([e, f]) for f, e in pairs]
    if "fc.bias" in state:
        inputs = [x + state["fc.bias"] for x in inputs]
    x = decoder_block(state, config.layer, inputs[-1], inputs, len(inputs) - 1)
    return x, x


def _eagle3(state: State, config: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The last pair's state for the next step, and what the LM head reads."""
    eps = config.layer.rms_norm_eps
    weight = state["state_norm"] if config.norm_before_residual else state["layer.input_norm"]
    normed = [rms(g, eps) * weight for g, _ in pairs]
    reads = [torch.cat([rms(e, eps) * state["layer.side_norm"], n]) for (_, e), n in zip(pairs, normed, strict=True)]
    residual = normed[-1] if config.norm_before_residual else pairs[-1][0]
    x = decoder_block(state, config.layer, residual, reads, len(reads) - 1)
    read = rms(x, eps) * state["norm"]
    return (read if config.feeds_normed else x), read


S, K = 7, 3
SIZES: dict[str, Any] = {"hidden_size": E, "vocab_size": V, "num_steps": K}
LAYER = LayerConfig(
    num_attention_heads=4, num_key_value_heads=2, head_dim=4, intermediate_size=5, rms_norm_eps=1e-3, rope_theta=50.0
)
BIASED = LAYER.model_copy(update={"attention_bias": True})
TAPS = {"boundaries": (0, 2, 3), "layer": LAYER}
CONFIGS: dict[str, EagleConfig | Eagle3Config] = {
    "eagle": EagleConfig(**SIZES, layer=LAYER),
    "eagle without a bias, with those of attention": EagleConfig(**SIZES, layer=BIASED, has_bias=False),
    "eagle3": Eagle3Config(**SIZES, **TAPS),
    "eagle3, one tap, part of the vocabulary": Eagle3Config(**SIZES, boundaries=(1,), layer=BIASED, draft_vocab_size=5),
    "eagle3, normed residual": Eagle3Config(**SIZES, **TAPS, norm_before_residual=True),
    "eagle3, fed normed": Eagle3Config(**SIZES, **TAPS, feeds_normed=True, fc_norms=True),
    "eagle3, norm before fc": Eagle3Config(**SIZES, **TAPS, norm_before_fc=True),
    "eagle3, another width": Eagle3Config(**SIZES, **TAPS, draft_hidden_size=8, own_embedding=True),
}


def head_of(config: EagleConfig | Eagle3Config) -> AutoregressiveHead:
    head = random_weights(build_head(config, dtype=torch.float64))
    assert isinstance(head, AutoregressiveHead)
    return head


def features_of(config: EagleConfig | Eagle3Config) -> torch.Tensor:
    return numbers(2, S, len(config.taps) * E, seed=7)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_step_of_every_draft_is_the_formulas(name: str) -> None:
    config, parts, ids = CONFIGS[name], shared_parts(), tokens(2, S)
    head, features = head_of(config), features_of(config)
    with torch.no_grad():
        steps = list(head.teacher_forced(features, ids, parts))
        for b in range(2):
            for begin in range(S - 1):
                slow = slow_draft(head.state_dict(), config, features[b], ids[b].tolist(), parts, begin)
                for index, read in enumerate(slow):
                    torch.testing.assert_close(steps[index][b, begin], read, **SAME)
                    lm_head = parts.lm_head if config.method == "eagle" else head.get_submodule("lm_head")
                    torch.testing.assert_close(head.draft_logits(index, read, parts), lm_head(read), **SAME)


def test_embeddings_come_first_and_there_is_no_norm_before_attention() -> None:
    """What early ports got wrong: the order of the two, and a norm that EAGLE's first block does not have."""
    config, parts, ids = CONFIGS["eagle"], shared_parts(), tokens(2, S)
    head, features = head_of(config), features_of(config)
    slow = slow_draft(head.state_dict(), config, features[0], ids[0].tolist(), parts, 3)[0]
    swapped = head_of(config)
    with torch.no_grad():
        weight = swapped.get_parameter("fc.weight")
        weight.copy_(weight.roll(E, dims=1))
    normed = head_of(config)
    normed.layer.input_norm = torch.nn.Parameter(torch.ones(E, dtype=torch.float64))
    for other in (swapped, normed):
        found = next(iter(other.teacher_forced(features, ids, parts)))[0, 3]
        assert not torch.allclose(found, slow, rtol=1e-3)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_only_differences_of_positions_count(name: str) -> None:
    """Other programs count a draft's positions from one."""
    head, features = head_of(CONFIGS[name]), features_of(CONFIGS[name])
    embedded = shared_parts().embed(tokens(2, S))
    inputs, side = head.paired(head.initial_state(features), embedded)
    positions = torch.arange(S).unsqueeze(0)
    ours, shifted = (head.layer(inputs, positions + shift, side) for shift in (0, 5))
    torch.testing.assert_close(ours, shifted, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(ours, head.layer(inputs, 2 * positions, side), rtol=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fresh_head_hands_on_what_the_target_says_next(name: str) -> None:
    """EAGLE's says the target's own next token; EAGLE-3's is a copy of its LM head on the last tap."""
    config, parts = CONFIGS[name], shared_parts()
    head = build_head(config, dtype=torch.float64)
    torch.manual_seed(0)
    head.initialize(parts)
    assert all(bool(parameter.isfinite().all()) for parameter in head.parameters())
    if config.method == "eagle":
        features = features_of(config)
        hidden = next(iter(head.teacher_forced(features, tokens(2, S), parts)))
        torch.testing.assert_close(hidden, features, **SAME)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": V + 1}, "Expected at most 11"),
        ({"draft_hidden_size": 8}, "Expected own_embedding"),
        ({"norm_before_fc": True, "fc_norms": True}, "exclude each other"),
        ({"boundaries": ()}, "at least 1 item"),
    ],
)
def test_sizes_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Eagle3Config(**(SIZES | TAPS | changes))

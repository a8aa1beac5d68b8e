"""EAGLE's and EAGLE-3's heads written once more, slowly: one draft, one position and one attention head at a time.

In float64, from the papers and the released layouts; of the modules only the names of parameters are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from heads.head_formulas import decoder_block, rms
from torch import Tensor

State = Mapping[str, Tensor]


def draft(state: State, config: Any, features: Tensor, tokens: Sequence[int], parts: Any, begin: int) -> list[Tensor]:
    """What the LM head reads at each step of the draft that begins at a position, the text itself being fed.

    Args:
        state: Parameters of the head.
        config: Its configuration.
        features: (S, F E) of the text.
        tokens: S ids.
        parts: The target's embedding.
        begin: The position.
    """
    step = _eagle if config.method == "eagle" else _eagle3
    states = [_first(state, config, row) for row in features[: begin + 1]]
    found = []
    for index in range(config.num_steps):
        position = begin + index
        if position + 1 >= len(tokens):
            break
        pairs = [(states[p], _embedded(state, tokens[p + 1], parts)) for p in range(position + 1)]
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

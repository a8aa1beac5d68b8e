"""EAGLE's and EAGLE-3's heads written once more, slowly: one draft, one position and one attention head at a time.

In float64, from the papers and the released layouts; of the modules only the names of parameters are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from heads.head_formulas import rms, silu
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
        pairs = [(states[p], embedded(state, config, tokens[p + 1], parts)) for p in range(position + 1)]
        output, read = step(state, config, pairs)
        states.append(output)
        found.append(read)
    return found


def embedded(state: State, config: Any, token: int, parts: Any) -> Tensor:
    """The embedding that the head reads of a token."""
    del config
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
    x = _block(state, config, inputs, inputs)
    return x, x


def _eagle3(state: State, config: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The last pair's state for the next step, and what the LM head reads."""
    eps = config.layer.rms_norm_eps
    weight = state["state_norm"] if config.norm_before_residual else state["layer.input_norm"]
    normed = [rms(g, eps) * weight for g, _ in pairs]
    reads = [torch.cat([rms(e, eps) * state["layer.side_norm"], n]) for (_, e), n in zip(pairs, normed, strict=True)]
    x = _block(state, config, normed if config.norm_before_residual else [g for g, _ in pairs], reads)
    read = rms(x, eps) * state["norm"]
    return (read if config.feeds_normed else x), read


def _block(state: State, config: Any, residuals: Sequence[Tensor], reads: Sequence[Tensor]) -> Tensor:
    """The block's output at the last position."""
    layer = config.layer
    heads, groups, size = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim

    def projected(name: str, x: Tensor, count: int) -> Tensor:
        y = state[f"layer.{name}.weight"] @ x
        return (y + state[f"layer.{name}.bias"] if layer.attention_bias else y).view(count, size)

    def rotated(x: Tensor, position: int) -> Tensor:
        result = x.clone()
        for pair in range(size // 2):
            angle = position * layer.rope_theta ** (-2 * pair / size)
            a, b = float(x[pair]), float(x[pair + size // 2])
            result[pair] = a * math.cos(angle) - b * math.sin(angle)
            result[pair + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return result

    last = len(reads) - 1
    mixed = []
    for head in range(heads):
        group = head // (heads // groups)
        query = rotated(projected("q_proj", reads[last], heads)[head], last)
        keys = [rotated(projected("k_proj", x, groups)[group], s) for s, x in enumerate(reads)]
        scores = [float(query @ key) / math.sqrt(size) for key in keys]
        shares = [math.exp(score - max(scores)) for score in scores]
        values = [projected("v_proj", x, groups)[group] for x in reads]
        mixed.append(sum(w / sum(shares) * value for w, value in zip(shares, values, strict=True)))
    x = residuals[last] + state["layer.o_proj.weight"] @ torch.cat(mixed)  # type: ignore[arg-type]
    inner = rms(x, layer.rms_norm_eps) * state["layer.post_attention_norm"]
    gated = silu(state["layer.gate_proj.weight"] @ inner) * (state["layer.up_proj.weight"] @ inner)
    return x + state["layer.down_proj.weight"] @ gated

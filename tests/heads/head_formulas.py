"""Draft heads written once more, slowly: one position, one head and one block at a time, from the published formulas.

Everything here works on single vectors in float64 and knows of the modules only the names of their parameters.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.heads.base import Head
from foretoken.models.parts import TargetParts

E, V = 6, 11  # hidden size and vocabulary of the tests
SAME = {"rtol": 1e-11, "atol": 1e-11}  # float64: only the order of sums differs


def numbers(*shape: int, seed: int) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(*shape: int, seed: int = 3) -> Tensor:
    """Random token ids."""
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(seed))


def random_weights(head: Head) -> Head:
    """The head with normal numbers in every parameter, none of them neutral."""
    with torch.no_grad():
        for seed, parameter in enumerate(head.parameters()):
            parameter.copy_(0.7 * numbers(*parameter.shape, seed=100 + seed))
    return head.eval()


def shared_parts(width: int = E, vocab: int = V) -> TargetParts:
    """An embedding and an LM head that bends its logits, as some targets do."""
    table, rows = numbers(vocab, width, seed=1), numbers(vocab, width, seed=2)
    return TargetParts(
        embed=lambda ids: table[ids], lm_head=lambda x: 3 * torch.tanh(x @ rows.T / 3), lm_head_weight=rows
    )


def silu(z: Tensor) -> Tensor:
    """z times the logistic function."""
    return torch.stack([v / (1 + math.exp(-float(v))) for v in z])


def gelu(z: Tensor) -> Tensor:
    """z times the normal distribution function, not its tanh approximation."""
    return torch.stack([v * 0.5 * (1 + math.erf(float(v) / math.sqrt(2))) for v in z])


def rms(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    """x over its root mean square."""
    return x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + epsilon)


def medusa(state: Mapping[str, Tensor], config: Any, index: int, feature: Tensor, parts: TargetParts) -> Tensor:
    """(V,) logits of Medusa head `index` after one feature."""
    x = feature
    for layer in range(config.num_layers):
        block = 0 if config.tied_blocks else layer
        z = state["weight"][index, block] @ x
        if config.has_bias:
            z = z + state["bias"][index, block]
        x = x + silu(z)
    if not config.own_lm_head:
        return parts.lm_head(x)
    scores = state["lm_head"][index] @ x
    if "token_map" not in state:
        return scores
    whole = torch.full((V,), -math.inf, dtype=torch.float64)
    for row, token in enumerate(state["token_map"].tolist()):
        whole[token] = scores[row]
    return whole


def hydra(state: Mapping[str, Tensor], config: Any, feature: Tensor, drafted: list[int], parts: TargetParts) -> Tensor:
    """(V,) logits of Hydra head `len(drafted) - 1`; feature: f_t; drafted: x_{t+1} and so on, one for each head."""
    index = len(drafted) - 1
    u = torch.cat([feature, *(parts.embed(torch.tensor(token)) for token in drafted)])
    w, b = state[f"first.{index}.linear.weight"], state[f"first.{index}.linear.bias"]
    r, c = state[f"first.{index}.residual.weight"], state[f"first.{index}.residual.bias"]
    y = r @ u + c + silu(w @ u + b)
    for layer in range(config.num_layers - 1):
        block = 0 if config.tied_blocks else layer
        y = y + silu(state["weight"][index, block] @ y + state["bias"][index, block])
    if config.own_lm_head:
        return state[f"lm_heads.{index}.weight"] @ y + state[f"lm_heads.{index}.bias"]
    return parts.lm_head(y)


def mlp_speculator(state: Mapping[str, Tensor], config: Any, feature: Tensor, drafted: list[int]) -> Tensor:
    """(V,) logits of stage `len(drafted) - 1` of an MLP speculator."""
    stages, inner = config.num_heads, config.inner_dim
    is_tied = config.tie_weights
    keep = 0.5 ** (0.5 / stages)
    alpha = math.sqrt((1 - keep**2) * inner / 2) / keep
    epsilon = config.rms_norm_eps
    s = rms(feature, epsilon) / math.sqrt(2) if config.scale_input else feature
    for index, token in enumerate(drafted):
        own = 0 if is_tied else index
        projection = min(index, 1) if is_tied else index
        x = state[f"projections.{projection}.weight"] @ s + alpha * state[f"embeddings.{own}.weight"][token]
        s = gelu(rms(x, epsilon) * state[f"norms.{own}.weight"] + state[f"norms.{own}.bias"])
    return state[f"lm_heads.{0 if is_tied else len(drafted) - 1}.weight"] @ s


def decoder_block(
    state: Mapping[str, Tensor], layer: Any, residual: Tensor, reads: Sequence[Tensor], own: int, prefix: str = "layer."
) -> Tensor:
    """(W,) what a Llama's block gives at position `own`, head by head.

    `reads` are what attention reads, of all positions that are seen, the first of them position 0.
    """
    heads, groups, size = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim

    def projected(name: str, x: Tensor) -> Tensor:
        y = state[f"{prefix}{name}_proj.weight"] @ x
        return (y + state[f"{prefix}{name}_proj.bias"] if layer.attention_bias else y).view(-1, size)

    def rotated(x: Tensor, position: int) -> Tensor:
        result = x.clone()
        for pair in range(size // 2):
            angle = position * layer.rope_theta ** (-2 * pair / size)
            a, b = float(x[pair]), float(x[pair + size // 2])
            result[pair] = a * math.cos(angle) - b * math.sin(angle)
            result[pair + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return result

    query, keys, values = (
        projected("q", reads[own]), [projected("k", x) for x in reads], [projected("v", x) for x in reads]
    )  # fmt: skip
    mixed = []
    for head in range(heads):
        group = head // (heads // groups)
        turned = rotated(query[head], own)
        scores = [float(turned @ rotated(key[group], s)) / math.sqrt(size) for s, key in enumerate(keys)]
        shares = [math.exp(score - max(scores)) for score in scores]
        parts = [w / sum(shares) * value[group] for w, value in zip(shares, values, strict=True)]
        mixed.append(torch.stack(parts).sum(0))
    x = residual + state[f"{prefix}o_proj.weight"] @ torch.cat(mixed)
    inner = rms(x, layer.rms_norm_eps) * state[f"{prefix}post_attention_norm"]
    gated = silu(state[f"{prefix}gate_proj.weight"] @ inner) * (state[f"{prefix}up_proj.weight"] @ inner)
    return x + state[f"{prefix}down_proj.weight"] @ gated


def prefix_layer(state: Mapping[str, Tensor], config: Any, features: Tensor) -> Tensor:
    """(S, E) to (S, E): the decoder block of Hydra++ over one text, position by position."""
    eps = config.rms_norm_eps
    normed = [rms(x, eps) * state["input_norm"] for x in features]
    outputs = [decoder_block(state, config, x, normed[: t + 1], t, prefix="") for t, x in enumerate(features)]
    return torch.stack([rms(x, eps) * state["norm"] for x in outputs])

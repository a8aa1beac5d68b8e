"""Draft heads written once more, slowly: one position, one head and one block at a time, from the published formulas.

Everything here works on single vectors in float64 and knows of the modules only the names of their parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

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


def medusa(state: Mapping[str, Tensor], config: object, index: int, feature: Tensor, parts: TargetParts) -> Tensor:
    """(V,) logits of Medusa head `index` after one feature."""
    x = feature
    for layer in range(config.num_layers):  # type: ignore[attr-defined]
        block = 0 if config.tied_blocks else layer  # type: ignore[attr-defined]
        z = state["weight"][index, block] @ x
        if config.has_bias:  # type: ignore[attr-defined]
            z = z + state["bias"][index, block]
        x = x + silu(z)
    if not config.own_lm_head:  # type: ignore[attr-defined]
        return parts.lm_head(x)
    scores = state["lm_head"][index] @ x
    if "token_map" not in state:
        return scores
    whole = torch.full((V,), -math.inf, dtype=torch.float64)
    for row, token in enumerate(state["token_map"].tolist()):
        whole[token] = scores[row]
    return whole


def hydra(
    state: Mapping[str, Tensor], config: object, feature: Tensor, drafted: list[int], parts: TargetParts
) -> Tensor:
    """(V,) logits of Hydra head `len(drafted) - 1`; feature: f_t; drafted: x_{t+1} and so on, one for each head."""
    index = len(drafted) - 1
    u = torch.cat([feature, *(parts.embed(torch.tensor(token)) for token in drafted)])
    w, b = state[f"first.{index}.linear.weight"], state[f"first.{index}.linear.bias"]
    r, c = state[f"first.{index}.residual.weight"], state[f"first.{index}.residual.bias"]
    y = r @ u + c + silu(w @ u + b)
    for layer in range(config.num_layers - 1):  # type: ignore[attr-defined]
        block = 0 if config.tied_blocks else layer  # type: ignore[attr-defined]
        y = y + silu(state["weight"][index, block] @ y + state["bias"][index, block])
    if config.own_lm_head:  # type: ignore[attr-defined]
        return state[f"lm_heads.{index}.weight"] @ y + state[f"lm_heads.{index}.bias"]
    return parts.lm_head(y)


def mlp_speculator(state: Mapping[str, Tensor], config: object, feature: Tensor, drafted: list[int]) -> Tensor:
    """(V,) logits of stage `len(drafted) - 1` of an MLP speculator."""
    stages, inner = config.num_heads, config.inner_dim  # type: ignore[attr-defined]
    is_tied = config.tie_weights  # type: ignore[attr-defined]
    keep = 0.5 ** (0.5 / stages)
    alpha = math.sqrt((1 - keep**2) * inner / 2) / keep
    epsilon = config.rms_norm_eps  # type: ignore[attr-defined]
    s = rms(feature, epsilon) / math.sqrt(2) if config.scale_input else feature  # type: ignore[attr-defined]
    for index, token in enumerate(drafted):
        own = 0 if is_tied else index
        projection = min(index, 1) if is_tied else index
        x = state[f"projections.{projection}.weight"] @ s + alpha * state[f"embeddings.{own}.weight"][token]
        s = gelu(rms(x, epsilon) * state[f"norms.{own}.weight"] + state[f"norms.{own}.bias"])
    return state[f"lm_heads.{0 if is_tied else len(drafted) - 1}.weight"] @ s


def prefix_layer(state: Mapping[str, Tensor], config: object, features: Tensor) -> Tensor:
    """(S, E) to (S, E): the decoder block of Hydra++ over one text, position by position and head by head."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads  # type: ignore[attr-defined]
    size, eps = config.head_dim, config.rms_norm_eps  # type: ignore[attr-defined]

    def rotated(x: Tensor, position: int) -> Tensor:
        result = x.clone()
        for pair in range(size // 2):
            angle = position * config.rope_theta ** (-2 * pair / size)  # type: ignore[attr-defined]
            a, b = float(x[pair]), float(x[pair + size // 2])
            result[pair] = a * math.cos(angle) - b * math.sin(angle)
            result[pair + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return result

    normed = [rms(x, eps) * state["input_norm"] for x in features]
    queries = [(state["q_proj.weight"] @ x).view(heads, size) for x in normed]
    keys = [(state["k_proj.weight"] @ x).view(groups, size) for x in normed]
    values = [(state["v_proj.weight"] @ x).view(groups, size) for x in normed]
    outputs = []
    for t, feature in enumerate(features):
        mixed = []
        for head in range(heads):
            group = head // (heads // groups)
            query = rotated(queries[t][head], t)
            scores = [float(query @ rotated(keys[s][group], s)) / math.sqrt(size) for s in range(t + 1)]
            shares = [math.exp(score - max(scores)) for score in scores]
            mixed.append(sum(w / sum(shares) * values[s][group] for s, w in enumerate(shares)))
        x = feature + state["o_proj.weight"] @ torch.cat(mixed)  # type: ignore[arg-type]
        inner = rms(x, eps) * state["post_attention_norm"]
        gated = silu(state["gate_proj.weight"] @ inner) * (state["up_proj.weight"] @ inner)
        x = x + state["down_proj.weight"] @ gated
        outputs.append(rms(x, eps) * state["norm"])
    return torch.stack(outputs)

"""Decoder blocks in readable arithmetic: whole sequences, a token and a head at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, relu, rms_norm, silu

from foretoken.decoder.blocks import Block, Blocks, Experts, Matrix, Norm


class Slow:
    """Whole sequences in readable arithmetic, a token at a time."""

    def __init__(self, layers: Blocks) -> None:
        self.layers = layers

    def __call__(self, inputs: Tensor, side: Tensor | None = None) -> list[Tensor]:
        """(T, E) to L + 2 boundaries (T, E): what every block reads, the last one's output, the final norm's.

        side: (T, E), the second input of the first block; None where it has none.
        """
        x, boundaries = inputs, []
        for each in self.layers.blocks:
            boundaries.append(x)
            read = self.normed(each.attention_norm, x)
            if each.side is not None:
                assert side is not None
                read = torch.cat([self.normed(each.side.norm, side), read], dim=1)
            x = x + self.normed(each.attention_post_norm, self.attention(each, read)) * each.attention_factor
            inner = self.normed(each.mlp_norm, x)
            mlp = self.routed if isinstance(each.mlp, Experts) else self.feed_forward
            outputs = torch.stack([mlp(each, row) for row in inner])
            x = x + self.normed(each.mlp_post_norm, outputs) * each.mlp_factor
        return [*boundaries, x, self.normed(self.layers.final_norm, x)]

    @staticmethod
    def normed(by: Norm | None, x: Tensor) -> Tensor:
        if by is None:
            return x
        if by.kind == "layer":
            return layer_norm(x, by.weight.shape, by.weight, by.bias, by.epsilon)
        return rms_norm(x, by.weight.shape, by.weight, by.epsilon)

    @staticmethod
    def linear(by: Matrix, x: Tensor) -> Tensor:
        return x @ by.weight.T + (0 if by.bias is None else by.bias)

    def activated(self, each: Block, x: Tensor) -> Tensor:
        kinds = {
            "silu": silu,
            "gelu": gelu,
            "gelu_tanh": lambda y: gelu(y, approximate="tanh"),
            "relu2": lambda y: relu(y) ** 2,
        }
        return kinds[each.spec.activation](x)

    def feed_forward(self, each: Block, x: Tensor, mlp: Any = None) -> Tensor:
        mlp = mlp or each.mlp
        up = self.linear(mlp.up, x)
        if mlp.gate is None:
            return self.linear(mlp.down, self.activated(each, up))
        return self.linear(mlp.down, self.activated(each, self.linear(mlp.gate, x)) * up)

    def routed(self, each: Block, x: Tensor) -> Tensor:
        mlp: Any = each.mlp
        logits = self.linear(mlp.router, x)
        probs = logits.sigmoid() if mlp.is_sigmoid else logits.softmax(-1)
        biases = torch.zeros(len(probs)) if mlp.score_bias is None else mlp.score_bias
        chosen = sorted(range(len(probs)), key=lambda e: -float(probs[e] + biases[e]))[: mlp.top_k]
        total = (sum(probs[e] for e in chosen) + mlp.epsilon if mlp.is_normalized else 1.0) / mlp.factor
        parts = []
        for e in chosen:
            if mlp.is_gated:
                gate, up = (mlp.gate_up[e] @ x).chunk(2)
                inner = self.activated(each, gate) * up
            else:
                inner = self.activated(each, mlp.gate_up[e] @ x)
            parts.append(mlp.down[e] @ inner * probs[e] / total)
        if mlp.shared is not None:
            gate = torch.ones(1) if mlp.shared_gate is None else self.linear(mlp.shared_gate, x).sigmoid()
            parts.append(self.feed_forward(each, x, mlp.shared) * gate)
        return torch.stack(parts).sum(0)

    def attention(self, each: Block, x: Tensor) -> Tensor:
        spec = each.spec
        num_heads, num_kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_dim
        heads = []
        for by, over, count in ((each.query, each.query_norm, num_heads), (each.key, each.key_norm, num_kv_heads)):
            part = self.linear(by, x)
            if over is not None and over.weight.shape[0] != size:
                part = self.normed(over, part)
            part = part.unflatten(1, (count, size))
            heads.append(part if over is None or over.weight.shape[0] != size else self.normed(over, part))
        query, key = (self.turned(each, part) for part in heads)
        value = self.linear(each.value, x).unflatten(1, (num_kv_heads, size))
        rows = []
        for t in range(len(x)):
            first = 0 if spec.window is None else max(0, t - spec.window + 1)
            mixed = []
            for h in range(num_heads):
                group = h // (num_heads // num_kv_heads)
                scores = key[first : t + 1, group] @ query[t, h] * (size**-0.5 if spec.scale is None else spec.scale)
                if spec.softcap is not None:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                mixed.append(scores.softmax(0) @ value[first : t + 1, group])
            rows.append(torch.cat(mixed))
        return self.linear(each.output, torch.stack(rows))

    @staticmethod
    def turned(each: Block, x: Tensor) -> Tensor:
        if each.rotary is None:
            return x
        x, half = x.clone(), each.rotary.cos.shape[1]
        for t in range(len(x)):
            for i in range(half):
                cos, sin = each.rotary.cos[t, i], each.rotary.sin[t, i]
                a, b = x[t, :, i].clone(), x[t, :, i + half].clone()
                x[t, :, i], x[t, :, i + half] = a * cos - b * sin, b * cos + a * sin
        return x

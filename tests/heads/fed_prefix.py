"""The decoder block of Hydra++ fed piece by piece, beside the whole texts."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from drafters.drafting_contexts import handle
from heads.head_formulas import SAME, E, numbers
from torch import Tensor

from foretoken.decoder.block_stack import BlockStack
from foretoken.drafters.base import Committed, Prefix
from foretoken.drafters.head_features import StackFeatures
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.hydra import PrefixLayer

GROUPS = {"one key head each": (4, 4), "grouped": (4, 2), "one key head": (4, 1)}


def block(
    heads: int = 4, groups: int = 2, width: int = E, theta: float = 10000.0, scaling: dict[str, Any] | None = None
) -> PrefixLayer:
    config = LayerConfig(
        num_attention_heads=heads, num_key_value_heads=groups, head_dim=8, intermediate_size=10, rms_norm_eps=1e-5,
        rope_theta=theta, rope_scaling=scaling,
    )  # fmt: skip
    layer = PrefixLayer(config, width, dtype=torch.float64)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(0.6 * numbers(*parameter.shape, seed=200 + seed))
    return layer.requires_grad_(requires_grad=False)


class Fed:
    """Features through a block beside the whole texts that it is fed with."""

    def __init__(
        self, layer: PrefixLayer, dtype: torch.dtype, num_slots: int = 3, context_len: int = 96, capture: Any = None
    ) -> None:
        target = handle(vocab_size=4, context_len=context_len, num_slots=num_slots, dtype=dtype)
        own = deepcopy(layer).to(dtype)
        stack = BlockStack(own.as_blocks(context_len), num_slots=num_slots, capacity=context_len, capture=capture)
        self.layer, self.features = layer, StackFeatures(stack, target, width=len(own.norm), dtype=dtype)
        expected = "torch" if dtype == torch.float64 else "native" if capture is None else "graphs"
        assert self.features.stack.backend == expected
        self.same = SAME if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
        self.texts: list[Tensor] = [torch.empty(0)] * num_slots
        self.encoded: list[Tensor] = [torch.empty(0)] * num_slots
        self.length = [0] * num_slots

    def begin(self, slot: int, seed: int, size: int = 90) -> None:
        """Another text in a slot."""
        self.texts[slot] = numbers(size, E, seed=seed)
        self.encoded[slot] = self.layer(self.texts[slot][None])[0]
        self.length[slot] = 0

    def begin_alike(self, slot: int, source: int, length: int, seed: int, size: int = 90) -> int:
        """A text in a slot whose first `length` positions are those of another slot's; gives how many were kept."""
        kept = self.features.reusable(source, length)
        shared = self.texts[source][:kept].clone()
        self.begin(slot, seed, size)
        self.texts[slot][:kept] = shared
        self.encoded[slot] = self.layer(self.texts[slot][None])[0]
        self.length[slot] = kept
        self.features.begin(slot, Prefix(source, kept))
        self.features.stack.cache.poison(slot, self.features._fed[slot])
        return kept

    def commit(self, counts: dict[int, int]) -> None:
        """Commits further positions of some slots in one call."""
        rows, starts = [], [self.length[slot] for slot in counts]
        for slot, count in counts.items():
            rows.append(self.texts[slot][self.length[slot] :][:count])
            self.length[slot] += count
        tokens = [[0] * count for count in counts.values()]
        features = torch.cat(rows).unsqueeze(1)
        self.features.learn(Committed(slots=list(counts), starts=starts, tokens=tokens, features=features))

    def check(self, slots: Sequence[int]) -> None:
        """What drafting would read is the whole pass's; then all rows that are not committed become NaN."""
        assert all(self.features.is_known(slot, self.length[slot]) for slot in slots)
        found = self.features.of(slots, [[0] * (self.length[slot] + 1) for slot in slots])
        for row, slot in enumerate(slots):
            expected = self.encoded[slot][self.length[slot] - 1]
            torch.testing.assert_close(found[row].double(), expected, **self.same)
            self.features.stack.cache.poison(slot, self.length[slot])

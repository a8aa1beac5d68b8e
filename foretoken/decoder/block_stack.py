"""Decoder blocks with a KV cache of their own, on whatever runs them best: for drafters that bring blocks.

What runs them is chosen in `stack_backends`.

Letters: M tokens of a pass, E hidden size, F taps, L blocks.
"""

from __future__ import annotations

from itertools import pairwise
from operator import add
from typing import TYPE_CHECKING, Literal

from foretoken.core.checks import require
from foretoken.core.errors import PassError
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.decoder.stack_backends import backend_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foretoken.core.passes import Pass
    from foretoken.decoder.blocks import Blocks
    from foretoken.decoder.cuda_graphs import GraphCapture
    from foretoken.decoder.lean.int8 import Quantization
    from foretoken.decoder.lean.native import NativeBlocks


class BlockStack:
    """Blocks and their KV rows by slot.

    A drafter feeds it inputs of its own making (embeddings, features of the target, both joined) where a model would
    look up embeddings, and passes over trees or chains as a target gets them. `work.tokens` is not read, so it may hold
    anything; row i of a slot holds position i of what was committed, and the nodes of a pass follow the prefix that it
    names. `cache.move_paths` makes an accepted path permanent; rejected nodes need nothing.

    >>> import torch
    >>> from foretoken.core.passes import Pass
    >>> from foretoken.decoder.block_stack import BlockStack
    >>> from foretoken.decoder.blocks import Block, Blocks, BlockSpec, FeedForward, Matrix, Norm, Rotary
    >>> def matrix(outputs, inputs):
    ...     return Matrix(weight=torch.randn(outputs, inputs) / inputs**0.5)
    >>> def norm():
    ...     return Norm(weight=torch.ones(32), epsilon=1e-6)
    >>> block = Block(
    ...     spec=BlockSpec(num_heads=4, num_kv_heads=2, head_dim=8),
    ...     query=matrix(32, 32), key=matrix(16, 32), value=matrix(16, 32), output=matrix(32, 32),
    ...     mlp=FeedForward(gate=matrix(48, 32), up=matrix(48, 32), down=matrix(32, 48)),
    ...     attention_norm=norm(), mlp_norm=norm(), rotary=Rotary.plain(num_positions=64, head_dim=8),
    ... )
    >>> stack = BlockStack(Blocks(blocks=[block], final_norm=norm()), num_slots=2, capacity=64)
    >>> prompt = Pass.of_chains([[0] * 5], slots=[1], prefix_lens=[0])  # five positions of slot 1
    >>> stack.run(torch.randn(5, 32), prompt).shape
    torch.Size([5, 32])
    >>> further = Pass.of_chains([[0] * 2], slots=[1], prefix_lens=[5])
    >>> stack.append(torch.randn(2, 32), further)  # seen by what comes later; nothing comes out

    Attributes:
        cache: KV rows; yours to move and to poison.
        backend: "native", "torch" or "graphs": what runs passes.
        hidden_size: E.
        has_side: Whether the first block has a second input.
    """

    def __init__(
        self,
        layers: Blocks,
        *,
        num_slots: int,
        capacity: int,
        taps: Sequence[int] = (),
        backend: Literal["auto", "native", "torch"] = "auto",
        capture: GraphCapture | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """Allocates the cache, in dtype and on the device of the blocks.

        Args:
            layers: The blocks; their weights stay where they are and must not be freed.
            num_slots: Sequences held at once.
            capacity: Rows a slot, those of drafted nodes included.
            taps: What `run_with_features` gives besides: i is what block i reads, L what comes out of the last one.
            backend: "auto" for the fastest here.
            capture: Captures and replays; None for CUDA graphs on GPUs and none elsewhere.
            quantization: "int8" to multiply by copies of all matrices in int8, a byte a weight; on the native backend
                alone. None to read the weights where they are.

        Raises:
            UnsuitableError: When the backend that was asked for cannot run the blocks, or they cannot be quantised.
            ValueError: When a rotary table ends before the slots do, or a tap does not exist.
        """
        for block in layers.blocks:
            rows = capacity if block.rotary is None else block.rotary.cos.shape[0]
            require(rows >= capacity, f"a rotary table has {rows} positions. Expected at least the capacity {capacity}")
        num_layers = len(layers.blocks)
        require(all(0 <= tap <= num_layers for tap in taps), f"taps {list(taps)}. Expected boundaries 0..{num_layers}")
        shapes = [LayerShape(b.spec.num_kv_heads, b.spec.head_dim, b.spec.head_dim) for b in layers.blocks]
        self.cache = SlotCache(shapes, num_slots=num_slots, capacity=capacity, dtype=layers.dtype, device=layers.device)
        self.hidden_size, self.has_side = layers.hidden_size, layers.has_side
        self._backend = backend_for(layers, self.cache, [num_layers + 1, *taps], backend, capture, quantization)
        self.backend = self._backend.name

    @property
    def native_blocks(self) -> NativeBlocks | None:
        """What runs the blocks where that is the native kernels, for those who draft with them."""
        return self._backend.native_blocks

    def run(self, inputs: Tensor, work: Pass, side: Tensor | None = None) -> Tensor:
        """Every token of a pass; writes its keys and values to the cache rows of its nodes.

        Args:
            inputs: (M, E), any real dtype, what goes into the first block.
            work: Slots, positions and who sees what; its tokens and logit rows are not read.
            side: (M, E), any real dtype, the second input of the first block; None where it has none.

        Returns:
            (M, E) in the dtype of the blocks: what comes out of the last one, after the final norm where there is one.

        Raises:
            PassError: When something does not fit the blocks or the cache, or a weight's memory was freed.
        """
        return self._run(inputs, work, side)[:, 0]

    def run_with_features(self, inputs: Tensor, work: Pass, side: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `run`; gives besides the (M, F, E) features of the taps."""
        outputs = self._run(inputs, work, side)
        return outputs[:, 0], outputs[:, 1:]

    def append(self, inputs: Tensor, work: Pass, side: Tensor | None = None) -> None:
        """Writes the keys and values of a pass as `run` does, without computing what nobody reads of the last block.

        Args:
            inputs: See `run`.
            work: Likewise.
            side: Likewise.

        Raises:
            PassError: Likewise.
        """
        self._check(inputs, work, side)
        self._backend.append(inputs, work, side)

    def _run(self, inputs: Tensor, work: Pass, side: Tensor | None) -> Tensor:
        """(M, 1 + F, E), the output and the features."""
        self._check(inputs, work, side)
        return self._backend.run(inputs, work, side)

    def _check(self, inputs: Tensor, work: Pass, side: Tensor | None) -> None:
        """Raises `PassError` for inputs of another shape and rows that the cache does not have."""
        expected = (work.num_tokens, self.hidden_size)
        if inputs.shape != expected:
            raise PassError(f"inputs are {tuple(inputs.shape)}. Expected {expected}: a row for each token of the pass.")
        found = None if side is None else tuple(side.shape)
        if found != (expected if self.has_side else None):
            wanted = f"{expected}: a second input" if self.has_side else "None: the first block has no second input"
            raise PassError(f"side is {found}. Expected {wanted}.")
        rows = max(map(add, work.prefix_lens, (end - start for start, end in pairwise(work.node_offsets))))
        if rows > self.cache.capacity:
            raise PassError(f"the pass needs {rows} rows of a slot, which has {self.cache.capacity}. Feed fewer.")

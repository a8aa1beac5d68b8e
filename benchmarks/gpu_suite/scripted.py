"""A random Llama whose greedy text is known beforehand, and a drafter that is right as often as a script says.

After token t the model writes t + 1. Its layers are random and cost what trained ones cost. Its embeddings are so long
that they outweigh what the layers add, and its LM head knows each token's successor by its embedding. Every choice is
then clear by far, whatever rounding does in passes of different widths, so a script is kept to the letter. The drafter
drafts any static tree; the `oracle` drafter of the package drafts chains and their siblings alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle, TargetReads

if TYPE_CHECKING:
    from foretoken.trees.choices import TreeShape

_WRONG = 100  # how far a wrong token is from any that could be right
# The layers of the large shape together add about 10 to each number. In bfloat16 the less they weigh, the less do
# passes of two runners differ: at 32 layers 1.3 % of the logits here, 2.7 % with 8.0 and 4.6 % with 2.0.
_EMBEDDING_STD = 32.0
_HEAD_STD = 0.02


def eight_billion(context_len: int) -> LlamaConfig:
    """The shape of Llama 3.1 8B."""
    return _config(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        vocab_size=128256, max_position_embeddings=context_len,
    )  # fmt: skip


def toy(context_len: int) -> LlamaConfig:
    """A shape for rehearsals."""
    return _config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=512, max_position_embeddings=context_len,
    )  # fmt: skip


def _config(**sizes: Any) -> LlamaConfig:
    """A Llama without special tokens, so that nothing ends a text."""
    return LlamaConfig(
        **sizes, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def successor_model(config: LlamaConfig, *, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """Makes the model where it will run; no file is read or written."""
    torch.manual_seed(seed)
    with torch.device(device):
        module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    module.eval().requires_grad_(requires_grad=False)
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    embedding.normal_(std=_EMBEDDING_STD)
    head.copy_(embedding.roll(1, 0) * (_HEAD_STD / _EMBEDDING_STD))
    module.generation_config = GenerationConfig(pad_token_id=0)
    return module


def text_after(token: int, count: int, vocab_size: int) -> list[int]:
    """The model's greedy text after a token."""
    return [(token + 1 + i) % vocab_size for i in range(count)]


def read_bytes(module: Any) -> int:
    """Bytes of weights that a pass over one token reads: all but the other tokens' embeddings."""
    total = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    embedding = module.get_input_embeddings().weight
    return int(total - embedding.numel() * embedding.element_size())


def prompt_ids(length: int, vocab_size: int) -> Sequence[int]:
    """A prompt that the model itself might have written."""
    return text_after(vocab_size // 2, length, vocab_size)


class ScriptedDrafter:
    """Drafts the successors of the root down one path of a tree, and what is certainly wrong elsewhere."""

    name = "scripted"
    reads = TargetReads()

    def __init__(self, shape: TreeShape, pattern: Sequence[int]) -> None:
        self.nodes_by_depth = (1, *[shape.num_nodes] * shape.depth)
        self._parents, self._depth = shape.parents, shape.depth
        # The right child is another one in each pass: accepted rows then have to be moved, as in real decoding.
        self._plans = [_plan(shape.parents, min(right, shape.depth), turn) for turn, right in enumerate(pattern)]
        self._passes: dict[int, int] = {}

    def attach(self, target: TargetHandle) -> None:
        """Learns what a wrong token can be."""
        self._target = target

    def begin(self, slot: int, request: DraftRequest) -> None:
        """The script starts anew."""
        del request
        self._passes[slot] = 0

    def propose(self, context: DraftContext) -> TokenTree:
        """See `Drafter`."""
        return TokenTree.from_rows(
            [self._row(self._passes[slot], root) for slot, root in zip(context.slots, context.roots, strict=True)],
            device=self._target.device,
        )

    def commit(self, committed: Committed) -> None:
        """The script goes on by one pass, except after a part of a prompt."""
        for slot in committed.slots if committed.verified is not None else ():
            self._passes[slot] += 1

    def release(self, slot: int) -> None:
        """See `Drafter`."""
        self._passes.pop(slot, None)

    def _row(self, number: int, root: int) -> TreeRow:
        plan = self._plans[number % len(self._plans)]
        return TreeRow([(root + step) % self._target.vocab_size for step in plan], self._parents)


def scripted(shape: TreeShape, pattern: Sequence[int]) -> Callable[[], Drafter]:
    """A drafter to hand to `LLM`; pattern: right tokens in each pass, repeated from the start when it ends."""
    return lambda: ScriptedDrafter(shape, pattern)


def _plan(parents: Sequence[int], num_right: int, turn: int) -> list[int]:
    """What is added to the root's token at every node."""
    steps = [0, *(_WRONG + node for node in range(1, len(parents)))]
    node = 0
    for depth in range(1, num_right + 1):
        children = [child for child, parent in enumerate(parents) if parent == node]
        deep = [child for child in children if _height(parents, child) >= num_right - depth]
        node = deep[turn % len(deep)]
        steps[node] = depth
    return steps


def _height(parents: Sequence[int], node: int) -> int:
    heights = [0] * len(parents)
    for child in range(len(parents) - 1, 0, -1):
        heights[parents[child]] = max(heights[parents[child]], heights[child] + 1)
    return heights[node]

"""The block of EAGLE heads with a KV cache, fed piece by piece, beside the head's own pass over whole texts."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from heads.head_formulas import SAME, V, numbers, random_weights, shared_parts, tokens
from torch import Tensor

from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.block_stack import BlockStack
from foretoken.heads.base import AutoregressiveHead, build_head
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.eagle import EagleConfig
from foretoken.heads.eagle3 import Eagle3Config

pytestmark = pytest.mark.native

CAPACITY, SLOTS = 40, 3
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def config(kind: str, width: int) -> Any:
    """The configurations by name; width: of the target's features."""
    layer = LayerConfig(
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, intermediate_size=20, rms_norm_eps=1e-5,
        attention_bias="bias" in kind, rope_scaling=YARN if "yarn" in kind else None,
    )  # fmt: skip
    shared: dict[str, Any] = {"hidden_size": width, "vocab_size": V, "layer": layer}
    if kind.startswith("eagle 1"):
        return EagleConfig(**shared, has_bias="bias" in kind)
    if "narrow" in kind:
        shared |= {"draft_hidden_size": width - 7, "own_embedding": True}
    return Eagle3Config(
        **shared, boundaries=(1, 2, 3), draft_vocab_size=7 if "part" in kind else None,
        norm_before_residual="normed residual" in kind, norm_before_fc="norm before fc" in kind,
        fc_norms="fc norms" in kind, feeds_normed="fed normed" in kind,
    )  # fmt: skip


KINDS = [
    "eagle 1", "eagle 1, biases, yarn", "eagle 3", "eagle 3, normed residual", "eagle 3, narrow, fed normed, fc norms",
    "eagle 3, biases, yarn, norm before fc",
]  # fmt: skip


def head_of(kind: str, width: int) -> AutoregressiveHead:
    """A head in float64 whose weights are of the size at which outputs are about as large as inputs."""
    head: Any = build_head(config(kind, width), dtype=torch.float64)
    with torch.no_grad():
        for parameter in random_weights(head).parameters():
            parameter.div_(parameter.shape[1] ** 0.5 if parameter.dim() > 1 else 1.0)
    return head.requires_grad_(requires_grad=False)  # type: ignore[no-any-return]


def whole(head: AutoregressiveHead, state: Tensor, embedded: Tensor) -> Tensor:
    """(T, W), the head's own pass over (T, W) states and embeddings."""
    inputs, side = head.paired(state.unsqueeze(0), embedded.unsqueeze(0))
    return head.outputs(head.layer(inputs, side=side)).hidden[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["torch", "native kernels"])
@pytest.mark.parametrize("width", [24, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_whole(kind: str, width: int, dtype: torch.dtype) -> None:
    """Pieces of several sequences, then a tree that goes on from one of them."""
    head = head_of(kind, width)
    parts, size = shared_parts(width), head.config.hidden_size * len(head.config.taps)
    states = [head.initial_state(numbers(15, size, seed=seed)) for seed in (1, 2)]
    embeddings = [head.embed(tokens(15, seed=seed), parts) for seed in (3, 4)]
    expected = [whole(head, *pair) for pair in zip(states, embeddings, strict=True)]
    fed = deepcopy(head).to(dtype)
    stack = BlockStack(fed.layer.as_blocks(CAPACITY), num_slots=SLOTS, capacity=CAPACITY)
    assert stack.backend == ("torch" if dtype == torch.float64 else "native")
    same = SAME if dtype == torch.float64 else {"rtol": 1e-4, "atol": 2e-5}
    for slot in range(SLOTS):
        stack.cache.poison(slot, 0)

    def run(state: Tensor, embedded: Tensor, work: Pass) -> Tensor:
        inputs, side = fed.paired(state.to(dtype), embedded.to(dtype))
        return fed.outputs(stack.run(inputs, work, side)).hidden.double()

    at = [0, 0]
    for counts in ((5, 1), (1, 3), (4, 6)):
        spans = [slice(start, start + count) for start, count in zip(at, counts, strict=True)]
        work = Pass.of_chains([[0] * count for count in counts], slots=[2, 0], prefix_lens=at)
        found = run(
            *(torch.cat([each[s] for each, s in zip(of, spans, strict=True)]) for of in (states, embeddings)), work
        )
        torch.testing.assert_close(found, torch.cat([e[s] for e, s in zip(expected, spans, strict=True)]), **same)
        at = [span.stop for span in spans]
    parents = [-1, 0, 0, 2, 2]
    tree = TokenTree.from_rows([TreeRow([0] * 5, parents)])
    work = Pass.of_tree(tree, slots=[0], prefix_lens=[at[1]], last_position=CAPACITY - 1)
    found = run(states[0][:5], embeddings[0][:5], work)
    for path in ([0, 1], [0, 2, 3], [0, 2, 4]):
        rows = (
            torch.cat([own[: at[1]], other[path]])
            for own, other in ((states[1], states[0]), (embeddings[1], embeddings[0]))
        )
        torch.testing.assert_close(found[path], whole(head, *rows)[at[1] :], **same)

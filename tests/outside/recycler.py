"""A drafter of another package: recycles the target's own second guesses, ranked by a block with a KV cache of its own.

Token recycling is Luo et al. 2024 (arXiv 2408.08696). The block is not trained here: it shows where one would stand.
"""

from dataclasses import replace

import torch

from foretoken.core.passes import Pass
from foretoken.core.token_tree import PROBE, TokenTree
from foretoken.decoder.block_stack import BlockStack
from foretoken.decoder.blocks import Block, Blocks, BlockSpec, FeedForward, Matrix, Norm, Rotary
from foretoken.drafters.base import DrafterOptions, TargetReads
from foretoken.models.parts import target_parts
from foretoken.trees.merge import Trie


class Options(DrafterOptions):
    num_guesses: int = 3


class Recycler:
    name, reads = "recycler", TargetReads(taps=("final",), top_k=3)

    def __init__(self, options):
        self.num_guesses, self.nodes_by_depth = options.num_guesses, (1, *[2 + 2 * options.num_guesses] * 2)
        self.guesses, self.lengths, self.states = {}, {}, {}

    def attach(self, target):
        self.head = target_parts(target.model, dtype=torch.float32, is_inference=True).lm_head
        width, rows = target.model.config.hidden_size, target.context_len + 8
        square, norm = Matrix(weight=torch.eye(width) / 2), Norm(weight=torch.ones(width), epsilon=1e-6)
        block = Block(
            spec=BlockSpec(num_heads=1, num_kv_heads=1, head_dim=width), query=square, key=square, value=square,
            output=square, mlp=FeedForward(gate=square, up=square, down=square), attention_norm=norm, mlp_norm=norm,
            rotary=Rotary.plain(num_positions=rows, head_dim=width),
        )  # fmt: skip
        self.stack = BlockStack(Blocks(blocks=[block], final_norm=norm), num_slots=target.num_slots, capacity=rows)

    def begin(self, slot, request):
        self.lengths[slot] = 0

    def propose(self, context):
        rows, probes = [], []
        for slot, tokens, depth in zip(context.slots, context.tokens, context.max_depth, strict=True):
            trie, unread = Trie(tokens[-1]), [token for token in tokens[-9:-1] if token not in self.guesses]
            scores = self.head(self.states[slot]) if slot in self.states else torch.zeros(context.sampling.vocab_size)
            for guess in sorted(self.guesses.get(tokens[-1], ()), key=lambda token: -scores[token]) if depth else ():
                node = trie.add(0, guess)
                if depth > 1 and guess in self.guesses:
                    trie.add(node, self.guesses[guess][0])
            count = len(trie.tokens)
            if unread:
                trie.add(0, unread[-1])  # asks the target what it would say after this token
            rows.append(trie.row())
            probes.append([0] * count + [PROBE] * (len(trie.tokens) - count))
        tree = TokenTree.from_rows(rows)
        return replace(tree, source=torch.tensor([row + [0] * (tree.width - len(row)) for row in probes]))

    def commit(self, committed):
        prefix = [self.lengths[slot] for slot in committed.slots]
        work = Pass.of_chains(committed.tokens, slots=committed.slots, prefix_lens=prefix)
        states = self.stack.run(committed.features[:, 0], work)
        for slot, count, end in zip(committed.slots, committed.lengths, committed.offsets[1:], strict=True):
            self.lengths[slot], self.states[slot] = self.lengths[slot] + count, states[end - 1]
        if committed.verified is not None:
            for row, start in zip(committed.verified.tree.rows(), committed.verified.offsets, strict=False):
                for node, token in enumerate(row.tokens):
                    self.guesses[token] = committed.verified.top_ids[start + node][: self.num_guesses].tolist()

    def release(self, slot):
        self.lengths.pop(slot, None), self.states.pop(slot, None)


def create(options):
    return Recycler(options)

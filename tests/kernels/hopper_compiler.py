"""Compiles every Triton kernel for Hopper with the arguments that its wrapper gives it; run as a script.

Neither a GPU nor a driver is needed to compile. The interpreter takes much that the compiler refuses.
"""

import sys
from dataclasses import replace

import torch
import triton
from torch import Tensor

from foretoken.acceptance import triton_walk
from foretoken.attention import triton_overlap, triton_tables, triton_tree, triton_weights
from foretoken.attention.layout import AttentionLayout
from foretoken.core.passes import Pass
from foretoken.decoder import triton_kernels
from foretoken.sampling import triton_choice
from foretoken.training import triton_losses
from foretoken.training.losses import LossWeights

BF16 = torch.bfloat16
POINTERS = {
    BF16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.bool: "*i1", torch.int8: "*i8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
KERNELS = {
    triton_tree: ["_attend_kernel", "_merge_kernel"],
    triton_weights: ["_scores_kernel", "_weights_kernel"],
    triton_tables: ["_tables_kernel"],
    triton_choice: ["_part_kernel", "_merge_kernel"],
    triton_walk: ["_walk_kernel"],
    triton_losses: ["_distribution_kernel", "_distance_kernel"],
    triton_kernels: [
        "_commit_kernel",
        "_write_kernel",
        "_norm_kernel",
        "_gate_kernel",
        "_rotate_kernel",
        "_gemm_kernel",
        "_states_kernel",
    ],
}


class ForHopper:
    """Stands for a kernel: compiles what it is launched with for compute capability 9.0, and does not run it."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, **kwargs) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        options = {
            name: kwargs.pop(name)
            for name in ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")
            if name in kwargs
        }
        signature, constants, attributes = {}, {}, {}
        for param in self.kernel.params:
            value = args[param.num] if param.num < len(args) else kwargs[param.name]
            is_special = isinstance(value, int) and not param.do_not_specialize
            if param.is_constexpr or (is_special and value == 1):
                signature[param.name], constants[(param.num,)] = "constexpr", value
                continue
            is_pointer = isinstance(value, Tensor)
            signature[param.name] = POINTERS[value.dtype] if is_pointer else {int: "i32", float: "fp32"}[type(value)]
            if is_pointer or (is_special and value % 16 == 0):
                attributes[(param.num,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert compiled.metadata.shared <= 227 * 1024, compiled.metadata.shared
        has_products = "wgmma.mma_async" in compiled.asm["ptx"] or "mma.sync" in compiled.asm["ptx"]
        assert has_products or compiled.metadata.name not in ("_attend_kernel", "_gemm_kernel")
        sys.stdout.write(compiled.metadata.name + "\n")


def compile_attention(*, heads: int, size: int, nodes: int, is_causal: bool = False, **options) -> None:
    """Attention over two chains behind long prefixes."""
    layout = layout_of(nodes, is_causal=is_causal)
    keys = torch.zeros(2, 8, 600, size, dtype=BF16)
    query = torch.zeros(2 * nodes, heads, size, dtype=BF16)
    triton_tree.tree_attention_triton(query, keys, keys, layout.tables(), scale=1.0, **options)


def layout_of(nodes: int, *, is_causal: bool = False) -> AttentionLayout:
    """Two chains behind 500 tokens."""
    chains = Pass.of_chains([[0] * nodes] * 2, slots=[1, 0], prefix_lens=[500, 500])
    return AttentionLayout(replace(chains, is_causal=is_causal))


def compile_all() -> None:
    """Every kernel, some in several variants."""
    triton_overlap.overlaps = lambda device: True
    for module, names in KERNELS.items():
        for name in names:
            setattr(module, name, ForHopper(getattr(module, name)))
    for size, nodes in ((64, 1), (96, 40), (128, 1), (128, 64), (256, 130)):
        compile_attention(heads=32, size=size, nodes=nodes, num_splits=1)
        compile_attention(heads=32, size=size, nodes=nodes, num_splits=5)
    compile_attention(heads=32, size=128, nodes=33, softcap=2.0, sinks=torch.zeros(32, dtype=BF16))
    compile_attention(heads=32, size=128, nodes=33, window=40)
    compile_attention(heads=32, size=128, nodes=64, is_causal=True, num_splits=3)

    for size, nodes, tokens in ((32, 5, 2), (128, 64, 2), (128, 40, 32)):
        weighed = triton_weights.WeighedTokens.of(
            [range(tokens), range(nodes, 2 * nodes)], 500 + nodes, torch.device("cpu")
        )
        triton_weights.attention_weights_triton(
            torch.zeros(2 * nodes, 32, size, dtype=BF16), torch.zeros(2, 8, 600, size, dtype=BF16),
            layout_of(nodes, is_causal=nodes == 40).tables(), weighed, scale=1.0,
        )  # fmt: skip

    parents = torch.zeros(3, 64, dtype=torch.int64)
    places = torch.zeros(3, dtype=torch.int32)
    triton_tables.pass_tables(
        parents[0], parents[0], places[:2], places[:2], places, places, num_tokens=64, max_prefix=512, max_tokens=64,
        max_nodes=64,
    )  # fmt: skip
    for kind in (torch.float32, BF16):
        triton_choice.chosen_tokens(torch.zeros(3, 64, 32_000, dtype=kind), torch.zeros(3), parents[:, 0], parents)
    walked = triton_walk.walk_chosen(parents, parents, parents, 8)
    for kind in (torch.float32, BF16):
        store = torch.zeros(4, 3, 8, 40, 128, dtype=kind)
        triton_kernels.commit_rows(store, parents[:, 0], parents[:, 0], walked.path, walked.num_accepted)

    for kind in (torch.float32, BF16):
        x = torch.zeros(10, 4096, dtype=kind)
        for delta in (None, x):
            triton_kernels.add_and_norm(x, delta, x[0], 1e-5)
        triton_kernels.gated_silu(torch.zeros(10, 28_672, dtype=kind))
        cache, layout, table = torch.zeros(2, 8, 600, 128, dtype=kind), layout_of(5), torch.zeros(600, 64)
        joined, positions = torch.zeros(10, 48 * 128, dtype=kind), torch.zeros(10, dtype=torch.int64)
        for norms in (None, (x[0, :128], x[0, :128])):
            triton_kernels.rotate_and_write(joined, table, table, positions, cache, cache, layout.tables(), norms, 1e-5)
        triton_kernels.write_rows(
            cache, cache, *joined.unflatten(1, (48, 128))[:, :16].chunk(2, dim=1), layout.tables()
        )
    for tokens in (1, 16, 64):
        x = torch.zeros(tokens, 4096, dtype=BF16)
        for outputs in (4096, 6144, 28_672):
            triton_kernels.small_batch_gemm(x, torch.zeros(1, dtype=BF16).expand(outputs, 4096))
        triton_kernels.small_batch_gemm(x, torch.zeros(1, dtype=BF16).expand(6144, 4096), torch.float32)
    compile_losses()
    compile_states()


def compile_states() -> None:
    """The delta rule of Qwen3.5, whose heads share keys, and a state of Mamba2 whose sizes are no powers of two."""
    tables = torch.zeros(5, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    for key_heads, heads, keys, values in ((16, 32, 128, 128), (80, 80, 96, 60)):
        key, value, rate = torch.zeros(3, key_heads, keys), torch.zeros(3, heads, values), torch.zeros(3, heads)
        scratch = torch.zeros(1, heads, keys, values)
        triton_kernels.walk_states(1, key, key, value, rate, rate, *tables, scratch, is_delta=key_heads < heads)


def compile_losses() -> None:
    """Distances of heads in training."""
    for kind in (torch.float32, BF16):
        logits, labels = torch.zeros(2, 6144, dtype=kind), torch.zeros(2, dtype=torch.int64)
        for has_probs in (False, True):
            triton_losses.distributions(logits, has_probs=has_probs)
        probs, entropy = logits.float(), torch.zeros(2)
        for weights in (
            LossWeights(kl=1.0),
            LossWeights(kl=0.1, top=1.0),
            LossWeights(1.0, 1.0, 1.0, 1.0),
            LossWeights(),
        ):
            triton_losses.losses_and_gradient(logits, probs, entropy, labels, weights[:5], 0.5)
        triton_losses.losses_and_gradient(logits, None, None, labels, LossWeights(token=1.0)[:5], 0.5)


if __name__ == "__main__":
    compile_all()

"""Trees of EAGLE and MTP heads in one call of the native kernels: those of the same heads level by level in torch.

Slow because kernels are compiled for each instruction set, once on a machine.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from decoder.instruction_sets import INSTRUCTION_SETS, kernels_for
from heads.test_native_heads import DRAWS, GREEDY, SAMPLED, assert_same, expansion_of, finished, with_dense_rows
from pairwise import slow_products
from tiny_models import VOCAB_SIZE, tiny_model
from torch import Tensor

from foretoken.core.errors import PassError
from foretoken.core.passes import Pass
from foretoken.core.sampling_params import SamplingParams
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.block_stack import BlockStack
from foretoken.decoder.blocks import LmHead, Norm, ScaledEmbedding
from foretoken.decoder.native_linear import NativeLinear
from foretoken.decoder.quantized import Quantization
from foretoken.drafters.levels import LevelPasses, Prefixes
from foretoken.drafters.native.heads import AutoregressiveKernels
from foretoken.heads.base import AutoregressiveHead, BlockOutputs, build_head
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.eagle import EagleConfig
from foretoken.heads.eagle3 import Eagle3Config
from foretoken.heads.mtp import MtpConfig, MtpLayerConfig
from foretoken.models.loading import wrap_model
from foretoken.models.making.in_memory import quantize_model
from foretoken.models.parts import TargetParts, target_parts
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees.choices import TreeShape
from foretoken.trees.expansion import TreeExpansion

pytestmark = pytest.mark.native

WIDTH, SLOTS, CAPACITY = 32, 4, 40
LAYER = LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=24)
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "vocab_size": VOCAB_SIZE, "layer": LAYER}
EAGLE3: dict[str, Any] = {**SIZES, "boundaries": (1, 2)}
HEADS: dict[str, Any] = {
    "eagle": EagleConfig(**SIZES),
    "eagle with a bias": EagleConfig(**SIZES, has_bias=True),
    "eagle3": Eagle3Config(**EAGLE3),
    "eagle3, part of the vocabulary": Eagle3Config(**EAGLE3, draft_vocab_size=20),
    "eagle3, normed residual": Eagle3Config(**EAGLE3, norm_before_residual=True),
    "eagle3, narrow, fed normed": Eagle3Config(
        **EAGLE3, draft_hidden_size=20, own_embedding=True, feeds_normed=True, draft_vocab_size=50
    ),
    "eagle3, all norms": Eagle3Config(**EAGLE3, feeds_normed=True, norm_before_residual=True, fc_norms=True),
    "mtp": MtpConfig(**{**SIZES, "layer": MtpLayerConfig(**LAYER.model_dump(), rotary_dim=4)}),
}
SHAPES = {
    "chain": TreeShape.chain(5),
    "tree": TreeShape.from_choices([(0,), (1,), (3,), (0, 0), (0, 2), (3, 0), (3, 1), (0, 2, 0), (3, 0, 0), (3, 0, 4)]),
    "widths": TreeShape.cartesian((3, 2, 2, 1)),
    "one level": TreeShape.cartesian((4,)),
}
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.03}


def random_weights(head: Any, dtype: torch.dtype) -> AutoregressiveHead:
    """The head with weights that a dtype holds, the same ones for all heads of one configuration."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_((drawn * scale + (parameter.dim() == 1)).to(dtype))
    if head.token_map is not None:
        chosen = torch.randperm(VOCAB_SIZE, generator=generator)[: len(head.token_map)]
        head.token_map.copy_(chosen.sort().values)
    result: AutoregressiveHead = head.requires_grad_(requires_grad=False).eval()
    return result


def shared(parts: TargetParts) -> TargetParts:
    """The same embedding and LM head in float64."""
    return replace(
        parts, embed=lambda tokens: parts.embed(tokens).double(), lm_head=lambda x: parts.lm_head(x.float()).double()
    )


class Drafting:
    """A random head, as it drafts on a CPU, and the KV rows of its block."""

    def __init__(
        self, name: str, dtype: torch.dtype = torch.float32, *, quantization: Any = None, architecture: str = "llama",
        capacity: int = CAPACITY, rounding: Quantization | None = None,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.head = random_weights(build_head(HEADS[name], dtype=torch.float32), dtype)
        self.head.optimize_for_inference(quantization)
        target = wrap_model(tiny_model(architecture, dtype=dtype), name=architecture)
        target = target if rounding is None else quantize_model(target, rounding)
        self.parts = target_parts(
            target, dtype=torch.float32, is_inference=True,
            quantization=quantization if self.head.has_target_lm_head else None,
        )  # fmt: skip
        self.blocks = self.head.layer.as_blocks(capacity)
        assert self.blocks.dtype == dtype
        self.stack = BlockStack(self.blocks, num_slots=SLOTS, capacity=capacity, quantization=quantization)
        steps = self.head.native_steps(self.parts)
        assert steps is not None
        self.kernels = AutoregressiveKernels(steps, self.stack)

    def states(self, count: int, seed: int) -> Tensor:
        """(M, W), of features."""
        size = self.head.config.hidden_size * len(self.head.config.taps)
        features = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
        return self.head.initial_state(features).float()

    def in_one_call(self, work: Pass, states: Tensor, expansion: TreeExpansion) -> TreeExpansion:
        assert self.kernels.can_draft(expansion)
        self.kernels.draft(work, states, expansion)
        return expansion

    def by_levels(self, work: Pass, states: Tensor, expansion: TreeExpansion) -> TreeExpansion:
        """A pass of the block for each level."""
        assert work.logit_rows is not None
        lengths = [end - begin for begin, end in pairwise(work.offsets)]
        prefix_lens = [known + new for known, new in zip(work.prefix_lens, lengths, strict=True)]
        passes = LevelPasses(Prefixes(work.slots, prefix_lens), states.device)
        states, hidden = (part[work.logit_rows].unsqueeze(1) for part in self._fed(work, states))
        expansion.grow(0, self.head.logits(0, hidden, self.parts).float())
        for depth in range(1, expansion.depth):
            frontier = expansion.frontier(depth)
            fed = self._fed(passes.next(frontier), frontier.inherited(states).flatten(0, 1))
            states, hidden = (part.unflatten(0, (len(lengths), -1)) for part in fed)
            expansion.grow(depth, self.head.logits(depth, hidden, self.parts).float())
        return expansion

    def _fed(self, work: Pass, states: Tensor) -> BlockOutputs:
        """What comes of every pair."""
        inputs, side = self.head.paired(states, self.head.embed(work.tokens, self.parts).float())
        return self.head.outputs(self.stack.run(inputs, work, side).float())


def pairs(counts: Sequence[int], prefix_lens: Sequence[int], slots: Sequence[int], seed: int = 0) -> Pass:
    """Committed pairs of several sequences."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist() for count in counts]
    return Pass.of_chains(tokens, slots=slots, prefix_lens=prefix_lens, has_last_logits=True)


def roots_of(work: Pass) -> Tensor:
    assert work.logit_rows is not None
    return work.tokens[work.logit_rows]


def compare(made: Drafting, draws: list[Any], shape: TreeShape, tolerance: float) -> None:
    """Rounds of drafts over what was committed meanwhile; NaN in all rows behind it, which rejected nodes took."""
    batch = len(draws)
    slots, at = [2, 0, 3, 1][:batch], [0] * batch
    for slot in range(SLOTS):
        made.stack.cache.poison(slot, 0)
    for turn, counts in enumerate(([6, 1, 9, 2], [1, 3, 1, 1], [2, 1, 4, 1])):
        work = pairs(counts[:batch], at, slots, seed=turn)
        states, trees = made.states(work.num_tokens, seed=turn), []
        for fill in (made.by_levels, made.in_one_call):
            for slot, length in zip(slots, at, strict=True):
                made.stack.cache.poison(slot, length)
            trees.append(finished(fill(work, states, expansion_of(shape, draws, roots_of(work)))))
        theirs, ours = trees
        assert_same(ours, theirs, tolerance)
        at = [start + count for start, count in zip(at, counts, strict=False)]


@pytest.mark.parametrize(("name", "dtype", "shape"), slow_products(list(HEADS), list(TOLERANCE), list(SHAPES)))
@torch.inference_mode()
def test_one_call_drafts_what_a_pass_for_each_level_drafts(name: str, dtype: torch.dtype, shape: str) -> None:
    made = Drafting(name, dtype)
    for draws in DRAWS.values():
        compare(made, draws, SHAPES[shape], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["eagle", "eagle3, part of the vocabulary", "eagle3, all norms", "mtp"])
@torch.inference_mode()
def test_int8(name: str, dtype: torch.dtype) -> None:
    """The matrices of the block, around it, and of the LM head, the target's included, in int8."""
    with kernels_for("x86-64-v3"):  # where tokens stay in float32: no last bit rounds to another one
        compare(Drafting(name, dtype, quantization="int8"), DRAWS["mixed"], SHAPES["tree"], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "instruction_set",
    [
        pytest.param(name, marks=[] if name == "x86-64-v3" else pytest.mark.slow)  # which `test_int8` compiles too
        for name in INSTRUCTION_SETS if name != "native"
    ],
)  # fmt: skip
@torch.inference_mode()
def test_older_processors(instruction_set: str, dtype: torch.dtype) -> None:
    rounds = instruction_set == "cooperlake"  # tokens that meet int8 to bfloat16, and a last bit to another one
    with kernels_for(instruction_set):
        for name in ("eagle", "eagle3, narrow, fed normed"):
            for quantization in (None,) if rounds else (None, "int8"):
                made = Drafting(name, dtype, quantization=quantization)
                compare(made, DRAWS["mixed"], SHAPES["tree"], TOLERANCE[dtype])


@pytest.mark.parametrize("architecture", ["gemma2", "granite"])
@torch.inference_mode()
def test_what_a_target_does_to_embeddings_and_logits(architecture: str) -> None:
    """Gemma scales embeddings and caps logits, Granite scales logits."""
    for name in ("eagle", "eagle3", "mtp"):
        compare(Drafting(name, architecture=architecture), DRAWS["mixed"], SHAPES["widths"], 2e-4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@torch.inference_mode()
def test_a_targets_embedding_in_integers(name: str, architecture: str, dtype: torch.dtype) -> None:
    """Every bit of a draft is that of the dequantized rows; in float32 torch drafts the same.

    In bfloat16 torch rounds otherwise on some processors, and tokens at near-ties change.
    """
    made = Drafting(name, dtype, architecture=architecture, rounding="int8")
    work = pairs([3, 1, 5, 2], [0] * 4, [2, 0, 3, 1])
    states, trees, parts = made.states(work.num_tokens, seed=1), [], made.parts
    for each in (parts, with_dense_rows(parts)):
        steps = made.head.native_steps(each)
        assert steps is not None
        expansion = expansion_of(SHAPES["tree"], DRAWS["mixed"], roots_of(work))
        AutoregressiveKernels(steps, made.stack).draft(work, states, expansion)
        trees.append(finished(expansion))
    assert_same(*trees, 0.0)
    if dtype == torch.float32:
        theirs = made.by_levels(work, states, expansion_of(SHAPES["tree"], DRAWS["mixed"], roots_of(work)))
        assert_same(trees[0], finished(theirs), TOLERANCE[dtype])


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_a_greedy_chain_is_what_training_unrolls(name: str) -> None:
    """The draft that begins at the last position of a text, in float64 with the whole text at once."""
    made, depth, length = Drafting(name), 4, 9
    config = HEADS[name].model_copy(update={"num_steps": depth})
    plain, parts = random_weights(build_head(config, dtype=torch.float64), torch.float32), shared(made.parts)
    size = config.hidden_size * len(config.taps)
    features = torch.randn(1, length - 1, size, generator=torch.Generator().manual_seed(1)).double()
    work = pairs([length - 1], [0], [1])
    expansion = expansion_of(TreeShape.chain(depth), [GREEDY], roots_of(work))
    made.kernels.draft(work, made.head.initial_state(features[0].float()).float(), expansion)
    drafted = expansion.tokens[0, 1:]
    # Position t of the text has the token before work.tokens[t].
    tokens = torch.cat([torch.tensor([0]), work.tokens, drafted]).unsqueeze(0)
    padded = torch.cat([features, torch.zeros(1, tokens.shape[1] - length + 1, size, dtype=torch.float64)], dim=1)
    for step, hidden in enumerate(plain.unrolled(padded, tokens, parts)):
        logits = plain.logits(step, hidden[0, length - 2], parts)
        assert int(logits.argmax()) == int(drafted[step])
        top = logits.log_softmax(-1)[drafted[step]]
        found = expansion._scores[0, step + 1] - expansion._scores[0, step]
        torch.testing.assert_close(found.double(), top, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["eagle", "eagle3, part of the vocabulary", "mtp"])
@torch.inference_mode()
def test_company_and_threads_change_no_bit(name: str) -> None:
    made, before, trees = Drafting(name, torch.bfloat16), torch.get_num_threads(), []
    work = pairs([3, 1, 5, 2], [0] * 4, [2, 0, 3, 1])
    states, spans = made.states(11, seed=1), list(pairwise(work.offsets))
    for threads, rows in ((2, range(4)), (1, range(4)), (3, range(1, 2)), (2, range(2, 4))):
        begin, end = spans[rows[0]][0], spans[rows[-1]][1]
        part = Pass.of_chains(
            [work.tokens[b:e].tolist() for b, e in spans[rows[0] : rows[-1] + 1]],
            slots=work.slots[rows[0] : rows[-1] + 1], prefix_lens=[0] * len(rows), has_last_logits=True,
        )  # fmt: skip
        torch.set_num_threads(threads)
        try:
            expansion = expansion_of(SHAPES["tree"], [GREEDY] * len(rows), roots_of(part))
            trees.append((rows, finished(made.in_one_call(part, states[begin:end], expansion))))
        finally:
            torch.set_num_threads(before)
    for rows, tree in trees[1:]:
        assert torch.equal(tree.tokens, trees[0][1].tokens[rows[0] : rows[-1] + 1])
        assert torch.equal(tree.scores, trees[0][1].scores[rows[0] : rows[-1] + 1])  # type: ignore[arg-type, index]


@torch.inference_mode()
def test_the_end_of_the_cache() -> None:
    """As many rows as nodes that are fed; deeper nodes than there are positions get the last one."""
    made = Drafting("eagle3", capacity=12)
    work = pairs([8], [0], [0])  # four of a chain of five are fed
    states = made.states(8, seed=1)
    ours, theirs = (
        finished(fill(work, states, expansion_of(TreeShape.chain(5), [GREEDY], roots_of(work))))
        for fill in (made.in_one_call, made.by_levels)
    )
    assert_same(ours, theirs, 1e-4)
    with pytest.raises(PassError, match="Expected at most 12 rows a slot in all"):
        made.kernels.draft(work, states, expansion_of(TreeShape.chain(6), [GREEDY], roots_of(work)))


def test_what_the_kernels_leave_to_the_loop() -> None:
    """Truncated distributions, trees of roots alone, and blocks or heads that they do not know."""
    made = Drafting("eagle3")
    assert made.kernels.can_draft(expansion_of(SHAPES["tree"], [SAMPLED], torch.tensor([3])))
    assert not made.kernels.can_draft(expansion_of(TreeShape(()), [SAMPLED], torch.tensor([3])))
    batch = SamplingBatch.build(
        [SamplingRequest(params=SamplingParams(temperature=1.0, top_p=0.9), seed=0)], VOCAB_SIZE
    )
    draws = DraftDraws.build(batch, [False], torch.tensor([9]))
    assert not made.kernels.can_draft(TreeExpansion(SHAPES["chain"], torch.tensor([3]), draws))
    assert made.head.native_steps(replace(made.parts, native=None)) is None
    steps = made.head.native_steps(made.parts)
    assert steps is not None
    plain = BlockStack(made.blocks, num_slots=1, capacity=CAPACITY, backend="torch")
    with pytest.raises(UnsuitableError, match=r"the block runs on torch\. Expected the native kernels"):
        AutoregressiveKernels(steps, plain)
    with pytest.raises(UnsuitableError, match="Expected a native linear layer"):
        AutoregressiveKernels(replace(steps, head=steps.head._replace(layer=torch.nn.Identity())), made.stack)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("eagle3", {"width": 40}),
        ("eagle3", {"fuse": NativeLinear(torch.ones(WIDTH, 2 * WIDTH))}),
        ("eagle", {"fuse": None}),
        ("eagle", {"fuse": NativeLinear(torch.ones(WIDTH, WIDTH))}),
        ("eagle", {"fuse": NativeLinear(torch.ones(WIDTH + 1, 2 * WIDTH))}),
        ("mtp", {"embedding_norm": Norm(weight=torch.ones(WIDTH + 1), epsilon=1e-6)}),
        ("eagle3", {"norm": Norm(weight=torch.ones(WIDTH + 1), epsilon=1e-6)}),
        ("eagle3", {"state_norm": Norm(weight=torch.ones(WIDTH), epsilon=1e-6, kind="layer")}),
        ("eagle3", {"vocab_size": VOCAB_SIZE + 1}),
        ("eagle3", {"token_map": torch.arange(20)}),
        ("eagle3, part of the vocabulary", {"token_map": torch.arange(20) + VOCAB_SIZE - 19}),
        ("eagle3, part of the vocabulary", {"token_map": torch.arange(20) - 1}),
        ("eagle3", {"embedding": ScaledEmbedding(torch.ones(VOCAB_SIZE - 1, WIDTH))}),
        ("eagle3", {"embedding": ScaledEmbedding(torch.ones(VOCAB_SIZE, WIDTH + 1))}),
        ("eagle3", {"embedding": ScaledEmbedding(torch.ones(VOCAB_SIZE, WIDTH, dtype=torch.float64))}),
        ("eagle3", {"embedding": ScaledEmbedding(torch.ones(WIDTH, VOCAB_SIZE).T)}),
        ("eagle3", {"head": LmHead(NativeLinear(torch.ones(VOCAB_SIZE, WIDTH - 1)))}),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit_are_refused(name: str, changes: dict[str, Any]) -> None:
    made = Drafting(name)
    steps = made.head.native_steps(made.parts)
    assert steps is not None
    with pytest.raises(UnsuitableError, match=r"Its kernels expect|Expected the same width, and one of the two"):
        AutoregressiveKernels(replace(steps, **changes), made.stack)


GOOD = pairs([3, 2], [0, 0], [0, 1])
WRONG: dict[str, Any] = {
    "narrow states": {"states": torch.zeros(5, WIDTH - 1)},
    "too few states": {"states": torch.zeros(4, WIDTH)},
    "double states": {"states": torch.zeros(5, WIDTH, dtype=torch.float64)},
    "no logits": {"work": replace(GOOD, logit_rows=None)},
    "fewer logits": {"work": replace(GOOD, logit_rows=torch.tensor([4]))},
    "rows of logits past the tokens": {"work": replace(GOOD, logit_rows=torch.tensor([2, 5]))},
    "negative tokens": {"work": replace(GOOD, tokens=GOOD.tokens - VOCAB_SIZE)},
    "tokens past the vocabulary": {"work": replace(GOOD, tokens=GOOD.tokens + VOCAB_SIZE)},
    "huge tokens": {"work": replace(GOOD, tokens=GOOD.tokens + 2**62)},
    "int32 tokens": {"work": replace(GOOD, tokens=GOOD.tokens.int())},
    "slots": {"work": replace(GOOD, slots=[0, SLOTS])},
    "a negative prefix": {"work": replace(GOOD, prefix_lens=[0, -1])},
    "no room": {"work": replace(GOOD, prefix_lens=[0, CAPACITY - 2])},
    "no room for the levels": {"work": replace(GOOD, prefix_lens=[0, CAPACITY - 4])},
    "positions": {"work": replace(GOOD, positions=GOOD.positions + CAPACITY)},
    "parents": {"work": replace(GOOD, parents=GOOD.parents + 1)},
    "fewer trees": {"count": 1},
    "more trees": {"count": 3},
    "an unordered shape": {"shape": TreeShape(((0,), (0, 0), (1,)))},
    "a shape of roots": {"shape": TreeShape(())},
}


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
@pytest.mark.parametrize("what", WRONG)
def test_drafts_that_do_not_fit_are_refused(what: str, name: str) -> None:
    """Nothing is written, and the next draft is as before."""
    made = Drafting(name)
    given = {"work": GOOD, "states": torch.zeros(5, WIDTH), "count": 2, "shape": SHAPES["chain"], **WRONG[what]}
    tree = expansion_of(given["shape"], [GREEDY] * given["count"], torch.full((given["count"],), 7))
    before = made.stack.cache.keys[0].clone()
    with pytest.raises(PassError, match=r"Expected|lacks|not ascending"):
        made.kernels.draft(given["work"], given["states"], tree)
    assert torch.equal(made.stack.cache.keys[0], before)
    assert not tree.tokens[:, 1:].any()
    good = expansion_of(SHAPES["chain"], [GREEDY] * 2, roots_of(GOOD))
    made.kernels.draft(GOOD, torch.zeros(5, WIDTH), good)
    assert not torch.equal(made.stack.cache.keys[0], before)


def test_weights_that_move_are_followed() -> None:
    """Sharing a weight's memory moves it; freeing it is an error in words."""
    made, trees = Drafting("eagle3, narrow, fed normed"), []
    states = torch.ones(5, 20)
    for change in (lambda weight: None, lambda weight: weight.share_memory_()):
        change(made.head.get_parameter("embedding"))
        expansion = expansion_of(SHAPES["chain"], [GREEDY] * 2, roots_of(GOOD))
        made.kernels.draft(GOOD, states, expansion)
        trees.append(finished(expansion))
    assert torch.equal(trees[0].scores, trees[1].scores)  # type: ignore[arg-type]
    made.head.get_parameter("embedding").untyped_storage().resize_(0)
    with pytest.raises(PassError, match="was freed or cut"):
        made.kernels.draft(GOOD, states, expansion_of(SHAPES["chain"], [GREEDY] * 2, roots_of(GOOD)))


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_fusing_layer_keeps_small_weights_beside_large_ones(name: str) -> None:
    """Inputs of different sizes side by side have weights of different sizes, which count alike."""
    head: Any = random_weights(build_head(HEADS[name], dtype=torch.float32), torch.bfloat16)
    size = torch.ones(head.fc.in_features)
    size[:WIDTH] = 1000.0
    head.fc.weight.data.mul_(size)
    x = torch.randn(5, head.fc.in_features, generator=torch.Generator().manual_seed(1)) / size
    expected = x @ head.fc.weight.T
    head.optimize_for_inference("int8")
    torch.testing.assert_close(head.fc(x), expected, rtol=0, atol=0.03)

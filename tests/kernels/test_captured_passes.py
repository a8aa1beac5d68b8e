"""A captured pass, run again with other contents of its tensors, is the pass that those contents describe.

Slow because every captured kernel runs in Triton's interpreter.
"""

import pytest
import torch

pytest.importorskip("triton")

from kernel_device import DEVICE, Rerun, graph_decoder, random_parents
from tiny_models import random_model, tiny_config

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ModelError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.cuda_graphs import MAX_GRAPHS, CudaGraphCapture
from foretoken.decoder.torch_blocks import TritonOps
from foretoken.models.loading import wrap_model
from foretoken.runner.decoders import DECODERS
from foretoken.runner.runner import Runner

CONTEXT_LEN, SLOTS = 32, 3


@pytest.fixture
def capture(monkeypatch):
    """What the runner "lean-graphs" captures with here."""
    made = CudaGraphCapture(torch.device(DEVICE)) if DEVICE == "cuda" else Rerun()
    monkeypatch.setattr("foretoken.decoder.cuda_graphs._LEAST_BOUND", 32)  # fewer programs for the interpreter
    monkeypatch.setattr("foretoken.decoder.fused_linear.is_packable", lambda weight: False)  # as on a GPU
    monkeypatch.setitem(DECODERS, "lean-graphs", graph_decoder(made))
    return made


def model(architecture, **options):
    return random_model(tiny_config(architecture, **{"num_hidden_layers": 1, **options})).to(DEVICE)


def runner(name, module, max_nodes=8, taps=()):
    loaded = wrap_model(module, name="tiny")
    made = Runner(loaded, num_slots=SLOTS, context_len=CONTEXT_LEN, max_nodes=max_nodes, runner=name, taps=taps)
    for store in made.cache._stores.values():
        store.zero_()  # of the rows of the self-test
    return made


def random_tree(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = [
        TreeRow(torch.randint(0, 60, (size,), generator=generator).tolist(), random_parents(size, 4, generator))
        for size in sizes
    ]
    return TokenTree.from_rows(rows, device=DEVICE)


def prefilled(lengths, module, **options):
    """A runner without graphs and one with them, whose slots hold prompts of these lengths."""
    pair = [runner(name, module, **options) for name in ("lean-stock", "lean-graphs")]
    for slot, length in lengths.items():
        for each in pair:
            each.prefill(slot, [(5 * i + slot) % 60 for i in range(length)], 0)
    return pair


def assert_same(work, plain, captured):
    """Runs a pass on both; gives the second one's output."""
    theirs, ours = plain.run(work), captured.run(work)
    assert ours.logits.shape == theirs.logits.shape == (len(work.logit_rows), captured.vocab_size)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    if theirs.features is not None:
        assert ours.features.shape == theirs.features.shape == (work.num_tokens, *theirs.features.shape[1:])
        torch.testing.assert_close(ours.features, theirs.features, rtol=1e-4, atol=1e-4)
    for own, other in zip(captured.cache._stores.values(), plain.cache._stores.values(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)  # every row, those that nothing wrote included
    return ours


def num_captured(capture):
    return capture.num_captured if DEVICE == "cpu" else 0


@pytest.mark.parametrize(
    "architecture", ["mistral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3"))]
)
def test_passes_of_one_shape(architecture, capture) -> None:
    """Slots, lengths, sizes and trees change from pass to pass, and how many sequences; features are read as well."""
    lengths = {0: 12, 1: 5, 2: 1}
    plain, captured = prefilled(lengths, model(architecture), taps=("final", 0))
    assert captured.name == "lean-graphs"
    before, kept = num_captured(capture), []
    batches = [((0, 2), (5, 7)), ((2, 1), (8, 2)), ((1, 0), (5, 5)), ((0, 2, 1), (1, 6, 3))]
    for seed, (slots, sizes) in enumerate(batches):
        work = captured.verification(slots, [lengths[slot] for slot in slots], random_tree(sizes, seed))
        ours = assert_same(work, plain, captured)
        kept.append((ours.logits, ours.logits.clone(), ours.features, ours.features.clone()))
    for logits, as_given, features, features_as_given in kept:
        assert torch.equal(logits, as_given), "what a caller keeps is not overwritten"
        assert torch.equal(features, features_as_given)
    if DEVICE == "cpu":
        assert capture.num_captured <= before + 2, "two sequences or three, 9 to 16 nodes, up to 8 of them in a tree"


@pytest.mark.parametrize(
    "architecture",
    [
        "phi3", "gemma2", "smollm3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "olmo2", "starcoder2")),
    ],
)  # fmt: skip
def test_blocks_that_the_triton_kernels_know_in_part(architecture, capture) -> None:
    """What they do not know runs in torch's operations, captured with the rest. Partial rotation, layers without."""
    changes = {"phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}}
    own = {"no_rope_layers": [0], "layer_types": ["full_attention"]} if architecture == "smollm3" else {}
    own |= {"layer_types": ["sliding_attention"]} if architecture.startswith("gemma") else {}
    lengths = {0: 6, 1: 3, 2: 9}
    plain, captured = prefilled(lengths, model(architecture, **changes.get(architecture, own)))
    runs = capture.num_runs if DEVICE == "cpu" else 0
    for seed, slots in enumerate(((0, 2), (1, 0))):
        work = captured.verification(slots, [lengths[slot] for slot in slots], random_tree([6, 4], seed))
        assert_same(work, plain, captured)
    if DEVICE == "cpu":
        assert capture.num_runs == runs + 2


@pytest.mark.usefixtures("capture")
@pytest.mark.parametrize(
    ("architecture", "why"),
    [("qwen3_moe", "looks at their routing on the host"), ("lfm2", "goes as deep as its trees")],
)
def test_what_cannot_be_captured_is_left_to_another_decoder(architecture, why) -> None:
    target = model(architecture, num_hidden_layers=3)
    with pytest.raises(ModelError, match=f"{why}, and cannot be captured"):
        runner("lean-graphs", target)
    assert runner("lean-stock", target).name == "lean-stock"


@pytest.mark.parametrize("architecture", ["qwen3_5", "falcon_h1"])
def test_recurrent_layers_between_the_triton_kernels(architecture, monkeypatch) -> None:
    """Blocks with a mixer in place of attention, and beside it; norms, rotation and activations are our kernels'."""
    target, lengths = model(architecture, num_hidden_layers=3), {0: 6, 1: 3}
    monkeypatch.setattr("foretoken.decoder.fused_linear.is_packable", lambda weight: False)  # as on a GPU
    plain = runner("lean-stock", target)
    monkeypatch.setattr("foretoken.decoder.torch_blocks.elementwise_ops", lambda *_: TritonOps())
    ours = runner("lean-stock", target)
    for slot, length in lengths.items():
        for each in (plain, ours):
            each.prefill(slot, list(range(3, 3 + length)), 0)
    assert_same(ours.verification((1, 0), [3, 6], random_tree([6, 4], 0)), plain, ours)


def test_levels_and_chains(capture) -> None:
    """Levels of trees behind nodes of earlier passes, another number for each sequence, and last logits of chains."""
    lengths = {0: 6, 1: 4, 2: 9}
    plain, captured = prefilled(lengths, model("llama"))
    count = num_captured(capture)
    device = captured.device
    for turn, slots in enumerate(((2, 0), (0, 1))):
        prefix = [lengths[slot] - turn for slot in slots]
        trees = [[-1, 0, 0, 1, 3], [-1, -1, 1, 1, 2, 0, 5]]
        first, new = (3, 4), (2, 3)  # nodes fed before, and now
        for num_earlier, fed in ((None, first), (list(first), new)):
            ends = [0 if num_earlier is None else num_earlier[row] + fed[row] for row in range(2)]
            nodes = [tree[: end or fed[row]] for row, (tree, end) in enumerate(zip(trees, ends, strict=True))]
            depths = [[0] * len(tree) for tree in nodes]
            for row, tree in enumerate(nodes):
                for node, parent in enumerate(tree):
                    depths[row][node] = depths[row][parent] + 1 if parent >= 0 else 0
            work = Pass(
                tokens=torch.arange(sum(fed), device=device) + 7 * turn,
                positions=torch.tensor(
                    [prefix[row] + depth for row in range(2) for depth in depths[row]], device=device
                ),
                parents=torch.tensor([parent for tree in nodes for parent in tree], device=device),
                slots=slots, prefix_lens=prefix, offsets=[0, fed[0], sum(fed)], num_earlier=num_earlier,
                logit_rows=torch.arange(sum(fed), device=device),
            )  # fmt: skip
            assert_same(work, plain, captured)
        chains = Pass.of_chains(
            [[1, 2], [3]], slots=slots, prefix_lens=prefix, device=device, has_last_logits=True
        )  # fmt: skip
        assert_same(chains, plain, captured)
    assert num_captured(capture) <= count + 3, "each of the three shapes is captured once"


def test_trees_beside_prompts(capture, monkeypatch) -> None:
    """One pass of a tree and chunks of two prompts, whose logits nobody wants, is captured as long as it is short."""
    monkeypatch.setattr("foretoken.decoder.cuda_graphs._MOST_UNWANTED", 8)
    lengths = {0: 6, 1: 3}
    plain, captured = prefilled(lengths, model("llama"))
    runs = capture.num_runs if DEVICE == "cpu" else 0
    for slots, prefix, sizes in (((0, 1, 2), [6, 3, 0], (1, 7)), ((1, 2, 0), [3, 7, 0], (2, 7))):
        tree = captured.verification([slots[0]], [prefix[0]], random_tree([5], slots[0]))
        chunks = [[(11 * i + slot) % 60 for i in range(size)] for slot, size in zip(slots[1:], sizes, strict=True)]
        chains = Pass.of_chains(chunks, slots=slots[1:], prefix_lens=prefix[1:], device=captured.device)
        assert_same(tree.with_chains(chains), plain, captured)
    if DEVICE == "cpu":
        assert capture.num_runs == runs + 1, "the second chunks have nine tokens"


def test_passes_at_the_end_of_the_cache(capture) -> None:
    """What a pass is padded with takes no rows: where its own nodes fit it is captured."""
    plain, captured = prefilled({1: CONTEXT_LEN - 1, 0: 3}, model("llama"), max_nodes=5)
    runs = capture.num_runs if DEVICE == "cpu" else 0
    end = captured.cache.capacity - 5
    for each in (plain, captured):
        each.cache.poison(1, end)
    work = captured.verification([1], [end], random_tree([5], 0))
    theirs, ours = plain.run(work).logits, captured.run(work).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    if DEVICE == "cpu":
        assert capture.num_runs == runs + 1


def test_graphs_are_bounded(capture, monkeypatch) -> None:
    monkeypatch.setattr("foretoken.decoder.cuda_graphs.MAX_GRAPHS", 2)
    assert MAX_GRAPHS > 2
    captured = runner("lean-graphs", model("llama"))
    for size in (1, 2, 4, 2):
        captured.verify([0], [3], random_tree([size], 0))
    assert [shape.num_tokens for shape in captured.decoder._graphs.shapes] == [4, 2]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_text_is_plain_decodings(temperature, capture) -> None:
    module = model("llama")
    prompts = [{"prompt_token_ids": ids} for ids in ([3, 4, 5, 3, 4, 5, 3], [7, 8, 7, 8, 7])]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=6, ignore_eos=True)
    texts = []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}):
        engine = LLM(module, runner="lean-graphs", speculative_config=config, max_num_seqs=2, max_model_len=CONTEXT_LEN)
        texts.append([output.outputs[0].token_ids for output in engine.generate(prompts, params)])
    assert all(len(text) == params.max_tokens for text in texts[0])
    assert texts[0] == texts[1]


def test_other_devices_say_why() -> None:
    module = model("llama")
    if DEVICE == "cpu":
        with pytest.raises(Exception, match="CUDA graphs on NVIDIA GPUs only"):
            runner("lean-graphs", module)

"""A recorded pass, run again with other contents of its tensors, is the pass that those contents describe."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernel_device import DEVICE, OnDevice, random_parents
from tiny_models import random_model, tiny_config

from foretoken import LLM, SamplingParams
from foretoken.attention.layout import AttentionLayout
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.target import runner as runner_module
from foretoken.target.lean.stock import fused_steps
from foretoken.target.loading import wrap_model
from foretoken.target.recorded import MAX_RECORDINGS, RecordedDecoder
from foretoken.target.recorder import GraphRecorder
from foretoken.target.runner import Runner

CONTEXT_LEN, SLOTS = 32, 3


class Rerun:
    """Runs the function itself again, into the tensors of the first run: what a graph does, without one."""

    def __init__(self):
        self.num_recorded = self.num_runs = 0

    def record(self, run):
        self.num_recorded += 1
        first = run()

        def again():
            self.num_runs += 1
            with OnDevice():  # a graph could not look at a tensor's content, and neither may this
                output = run()
            first.logits.copy_(output.logits)
            if first.features is not None:
                first.features.copy_(output.features)

        return first, again


@pytest.fixture
def recorder(monkeypatch):
    """What the runner "lean-recorded" records with here."""
    made = GraphRecorder(torch.device(DEVICE)) if DEVICE == "cuda" else Rerun()
    monkeypatch.setattr("foretoken.target.lean.fused_linear.is_packable", lambda weight: False)  # as on a GPU
    monkeypatch.setitem(
        runner_module._DECODERS,
        "lean-recorded",
        lambda model, cache, taps: RecordedDecoder(model, cache, taps, recorder=made, steps=fused_steps()),
    )
    return made


def model(architecture, **options):
    return random_model(tiny_config(architecture, **{"num_hidden_layers": 1, **options})).to(DEVICE)


def runner(name, module, max_nodes=8, taps=()):
    loaded = wrap_model(module, name="tiny")
    return Runner(loaded, num_slots=SLOTS, context_len=CONTEXT_LEN, max_nodes=max_nodes, runner=name, taps=taps)


def random_tree(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = [
        TreeRow(torch.randint(0, 60, (size,), generator=generator).tolist(), random_parents(size, 4, generator))
        for size in sizes
    ]
    return TokenTree.from_rows(rows, device=DEVICE)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_passes_of_one_shape(architecture, recorder) -> None:
    """Slots, lengths, widths and trees change from pass to pass; features are read as well."""
    module = model(architecture)
    plain, recorded = (runner(name, module, taps=("final", 0)) for name in ("lean-stock", "lean-recorded"))
    assert recorded.name == "lean-recorded"
    lengths = {0: 12, 1: 5, 2: 1}
    for slot, length in lengths.items():
        for each in (plain, recorded):
            each.prefill(slot, [(5 * i + slot) % 60 for i in range(length)], 0)
    before = recorder.num_recorded if DEVICE == "cpu" else 0
    kept = []
    for seed, (slots, sizes) in enumerate([((0, 2), (5, 7)), ((2, 1), (8, 6)), ((1, 0), (6, 1)), ((2, 0), (5, 5))]):
        tree, prefix = random_tree(sizes, seed), [lengths[slot] for slot in slots]
        ours, theirs = recorded.verify(slots, prefix, tree), plain.verify(slots, prefix, tree)
        for row, size in enumerate(sizes):
            torch.testing.assert_close(ours.logits[row, :size], theirs.logits[row, :size], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours.features[row, :size], theirs.features[row, :size], rtol=1e-4, atol=1e-4)
        kept.append((ours.logits, ours.logits.clone()))
    assert all(torch.equal(*pair) for pair in kept), "what a caller keeps is not overwritten"
    if DEVICE == "cpu":
        assert recorder.num_recorded <= before + 1, "all four are passes of one shape, which the self-test may have met"


def test_passes_that_are_no_trees(recorder) -> None:
    """Levels of a draft model's tree behind earlier scratch rows, and chains; each shape is recorded once."""
    module = model("llama")
    plain, recorded = runner("lean-stock", module), runner("lean-recorded", module)
    for each in (plain, recorded):
        for slot in (0, 1):
            each.prefill(slot, [slot + 3 * i for i in range(6)], 0)
    count = recorder.num_recorded if DEVICE == "cpu" else 0
    visible = [[True, False, True, False], [True, True, False, True]]
    for slot, prefix, rows in ((0, 5, visible), (1, 4, visible[::-1])):
        layout = AttentionLayout(
            slots=[slot], prefix=[prefix], positions=torch.tensor([[prefix + 1, prefix + 2]], device=DEVICE), offset=2,
            visible=torch.tensor([rows], device=DEVICE) | torch.eye(4, dtype=torch.bool, device=DEVICE)[2:],
            scratch_positions=prefix + torch.tensor([[0, 1, 1, 2]], device=DEVICE),
        )  # fmt: skip
        scratch = AttentionLayout(
            slots=[slot], prefix=[prefix], positions=prefix + torch.tensor([[0, 1]], device=DEVICE)
        )
        for tokens, given in (([[1, 2]], scratch), ([[3, 4]], layout)):
            fed = torch.tensor(tokens, device=DEVICE)
            outputs = [each.forward(fed, given).logits for each in (plain, recorded)]
            torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    if DEVICE == "cpu":
        assert recorder.num_recorded == count + 2


def test_what_is_not_recorded(recorder) -> None:
    """Trees at the very end of the cache, which could not be padded."""
    module = model("llama")
    plain, recorded = runner("lean-stock", module, 5), runner("lean-recorded", module, 5)
    end = recorded.context_len - 1
    for each in (plain, recorded):
        each.prefill(1, [i % 60 for i in range(end)], 0)
    if DEVICE == "cpu":
        assert recorder.num_runs, "the self-test was recorded"
        recorder.num_runs = 0
    tree = random_tree([5], 0)  # padded to 8 it would not fit
    outputs = [each.verify([1], [end], tree).logits for each in (plain, recorded)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    if DEVICE == "cpu":
        assert not recorder.num_runs


def test_recordings_are_bounded(recorder, monkeypatch) -> None:
    monkeypatch.setattr("foretoken.target.recorded.MAX_RECORDINGS", 2)
    assert MAX_RECORDINGS > 2
    recorded = runner("lean-recorded", model("llama"))
    for size in (1, 2, 4, 2):
        recorded.verify([0], [3], random_tree([size], 0))
    assert [shape.width for shape in recorded._decoder._recordings.shapes] == [4, 2]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_plain_decodings(temperature, recorder) -> None:
    module = model("llama")
    prompts = [{"prompt_token_ids": ids} for ids in ([3, 4, 5, 3, 4, 5, 3], [7, 8, 7, 8, 7])]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=6, ignore_eos=True)
    texts = []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}):
        engine = LLM(
            module, runner="lean-recorded", speculative_config=config, max_num_seqs=2, max_model_len=CONTEXT_LEN
        )
        texts.append([output.outputs[0].token_ids for output in engine.generate(prompts, params)])
    assert texts[0] == texts[1]


def test_other_devices_say_why() -> None:
    module = model("llama")
    if DEVICE == "cpu":
        with pytest.raises(Exception, match="recorded on NVIDIA GPUs only"):
            runner("lean-recorded", module)

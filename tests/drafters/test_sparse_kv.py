"""Drafts with a part of the KV cache: which rows they read, what is drafted from them, and when nothing is."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafters.drafting_contexts import attached, context
from tiny_models import VOCAB_SIZE, tiny_model
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.drafters.base import Committed
from foretoken.drafters.partial_reads import PartialRows
from foretoken.drafters.sparse_kv import DraftBytes, Options, SparseKvDrafter, greatest
from foretoken.models.loading import wrap_model
from foretoken.runner.decoders import DECODERS
from foretoken.runner.runner import Runner

ON_CPUS = [name for name in DECODERS if name != "lean-graphs"]
CONTEXT_LEN = 96
DICE = torch.Generator().manual_seed(3)
TEXTS = [torch.randint(1, VOCAB_SIZE, (length,), generator=DICE).tolist() for length in (61, 40, 75)]
DEPTH = 4


def made(target: Runner, **options: Any) -> SparseKvDrafter:
    """A drafter on a target that has read all texts but their roots."""
    for slot, text in enumerate(TEXTS):
        target.prefill(slot, text[:-1], 0)
    values = {"method": "sparse_kv", "kv_budget": 16, "kv_sinks": 4, "num_speculative_tokens": DEPTH, **options}
    drafter = SparseKvDrafter(Options(**values))
    return attached(
        drafter, model=target.model, target_runner=target, runner=target.name, context_len=CONTEXT_LEN, num_slots=3
    )


def target_of(module: Any, decoder: str = "generic") -> Runner:
    return Runner(wrap_model(module, name="tiny"), num_slots=3, context_len=CONTEXT_LEN, max_nodes=16, runner=decoder)


def drafted(
    drafter: SparseKvDrafter, texts: Sequence[Sequence[int]] = TEXTS, slots: Sequence[int] | None = None
) -> list[list[int]]:
    tree = drafter.propose(context(texts, max_depth=DEPTH, slots=slots))
    return [tokens[1:] for tokens in tree.tokens.tolist()]


def slow_draft(module: Any, text: Sequence[int], rows: Sequence[int]) -> list[int]:
    """The most probable tokens, one after another, where root and drafts see some rows of the text and each other."""
    module.set_attn_implementation("eager")
    ids, root = list(text), len(text) - 1
    for _ in range(DEPTH):
        seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        seen[root:, [row for row in range(root) if row not in rows]] = False
        mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
        with torch.inference_mode():
            logits = module(torch.tensor([ids]), attention_mask=mask[None, None], use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(text) :]


@pytest.mark.parametrize("decoder", ON_CPUS)
def test_drafts_read_sinks_and_recent_rows(decoder: str) -> None:
    drafter = made(target_of(tiny_model("llama"), decoder), kv_selection="streaming_llm")
    rows = [[*range(4), *range(len(text) - 1 - 10, len(text) - 1)] for text in TEXTS]
    expected = [slow_draft(tiny_model("llama"), text, each) for text, each in zip(TEXTS, rows, strict=True)]
    assert drafted(drafter) == expected
    assert expected != [slow_draft(tiny_model("llama"), text, range(len(text) - 1)) for text in TEXTS]


@pytest.mark.parametrize("decoder", ON_CPUS)
@pytest.mark.parametrize("has_heads", [False, True], ids=["by layer", "by head"])
def test_drafts_read_listed_and_newer_rows(decoder: str, has_heads: bool) -> None:
    """Rows that are not listed hold NaN; a copy of the whole text at the true positions drafts the same."""
    module = tiny_model("llama")
    target = target_of(module, decoder)
    drafter = made(target)
    listed = torch.tensor([0, 3, 7, 8, 21, 30])
    for slot, text in enumerate(TEXTS):
        shape = (3, target.cache.keys[0].shape[1], -1) if has_heads else (3, -1)
        drafter._rows.choose(slot, listed.expand(shape), 33)
        others = [row for row in range(len(text) - 1) if row < 33 and row not in listed]
        for part in (*target.cache.keys, *target.cache.values):
            part[slot][:, others] = float("nan")
    rows = [[*listed.tolist(), *range(33, len(text) - 1)] for text in TEXTS]
    assert drafted(drafter) == [
        slow_draft(tiny_model("llama"), text, each) for text, each in zip(TEXTS, rows, strict=True)
    ]


@pytest.mark.parametrize("decoder", ON_CPUS)
def test_newer_rows_are_appended_until_a_slot_is_full(decoder: str) -> None:
    module, text = tiny_model("llama"), TEXTS[2]
    drafter = made(target_of(module, decoder), kv_selection="streaming_llm")
    for length, first in ((30, 19), (31, 19), (32, 19), (33, 22), (34, 22), (75, 64)):  # never more than 16 rows
        rows = [*range(4), *range(first, length - 1)]
        assert drafted(drafter, [text[:length]], [2]) == [slow_draft(tiny_model("llama"), text[:length], rows)]


def test_a_slot_takes_listed_rows_then_newer_ones() -> None:
    shapes = [LayerShape(2, 3, 3), LayerShape(2, 3, 3)]
    source, own = (
        SlotCache(shapes, num_slots=2, capacity=capacity, dtype=torch.bfloat16, device=torch.device("cpu"))
        for capacity in (64, 20)
    )
    for part in (*source.keys, *source.values):
        part.copy_(torch.rand(part.shape))
    rows = PartialRows(own, 4, window=lambda _: 16, store=source, is_copy=True)
    rows.begin(1)
    listed = torch.tensor([[1, 5, 9], [0, 2, 8]])
    rows.choose(1, listed, 12)

    def expect(length: int, first: int) -> None:
        count = rows.make_room(1, length)
        assert count == 3 + length - first
        for layer in range(2):
            wanted = [*listed[layer].tolist(), *range(first, length)]
            for theirs, ours in ((source.keys, own.keys), (source.values, own.values)):
                torch.testing.assert_close(ours[layer][1, :, :count], theirs[layer][1][:, wanted], rtol=0, atol=0)

    expect(14, 12)
    expect(14, 12)
    expect(25, 12)
    expect(26, 20)  # the slot was full: half of the room is left for rows to come
    rows.forget()
    expect(27, 21)
    assert rows.make_room(1, 28) == 10


def test_the_greatest_weights() -> None:
    weights = torch.rand(3, 2, 40)
    found = greatest(weights, 7)
    assert found.equal(weights.topk(7, dim=-1).indices.sort(-1).values)
    assert greatest(torch.zeros(2, 9), 3).shape == (2, 3)


def attention_of(*lengths: int) -> list[Tensor]:
    return [torch.rand(3, 2, length, generator=DICE) for length in lengths]


def committed(weights: Sequence[Tensor | None], **changes: Any) -> Committed:
    count = len(weights)
    return Committed(
        slots=range(count), starts=[0] * count, tokens=[[1]] * count, features=None, attention=weights, **changes
    )


def test_vegas_keeps_the_most_important_rows_of_each_layer() -> None:
    drafter = made(target_of(tiny_model("llama")), kv_selection="vegas")
    weights = attention_of(60, 39)
    drafter.commit(committed([*weights, None]))
    for slot, each in enumerate(weights):
        state = drafter._rows._slots[slot]
        assert state.end == each.shape[2]
        assert state.listed is not None
        assert state.listed.equal(each.mean(1).topk(16).indices.sort().values)
    assert drafter._rows._slots[2].listed is None


def test_snapkv_pools_weights_of_neighbours_for_each_head() -> None:
    drafter = made(target_of(tiny_model("llama")), kv_selection="snapkv", kv_budget=40)
    (weights,) = attention_of(60)
    drafter.commit(committed([weights]))
    state = drafter._rows._slots[0]
    assert state.end == 60 - 32
    padded = torch.nn.functional.pad(weights[:, :, :28], (2, 2))
    pooled = sum(padded[:, :, i : i + 28] for i in range(5)) / 5
    assert state.listed is not None
    assert state.listed.equal(pooled.topk(8).indices.sort().values)


def test_prompts_that_snapkv_does_not_observe_are_read_whole() -> None:
    drafter = made(target_of(tiny_model("llama")), kv_selection="snapkv", kv_budget=40)
    drafter.commit(committed(attention_of(1, 32, 60)))
    assert [drafter._rows._slots[slot].listed is None for slot in range(3)] == [True, True, False]


def test_slots_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    monkeypatch.setattr("foretoken.decoder.slot_cache.free_bytes", lambda _: 200_000)
    with pytest.raises(ConfigError, match=r"do not fit into half of the free memory, only \d+ rows a slot\. Lower max"):
        made(target)


def test_texts_shorter_than_the_budget_are_read_whole() -> None:
    module = tiny_model("llama")
    drafter = made(target_of(module), kv_budget=80)
    drafter.commit(committed(attention_of(60, 39, 74)))
    assert drafted(drafter) == [slow_draft(tiny_model("llama"), text, range(len(text) - 1)) for text in TEXTS]


@pytest.mark.parametrize("decoder", ON_CPUS)
@pytest.mark.parametrize("exit_layer", [None, 2])
def test_the_engine_selects_by_the_targets_attention(decoder: str, exit_layer: int | None) -> None:
    """The rows that a drafter keeps of a prompt are those with the greatest weights in transformers' own attention."""
    module = tiny_model("llama")
    config = {"method": "sparse_kv", "kv_budget": 16, "num_speculative_tokens": 3, "exit_layer": exit_layer}
    llm = LLM(module, speculative_config=config, runner=decoder, max_num_seqs=2)
    drafter: Any = llm._engine._drafting._guards[0]._drafter
    texts = TEXTS[:2]
    llm.generate(texts, SamplingParams(temperature=0, max_tokens=1))
    plain = tiny_model("llama")
    plain.set_attn_implementation("eager")
    for slot, text in enumerate(texts):
        with torch.inference_mode():
            weights = torch.cat(plain(torch.tensor([text]), output_attentions=True).attentions)
        expected = weights[:exit_layer, :, -1].mean(1).topk(16).indices.sort().values
        state = drafter._rows._slots[slot]
        assert state.listed is not None
        assert state.end == len(text)
        assert state.listed.equal(expected)


def test_weights_are_read_of_verifications_with_a_draft_alone() -> None:
    """Where bytes say that drafts cannot pay, the target computes no weights after the prompt."""
    read: dict[bool, list[bool]] = {}
    for is_adaptive in (True, False):
        config = {"method": "sparse_kv", "kv_budget": 16}
        llm = LLM(
            tiny_model("llama"), speculative_config=config | ({} if is_adaptive else {"num_speculative_tokens": 3})
        )
        drafter: Any = llm._engine._drafting._guards[0]._drafter
        drafter._costs = DraftBytes(weights=(1000.0, 1000.0), row=(1.0, 1.0))
        commit, read[is_adaptive] = drafter.commit, []

        def kept(committed: Committed, commit: Any = commit, found: list[bool] = read[is_adaptive]) -> None:
            if committed.verified is not None:
                found.append(committed.attention is not None)
            commit(committed)

        drafter.commit = kept
        llm.generate([TEXTS[0]], SamplingParams(temperature=0, max_tokens=12))
    assert read[True]
    assert not any(read[True])
    assert any(read[False])


def test_nothing_is_drafted_where_bytes_say_that_it_cannot_pay() -> None:
    drafter = made(target_of(tiny_model("llama")), num_speculative_tokens=None, kv_selection="streaming_llm")
    drafter._costs = DraftBytes(weights=(1000.0, 1000.0), row=(1.0, 1.0))
    assert drafter.modelled_speedup([60, 39, 74]) < 1.1
    assert drafted(drafter) == [[]] * 3
    drafter._costs = DraftBytes(weights=(10.0, 10.0), row=(1.0, 1.0))
    assert drafter.modelled_speedup([60, 39, 74]) > 1.1
    assert all(drafted(drafter))
    assert drafter.modelled_speedup([74]) == pytest.approx(
        max((1 - 0.9 ** (k + 1)) / 0.1 / (k * 26 / 84 + 1) for k in range(1, 17))
    )


def test_the_bytes_of_a_draft() -> None:
    target = target_of(tiny_model("llama"))
    whole = DraftBytes.of(target.model, target.cache, 3, quantization=None)
    module: Any = target.model.module
    weights = sum(each.numel() for each in module.parameters()) - module.get_input_embeddings().weight.numel()
    heads, width = target.cache.keys[0].shape[1], target.cache.keys[0].shape[3]
    assert whole.plain([10]) == 4 * weights + 10 * 3 * 2 * heads * width * 4
    less = DraftBytes.of(target.model, target.cache, 1, quantization="int8")
    head = module.get_output_embeddings().weight.numel()
    assert less.draft([6]) == pytest.approx(head + (weights - head) / 3 + 2 * whole.row[0])


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_targets_with_windows_are_refused(architecture: str) -> None:
    with pytest.raises(ConfigError, match="slide a window over its text"):
        LLM(tiny_model(architecture), speculative_config={"method": "sparse_kv"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 4}, "exit_layer is 4, and .* has 3 blocks"),
        ({"kv_selection": "quest"}, "kv_selection"),
        ({"kv_budget": 0}, "kv_budget"),
        ({"kv_ratio": 1.5}, "kv_ratio"),
        ({"kv_selection": "snapkv", "kv_budget": 32}, "kv_budget is 32, and SnapKV keeps the last 32"),
        ({"kv_selection": "streaming_llm", "kv_budget": 16}, "kv_sinks are 16 of 16 rows"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_model("llama"), speculative_config={"method": "sparse_kv", **options})


def observations(llm: LLM) -> list[tuple[int, float]]:
    """Collects rows and number of queries of every prompt whose attention the drafter gets."""
    drafter: Any = llm._engine._drafting._guards[0]._drafter
    found, commit = [], drafter.commit

    def kept(committed: Committed) -> None:
        if committed.verified is None and committed.attention is not None:
            heads = llm.target.model.config.num_attention_heads // llm.target.model.config.num_key_value_heads
            for each in committed.attention:
                if each is not None:
                    found.append((each.shape[2], round(float(each[0, 0].sum()) / heads, 3)))
        commit(committed)

    drafter.commit = kept
    return found


SNAPKV = {"method": "sparse_kv", "kv_selection": "snapkv", "kv_budget": 40, "num_speculative_tokens": 3}


@pytest.mark.parametrize("budget", [None, 40, 34, 8])
def test_snapkv_observes_the_last_tokens_of_every_prompt(budget: int | None) -> None:
    """A chunk that ends shortly before the prompt does, a hit in the prefix cache, samples 2 to n, and a scored one."""
    llm = LLM(tiny_model("llama"), speculative_config=SNAPKV, max_num_seqs=3, max_num_batched_tokens=budget)
    found, text, greedy = observations(llm), TEXTS[0], {"temperature": 0, "max_tokens": 6}
    queries = float(min(32, budget or 32))
    for params in (
        SamplingParams(**greedy),
        SamplingParams(**greedy),
        SamplingParams(n=3, temperature=1, max_tokens=6),
    ):
        llm.generate([text], params)
    assert found[:2] == [(len(text), queries)] * 2
    assert len(found) == 5
    if budget is None:
        assert found == [(len(text), queries)] * 5
    found.clear()
    llm.generate([text], SamplingParams(**greedy, prompt_logprobs=0))
    assert [rows for rows, _ in found] == [len(text) - 1]

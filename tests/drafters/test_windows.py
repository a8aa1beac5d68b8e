"""Windows over a drafter's own KV rows: which rows stay, where they lie, and what is drafted from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafters.drafting_contexts import attached, begin, context
from drafters.test_sparse_kv import DEPTH, ON_CPUS, TEXTS, slow_draft
from end_to_end.tiny_heads import head
from tiny_models import tiny_model
from torch import Tensor

from foretoken import LLM
from foretoken.core.errors import ConfigError
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.drafters.base import Committed
from foretoken.drafters.draft_model import DraftModelDrafter, Options
from foretoken.drafters.windows import PartialRows
from foretoken.models.loading import wrap_model


def made(**options: Any) -> tuple[PartialRows, SlotCache]:
    """Rows that a window of 8 narrows, with room for 32 more."""
    wanted = Options(method="draft_model", draft_window_size=8, draft_sink_size=2, **options)
    assert wanted.partial_rows is not None
    cache = SlotCache(
        [LayerShape(2, 3, 3)] * 2, num_slots=2, capacity=wanted.partial_rows + 4, dtype=torch.float32,
        device=torch.device("cpu"), num_positions=400,
    )  # fmt: skip
    return PartialRows.own(cache, 4, wanted, context_len=400), cache


def feed(rows: PartialRows, cache: SlotCache, slot: int, length: int, count: int) -> None:
    """Writes positions as a pass would: each row holds its position."""
    row = rows.make_room(slot, length, count)
    for part in (*cache.keys, *cache.values):
        part[slot, :, row : row + count] = torch.arange(length, length + count, dtype=torch.float32)[:, None]


def held(rows: PartialRows, cache: SlotCache, slot: int, length: int) -> list[int]:
    """The positions whose rows a pass behind `length` positions reads."""
    found = [part[slot, :, : rows.row(slot, length)] for part in (*cache.keys, *cache.values)]
    assert all(part.equal(found[0]) for part in found)
    assert (found[0] == found[0][:1, :, :1]).all()
    return found[0][0, :, 0].int().tolist()


def test_sinks_stay_and_the_window_moves() -> None:
    rows, cache = made()
    length = 0
    for count in (32, 8, 1, 2, 32, 3, 32, 32):
        feed(rows, cache, 1, length, count)
        length += count
        read = held(rows, cache, 1, length)
        assert read[:2] == [0, 1]
        assert read[2:] == list(range(read[2], length))
        assert min(length, 10) <= len(read) <= 42
        assert length < 42 or length - read[2] >= count
    assert read[2] > 2


def test_a_text_takes_the_rows_of_a_prefix() -> None:
    rows, cache = made()
    for length in range(0, 96, 32):
        feed(rows, cache, 0, length, 32)
    first = held(rows, cache, 0, 96)[2]
    assert rows.reusable(0, first + 3) == 0
    assert rows.reusable(0, 90) == 90
    rows.begin(1, 0, 90)
    assert held(rows, cache, 1, 90) == [0, 1, *range(first, 90)]
    rows.begin(1)
    assert rows.row(1, 5) == 5
    rows.begin(0, 0, 90)
    feed(rows, cache, 0, 90, 1)
    assert held(rows, cache, 0, 91) == [0, 1, *range(first, 91)]


def attention(length: int, chunks: dict[int, float]) -> Tensor:
    """Weights of two blocks: the last one says which chunks of 32 positions matter."""
    weights = torch.rand(2, 2, length) * 0.01
    for chunk, weight in chunks.items():
        weights[-1, :, 32 * chunk : 32 * chunk + 32] = weight
    return weights


def test_chunks_that_the_target_attends_to_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.drafters.windows._BEST_CHUNKS", 2)
    rows, cache = made(draft_retrieval=True)
    for length in range(0, 320, 32):
        feed(rows, cache, 0, length, 32)
    weights = attention(320, {3: 1.0, 7: 0.5, 1: 0.2})
    rows.retrieve(Committed(slots=[0], starts=[319], tokens=[[1]], features=None, attention=[weights]))
    feed(rows, cache, 0, 320, 2)
    assert held(rows, cache, 0, 322) == [0, 1, *range(96, 128), *range(224, 256), *range(312, 322)]
    rows.begin(1, 0, 322)
    feed(rows, cache, 1, 322, 5)
    assert held(rows, cache, 1, 327) == [0, 1, *range(96, 128), *range(224, 256), *range(312, 327)]
    for slot in (0, 1):
        rows.retrieve(Committed(slots=[slot], starts=[0], tokens=[[1]], features=None, attention=[None]))
        rows.retrieve(
            Committed(slots=[slot], starts=[0], tokens=[[1]], features=None, attention=[attention(320, {9: 1, 1: 1})])
        )
    feed(rows, cache, 0, 322, 3)
    assert held(rows, cache, 0, 325) == [0, 1, *range(32, 64), *range(288, 325)]


def test_a_choice_stays_while_the_draft_model_reads_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target has read the prompt before: it attends to chunks that the draft model reads later."""
    monkeypatch.setattr("foretoken.drafters.windows._BEST_CHUNKS", 1)
    rows, cache = made(draft_retrieval=True)
    weights = attention(320, {7: 1.0})
    rows.retrieve(Committed(slots=[0], starts=[319], tokens=[[1]], features=None, attention=[weights]))
    for length in range(0, 320, 32):
        feed(rows, cache, 0, length, 32)
    assert set(range(224, 256)) <= set(held(rows, cache, 0, 320))


def test_retrieval_keeps_rows_of_the_targets_context_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, cache = made(draft_retrieval=True)
    assert rows.store is not None
    assert (rows.store.capacity, cache.num_positions) == (400, 400)
    options = Options(method="draft_model", draft_window_size=8, draft_retrieval=True)
    short = PartialRows.own(cache, 4, options, context_len=99)
    assert short.store is not None
    assert short.store.capacity == 100
    monkeypatch.setattr("foretoken.decoder.slot_cache.free_bytes", lambda _: 1000)
    with pytest.raises(ConfigError, match="draft_retrieval keeps 100 KV rows of the drafter for each of 2 sequences"):
        PartialRows.own(cache, 4, options, context_len=99)


def draft_model(module: Any, decoder: str, **options: Any) -> Any:
    wanted = Options(method="draft_model", num_speculative_tokens=DEPTH, quantization="none", **options)
    drafter = DraftModelDrafter(wanted, lambda _: wrap_model(module, name="draft"))
    return attached(drafter, runner=decoder, num_slots=3)


def test_weights_for_another_drafter_move_nothing() -> None:
    rows, cache = made()
    for length in range(0, 32, 8):
        feed(rows, cache, 0, length, 8)
    rows.retrieve(Committed(slots=[0], starts=[31], tokens=[[1]], features=None, attention=[attention(32, {0: 1.0})]))
    feed(rows, cache, 0, 32, 1)
    assert held(rows, cache, 0, 33) == list(range(33))


def test_a_draft_model_that_slides_windows_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="'draft' has layers that slide a window over its text"):
        draft_model(tiny_model("mistral"), "auto", draft_window_size=8)
    assert draft_model(tiny_model("mistral"), "auto") is not None


@pytest.mark.parametrize("decoder", ON_CPUS)
def test_a_draft_model_reads_sinks_and_a_window(decoder: str) -> None:
    """With one block a row depends on its own token alone; texts grow by accepted drafts and by other tokens."""
    module = tiny_model("llama", num_hidden_layers=1)
    drafter = draft_model(module, decoder, draft_window_size=8, draft_sink_size=3)
    texts = [list(text) for text in TEXTS]
    for turn in range(14):
        tree = drafter.propose(context(texts, max_depth=DEPTH))
        for slot, text in enumerate(texts):
            drafted = tree.tokens[slot, 1:].tolist()
            state = drafter._rows._slots[slot]
            rows = [*range(state.num_listed), *range(state.first, len(text) - 1)]
            assert rows[:3] == [0, 1, 2]
            assert len(rows) >= 8 + 3
            assert drafted == slow_draft(tiny_model("llama", num_hidden_layers=1), text, rows)
            if len(text) < 85:
                text.extend([*drafted[: (turn + slot) % 5], 7])
    assert any(state.first > 3 for state in drafter._rows._slots)


def test_a_draft_model_begins_anew_in_a_used_slot() -> None:
    module = tiny_model("llama", num_hidden_layers=1)
    drafter, fresh = (draft_model(module, "lean-native", draft_window_size=8) for _ in range(2))
    drafter.propose(context([TEXTS[2]], max_depth=DEPTH))
    begin(drafter, 0)
    texts = [TEXTS[0]]
    one, other = (each.propose(context(texts, max_depth=DEPTH)).tokens for each in (drafter, fresh))
    assert one.equal(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_retrieval": True}, "draft_window_size is missing"),
        ({"draft_window_size": 0}, "draft_window_size"),
        ({"draft_window_size": 8, "vocab_match": "text"}, "reads its whole text"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_model("llama"), speculative_config={"method": "draft_model", "model": "nowhere", **options})


@pytest.mark.parametrize("name", ["medusa", "hydra", "mlp_speculator", "falcon"])
def test_heads_without_a_block_to_narrow(name: str) -> None:
    arguments = head(name, steps=0, draft_window_size=8)([TEXTS[0]])
    with pytest.raises(ConfigError, match="has no decoder block that a window could narrow"):
        LLM(tiny_model("llama"), **arguments)

"""Drafts of a part of the vocabulary, and on a part of the KV rows: windows and retrieval by attention."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters.test_sparse_kv import DEPTH, ON_CPUS, TEXTS, slow_draft
from drafting_contexts import attached, begin, context, verified
from end_to_end.tiny_heads import head
from end_to_end.tiny_llms import RUNNERS, WIDTHS, draft_model, llm, noisy
from pairwise import slow_products
from tiny_models import VOCAB_SIZE, tiny_model
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.core.passes import Pass
from foretoken.decoder.native_linear import HeadRows
from foretoken.decoder.quantized import quantized
from foretoken.decoder.quantized_modules import QuantizedLinear
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.drafters.base import Committed
from foretoken.drafters.draft_model import DraftModelDrafter, Options
from foretoken.drafters.partial_reads import DraftTokens, PartialRows, WeightOptions
from foretoken.drafters.registry import create_drafter, drafter_options
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.formats.draft_vocabulary import DraftVocabulary
from foretoken.formats.registry import read_head
from foretoken.heads.base import build_head
from foretoken.models.loading import wrap_model
from foretoken.models.parts import target_parts
from foretoken.runner.runner import Runner
from foretoken.training.objectives import head_config

TOKENS = torch.tensor([40, 3, 17, 5, 60, 61, 2, 33, 21, 22, 23, 50, 11, 12, 13, 14, 15])  # more than one panel


def runner_of(module: Any, name: str = "lean-native") -> Runner:
    """A runner for drafts."""
    return Runner(wrap_model(module, name="draft"), num_slots=2, context_len=32, max_nodes=9, runner=name)


def logits_of(runner: Runner) -> torch.Tensor:
    """After every token of a text."""
    work = Pass.of_chains([[5, 9, 7]], slots=[0], prefix_lens=[0], device=torch.device("cpu"))
    found = runner.run(work.with_all_logits()).logits
    assert found is not None
    return found


def spread(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of some tokens, the others -inf."""
    return torch.full_like(logits, float("-inf")).index_copy(1, tokens, logits[:, tokens])


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen2"])
@pytest.mark.parametrize(
    ("runner", "dtype", "quantization"),
    [
        ("lean-stock", torch.float64, None), ("lean-native", torch.float32, None),
        ("lean-native", torch.bfloat16, None), ("lean-native", torch.bfloat16, "int8"),
        ("lean-native", torch.float32, "int4"),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_whole_head(architecture: str, runner: str, dtype: Any, quantization: Any) -> None:
    """Also when rows were exchanged; with caps of logits, where absent ones are -inf all the same."""
    module = tiny_model(architecture, seed=1, dtype=dtype)
    whole, part = runner_of(module, runner), runner_of(module, runner)
    if quantization is not None:
        whole.draft_with(quantization)
    part.draft_with(quantization, TOKENS)
    expected = logits_of(whole)
    assert expected.shape == (3, VOCAB_SIZE)
    exact = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(logits_of(part), spread(expected, TOKENS), **exact)
    assert part.head_rows is not None
    places, tokens = torch.tensor([16, 0, 3]), torch.tensor([1, 63, 44])
    part.head_rows.exchange(places, tokens)
    now = TOKENS.index_copy(0, places, tokens)
    assert torch.equal(part.head_rows.tokens, now)
    torch.testing.assert_close(logits_of(part), spread(expected, now), **exact)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_rows_of_a_head_that_is_stored_in_integers(kind: Any) -> None:
    """They stand for the same weights to the bit, before and after an exchange, and the whole head stays as it was."""
    weight = torch.randn(45, 70, generator=torch.Generator().manual_seed(0))
    whole = QuantizedLinear(quantized(weight, kind, dtype=torch.float32), torch.arange(45.0))
    before, tokens = whole.weight, torch.tensor([44, 0, 7, *range(10, 30)])
    rows = HeadRows(whole, tokens)
    layer: Any = rows.layer
    assert torch.equal(layer.weight, before[tokens])
    rows.exchange(torch.tensor([22, 1]), torch.tensor([3, 43]))
    now = [44, 43, 7, *range(10, 29), 3]
    assert rows.tokens.tolist() == now
    assert torch.equal(layer.weight, before[now])
    assert layer.bias.tolist() == now
    assert torch.equal(whole.weight, before)


def test_recent_tokens_take_the_places_of_older_ones() -> None:
    """The first three quarters stay; a text with more new tokens than places leaves its last ones."""
    runner = runner_of(noisy(dtype=torch.float32))
    drafted = DraftTokens([2, *range(10, 21)], VOCAB_SIZE)
    runner.draft_with(None, torch.tensor(drafted.ids))
    assert runner.head_rows is not None
    kept = [2, *range(10, 18)]
    for text, recent in (
        ([2, 10, 20], [18, 19, 20]), ([30, 11, 30, 31], [30, 31, 20]), ([18], [30, 31, 18]),
        ([40, 41, 42, 43, 44], [42, 43, 44]), ([43, 50], [50, 43, 44]),
    ):  # fmt: skip
        drafted.learn(text, runner.head_rows)
        assert drafted.ids == [*kept, *recent]
        assert runner.head_rows.tokens.tolist() == drafted.ids


def test_which_tokens_are_drafted(tmp_path: Path) -> None:
    """End tokens, then those of a file, then the first ids; all of a small vocabulary unless told otherwise."""
    model = wrap_model(tiny_model("llama", seed=1, dtype=torch.float32, eos_token_id=60), name="draft")

    def drafted(size: Any, path: Path | None = None) -> list[int] | None:
        vocab = None if path is None else str(path)
        options = WeightOptions(method="draft_model", draft_vocab_size=size, draft_vocab=vocab)
        tokens = options.drafted_tokens(model)
        return None if tokens is None else tokens.ids

    assert [drafted(size) for size in ("auto", "all", VOCAB_SIZE, 5)] == [None, None, None, [60, 0, 1, 2, 3]]
    path = tmp_path / "vocab.json"
    DraftVocabulary(token_ids=(7, 9, 12), coverage=0.5, tokenizer_sha="x", tokens_sha256="y").write(path)
    assert [drafted(size, path) for size in ("auto", 6)] == [[60, 7, 9], [60, 7, 9, 12, 0, 1]]
    DraftVocabulary(token_ids=(7, 99), coverage=0.5, tokenizer_sha="x", tokens_sha256="y").write(path)
    with pytest.raises(ConfigError, match=r"names token 99, and the model 'draft' has ids below 67\. Expected"):
        drafted("auto", path)
    with pytest.raises(ConfigError, match=r"'draft_vocab_size' is 68, and the model 'draft' has 67 tokens"):
        drafted(68)
    with pytest.raises(ConfigError, match="there is no file"):
        drafted(5, tmp_path / "none.json")


@pytest.mark.parametrize("size", [0, -3, True, 2.0, "some"])
def test_sizes_that_make_no_sense(size: Any) -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        llm({"speculative_config": {"method": "draft_model", "model": "nowhere", "draft_vocab_size": size}})


def test_a_large_vocabulary_is_drafted_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default; on the generic runner, which computes the whole LM head, only if nobody asked for it."""
    monkeypatch.setattr(WeightOptions, "large_vocabulary", VOCAB_SIZE)
    make = draft_model(noisy(dtype=torch.float32))
    made = attached(make())
    assert len(made._runner.head_rows.tokens) == VOCAB_SIZE // 4
    assert attached(make(), runner="generic")._runner.head_rows is None
    assert attached(draft_model(noisy(dtype=torch.float32), draft_vocab_size="all")())._runner.head_rows is None
    asked = draft_model(noisy(dtype=torch.float32), draft_vocab_size=9)
    with pytest.raises(ConfigError, match=r"cannot be had: the generic runner computes the whole LM head\. Leave"):
        attached(asked(), runner="generic")


@pytest.mark.parametrize(("shape", "runner"), slow_products(["chain", "tree", WIDTHS, "dynamic"], list(RUNNERS)[1:]))
def test_drafts_follow_prompt_and_text(shape: Any, runner: str) -> None:
    """Every drafted token is one of those that were drafted at first, or that the text has."""
    make = draft_model(noisy(dtype=RUNNERS[runner]), tree=shape, num_speculative_tokens=None, draft_vocab_size=16)
    made = attached(make(), runner=runner, dtype=RUNNERS[runner])
    first = set(made._runner.head_rows.tokens.tolist())
    texts = [[5, 50, 51], [9, 60]]
    params = [SamplingParams(temperature=1.5, seed=1), SamplingParams(temperature=0.0)]
    for _ in range(3):
        tree = made.propose(context(texts, params=params, is_coupled=[False, False]))
        now = set(made._runner.head_rows.tokens.tolist())
        assert now <= first | {token for text in texts for token in text}
        for row, num in enumerate(tree.num_nodes.tolist()):
            assert set(tree.tokens[row, 1:num].tolist()) <= now
        if tree.distributions is not None:
            rows = tree.distributions.rows
            absent = [token for token in range(VOCAB_SIZE) if token not in now]
            assert not rows[..., absent].any()
        for text in texts:
            text += [text[-1] + 1, text[-1] - 5]
    assert {50, 51, 60} & now


def test_the_part_of_the_head_follows_writes_to_weights() -> None:
    module = copy.deepcopy(noisy(dtype=torch.float32))
    runner = runner_of(module)
    runner.draft_with("int8", TOKENS)
    before = logits_of(runner)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.1)
    assert runner.follow_weights()
    fresh = runner_of(module)
    fresh.draft_with("int8", TOKENS)
    assert torch.equal(logits_of(runner), logits_of(fresh))
    assert not torch.equal(logits_of(runner), before)


def test_texts_are_those_of_plain_decoding_and_rare_tokens_are_drafted_once_seen() -> None:
    """A draft model that is the target: with few tokens at first, acceptance grows to that of the whole vocabulary."""
    module = noisy(dtype=torch.float32, noise=0.0)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    plain = llm({}, module=module, runner="lean-native").generate([[5, 6]], params)[0].outputs[0].token_ids
    accepted = []
    for size in ("all", 24, 1):
        make = draft_model(module, num_speculative_tokens=3, draft_vocab_size=size)
        engine = llm({"drafter": make, "trust_drafter": True}, module=module, runner="lean-native")
        outputs = [engine.generate([[5, 6]], params)[0] for _ in range(2)]
        assert all(output.outputs[0].token_ids == plain for output in outputs)
        accepted.append([output.metrics.num_accepted for output in outputs])
    assert accepted[0][0] >= accepted[1][1] > accepted[2][1]


HEADS: dict[str, dict[str, Any]] = {
    "eagle": {}, "falcon": {"block": 2}, "hydra": {"num_heads": 3}, "medusa": {"num_heads": 3},
}  # fmt: skip


def head_drafter(method: str, path: Path, sizes: dict[str, Any] | None = None, **options: Any) -> Any:
    """Over a random head of a target that has its own LM head."""
    target = wrap_model(noisy(dtype=torch.float32), name="target")
    if not path.exists():
        torch.manual_seed(0)
        head = build_head(head_config(method, target, HEADS[method] if sizes is None else sizes), dtype=torch.float32)
        head.initialize(target_parts(target))
        for parameter in head.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
        native.write_checkpoint(HeadCheckpoint.of_head(head, target=TargetFingerprint.of(target)), path)
    keys = {"method": method, "model": str(path), "tree": WIDTHS, **options}
    return attached(create_drafter(drafter_options(keys), target), model=target)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("method", HEADS)
def test_heads_that_share_the_lm_head_draft_some_tokens(method: str, quantization: str, tmp_path: Path) -> None:
    """Those of before and of the texts, with the logits of the whole LM head."""
    some, whole = (
        head_drafter(method, tmp_path / "head", quantization=quantization, draft_vocab_size=size)
        for size in (16, "all")
    )
    first = {*some.parts.head_rows.tokens.tolist()}
    assert len(first) == 16
    text = [5, 50, 51, 60]
    features = torch.randn(5, 1, 32, generator=torch.Generator().manual_seed(1))
    begin(some, 0, text[:3])
    some.commit(Committed(slots=[0], starts=[0], tokens=[text[:3]], features=features[:3]))
    tree = some.propose(context([text]))
    assert {*tree.tokens[0, 1:].tolist()} <= first | {*text}
    some.commit(Committed(slots=[0], starts=[3], tokens=[[60, 61]], features=features[3:], verified=verified()))
    now = some.parts.head_rows.tokens
    assert {60, 61} <= {*now.tolist()}
    tree = some.propose(context([[*text, 61, 62]], params=[SamplingParams(temperature=1.5)], is_coupled=[False]))
    assert {*tree.tokens[0, 1:].tolist()} <= {*now.tolist()}
    ours, theirs = (made.head.logits(0, features[:, 0], made.parts).float() for made in (some, whole))
    torch.testing.assert_close(ours, spread(theirs, now))


def test_a_head_drafts_the_tokens_that_it_learned_over(tmp_path: Path) -> None:
    learned = [3, 7, 20, 21, 22, 40, 41, 60]
    head_drafter("eagle", tmp_path / "head")
    taught = replace(read_head(tmp_path / "head")[1], draft_vocab=learned)
    native.write_checkpoint(taught, tmp_path / "taught")
    tokens = head_drafter("eagle", tmp_path / "taught").parts.head_rows.tokens.tolist()
    assert len(tokens) == len(learned)
    assert {*tokens[1:]} <= {*learned}, "the first one is EOS"
    assert head_drafter("eagle", tmp_path / "taught", draft_vocab_size="all").parts.head_rows is None
    assert len(head_drafter("eagle", tmp_path / "taught", draft_vocab_size=30).parts.head_rows.tokens) == 30


def test_a_head_with_an_lm_head_of_its_own_has_its_own_tokens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has an LM head of its own, which drafts its own tokens\. Expected"):
        head_drafter("medusa", tmp_path / "head", {"num_heads": 3, "own_lm_head": True}, draft_vocab_size=9)
    assert head_drafter("medusa", tmp_path / "head").parts.head_rows is None


def test_the_lm_head_of_a_head_follows_writes_to_weights(tmp_path: Path) -> None:
    made = head_drafter("eagle", tmp_path / "head", quantization="int8", draft_vocab_size=30)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    before = made.parts.lm_head(x)
    with torch.no_grad():
        made._target.model.module.get_output_embeddings().weight.mul_(2.0)
    begin(made, 0)
    torch.testing.assert_close(made.parts.lm_head(x), 2 * before)


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
    monkeypatch.setattr("foretoken.drafters.partial_reads._BEST_CHUNKS", 2)
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
    monkeypatch.setattr("foretoken.drafters.partial_reads._BEST_CHUNKS", 1)
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


def model_drafter(module: Any, decoder: str, **options: Any) -> Any:
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
        model_drafter(tiny_model("mistral"), "auto", draft_window_size=8)
    assert model_drafter(tiny_model("mistral"), "auto") is not None


@pytest.mark.parametrize("decoder", ON_CPUS)
def test_a_draft_model_reads_sinks_and_a_window(decoder: str) -> None:
    """With one block a row depends on its own token alone; texts grow by accepted drafts and by other tokens."""
    module = tiny_model("llama", num_hidden_layers=1)
    drafter = model_drafter(module, decoder, draft_window_size=8, draft_sink_size=3)
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
    drafter, fresh = (model_drafter(module, "lean-native", draft_window_size=8) for _ in range(2))
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
        ({"draft_window_size": 8, "vocab_match": "text"}, "reads whole texts"),
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

"""Drafts of a part of the vocabulary: which tokens, what the LM head says of them, and that it follows the texts."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting_contexts import attached, begin, context, verified
from end_to_end.tiny_llms import RUNNERS, WIDTHS, draft_model, llm, noisy
from pairwise import slow_products
from tiny_models import VOCAB_SIZE, tiny_model

from foretoken import SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.core.passes import Pass
from foretoken.decoder.native_linear import HeadRows
from foretoken.decoder.quantized import quantized
from foretoken.decoder.quantized_modules import QuantizedLinear
from foretoken.drafters.base import Committed
from foretoken.drafters.draft_tokens import DraftTokens, VocabularyOptions
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
    assert DraftTokens.of(model, "auto", None, large=100) is None
    assert DraftTokens.of(model, "all", None, large=100) is None
    assert DraftTokens.of(model, VOCAB_SIZE, None, large=100) is None
    some = DraftTokens.of(model, 5, None, large=100)
    assert some is not None
    assert some.ids == [60, 0, 1, 2, 3]
    place = tmp_path / "vocab.json"
    DraftVocabulary(token_ids=(7, 9, 12), coverage=0.5, tokenizer_sha="x", tokens_sha256="y").write(place)
    for size, ids in (("auto", [60, 7, 9]), (6, [60, 7, 9, 12, 0, 1])):
        listed = DraftTokens.of(model, size, str(place), large=100)
        assert listed is not None
        assert listed.ids == ids
    DraftVocabulary(token_ids=(7, 99), coverage=0.5, tokenizer_sha="x", tokens_sha256="y").write(place)
    with pytest.raises(ConfigError, match=r"names token 99, and the model 'draft' has ids below 67\. Expected"):
        DraftTokens.of(model, "auto", str(place), large=100)
    with pytest.raises(ConfigError, match=r"'draft_vocab_size' is 68, and the model 'draft' has 67 tokens"):
        DraftTokens.of(model, 68, None, large=100)
    with pytest.raises(ConfigError, match="there is no file"):
        DraftTokens.of(model, 5, str(tmp_path / "none.json"), large=100)


@pytest.mark.parametrize("size", [0, -3, True, 2.0, "some"])
def test_sizes_that_make_no_sense(size: Any) -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        llm({"speculative_config": {"method": "draft_model", "model": "nowhere", "draft_vocab_size": size}})


def test_a_large_vocabulary_is_drafted_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default; on the generic runner, which computes the whole LM head, only if nobody asked for it."""
    monkeypatch.setattr(VocabularyOptions, "large_vocabulary", VOCAB_SIZE)
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


def head_drafter(method: str, place: Path, sizes: dict[str, Any] | None = None, **options: Any) -> Any:
    """Over a random head of a target that has its own LM head."""
    target = wrap_model(noisy(dtype=torch.float32), name="target")
    if not place.exists():
        torch.manual_seed(0)
        head = build_head(head_config(method, target, HEADS[method] if sizes is None else sizes), dtype=torch.float32)
        head.initialize(target_parts(target))
        for parameter in head.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
        native.write_checkpoint(HeadCheckpoint.of_head(head, target=TargetFingerprint.of(target)), place)
    keys = {"method": method, "model": str(place), "tree": WIDTHS, **options}
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

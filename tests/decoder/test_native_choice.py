"""Outputs of the native kernels: tokens are those of `KeyedNoise` and the logits, features those of any taps."""

from dataclasses import replace

import pytest
import torch
from tiny_models import CONTEXT_LEN, random_model, tiny_config, tiny_model
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.core.errors import PassError
from foretoken.core.passes import Pass, TokenChoice
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.base import PassOutput
from foretoken.decoder.native import NativeBlocks
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.models.lean_weights import read_weights
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner
from foretoken.sampling.noise import KeyedNoise, Purpose

SEEDS = [3, -(1 << 62) - 5]
PREFIX = [0, 4]


def target(vocab_size: int = 131) -> Runner:
    config = tiny_config("llama", vocab_size=vocab_size, tie_word_embeddings=False)
    made = Runner(wrap_model(random_model(config), name="tiny"), num_slots=2, max_nodes=64, runner="lean-native")
    made.prefill(1, [9, 8, 7, 6], 0)
    return made


def work(tokens: int) -> Pass:
    """Two trees: one whose nodes all follow the root, and a chain."""
    wide = TreeRow([5, *range(6, 5 + tokens)], [-1, *[0] * (tokens - 1)])
    chain = TreeRow([7, 3, 4], [-1, 0, 1])
    return Pass.of_tree(TokenTree.from_rows([wide, chain]), slots=[0, 1], prefix_lens=PREFIX, last_position=90)


def choice(counts: list[int], scales: list[float], impossible: list[int] | None = None) -> TokenChoice:
    repeats = torch.tensor(counts)
    return TokenChoice(
        inverse_temperature=torch.tensor(scales).repeat_interleave(repeats),
        seeds=torch.tensor(SEEDS).repeat_interleave(repeats),
        impossible_ids=None if impossible is None else torch.tensor(impossible),
    )


def answers(output: PassOutput) -> tuple[Tensor, Tensor]:
    assert output.logits is not None
    assert output.chosen is not None
    return output.logits, output.chosen


@pytest.mark.parametrize("vocab_size", [31, 61, 128, 6144])
@pytest.mark.parametrize("scales", [[1.0, 1.0], [0.5, 3.0], [1.25, 0.0], [0.0, 0.0]], ids=str)
def test_draws_are_those_of_the_keyed_noise(vocab_size: int, scales: list[float]) -> None:
    made, passed = target(vocab_size), work(20)
    chosen_as = choice([20, 3], scales)
    logits, chosen = answers(made.run(replace(passed, choice=chosen_as)))
    noise = KeyedNoise(chosen_as.seeds).gumbel(passed.positions + 1, Purpose.TARGET, vocab_size)
    scale = chosen_as.inverse_temperature.unsqueeze(1)
    scores = torch.where(scale == 0, logits, logits * scale + noise).double()
    best = scores.max(1)
    gap = best.values - scores.gather(1, chosen.unsqueeze(1))[:, 0]
    assert (gap <= 1e-5).all(), "logarithms may differ in the last places, no more"
    assert (chosen == best.indices).float().mean() > 0.9


def test_draws_follow_the_distribution() -> None:
    """Ten thousand seeds: every token as often as its probability says, within five standard deviations."""
    made, count = target(31), 10_000
    root = Pass.of_tree(TokenTree.roots([5]), slots=[0], prefix_lens=[0], last_position=90)
    probs = answers(made.run(root))[0][0].softmax(0).double()
    hits = torch.zeros(31, dtype=torch.float64)
    for seed in range(count):
        keyed = TokenChoice(inverse_temperature=torch.ones(1), seeds=torch.tensor([seed]))
        hits[int(answers(made.run(replace(root, choice=keyed)))[1])] += 1
    deviation = (count * probs * (1 - probs)).sqrt()
    assert ((hits - count * probs).abs() <= 5 * deviation + 1).all()


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_impossible_tokens_are_never_chosen(scale: float) -> None:
    made, passed = target(), work(20)
    free = answers(made.run(replace(passed, choice=choice([20, 3], [scale] * 2))))[1]
    banned = sorted(set(free.tolist()))
    logits, chosen = answers(made.run(replace(passed, choice=choice([20, 3], [scale] * 2, banned))))
    assert not set(chosen.tolist()) & set(banned)
    assert logits[:, banned].isneginf().all()
    everything = list(range(131))
    assert (answers(made.run(replace(passed, choice=choice([20, 3], [scale] * 2, everything))))[1] == -1).all()


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_no_token_is_drawn_from_what_is_no_number(odd: float) -> None:
    config = tiny_config("llama", vocab_size=61, tie_word_embeddings=False)
    module = random_model(config)
    made = Runner(wrap_model(module, name="tiny"), num_slots=1, runner="lean-native")
    with torch.no_grad():
        module.model.embed_tokens.weight[7] = odd
    root = Pass.of_tree(TokenTree.roots([7]), slots=[0], prefix_lens=[0], last_position=90)
    keyed = TokenChoice(inverse_temperature=torch.ones(1), seeds=torch.tensor([5]))
    assert answers(made.run(replace(root, choice=keyed)))[1].tolist() == [-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"inverse_temperature": torch.ones(22)},
        {"inverse_temperature": torch.ones(23).double()},
        {"seeds": torch.ones(23)},
        {"seeds": torch.ones(2, dtype=torch.int64)},
        {"impossible_ids": torch.tensor([131])},
        {"impossible_ids": torch.tensor([-1])},
        {"impossible_ids": torch.tensor([1.0])},
    ],
    ids=str,
)
def test_choices_that_do_not_fit_are_refused(changes: dict[str, Tensor]) -> None:
    made, passed = target(), work(20)
    with pytest.raises(PassError, match="Expected"):
        made.run(replace(passed, choice=replace(choice([20, 3], [1.0, 1.0]), **changes)))


def test_neighbours_do_not_change_what_is_drawn() -> None:
    """The kernels draw for a request or never do, whoever shares its pass."""
    module = random_model(tiny_config("llama"))
    llm = LLM(module, runner="lean-native", max_num_seqs=4)
    plain = SamplingParams(temperature=0.9, seed=4, max_tokens=20, ignore_eos=True)
    others = [replace(plain, top_p=0.7), replace(plain, temperature=0.0), replace(plain, presence_penalty=1.5)]
    alone = llm.generate([[5]], plain)[0].outputs[0].token_ids
    for other in others:
        together = llm.generate([[5], [6], [7]], [plain, other, replace(plain, seed=9)])
        assert together[0].outputs[0].token_ids == alone
    generic = LLM(module, runner="generic").generate([[5]], plain)[0].outputs[0].token_ids
    assert generic == alone


TREE = TokenTree.from_rows([TreeRow([5, 6, 7], [-1, 0, 0]), TreeRow([9], [-1])])


def features(dtype: torch.dtype, taps: list[int]) -> torch.Tensor:
    """(4, F, 32), of two sequences."""
    model = wrap_model(tiny_model("mistral").to(dtype), name="tiny")
    cache = SlotCache(
        [LayerShape(2, 8, 8)] * 3, num_slots=2, capacity=CONTEXT_LEN, dtype=dtype, device=model.device
    )  # fmt: skip
    weights = read_weights(model, CONTEXT_LEN)
    made = NativeBlocks(weights.layers, cache, taps, ends=weights)
    given = made.run(Pass.of_tree(TREE, slots=[0, 1], prefix_lens=[0, 0], last_position=CONTEXT_LEN - 1)).features
    assert given is not None
    return given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taps", [[4, 0, 3, 0], [2], [4], [0, 1, 2, 3, 4]])
def test_taps_are_given_in_the_order_that_they_are_asked_for(taps: list[int], dtype: torch.dtype) -> None:
    """0 is the embedding, 3 what comes out of the last of three layers, and 4 its final norm."""
    given = features(dtype, taps)
    assert (given.dtype, given.shape) == (dtype, (4, len(taps), 32))
    assert torch.isfinite(given).all()
    for place, tap in enumerate(taps):
        assert torch.equal(given[:, place], features(dtype, [tap])[:, 0])
    exact = features(torch.float32, taps)
    tolerance = 1e-5 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(given.float(), exact, rtol=tolerance, atol=tolerance)
    if len(taps) > 1:
        assert not torch.equal(given[:, 0], given[:, 1])

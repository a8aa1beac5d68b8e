"""Tokens chosen by kernels are those of `argmax` and of `KeyedNoise`."""

import pytest
import torch
from kernel_device import DEVICE, OnDevice
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from foretoken.sampling.noise import KeyedNoise, Purpose, _counters, _shift, mix
from foretoken.sampling.triton_choice import ChoiceParts, Choices, chosen_tokens, gumbel, noise_bits, target_key

SEEDS = [0, 1, -1, 12345, (1 << 63) - 1, -(1 << 63), -0x61C8864680B583EB]
POSITIONS = [0, 1, 131_071, (1 << 31) - 1, 1 << 31, (1 << 62) + 5]
NAN, INF = float("nan"), float("inf")


@triton.jit
def _bits_kernel(seeds, positions, out, count, BLOCK: tl.constexpr):
    row, token = tl.program_id(0), tl.arange(0, BLOCK)
    bits = noise_bits(target_key(tl.load(seeds + row), tl.load(positions + row)), token)
    tl.store(out + row * count + token, bits.to(tl.int64), mask=token < count)


@triton.jit
def _gumbel_kernel(bits, out, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    values = tl.load(bits + index, mask=index < count, other=0)
    tl.store(out + index, gumbel(values.to(tl.uint64)), mask=index < count)


def kernel_gumbel(bits: Tensor) -> Tensor:
    out = torch.empty(bits.shape, device=DEVICE)
    _gumbel_kernel[(1,)](bits.to(DEVICE), out, bits.numel(), BLOCK=triton.next_power_of_2(bits.numel()))
    return out.cpu()


def keys() -> tuple[Tensor, Tensor]:
    """Every seed with every position; two (R,) int64."""
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    return seeds.repeat_interleave(len(POSITIONS)), positions.repeat(len(SEEDS))


def defined_bits(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """(R, count) int64, the integers of `KeyedNoise.gumbel`."""
    numbers = KeyedNoise(seeds)._keys(positions, Purpose.TARGET, 0).unsqueeze(1)
    return _shift(mix(numbers + _counters(count, seeds.device)), 11)


def choose(logits: Tensor, inverse_temperature: list[float], seeds: Tensor, positions: Tensor, **buffers) -> Choices:
    scales = torch.tensor(inverse_temperature, device=DEVICE)
    choices = chosen_tokens(logits.to(DEVICE), scales, seeds.to(DEVICE), positions.to(DEVICE), **buffers)
    return Choices(*(t.cpu() for t in choices))


def greedy(logits: Tensor) -> Choices:
    """All sequences greedy, with seeds and positions that say nothing."""
    batch, nodes, _ = logits.shape
    zeros = torch.zeros(batch, nodes, dtype=torch.int64)
    return choose(logits, [0.0] * batch, zeros[:, 0].contiguous(), zeros)


def random_logits(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4


def test_the_integers_are_the_definition_s() -> None:
    seeds, positions = keys()
    out = torch.empty(len(seeds), 50, dtype=torch.int64, device=DEVICE)
    _bits_kernel[(len(seeds),)](seeds.to(DEVICE), positions.to(DEVICE), out, 50, BLOCK=64)
    assert torch.equal(out.cpu(), defined_bits(seeds, positions, 50))


def test_the_integers_of_late_tokens() -> None:
    seeds, positions = torch.tensor([-7]), torch.tensor([4096])
    out = torch.empty(1, 200_000, dtype=torch.int64, device=DEVICE)
    _bits_kernel[(1,)](seeds.to(DEVICE), positions.to(DEVICE), out, 200_000, BLOCK=1 << 18)
    assert torch.equal(out.cpu(), defined_bits(seeds, positions, 200_000))


def test_noise_of_random_integers() -> None:
    """Three roundings in the exponential, each 2^-23 of it at most, move its logarithm by that much: 4e-7."""
    seeds, positions = keys()
    bits = defined_bits(seeds, positions, 300).flatten()
    noise = KeyedNoise(seeds).gumbel(positions, Purpose.TARGET, 300).flatten()
    torch.testing.assert_close(kernel_gumbel(bits), noise, rtol=3e-7, atol=5e-7)


def test_noise_of_extreme_integers() -> None:
    """Both ends of the range and where float32 begins to lose digits of 1 - v, against float64."""
    powers = torch.tensor([1 << k for k in range(53)])
    bits = torch.cat([powers - 1, powers, powers + 1, (1 << 53) - powers]).clamp(0, (1 << 53) - 1).unique()
    v = ((bits.float() + 0.5) * 2.0**-53).clamp_max(1 - 2.0**-24).double()
    noise = kernel_gumbel(bits)
    assert bool(noise.isfinite().all())
    torch.testing.assert_close(noise.double(), -(-(-v).log1p()).log(), rtol=3e-7, atol=5e-7)


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 1000, 1023, 1024, 1025, 3001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_tokens(vocab_size: int, dtype: torch.dtype) -> None:
    """bfloat16 has ties in abundance."""
    logits = random_logits(2, 3, vocab_size, seed=vocab_size).to(dtype)
    choices = greedy(logits)
    assert torch.equal(choices.tokens, logits.float().argmax(-1))
    assert choices.tokens.dtype == torch.int64
    assert choices.is_finite.tolist() == [[True] * 3] * 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, -0.0, 0.0], 0),
        ([-0.0, 0.0, 0.0], 0),
        ([-1.0, -0.0, 0.0], 1),
        ([-3.0, -2.0, -2.0], 1),
        ([-1e-42, 1e-42, 2e-42], 2),
        ([-2e-42, -1e-42, -3.0], 1),
        ([-INF, -3.4e38, -INF], 1),
        ([3.4e38, 3.3e38, -3.4e38], 0),
    ],
)
def test_order_and_ties(values: list[float], expected: int) -> None:
    """Also where the equals stand in different lanes, blocks and parts of the row."""
    for stride in (1, 31, 1024, 1500):
        logits = torch.full((1, 1, 3 * stride), -INF)
        logits[0, 0, ::stride] = torch.tensor(values)
        assert greedy(logits).tokens.item() == expected * stride


@pytest.mark.parametrize("vocab_size", [5, 700, 1025, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_tokens(vocab_size: int, dtype: torch.dtype) -> None:
    """Greedy and sampled sequences in one batch; all seeds and positions."""
    inverse_temperature = [0.0, 1.0, 2.0, 0.5, 1 / 0.7, 1.0, 30.0]
    logits = random_logits(7, 6, vocab_size, seed=vocab_size).to(dtype)
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS).repeat(7, 1)
    choices = choose(logits, inverse_temperature, seeds, positions)
    noise = [KeyedNoise(seeds).gumbel(positions[:, node], Purpose.TARGET, vocab_size) for node in range(6)]
    scales = torch.tensor(inverse_temperature).view(7, 1, 1)
    scores = torch.where(scales > 0, logits.float() * scales + torch.stack(noise, dim=1), logits.float())
    # Noise that differs in the last place decides only between scores that close.
    lead = scores.amax(-1) - scores.gather(2, choices.tokens.unsqueeze(2))[:, :, 0]
    assert float(lead.max()) < 2e-5
    best = scores.topk(2).values
    is_clear = best[:, :, 0] - best[:, :, 1] > 2e-5
    is_clear[0] = True
    assert torch.equal(choices.tokens[is_clear], scores.argmax(-1)[is_clear])
    assert is_clear.float().mean() > 0.9
    assert (choices.tokens[1:] != logits[1:].float().argmax(-1)).any(), "noise should matter"
    assert bool(choices.is_finite.all())


@pytest.mark.parametrize("scale", [0.0, 0.8])
def test_rows_that_are_not_sound(scale: float) -> None:
    """The loop's definition: the largest logit is finite. The token stays in range, and greedily is argmax's."""
    vocab_size = 2600
    places = [0, 1, 1023, 1024, 2047, 2048, 2599]
    bad = [NAN, -NAN, INF, -INF]
    logits = random_logits(len(bad), len(places) + 2, vocab_size, seed=3)
    for row, value in enumerate(bad):
        for node, place in enumerate(places):
            logits[row, node, place] = value
        logits[row, -2] = value
    logits[1, -2, 5:] = 1.0
    logits[2, -2, 2000] = NAN
    choices = choose(
        logits, [scale] * 4, torch.tensor(SEEDS[:4]), torch.arange(36).view(4, 9)
    )  # fmt: skip
    expected = torch.isfinite(logits.amax(2))
    assert torch.equal(choices.is_finite, expected)
    assert expected.sum(1).tolist() == [1, 1, 1, 8]
    assert bool(((choices.tokens >= 0) & (choices.tokens < vocab_size)).all())
    if scale == 0:
        assert torch.equal(choices.tokens, logits.argmax(-1))


def test_cut_off_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 40, 1100), -INF)
    logits[:, :, 1077] = -1e30
    choices = choose(logits, [1.0], torch.tensor([4]), torch.arange(40).view(1, 40))
    assert choices.tokens.tolist() == [[1077] * 40]
    assert bool(choices.is_finite.all())


@pytest.mark.parametrize("scale", [0.0, 1.3])
def test_a_row_depends_on_nothing_else(scale: float) -> None:
    """Neither on its neighbours, nor on how the vocabulary is cut up, nor on what lies behind it in memory."""
    vocab_size = 4100
    storage = torch.full((3, 5, vocab_size + 60), NAN)
    storage[..., :vocab_size] = random_logits(3, 5, vocab_size, seed=11)
    winners = torch.tensor([[4099, 0, 4095], [1023, 4096, 2047], [1024, 2048, 3500]])  # in every block, at its ends
    storage[:, 1:4].scatter_(2, winners.unsqueeze(2), 90.0)
    logits, seeds, positions = storage[:, 1:4, :vocab_size], torch.tensor([5, -6, 7]), torch.arange(9).view(3, 3)
    whole = choose(logits.contiguous(), [scale] * 3, seeds, positions)
    assert torch.equal(whole.tokens, winners)
    assert torch.equal(choose(logits, [scale] * 3, seeds, positions).tokens, whole.tokens)
    for count in (1, 2, 3, 4, 5, 7):  # 5 blocks: parts of unequal length, and empty ones
        parts = ChoiceParts(
            keys=torch.empty(9, count, dtype=torch.int64, device=DEVICE),
            kinds=torch.empty(9, count, dtype=torch.int32, device=DEVICE),
        )
        again = choose(logits, [scale] * 3, seeds, positions, parts=parts)
        assert torch.equal(again.tokens, whole.tokens)
        assert torch.equal(again.is_finite, whole.is_finite)
    alone = choose(logits[1:2, 2:3], [scale], seeds[1:2], positions[1:2, 2:3])
    assert alone.tokens.item() == whole.tokens[1, 2]


@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 128_256), (1, 5), (64, 128_256), (4096, 32_000), (3, 1024)])
def test_parts_fill_a_gpu_but_not_more(rows: int, vocab_size: int) -> None:
    count = ChoiceParts.empty(rows, vocab_size, device="meta").keys.shape[1]
    blocks = -(-vocab_size // 1024)
    assert 1 <= count <= blocks
    assert rows * count >= min(rows * blocks, 528)
    assert rows * count <= max(rows, 1056)


def test_buffers_are_filled_whole_and_nothing_is_read_or_allocated() -> None:
    logits = random_logits(2, 3, 1500, seed=1)
    seeds, positions = torch.tensor([1, 2]), torch.arange(6).view(2, 3)
    inputs = [t.to(DEVICE) for t in (logits, torch.tensor([1.0, 0.0]), seeds, positions)]
    expected = choose(logits, [1.0, 0.0], seeds, positions)
    out, parts = Choices.empty(2, 3, device=DEVICE), ChoiceParts.empty(6, 1500, device=DEVICE)
    out.tokens.fill_(-77)
    out.is_finite.fill_(value=False)
    with OnDevice() as calls:
        assert chosen_tokens(*inputs, out=out, parts=parts) is out
    assert not calls.allocated
    assert torch.equal(out.tokens.cpu(), expected.tokens)
    assert torch.equal(out.is_finite.cpu(), expected.is_finite)
    with OnDevice() as calls:
        chosen_tokens(*inputs)
    assert sorted(calls.allocated) == [(2, 3), (2, 3), (6, 2), (6, 2)]

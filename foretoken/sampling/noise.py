"""Counter-based random numbers, keyed by (request seed, position, purpose, lane).

A number depends on its key alone. The text of a seed therefore depends on no drafter, tree or batch, and not on how
many numbers were used before. The mixing function is the 64-bit finaliser of SplitMix64 (Steele, Lea and Flood 2014,
"Fast splittable pseudorandom number generators"; constants of Stafford's variant 13). Lanes advance by its odd gamma,
so one key's lanes are exactly a SplitMix64 stream. The function is wrapping int64 arithmetic on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from foretoken.core.backend import runs_cpu_kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]


class Purpose(IntEnum):
    """What a random number decides; numbers of different purposes are independent."""

    TARGET = 0  # the target's token at an absolute position
    ACCEPT = 1  # whether a drafted token survives
    DRAFT = 2  # which token a drafter proposes
    RESIDUAL = 3  # the correction or bonus token of a non-coupled rule


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_WORD = (1 << 64) - 1
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
_DRAFTER = 0xD6E8FEB86659FD93  # tells drafters' seeds from those of a request's completions


_U11, _U27, _U30, _U31 = (np.uint64(bits) for bits in (11, 27, 30, 31))
_UGAMMA, _UMIX_1, _UMIX_2 = (np.uint64(word & _WORD) for word in (_GAMMA, _MIX_1, _MIX_2))


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection on 64-bit words; int64 in, int64 out."""
    return _mix_unsigned(z) if runs_cpu_kernels(z.device) else _mix_signed(z)


def _mix_signed(z: Tensor) -> Tensor:
    """`mix` in operations that torch has on every device."""
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _mix_unsigned(z: Tensor) -> Tensor:
    """`mix` in numpy's unsigned words: a third of the operations."""
    return torch.from_numpy(_mixed(_words(z)).view(np.int64)).view(z.shape)


def _words(z: Tensor) -> Words:
    return z.numpy().view(np.uint64).reshape(-1)


def _mixed(words: Words) -> Words:
    words = (words ^ (words >> _U30)) * _UMIX_1
    words = (words ^ (words >> _U27)) * _UMIX_2
    return words ^ (words >> _U31)


def derive_seed(seed: int, index: int) -> int:
    """Returns an int64 seed for a request's `index`-th completion; index 0 keeps the seed itself, modulo 2^64."""
    signed = _signed(seed & _WORD)
    if index == 0:
        return signed
    return int(mix(torch.tensor(signed) + _GAMMA * torch.tensor(index)).item())


@cache
def _counters(count: int, device: torch.device) -> Tensor:
    """The first `count` steps of a generator, (count,) int64."""
    return torch.arange(1, count + 1, device=device) * _GAMMA


@dataclass(frozen=True, slots=True)
class KeyedNoise:
    """Random numbers of the sequences of a batch; seeds: (B,) int64, one seed per request."""

    seeds: Tensor

    def select(self, rows: Tensor) -> KeyedNoise:
        """Returns the noise of some sequences of the batch; rows: (R,) int64."""
        return KeyedNoise(self.seeds[rows])

    def of_drafter(self, drafter: int, rows: Tensor) -> KeyedNoise:
        """Returns noise that is independent of all other noise in the (B,) bool `rows`; `drafter` is above 0."""
        return KeyedNoise(torch.where(rows, mix(self.seeds ^ _signed(_DRAFTER * drafter & _WORD)), self.seeds))

    def uniform(self, positions: Tensor, purpose: Purpose, lane: int | Tensor = 0) -> Tensor:
        """Returns (B,) float64 numbers in [0, 1), multiples of 2^-53.

        positions: (B,) int64; lane: which of several numbers of the same key, for all or (B,) int64.
        """
        if runs_cpu_kernels(self.seeds.device):
            words = _mixed(self._unsigned_keys(positions, purpose, lane) + _UGAMMA)
            return torch.from_numpy((words >> _U11).astype(np.float64) * 2.0**-53)
        bits = mix(self._keys(positions, purpose, lane) + _GAMMA)
        return _shift(bits, 11).to(torch.float64) * 2.0**-53

    def gumbel(self, positions: Tensor, purpose: Purpose, vocab_size: int, lane: int | Tensor = 0) -> Tensor:
        """Returns (B, V) float32, finite standard Gumbel noise for every token: argmax(log p + g) is a draw from p.

        The exponential race `-log1p(-v)` keeps full relative precision at the winner, where v is near 0. Arguments: see
        `uniform`.
        """
        counters = _counters(vocab_size, self.seeds.device)
        if runs_cpu_kernels(self.seeds.device):
            words = _mixed(self._unsigned_keys(positions, purpose, lane)[:, None] + _words(counters))
            integers = torch.from_numpy((words >> _U11).astype(np.float32))
        else:
            bits = mix(self._keys(positions, purpose, lane).unsqueeze(1) + counters)
            integers = _shift(bits, 11).to(torch.float32)
        v = (integers + 0.5) * 2.0**-53
        v = v.clamp_max(1 - 2.0**-24)  # float32 rounds the top 2^-25 to 1, whose noise would exclude the token
        return -torch.log(-torch.log1p(-v))

    def _keys(self, positions: Tensor, purpose: Purpose, lane: int | Tensor) -> Tensor:
        """(B,) int64: each component passes through the mixer before the next is added."""
        key = mix(self.seeds + _GAMMA)
        key = mix(key ^ (positions * _GAMMA))
        tag = _tag(purpose, lane)
        return mix(key ^ (tag if isinstance(tag, Tensor) else _signed(tag & _WORD)))

    def _unsigned_keys(self, positions: Tensor, purpose: Purpose, lane: int | Tensor) -> Words:
        key = _mixed(_words(self.seeds) + _UGAMMA)
        key = _mixed(key ^ (_words(positions) * _UGAMMA))
        tag = _tag(purpose, lane)
        return _mixed(key ^ (_words(tag) if isinstance(tag, Tensor) else np.uint64(tag & _WORD)))


def _tag(purpose: Purpose, lane: int | Tensor) -> int | Tensor:
    """Modulo 2^64."""
    return (lane * 8 + int(purpose) + 1) * _MIX_2

"""SplitMix64 and foretoken's key scheme in Python integers, written from the paper and the docstrings."""

import math

WORD = 2**64
GAMMA = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(z: int) -> int:
    """The finaliser of SplitMix64 on 0 <= z < 2^64."""
    z = (z ^ (z >> 30)) * FIRST % WORD
    z = (z ^ (z >> 27)) * SECOND % WORD
    return z ^ (z >> 31)


def unmix(z: int) -> int:
    """The inverse of `mix`."""
    z = _unshift(z, 31) * pow(SECOND, -1, WORD) % WORD
    z = _unshift(z, 27) * pow(FIRST, -1, WORD) % WORD
    return _unshift(z, 30)


def _unshift(z: int, bits: int) -> int:
    """Solves y = x ^ (x >> bits) for x."""
    x = z
    for _ in range(64 // bits):
        x = z ^ (x >> bits)
    return x


def key(seed: int, position: int, purpose: int, lane: int) -> int:
    """Each component passes through the mixer before the next is added."""
    state = mix((seed + GAMMA) % WORD)
    state = mix(state ^ (position * GAMMA % WORD))
    return mix(state ^ ((lane * 8 + purpose + 1) * SECOND % WORD))


def uniform(seed: int, position: int, purpose: int, lane: int) -> float:
    """The top 53 bits of the key's first SplitMix64 output."""
    return (mix((key(seed, position, purpose, lane) + GAMMA) % WORD) >> 11) / 2**53


def gumbel(seed: int, position: int, purpose: int, lane: int, token: int) -> float:
    """-log(-log(1 - v)) of the key's output number `token`, v in the middle of its cell of width 2^-53."""
    bits = mix((key(seed, position, purpose, lane) + (token + 1) * GAMMA) % WORD) >> 11
    return -math.log(-math.log1p(-(bits + 0.5) / 2**53))


def signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word."""
    return (word + 2**63) % WORD - 2**63

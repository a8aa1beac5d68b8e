"""Unpacks the blocks in which GGUF files store weights: into integers, and scales and offsets of groups of weights.

A type is a row of `FORMATS`. This module knows no file; the kernels do the same in C++, see `stored_blocks.h`.

Source: the type traits of ggml-org/llama.cpp, ggml/src/ggml-quants.c (MIT), from where the grids are too.
"""

import zlib
from base64 import b64decode
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Numbers (blocks, block) int8, scales (blocks, block / group), and offsets as scales or None.
Unpacked = tuple[Tensor, Tensor, Tensor | None]


class BlockFormat(NamedTuple):
    """How integers are stored: in blocks of `block` weights and `num_bytes` bytes; `group` weights share a scale.

    Attributes:
        bits: Of a number in a `QuantizedMatrix` that the kernels store.
        unpack: Where there are no kernels; takes blocks (blocks, bytes) uint8.
        scales: The dtype of scales and offsets in a `QuantizedMatrix` that the kernels store.
        offsets_are_lowest: See `QuantizedMatrix`.
        table: int8, the numbers that codes stand for, see `StoredBlocks` of the kernels; None where codes are numbers.
    """

    block: int
    num_bytes: int
    bits: int
    group: int
    unpack: Callable[[Tensor], Unpacked]
    has_offsets: bool = False
    offsets_are_lowest: bool = False
    scales: torch.dtype = torch.float32
    table: Tensor | None = None


# The entries of each table in order, as one bit for each of all possible ones.
_GRIDS = {
    "IQ2_XXS": (
        "eNp1UkuuhDAMs7KyeoqIVY8ZdcUxWD7NKV+S/mDEWFQqjZ3agc9f/fBoDVoPEIAKKgSxAwqlnbCqUvzcy5evAhiC0vy81iT2J1XEQFXSaXpC"
        "zTcSKod1IlW8ZVdxrLyi47IohY9zHqVcRut4tat36qIyeZDmVZlsHZpRi6c7UDzR7RWfBumRwS4/EN6Hf2HSGEZXUsOODNpuTptDycUjPaql"
        "RB/a7VHs1lEXR6nbs9zLiZY0GyXZtDR57pT1NfstwzdimuNTqCzhapC/jeyQeWPO3B6x7jfseMY5hrtvzBnKq+oB/qgtJ9/TfNm/Qn/T/gHr"
        "3Cc5"
    ),
    "IQ2_XS": (
        "eNpdUUuuhDAMs7KKeoqIFeKUUVeIU1SsUE85+bTQ96oZCE3i2E7v/ep3fW49ei935aY4LqYqUEXx1KO7wFJoKgJQBTd72a+3cxdlEFmXpxiw"
        "QGGHDfCyLpqAlioopzd6gQPeygkYN44pM2wNYpX2fca3AKPET+8JCCnsU9kHZqsVbhWkb7VkUgcwuGpM4YnpOahXYUvJoWtIxmbyqk5AM8pS"
        "3tKCvM8woyja4SlVHVNrzCfMM+wNyYL2MsxeCnvZ7al5wRhJ+4u5QQFl6DzYfJ6EG+y0yppJjSb9I+EM8Q7FEuofo/3NHJKbPuK45THyKTpU"
        "uMt1P6yfkLtKjBEHU4mV7i5g4RXgIulGbEaDhX4FBrJZUHkluS9EP7ayXPIsvXVM1NdL2ucUmXsh/D+Uw++xgsG6fU+j+wMxz1/h"
    ),
    "IQ2_S": (
        "eNptUktuBSEMi7KKOAWaFeKUESvEKRArlFPWCUz7qhaN5mdsbIOZDVu2Z8dLWlbmLnVIsky947HMbNc1klnBBYgBjZKTEG9zlqjytPwAYiIt"
        "MoWImKqNAeU9SrVYwgql0lqeVDL5Wq+gQyFYpgICnW1kh5ToQPiXxaEMbapjjzazdqqp8TwsoZExf9KDFL8EOyhTQQ1yhw1fgmjHN4U4PnFT"
        "Su7Vdnm8jXkdtp09svsyq15UowOl9jqEgJQDwUaw0AbTgXxAcAeL/kQugN+1PgTpmo/IgJgQ8Ecwaokkz9oTDtk35XYobiM7gXR8CkpgdLPj"
        "PcktQU8t74gZzHv1Urs0pXXMN+K+Lwu73D3y/ImsDqUrDtbUkMFdX3UoTz8ry+SyYlNC8RwAp/zTYZfv2IBET6+B0MfAZJzeGjp+JuSEkcxe"
        "9KM0rqDy7fBXZmDXqF41/GYtemv6AlGinC0="
    ),
    "IQ3_XXS": (
        "eNpNUUEKwzAMU0IHYacOtnue4sIekMEeZHoae4XZqc+c5TTdVEqbWJbkZHuYVODa7G5SoJvYAwumxSY4FDNSSbguQPWH8EIB3vCSoFnbkgIm"
        "FsVm4itUg0pGxr2rOF6+goRqoMa2tQ/98Yy+i9piSZ0kL/Qm+s30Su5G446WIwjEmutP4XfmPpuZVNgV0OQ7K8OzoTBGlGYG89lOuByhCumK"
        "1d0GnSZlxNBBnGz/d1nPpSvyaOA4te4O0BCvnTYS4SDyew4X6W/CcF3/QoX03rCH73I3HfeSuyzHrDySEVeCab+jO2Ygvs6ML0w="
    ),
    "IQ3_S": (
        "eNotUUFKA0EQrB1WGDxNIA/ohA2sv+jICBtPE1n/0wk5zN424gNGURDfET8g5AlC8BX2zNqHhq7qrqrZ/fk9ufeQNpfT0Vt4+nrycRUwOp8e"
        "bKq8zDoaGdLi1d3BOBPAIPCHzojA5Zzucc30HXnkhL2sIo210GZcR12UeYuw1L3CMrQGXGsPievMnz+3qU/Vczo2HSm/QdjxDN0bt4HEYI2x"
        "UbixTJU4yEsW0cuajTgB6JH6G3bc2wCBLIU0quIct7Kt4dytqlIEp5qsgYNBiRGQ6pwm0kCsh4tAB+cVP7CTisSG5DOfYKssd1WuCKpgkQ0O"
        "EKcQRcJAxvbElBeE3V53sJAKlmvXQchkodwDSuXFtnStPqMaADsdbCYt1SRiObto6SMUHDH55tAF/9cakIxYArHFXOdur6/h4tHkHD5/JJlc"
        "afIuf2HSBv4ADEBdhw=="
    ),
    "IQ1_S": (
        "eNotUk1rVEkUva+5xbSZKPe1VTEuGu0mgUdWkYmzlKrkVRIl0SpTZSv6iIKS1UAWaTehtQMdFGeEiMZsFNKNQnSlf2CYARfCbNLSM2HAIAO6"
        "cOVKXPlR3c6u6sK555x7ztNHSZPJ8VvU+k1cQqvPksOk2ZcoLLcebW0yqTAeBFLsD8fiXW/2+G1IwfgjilEuoBpx1JcEuO2ng4wiFyZJEwvj"
        "T6lVH5tgaC+DGxJe09RHIs4hcHHPUURo/qWHmcC56h1d9ReO7VSyXbVYTLO5vxaPyxRSFDYzShK40z/o1yl2NKzkVrzllNaDwi2Fa63GSJOR"
        "fCEuYEnhSJChkZ70JdJRUaiIFSSS0gNa8r8dNcO7n1o56CpkMH4LWvV7CqxytNqfbAbL/Lt4KdE7wOnbtspFturFPlCGJE9lCRQUIlbZ6/wE"
        "trO0cv5du31VHA//k21bHnVYKOW4deRx/0861R/PsQNCggQnYsCItbXmGYvUjMlqxez6jmYdTdbwiobVGTk6P1xZ/tQRS89r13bmP3z5vPB7"
        "tnz/zduvny/PT2/csGne1xZLnmbFtqp+zYY2/owOT44NnBJmuAPBMk35aZDKmSt4V93ZozhoOBK9BEUEP1vvd+WVmmVzMvrn/dKPsxt5lV/y"
        "y3zr18eHwXTvgFRfReUfZOlMia1Fg2D1pFxJyuFQjaOql7JH7v8z072UNxl1a1NHyXI6hRhI0xl7teh9BGjU1P60QeUuas3iVmjUJUPeuQhM"
        "F9UQ0Fs4hbEygyECr73d25bGBQoVecOJw3osU1bb5kWy2avZYHn4UNXjCT7wC+tfiIwMTTgzGYokve/4il5nmiiPzKagFr+nbHoVXb8Ip72k"
        "x5B/Vv4/5c1QaXX0FAJA4DIZVrQEVVjjGwncfNXqdkPInsJ4iGJuchQmwbLsLqx/A+we4LU="
    ),
}


def _grid(name: str, width: int, *levels: int) -> Tensor:
    """Returns a table (entries, width) int8: the first number of an entry counts most in the order of entries."""
    bits = np.unpackbits(np.frombuffer(zlib.decompress(b64decode(_GRIDS[name])), np.uint8))
    entries = bits.nonzero()[0][:, None] // len(levels) ** np.arange(width) % len(levels)
    return torch.from_numpy(np.array(levels, np.int8)[entries])


_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
_IQ1_GRID = _grid("IQ1_S", 8, -1, 0, 1)
# The signs of eight weights, by seven bits: the number of negative ones is even.
_EIGHT_BITS = torch.tensor([bits | (bits.bit_count() & 1) << 7 for bits in range(128)], dtype=torch.uint8)


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    return torch.cat([packed & 15, packed >> 4], -1)


def _shifted(packed: Tensor, shifts: range, mask: int) -> Tensor:
    """Takes (..., bytes) apart into (..., shifts, bytes)."""
    return packed.unsqueeze(-2) >> torch.tensor(shifts, dtype=torch.uint8).unsqueeze(-1) & mask


def _centred(numbers: Tensor, zero: int) -> Tensor:
    return numbers.flatten(1).view(torch.int8) - zero


def _short_block(blocks: Tensor, *, bits: int, has_offset: bool) -> Unpacked:
    """Unpacks Q4_0, Q4_1, Q5_0 and Q5_1: a scale, an offset, the fifth bits, and 32 nibbles."""
    zero, at = 1 << bits - 1, 4 if has_offset else 2
    scales, numbers = _half(blocks, 0), _nibbles(blocks[:, at + (bits - 4) * 4 :])
    if bits == 5:
        numbers = numbers | _shifted(blocks[:, at : at + 4], range(8), 1).transpose(1, 2).flatten(1) << 4
    return _centred(numbers, zero), scales, _half(blocks, 2) if has_offset else None


def _q8_0(blocks: Tensor) -> Unpacked:
    return blocks[:, 2:].view(torch.int8), _half(blocks, 0), None


def _long_block(blocks: Tensor, *, bits: int) -> Unpacked:
    """Unpacks Q4_K and Q5_K: a scale of scales and one of offsets, 8 of each in 6 bits, the fifth bits, and nibbles."""
    low, high, rest = blocks[:, 4:16].split(4, 1)
    scales = torch.cat([low & 63, rest & 15 | low >> 2 & 48], 1) * _half(blocks, 0).float()
    offsets = torch.cat([high & 63, rest >> 4 | high >> 2 & 48], 1) * -_half(blocks, 2).float()
    numbers = _nibbles(blocks[:, 16 if bits == 4 else 48 :].unflatten(1, (4, 32))).flatten(1)
    if bits == 5:
        numbers = numbers | _shifted(blocks[:, 16:48], range(8), 1).flatten(1) << 4
    return _centred(numbers, 1 << bits - 1), scales, offsets


def _q6_k(blocks: Tensor) -> Unpacked:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64)))
    high = _shifted(blocks[:, 128:192].unflatten(1, (2, 32)), range(0, 8, 2), 3).flatten(2)
    scales = blocks[:, 192:208].contiguous().view(torch.int8) * _half(blocks, 208).float()
    return _centred(low | high << 4, 32), scales, None


def _two_bits(packed: Tensor) -> Tensor:
    """Takes (blocks, 64) apart into (blocks, 256): the lowest bits of 32 bytes are side by side."""
    return _shifted(packed.unflatten(1, (2, 32)), range(0, 8, 2), 3).flatten(1)


def _parts(packed: Tensor, bits: int) -> Tensor:
    """Takes (blocks, bytes) apart into numbers of 1, 2 or 4 bits, the lowest first."""
    return _shifted(packed.unsqueeze(2), range(0, 8, bits), (1 << bits) - 1).flatten(1)


def _words(blocks: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    return blocks[:, start:end].contiguous().view(dtype).int()


def _fields(words: Tensor, shifts: range, mask: int) -> Tensor:
    """Takes words (blocks, N) int32 apart into (blocks, N * shifts)."""
    return (words.unsqueeze(2) >> torch.tensor(shifts, dtype=torch.int32) & mask).flatten(1)


def _q2_k(blocks: Tensor) -> Unpacked:
    scales = (blocks[:, :16] & 15) * _half(blocks, 80).float()
    offsets = (blocks[:, :16] >> 4) * -_half(blocks, 82).float()
    return _two_bits(blocks[:, 16:80]).view(torch.int8), scales, offsets


def _q3_k(blocks: Tensor) -> Unpacked:
    numbers = _two_bits(blocks[:, 32:96]) | _shifted(blocks[:, :32], range(8), 1).flatten(1) << 2
    high = _shifted(blocks[:, 104:108], range(0, 8, 2), 3).flatten(1)
    scales = _centred(_nibbles(blocks[:, 96:104]) | high << 4, 32) * _half(blocks, 108).float()
    return _centred(numbers, 4), scales, None


def _iq4_nl(blocks: Tensor) -> Unpacked:
    return _IQ4[_nibbles(blocks[:, 2:]).int()], _half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> Unpacked:
    factors = _centred(_parts(blocks[:, 4:8], 4) | _parts(blocks[:, 2:4], 2) << 4, 32)
    numbers = _IQ4[_nibbles(blocks[:, 8:].unflatten(1, (8, 16))).flatten(1).int()]
    return numbers, factors * _half(blocks, 0).float(), None


def _mxfp4(blocks: Tensor) -> Unpacked:
    """Unpacks MXFP4: a scale that is a power of 2 (code 255: NaN), and 32 nibbles."""
    powers = torch.ldexp(torch.ones(256), torch.arange(-128, 128))
    powers[255] = torch.nan
    return _E2M1[_nibbles(blocks[:, 1:]).int()], powers[blocks[:, :1].int()], None


def _signed(entries: Tensor, signs: Tensor) -> Tensor:
    """Returns numbers (blocks, 256): of entries of a table, negated by bits of signs (blocks, 32) uint8."""
    return entries.flatten(1) * (1 - 2 * _parts(signs, 1).view(torch.int8))


def _iq3_s(blocks: Tensor, *, table: Tensor) -> Unpacked:
    """Unpacks IQ3_S: indices in 8 bits, the ninth bits, signs, and 8 scales in 4 bits."""
    entries = table[blocks[:, 2:66].int() | _parts(blocks[:, 66:74], 1).int() << 8]
    scales = (2 * _parts(blocks[:, 106:], 4) + 1) * _half(blocks, 0).float()
    return _signed(entries, blocks[:, 74:106]), scales, None


def _iq3_xxs(blocks: Tensor, *, table: Tensor) -> Unpacked:
    """Unpacks IQ3_XXS: indices in 8 bits; four times seven signs and a scale in each word of 32 bits."""
    words = _words(blocks, 66, 98, torch.int32)
    numbers = _signed(table[blocks[:, 2:66].int()], _EIGHT_BITS[_fields(words, range(0, 28, 7), 127)])
    return numbers, ((words >> 28 & 15) + 0.5) * 0.5 * _half(blocks, 0).float(), None


def _iq2_s(blocks: Tensor, *, table: Tensor) -> Unpacked:
    """Unpacks IQ2_S: indices in 8 bits, signs, two further bits of indices, and 16 scales in 4 bits."""
    entries = table[blocks[:, 2:34].int() | _parts(blocks[:, 66:74], 2).int() << 8]
    return _signed(entries, blocks[:, 34:66]), _quarters(_parts(blocks[:, 74:], 4), blocks), None


def _iq2_xs(blocks: Tensor, *, table: Tensor) -> Unpacked:
    """Unpacks IQ2_XS: words with an index in 9 bits and seven signs, and 16 scales in 4 bits."""
    words = _words(blocks, 2, 66, torch.int16)
    numbers = _signed(table[words & 511], _EIGHT_BITS[words >> 9 & 127])
    return numbers, _quarters(_parts(blocks[:, 66:], 4), blocks), None


def _iq2_xxs(blocks: Tensor, *, table: Tensor) -> Unpacked:
    """Unpacks IQ2_XXS: four indices, then a word with four times seven signs and a scale."""
    indices, packed = blocks[:, 2:].unflatten(1, (8, 8)).split(4, 2)
    words = packed.contiguous().view(torch.int32).flatten(1)
    numbers = _signed(table[indices.flatten(1).int()], _EIGHT_BITS[_fields(words, range(0, 28, 7), 127)])
    return numbers, _quarters(words >> 28 & 15, blocks), None


def _quarters(codes: Tensor, blocks: Tensor) -> Tensor:
    return (codes + 0.5) * 0.25 * _half(blocks, 0).float()


def _iq1_s(blocks: Tensor) -> Unpacked:
    """Unpacks IQ1_S: indices in 8 bits; words with three further bits of four indices, a scale, and a sign."""
    words = _words(blocks, 34, 50, torch.int16)
    numbers = _moved(
        blocks[:, 2:34].int() | _fields(words, range(0, 12, 3), 7) << 8, (words < 0).repeat_interleave(4, 1)
    )
    return numbers, (2 * (words >> 12 & 7) + 1) * 0.125 * _half(blocks, 0).float(), None


def _iq1_m(blocks: Tensor) -> Unpacked:
    """Unpacks IQ1_M: indices in 8 bits, further bits and signs, 16 scales in 3 bits; a scale in 4 places."""
    high, words = _parts(blocks[:, 32:48], 4).int(), _words(blocks, 48, 56, torch.int16)
    scale = ((words >> 12 & 15) << torch.arange(0, 16, 4, dtype=torch.int32)).sum(1, dtype=torch.int32)
    numbers = _moved(blocks[:, :32].int() | (high & 7) << 8, high >= 8)
    factors = (2 * _fields(words, range(0, 12, 3), 7) + 1) * 0.125
    return numbers, factors * scale.short().view(torch.float16).float().unsqueeze(1), None


def _moved(indices: Tensor, is_down: Tensor) -> Tensor:
    """Returns numbers -1, 0 and 1 that are moved up or down by an eighth, in eighths."""
    return (8 * _IQ1_GRID[indices] + torch.where(is_down, -1, 1).to(torch.int8).unsqueeze(2)).flatten(1)


def _with_table(
    block_bytes: int, group: int, unpack: Callable[..., Unpacked], table: Tensor, **fields: Any
) -> BlockFormat:
    return BlockFormat(256, block_bytes, 8, group, partial(unpack, table=table), table=table, **fields)


_IQ2_LEVELS, _IQ3_LEVELS = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
_half_scaled, _coded = partial(BlockFormat, scales=torch.float16), partial(BlockFormat, scales=torch.int8)
_lowest: dict[str, Any] = {"has_offsets": True, "offsets_are_lowest": True}
FORMATS = {
    "Q4_0": _half_scaled(32, 18, 4, 32, partial(_short_block, bits=4, has_offset=False)),
    "Q4_1": _half_scaled(32, 20, 4, 32, partial(_short_block, bits=4, has_offset=True), **_lowest),
    "Q5_0": _half_scaled(32, 22, 5, 32, partial(_short_block, bits=5, has_offset=False)),
    "Q5_1": _half_scaled(32, 24, 5, 32, partial(_short_block, bits=5, has_offset=True), **_lowest),
    "Q8_0": _half_scaled(32, 34, 8, 32, _q8_0),
    "Q4_K": _coded(256, 144, 4, 32, partial(_long_block, bits=4), **_lowest),
    "Q5_K": _coded(256, 176, 5, 32, partial(_long_block, bits=5), **_lowest),
    "Q6_K": _coded(256, 210, 6, 16, _q6_k),
    "Q2_K": _coded(256, 84, 4, 16, _q2_k, has_offsets=True),
    "Q3_K": _coded(256, 110, 4, 16, _q3_k),
    "IQ4_NL": _half_scaled(32, 18, 8, 32, _iq4_nl, table=_IQ4),
    "IQ4_XS": _coded(256, 136, 8, 32, _iq4_xs, table=_IQ4),
    "MXFP4": BlockFormat(32, 17, 8, 32, _mxfp4, table=_E2M1),
    "IQ3_S": _with_table(110, 32, _iq3_s, _grid("IQ3_S", 4, *range(1, 16, 2)), scales=torch.int8),
    "IQ3_XXS": _with_table(98, 32, _iq3_xxs, _grid("IQ3_XXS", 4, *_IQ3_LEVELS)),
    "IQ2_S": _with_table(82, 16, _iq2_s, _grid("IQ2_S", 8, *_IQ2_LEVELS)),
    "IQ2_XS": _with_table(74, 16, _iq2_xs, _grid("IQ2_XS", 8, *_IQ2_LEVELS)),
    "IQ2_XXS": _with_table(66, 32, _iq2_xxs, _grid("IQ2_XXS", 8, *_IQ2_LEVELS)),
    "IQ1_S": BlockFormat(256, 50, 8, 32, _iq1_s, table=_IQ1_GRID),
    "IQ1_M": BlockFormat(256, 56, 8, 16, _iq1_m, table=_IQ1_GRID),
}

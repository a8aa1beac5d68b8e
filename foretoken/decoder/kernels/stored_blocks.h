// Blocks of weights in integers as GGUF files have them, stored in the panels of `Matrix`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "interface.h"
#include "quantized.h"
#include "rows.h"
#include "vectors.h"

namespace {

// Numbers from 0 on, and the scales and offsets of their groups, see `ScaleKind`: of kFloat `scales`, of kHalf the first
// of `supers`, of kCoded all codes and `supers`.
struct Block {
  uint8_t numbers[256];
  float scales[16];
  int8_t scale_codes[16], offset_codes[16];
  uint16_t supers[2];   // of scales and offsets, in half precision
  const int8_t* table;  // see `StoredBlocks`
};

template <typename Word>
Word word_at(const uint8_t* bytes) {
  Word word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

inline float half_at(const uint8_t* bytes) { return half_to_float(word_at<uint16_t>(bytes)); }
inline uint16_t negated(uint16_t half) { return half ^ 0x8000; }

// Adds 16 to each of eight numbers whose bit is set.
inline void add_fifth_bits(uint8_t bits, uint8_t* numbers) {
  const uint64_t apart = bits * 0x0101010101010101u & 0x8040201008040201u;  // bit i in byte i, little-endian
  const uint64_t fifth = (apart + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
  const uint64_t sum = word_at<uint64_t>(numbers) | fifth;
  std::memcpy(numbers, &sum, sizeof sum);
}

// Q4_0, Q4_1, Q5_0 and Q5_1: a scale, an offset, the fifth bits, and nibbles.
template <int kBits, bool kHasOffset>
void read_short(const uint8_t* from, Block& to) {
  const uint8_t *fifth = from + (kHasOffset ? 4 : 2), *nibbles = fifth + (kBits == 5 ? 4 : 0);
  for (int i = 0; i < 16; ++i) {
    to.numbers[i] = nibbles[i] & 15;
    to.numbers[i + 16] = nibbles[i] >> 4;
  }
  if (kBits == 5) {
    for (int i = 0; i < 4; ++i) add_fifth_bits(fifth[i], to.numbers + 8 * i);
  }
  to.supers[0] = word_at<uint16_t>(from);
  if (kHasOffset) to.supers[1] = word_at<uint16_t>(from + 2);
}

inline void read_q8_0(const uint8_t* from, Block& to) {
  for (int i = 0; i < 32; ++i) to.numbers[i] = from[2 + i] ^ 0x80;
  to.supers[0] = word_at<uint16_t>(from);
}

// Q4_K and Q5_K: a scale of scales and one of offsets, 8 of each in 6 bits, the fifth bits, and nibbles.
template <int kBits>
void read_long(const uint8_t* from, Block& to) {
  const uint8_t *low = from + 4, *high = from + 8, *rest = from + 12;
  for (int i = 0; i < 8; ++i) {
    to.scale_codes[i] = int8_t(i < 4 ? low[i] & 63 : (rest[i - 4] & 15) | (low[i - 4] >> 2 & 48));
    to.offset_codes[i] = int8_t(i < 4 ? high[i] & 63 : rest[i - 4] >> 4 | (high[i - 4] >> 2 & 48));
  }
  to.supers[0] = word_at<uint16_t>(from);
  to.supers[1] = negated(word_at<uint16_t>(from + 2));
  const uint8_t *fifth = from + 16, *nibbles = from + (kBits == 5 ? 48 : 16);
  for (int part = 0; part < 4; ++part) {
    for (int i = 0; i < 32; ++i) {
      to.numbers[64 * part + i] = nibbles[32 * part + i] & 15;
      to.numbers[64 * part + 32 + i] = nibbles[32 * part + i] >> 4;
    }
  }
  if (kBits == 5) {
    for (int part = 0; part < 8; ++part) {
      for (int i = 0; i < 32; ++i) to.numbers[32 * part + i] |= (fifth[i] >> part & 1) << 4;
    }
  }
}

inline void read_q6_k(const uint8_t* from, Block& to) {
  const uint8_t *high = from + 128, *scales = from + 192;
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 64; ++i) {
      to.numbers[128 * half + i] = from[64 * half + i] & 15;
      to.numbers[128 * half + 64 + i] = from[64 * half + i] >> 4;
    }
    for (int part = 0; part < 4; ++part) {
      for (int i = 0; i < 32; ++i) to.numbers[128 * half + 32 * part + i] |= (high[32 * half + i] >> 2 * part & 3) << 4;
    }
  }
  std::memcpy(to.scale_codes, scales, 16);
  to.supers[0] = word_at<uint16_t>(from + 208);
}

// 256 numbers of two bits each plus `first`; number 128 h + 32 s + i is at bit 2 s of byte 32 h + i.
inline void read_two_bits(const uint8_t* from, uint8_t first, uint8_t* numbers) {
  for (int part = 0; part < 8; ++part) {
    for (int i = 0; i < 32; ++i) numbers[32 * part + i] = uint8_t(first + (from[part / 4 * 32 + i] >> part % 4 * 2 & 3));
  }
}

// Q2_K: 16 scales and 16 offsets in 4 bits, and numbers in 2 bits.
inline void read_q2_k(const uint8_t* from, Block& to) {
  for (int i = 0; i < 16; ++i) {
    to.scale_codes[i] = int8_t(from[i] & 15);
    to.offset_codes[i] = int8_t(from[i] >> 4);
  }
  to.supers[0] = word_at<uint16_t>(from + 80);
  to.supers[1] = negated(word_at<uint16_t>(from + 82));
  read_two_bits(from + 16, 8, to.numbers);
}

// Q3_K: the third bits, two bits, and 16 scales in 6 bits.
inline void read_q3_k(const uint8_t* from, Block& to) {
  const uint8_t* scales = from + 96;
  read_two_bits(from + 32, 4, to.numbers);
  for (int part = 0; part < 8; ++part) {
    for (int i = 0; i < 32; ++i) to.numbers[32 * part + i] += (from[i] >> part & 1) << 2;
  }
  for (int i = 0; i < 16; ++i) {
    const int factor = (scales[i % 8] >> i / 8 * 4 & 15) | (scales[8 + i % 4] >> i / 4 * 2 & 3) << 4;
    to.scale_codes[i] = int8_t(factor - 32);
  }
  to.supers[0] = word_at<uint16_t>(from + 108);
}

// Codes in 16 bytes of nibbles, as 32 numbers of a table.
inline void read_codes(const uint8_t* nibbles, const int8_t* table, uint8_t* numbers) {
  for (int i = 0; i < 16; ++i) {
    numbers[i] = uint8_t(table[nibbles[i] & 15]);
    numbers[i + 16] = uint8_t(table[nibbles[i] >> 4]);
  }
}

inline void read_iq4_nl(const uint8_t* from, Block& to) {
  read_codes(from + 2, to.table, to.numbers);
  to.supers[0] = word_at<uint16_t>(from);
}

inline void read_iq4_xs(const uint8_t* from, Block& to) {
  to.supers[0] = word_at<uint16_t>(from);
  for (int i = 0; i < 8; ++i) {
    const int factor = (from[4 + i / 2] >> i % 2 * 4 & 15) | (from[2 + i / 4] >> i % 4 * 2 & 3) << 4;
    to.scale_codes[i] = int8_t(factor - 32);
    read_codes(from + 8 + 16 * i, to.table, to.numbers + 32 * i);
  }
}

// The scale is a power of 2; its code 255 is NaN.
inline void read_mxfp4(const uint8_t* from, Block& to) {
  read_codes(from + 1, to.table, to.numbers);
  to.scales[0] = from[0] == 255 ? NAN : std::ldexp(1.0f, from[0] - 128);
}

// Eight numbers, four from each of two places of a table; a bit of `signs` negates one.
inline void read_signed(const int8_t* low, const int8_t* high, unsigned signs, uint8_t* numbers) {
  for (int i = 0; i < 8; ++i) {
    const int number = i < 4 ? low[i] : high[i - 4];
    numbers[i] = uint8_t(signs >> i & 1 ? -number : number);
  }
}

// The eighth sign makes the number of negative ones even.
inline unsigned with_eighth(unsigned signs) { return signs | unsigned(__builtin_parity(signs)) << 7; }

// IQ3_S: indices in 8 bits, the ninth bits, signs, and 8 scales in 4 bits.
inline void read_iq3_s(const uint8_t* from, Block& to) {
  const uint8_t *index = from + 2, *ninth = from + 66, *signs = from + 74, *scales = from + 106;
  for (int i = 0; i < 32; ++i) {
    const int high = ninth[i / 4] >> i % 4 * 2;
    const int8_t* low = to.table + 4 * (index[2 * i] | (high & 1) << 8);
    read_signed(low, to.table + 4 * (index[2 * i + 1] | (high & 2) << 7), signs[i], to.numbers + 8 * i);
  }
  to.supers[0] = word_at<uint16_t>(from);
  for (int i = 0; i < 8; ++i) to.scale_codes[i] = int8_t(1 + 2 * (scales[i / 2] >> i % 2 * 4 & 15));
}

// IQ3_XXS: indices in 8 bits; four times seven signs and a scale in each word of 32 bits.
inline void read_iq3_xxs(const uint8_t* from, Block& to) {
  const float scale = half_at(from);
  for (int i = 0; i < 8; ++i) {
    const auto word = word_at<uint32_t>(from + 66 + 4 * i);
    const uint8_t* index = from + 2 + 8 * i;
    for (int j = 0; j < 4; ++j) {
      const int8_t *low = to.table + 4 * index[2 * j], *high = to.table + 4 * index[2 * j + 1];
      read_signed(low, high, with_eighth(word >> 7 * j & 127), to.numbers + 32 * i + 8 * j);
    }
    to.scales[i] = (0.5f + float(word >> 28)) * 0.5f * scale;
  }
}

inline void read_entry(int index, unsigned signs, const Block& block, uint8_t* numbers) {
  const int8_t* entry = block.table + 8 * index;
  read_signed(entry, entry + 4, signs, numbers);
}

inline float quarter_scale(int code, float scale) { return (0.5f + float(code)) * 0.25f * scale; }

// IQ2_S: indices in 8 bits, signs, two further bits of indices, and 16 scales in 4 bits.
inline void read_iq2_s(const uint8_t* from, Block& to) {
  const uint8_t *signs = from + 34, *high = from + 66, *scales = from + 74;
  for (int i = 0; i < 32; ++i) {
    read_entry(from[2 + i] | (high[i / 4] >> i % 4 * 2 & 3) << 8, signs[i], to, to.numbers + 8 * i);
  }
  for (int i = 0; i < 16; ++i) to.scales[i] = quarter_scale(scales[i / 2] >> i % 2 * 4 & 15, half_at(from));
}

// IQ2_XS: words with an index in 9 bits and seven signs, and 16 scales in 4 bits.
inline void read_iq2_xs(const uint8_t* from, Block& to) {
  for (int i = 0; i < 32; ++i) {
    const auto word = word_at<uint16_t>(from + 2 + 2 * i);
    read_entry(word & 511, with_eighth(word >> 9), to, to.numbers + 8 * i);
  }
  for (int i = 0; i < 16; ++i) to.scales[i] = quarter_scale(from[66 + i / 2] >> i % 2 * 4 & 15, half_at(from));
}

// IQ2_XXS: four indices, then a word with four times seven signs and a scale.
inline void read_iq2_xxs(const uint8_t* from, Block& to) {
  for (int i = 0; i < 8; ++i) {
    const uint8_t* index = from + 2 + 8 * i;
    const auto word = word_at<uint32_t>(index + 4);
    for (int j = 0; j < 4; ++j) {
      read_entry(index[j], with_eighth(word >> 7 * j & 127), to, to.numbers + 32 * i + 8 * j);
    }
    to.scales[i] = quarter_scale(int(word >> 28), half_at(from));
  }
}

// Eight numbers -1, 0 and 1 that are moved up or down by an eighth, in eighths.
inline void read_moved(int index, bool is_down, const Block& block, uint8_t* numbers) {
  for (int i = 0; i < 8; ++i) numbers[i] = uint8_t(8 * block.table[8 * index + i] + (is_down ? -1 : 1));
}

// IQ1_S: indices in 8 bits; words with three further bits of four indices, a scale, and where numbers move.
inline void read_iq1_s(const uint8_t* from, Block& to) {
  for (int i = 0; i < 8; ++i) {
    const auto word = word_at<uint16_t>(from + 34 + 2 * i);
    for (int j = 0; j < 4; ++j) {
      read_moved(from[2 + 4 * i + j] | (word >> 3 * j & 7) << 8, word >> 15, to, to.numbers + 32 * i + 8 * j);
    }
    to.scales[i] = float(2 * (word >> 12 & 7) + 1) * 0.125f * half_at(from);
  }
}

// IQ1_M: indices in 8 bits, three further bits and where numbers move, 16 scales in 3 bits, and a scale in 4 places.
inline void read_iq1_m(const uint8_t* from, Block& to) {
  const uint8_t *high = from + 32, *scales = from + 48;
  for (int i = 0; i < 32; ++i) {
    const int bits = high[i / 2] >> i % 2 * 4;
    read_moved(from[i] | (bits & 7) << 8, bits & 8, to, to.numbers + 8 * i);
  }
  int whole = 0;
  for (int i = 0; i < 4; ++i) whole |= scales[2 * i + 1] >> 4 << 4 * i;
  for (int i = 0; i < 16; ++i) {
    const int code = word_at<uint16_t>(scales + i / 4 * 2) >> i % 4 * 3 & 7;
    to.scales[i] = float(2 * code + 1) * 0.125f * half_to_float(uint16_t(whole));
  }
}

// A type of blocks: weights and bytes of a block, weights that share a scale, bits of a stored number, and the number that
// stands for 0, in fewer than 8 bits the middle one.
struct BlockForm {
  int64_t weights, bytes, group, bits;
  int zero;
  bool has_offsets, has_table;
  ScaleKind scale_kind;
  void (*read)(const uint8_t*, Block&);
};
constexpr BlockForm kBlockForms[] = {  // in the order of `KINDS` in quantized.py
  {32, 18, 32, 4, 8, false, false, kHalf, read_short<4, false>},
  {32, 20, 32, 4, 8, true, false, kHalf, read_short<4, true>},
  {32, 22, 32, 5, 16, false, false, kHalf, read_short<5, false>},
  {32, 24, 32, 5, 16, true, false, kHalf, read_short<5, true>},
  {32, 34, 32, 8, 128, false, false, kHalf, read_q8_0},
  {256, 144, 32, 4, 8, true, false, kCoded, read_long<4>},
  {256, 176, 32, 5, 16, true, false, kCoded, read_long<5>},
  {256, 210, 16, 6, 32, false, false, kCoded, read_q6_k},
  {256, 84, 16, 4, 8, true, false, kCoded, read_q2_k},
  {256, 110, 16, 4, 8, false, false, kCoded, read_q3_k},
  {32, 18, 32, 8, 0, false, true, kHalf, read_iq4_nl},
  {256, 136, 32, 8, 0, false, true, kCoded, read_iq4_xs},
  {32, 17, 32, 8, 0, false, true, kFloat, read_mxfp4},
  {256, 110, 32, 8, 0, false, true, kCoded, read_iq3_s},
  {256, 98, 32, 8, 0, false, true, kFloat, read_iq3_xxs},
  {256, 82, 16, 8, 0, false, true, kFloat, read_iq2_s},
  {256, 74, 16, 8, 0, false, true, kFloat, read_iq2_xs},
  {256, 66, 32, 8, 0, false, true, kFloat, read_iq2_xxs},
  {256, 50, 32, 8, 0, false, true, kFloat, read_iq1_s},
  {256, 56, 16, 8, 0, false, true, kFloat, read_iq1_m},
};

// The panel that a matrix's blocks fill, and where its rows' parts are.
class StoredPanel {
 public:
  StoredPanel(const StoredBlocks& stored, int64_t panel)
      : stored_(stored), form_(kBlockForms[stored.kind]), padded_(padded_inputs(stored.cols)), groups_((padded_ + form_.group - 1) / form_.group),
        supers_(form_.scale_kind == kCoded ? (padded_ + kSuper - 1) / kSuper : 0), first_(panel * kPanelRows),
        count_(std::min(stored.rows - first_, int64_t(kPanelRows))), num_bytes_(padded_ * kPanelRows * form_.bits / 8),
        numbers_(reinterpret_cast<char*>(stored.numbers) + panel * num_bytes_), place_(panel * groups_ * kPanelRows), super_(panel * supers_ * kPanelRows) {}

  // Returns whether all scales and offsets are finite.
  bool fill() const {
    if (count_ < kPanelRows || padded_ > stored_.cols) clear();
    bool is_finite = true;
    Block block;
    block.table = stored_.table;
    // 256 weights of a row, then of the next one: the lines of the panel that they share stay in the cache.
    const int64_t per_row = stored_.cols / form_.weights, step = kSuper / form_.weights;
    for (int64_t first = 0; first < per_row; first += step) {
      for (int64_t r = 0; r < count_; ++r) {
        const int64_t row = stored_.order == nullptr ? first_ + r : stored_.order[first_ + r];
        for (int64_t at = first; at < std::min(first + step, per_row); ++at) {
          form_.read(stored_.blocks + (row * per_row + at) * form_.bytes, block);
          put_numbers(block, at, r);
          is_finite = put_scales(block, at, r) && is_finite;
        }
      }
    }
    return is_finite;
  }

 private:
  // Makes all numbers and scales 0.
  void clear() const {
    Block block;
    for (int64_t at = 0; at < padded_ / form_.weights; ++at) {
      for (int64_t r = 0; r < kPanelRows; ++r) {
        std::fill_n(block.numbers, form_.weights, uint8_t(form_.zero));
        put_numbers(block, at, r);
      }
    }
    const auto fill = [](void* part, int64_t first, int64_t count, int64_t width) {
      if (part != nullptr) std::memset(static_cast<char*>(part) + first * width, 0, size_t(count * width));
    };
    const int64_t width = form_.scale_kind == kFloat ? 4 : form_.scale_kind == kHalf ? 2 : 1;
    for (void* part : {stored_.scales, stored_.offsets}) fill(part, place_, groups_ * kPanelRows, width);
    for (uint16_t* part : {stored_.super_scales, stored_.super_offsets}) fill(part, super_, supers_ * kPanelRows, sizeof *part);
  }

  // Stores the numbers of block `at` of row r; changes the block.
  void put_numbers(Block& block, int64_t at, int64_t r) const {
    char* to = numbers_ + at * form_.weights * kPanelRows * form_.bits / 8 + r * kQuad;
    with_bits(form_.bits, [&](auto bits) {
      using Own = Packing<decltype(bits)::value>;
      if constexpr (decltype(bits)::value == 8) {
        for (int64_t i = 0; i < form_.weights; ++i) block.numbers[i] = uint8_t(block.numbers[i] - form_.zero);
      }
      for (int64_t i = 0; i < form_.weights; i += Own::kNumbers, to += Own::kBytes) Own::put(block.numbers + i, to);
    });
  }

  // Stores the scales and offsets of a block. Returns whether all are finite.
  bool put_scales(const Block& block, int64_t at, int64_t r) const {
    const int64_t shares = form_.weights / form_.group;
    bool is_finite = true;
    for (int64_t i = 0, place = place_ + at * shares * kPanelRows + r; i < shares; ++i, place += kPanelRows) {
      if (form_.scale_kind == kFloat) {
        static_cast<float*>(stored_.scales)[place] = block.scales[i];
        is_finite = is_finite && std::isfinite(block.scales[i]);
      } else if (form_.scale_kind == kHalf) {
        static_cast<uint16_t*>(stored_.scales)[place] = block.supers[0];
        if (form_.has_offsets) static_cast<uint16_t*>(stored_.offsets)[place] = block.supers[1];
      } else {
        static_cast<int8_t*>(stored_.scales)[place] = block.scale_codes[i];
        if (form_.has_offsets) static_cast<int8_t*>(stored_.offsets)[place] = block.offset_codes[i];
      }
    }
    if (form_.scale_kind == kFloat) return is_finite;
    const int64_t super = super_ + at * kPanelRows + r;
    for (int i = 0; i < 1 + form_.has_offsets; ++i) {
      if (form_.scale_kind == kCoded) (i == 0 ? stored_.super_scales : stored_.super_offsets)[super] = block.supers[i];
      is_finite = is_finite && std::isfinite(half_to_float(block.supers[i]));
    }
    return is_finite;
  }

  const StoredBlocks& stored_;
  const BlockForm& form_;
  const int64_t padded_, groups_, supers_, first_, count_, num_bytes_;
  char* const numbers_;
  const int64_t place_, super_;  // of the panel, among the scales of groups and of 256 weights
};

}  // namespace

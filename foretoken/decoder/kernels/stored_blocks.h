// Blocks of weights in integers as GGUF files have them, stored in the panels of `Matrix`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "interface.h"
#include "rounded_inputs.h"
#include "rows.h"
#include "vectors.h"

namespace {

// Numbers from 0 on, scales, and offsets: a weight is (number - zero) * scale + offset.
struct Block {
  uint8_t numbers[256];
  float scales[16], offsets[16];
};

inline float half_at(const uint8_t* bytes) {
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return half_to_float(bits);
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
    for (int i = 0; i < 32; ++i) to.numbers[i] |= (fifth[i / 8] >> i % 8 & 1) << 4;
  }
  to.scales[0] = half_at(from);
  if (kHasOffset) to.offsets[0] = half_at(from + 2) + float(1 << (kBits - 1)) * to.scales[0];  // the product is exact
}

inline void read_q8_0(const uint8_t* from, Block& to) {
  for (int i = 0; i < 32; ++i) to.numbers[i] = from[2 + i] ^ 0x80;
  to.scales[0] = half_at(from);
}

// Q4_K and Q5_K: a scale of scales and one of offsets, 8 of each in 6 bits, the fifth bits, and nibbles.
template <int kBits>
void read_long(const uint8_t* from, Block& to) {
  const float scale = half_at(from), least = half_at(from + 2);
  const uint8_t *low = from + 4, *high = from + 8, *rest = from + 12;
  for (int i = 0; i < 8; ++i) {
    const int factor = i < 4 ? low[i] & 63 : (rest[i - 4] & 15) | (low[i - 4] >> 2 & 48);
    const int lift = i < 4 ? high[i] & 63 : rest[i - 4] >> 4 | (high[i - 4] >> 2 & 48);
    to.scales[i] = float(factor) * scale;  // exact, as the next products are
    to.offsets[i] = float(1 << (kBits - 1)) * to.scales[i] - float(lift) * least;
  }
  const uint8_t *fifth = from + 16, *nibbles = from + (kBits == 5 ? 48 : 16);
  for (int part = 0; part < 4; ++part) {
    for (int i = 0; i < 32; ++i) {
      to.numbers[64 * part + i] = nibbles[32 * part + i] & 15;
      to.numbers[64 * part + 32 + i] = nibbles[32 * part + i] >> 4;
    }
  }
  if (kBits == 5) {
    for (int i = 0; i < 256; ++i) to.numbers[i] |= (fifth[i % 32] >> i / 32 & 1) << 4;
  }
}

inline void read_q6_k(const uint8_t* from, Block& to) {
  const uint8_t *high = from + 128, *scales = from + 192;
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 64; ++i) {
      to.numbers[128 * half + i] = from[64 * half + i] & 15;
      to.numbers[128 * half + 64 + i] = from[64 * half + i] >> 4;
    }
    for (int i = 0; i < 128; ++i) to.numbers[128 * half + i] |= (high[32 * half + i % 32] >> i / 32 * 2 & 3) << 4;
  }
  const float scale = half_at(from + 208);
  for (int i = 0; i < 16; ++i) to.scales[i] = float(int8_t(scales[i])) * scale;
}

// Weights and bytes of a block, weights that share a scale, and the number that stands for 0. With 4 bits, numbers are
// stored in 4 bits, otherwise in 8. Scales are stored in half precision where blocks have them so, otherwise in float32.
struct BlockForm {
  int64_t weights, bytes, group, bits;
  int zero;
  bool has_offsets, is_half;
  void (*read)(const uint8_t*, Block&);
};
constexpr BlockForm kBlockForms[] = {
  {32, 18, 32, 4, 8, false, true, read_short<4, false>}, {32, 20, 32, 4, 8, true, false, read_short<4, true>},
  {32, 22, 32, 8, 16, false, true, read_short<5, false>}, {32, 24, 32, 8, 16, true, false, read_short<5, true>},
  {32, 34, 32, 8, 128, false, true, read_q8_0}, {256, 144, 32, 4, 8, true, false, read_long<4>},
  {256, 176, 32, 8, 16, true, false, read_long<5>}, {256, 210, 16, 8, 32, false, false, read_q6_k},
};
static_assert(std::size(kBlockForms) == kNumBlockKinds);

// Fills one panel. Returns whether all scales and offsets are finite.
inline bool fill_panel(const StoredBlocks& stored, int64_t panel) {
  const BlockForm& form = kBlockForms[stored.kind];
  const int64_t padded = padded_inputs(stored.cols), per_row = stored.cols / form.weights, shares = form.weights / form.group;
  const int64_t num_bytes = padded * kPanelRows * form.bits / 8, groups = (padded + form.group - 1) / form.group;
  const int64_t count = std::min<int64_t>(kPanelRows, stored.rows - panel * kPanelRows);
  uint8_t* numbers = stored.numbers + panel * num_bytes;
  if (count < kPanelRows || padded > stored.cols) {
    std::memset(numbers, form.bits == 4 ? 0x88 : 0, size_t(num_bytes));
    for (void* part : {stored.scales, stored.offsets}) {
      const int64_t width = groups * kPanelRows * (form.is_half ? 2 : 4);
      if (part != nullptr) std::memset(static_cast<char*>(part) + panel * width, 0, size_t(width));
    }
  }
  bool is_finite = true;
  Block block;
  for (int64_t at = 0; at < per_row; ++at) {
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = stored.order == nullptr ? panel * kPanelRows + r : stored.order[panel * kPanelRows + r];
      const uint8_t* from = stored.blocks + (row * per_row + at) * form.bytes;
      form.read(from, block);
      const uint8_t* own = block.numbers;
      uint8_t* to = numbers + at * form.weights * kPanelRows * form.bits / 8 + r * kQuad;
      if (form.bits == 4) {
        for (int64_t i = 0; i < form.weights; i += 2 * kQuad, own += 2 * kQuad, to += kPanelRows * kQuad) {
          for (int64_t j = 0; j < kQuad; ++j) to[j] = uint8_t(own[j] | own[kQuad + j] << 4);
        }
      } else {
        for (int64_t i = 0; i < form.weights; i += kQuad, own += kQuad, to += kPanelRows * kQuad) {
          for (int64_t j = 0; j < kQuad; ++j) to[j] = uint8_t(own[j] - form.zero);
        }
      }
      for (int64_t i = 0; i < shares; ++i) {
        const int64_t place = (panel * groups + at * shares + i) * kPanelRows + r;
        is_finite = is_finite && std::isfinite(block.scales[i]) && (!form.has_offsets || std::isfinite(block.offsets[i]));
        if (form.is_half) {
          std::memcpy(static_cast<uint16_t*>(stored.scales) + place, from, sizeof(uint16_t));  // as it is in the file
        } else {
          static_cast<float*>(stored.scales)[place] = block.scales[i];
          if (form.has_offsets) static_cast<float*>(stored.offsets)[place] = block.offsets[i];
        }
      }
    }
  }
  return is_finite;
}

}  // namespace

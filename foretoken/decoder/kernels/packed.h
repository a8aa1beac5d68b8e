// Numbers of fewer than 8 bits in the blocks of a panel, see `Matrix`, and the scales and offsets of their groups.
//
// Numbers are stored plus kZero, as codes from 0 on. A block has the lower four bits of two quads: of the first one in the
// lower halves of bytes, of the second one in the upper halves. In 5 bits four such blocks, in 6 bits two, are followed by
// a block with the upper bits of their quads: in 5 bits, bit q belongs to quad q; in 6 bits, bits 2 q and 2 q + 1 do.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "gemm.h"
#include "interface.h"
#include "vectors.h"

namespace {

constexpr int kQuad = 4;            // inputs whose weights in one row stand side by side
constexpr int kWholeStep = 64;      // the inputs of a row are padded to multiples of this
constexpr int kBlockBytes = kPanelRows * kQuad;
constexpr int64_t kSuper = 256;     // weights that share a scale of coded scales

#if defined(__AVX512F__)
typedef uint8_t ByteLanes __attribute__((vector_size(64), aligned(1), may_alias));
#else
typedef uint8_t ByteLanes __attribute__((vector_size(32), aligned(1), may_alias));
#endif

inline int64_t padded_inputs(int64_t K) { return (K + kWholeStep - 1) / kWholeStep * kWholeStep; }
inline int64_t panel_bytes(const Matrix& matrix) { return kPanelRows * padded_inputs(matrix.cols) * matrix.bits / 8; }
inline int64_t num_groups(const Matrix& matrix) { return matrix.group_scales == nullptr ? 0 : (padded_inputs(matrix.cols) + matrix.group - 1) / matrix.group; }
inline int64_t num_supers(const Matrix& matrix) { return (matrix.cols + kSuper - 1) / kSuper; }
inline int64_t super_place(const Matrix& matrix, int64_t panel, int64_t group) { return (panel * num_supers(matrix) + group * matrix.group / kSuper) * kPanelRows; }

inline int zero_of(int64_t bits) { return 1 << (bits - 1); }

// A chunk: blocks that are only understood together.
template <int kBits>
struct Packing {
  static constexpr int kUpper = kBits == 8 ? 0 : kBits - 4;                                  // upper bits of a code
  static constexpr int kQuads = kBits == 8 ? 1 : kUpper == 0 ? 2 : 8 / kUpper;
  static constexpr int kNumbers = kQuads * kQuad;                                            // of a row
  static constexpr int kBlocks = kBits == 8 ? 1 : kQuads / 2 + (kUpper > 0);
  static constexpr int kBytes = kBlocks * kBlockBytes;
  static constexpr int kZero = 1 << (kBits - 1);
  static constexpr bool kIsSmall = kBits < 8;  // whether no code is above 127

  // The codes of quad q, a constant, for as many rows as fill a register; from the place of the first one in the chunk on.
  static FORETOKEN_INLINE ByteLanes codes(const char* chunk, int q) {
    const auto block = [&](int i) { return *reinterpret_cast<const IntLanes*>(chunk + i * kBlockBytes); };
    if constexpr (kBits == 8) return (ByteLanes)block(0) ^ 0x80;
    const IntLanes low = (q % 2 == 0 ? block(q / 2) : block(q / 2) >> 4) & 0x0f0f0f0f;
    if constexpr (kUpper == 0) return (ByteLanes)low;
    constexpr int kMask = ((1 << kUpper) - 1) << 4;  // bits that another byte lends in a shift are cut off
    const int shift = q * kUpper - 4;
    const IntLanes upper = shift < 0 ? block(kQuads / 2) << -shift : block(kQuads / 2) >> shift;
    return (ByteLanes)(low | (upper & (kMask * 0x01010101)));
  }

  // Stores the codes of a row, of 8 bits its numbers, kNumbers of them, from its place in the chunk on.
  static void put(const uint8_t* codes, char* chunk) {
    if constexpr (kBits == 8) return put_quad(quad_at(codes), chunk);
    uint32_t upper = 0;
    for (int q = 0; q < kQuads; q += 2) {
      const uint32_t even = quad_at(codes + q * kQuad), odd = quad_at(codes + (q + 1) * kQuad);
      put_quad((even & 0x0f0f0f0f) | (odd & 0x0f0f0f0f) << 4, chunk + q / 2 * kBlockBytes);
      if (kUpper > 0) upper |= (even >> 4 & 0x0f0f0f0f) << q * kUpper | (odd >> 4 & 0x0f0f0f0f) << (q + 1) * kUpper;
    }
    if (kUpper > 0) put_quad(upper, chunk + kQuads / 2 * kBlockBytes);
  }

 private:
  static uint32_t quad_at(const uint8_t* from) {
    uint32_t quad;
    std::memcpy(&quad, from, kQuad);
    return quad;
  }
  static void put_quad(uint32_t quad, char* to) { std::memcpy(to, &quad, kQuad); }
};

// Calls work(integral constant) with the bits of numbers.
template <class Work>
FORETOKEN_INLINE auto with_bits(int64_t bits, Work&& work) {
  using std::integral_constant;
  switch (bits) {
    case 4: return work(integral_constant<int, 4>());
    case 5: return work(integral_constant<int, 5>());
    case 6: return work(integral_constant<int, 6>());
    default: return work(integral_constant<int, 8>());
  }
}

// Number k of a row of a panel, from the row's first byte on.
template <int kBits>
inline int number_at(const uint8_t* row, int64_t k) {
  using Own = Packing<kBits>;
  const uint8_t* own = row + k / Own::kNumbers * Own::kBytes + k % kQuad;
  if constexpr (kBits == 8) return int8_t(*own);
  const int q = int(k % Own::kNumbers / kQuad);
  int code = own[q / 2 * kBlockBytes] >> q % 2 * 4 & 15;
  if (Own::kUpper > 0) code |= (own[Own::kQuads / 2 * kBlockBytes] >> q * Own::kUpper & ((1 << Own::kUpper) - 1)) << 4;
  return code - Own::kZero;
}

// The scales or offsets of one group and row. is_offset: which of these.
inline float group_value(const Matrix& matrix, bool is_offset, int64_t panel, int64_t group, int64_t row) {
  const void* const values = is_offset ? matrix.group_offsets : matrix.group_scales;
  const int64_t at = (panel * num_groups(matrix) + group) * kPanelRows + row;
  if (matrix.scale_kind == kFloat) return static_cast<const float*>(values)[at];
  if (matrix.scale_kind == kHalf) return half_to_float(static_cast<const uint16_t*>(values)[at]);
  const uint16_t* const supers = is_offset ? matrix.super_offsets : matrix.super_scales;
  return float(static_cast<const int8_t*>(values)[at]) * half_to_float(supers[super_place(matrix, panel, group) + row]);  // exact
}

}  // namespace

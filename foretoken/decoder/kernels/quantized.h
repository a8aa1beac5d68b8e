// Matrices in 4 to 8 bits: their numbers and scales in memory, the inputs that they are multiplied with, and their rows.
//
// A block of a panel, see `Matrix`, has the lower four bits of two quads: of the first one in the lower halves of bytes, of
// the second one in the upper halves. Numbers of fewer than 8 bits are stored plus kZero, as codes from 0 on. In 5 bits four
// such blocks, in 6 bits two, are followed by a block with the upper bits of their quads: in 5 bits, bit q belongs to quad q;
// in 6 bits, bits 2 q and 2 q + 1 do.
//
// Inputs are rounded to integers of 8, 16 or 24 bits, in groups that share a scale. An input is a number of digits, each
// from -128 to 127, to base 256. A digit of many inputs is a vector of int8, which processors multiply with int8 weights.
// Integers are added without rounding, in any order. So every instruction set, number of tokens and number of threads gives
// the same sum of a unit, of inputs that share all scales. These sums, times the scales of weights, are then added in
// float32 in their order, those of a span before they are multiplied by the scale of its inputs.
//
// Letters: M tokens, K inputs, D digits of an input; a panel is 16 rows of weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "gemm.h"
#include "interface.h"
#include "tiles.h"
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

constexpr int kKept = 512;                      // inputs that stay in registers and on the stack while they are rounded
// Inputs whose products are added as integers, at most; see `unit_of`. A choice: stores of tiles that are further apart
// take longer, see `benchmarks/NOTES.md`.
constexpr int64_t kLongestUnit = 1024;
constexpr int64_t kSpan = 128;                  // inputs that share a scale at least, but for the last ones; see `span_of`
constexpr int kSummed = 16;                     // inputs of one entry of `RoundedInputs::sums`; the shortest group
constexpr int kStrips = kPanelRows / kLanes;    // registers for the rows of a panel
constexpr int kMostDigits = 3;
constexpr float kLeast = 1e-30f;                // smaller inputs become 0: the factor that rounds them may overflow
// Tokens from which on matrix units are faster than vector registers, where they multiply integers.
#if defined(FORETOKEN_TILES) && defined(__AMX_INT8__)
constexpr int64_t kFewestOfTiles = 5;
#else
constexpr int64_t kFewestOfTiles = INT64_MAX;
#endif

inline int digits_of(const Matrix& matrix) { return int(matrix.input_bits + 7) / 8; }
inline int64_t input_group(const Matrix& matrix) { return matrix.input_group == 0 ? padded_inputs(matrix.cols) : matrix.input_group; }
// Inputs whose products are added as integers: they share the scales of inputs and of weights. 32 bits hold the sums of
// products of 16-bit inputs with 512 numbers.
inline int64_t unit_of(const Matrix& matrix) {
  const int64_t most = std::min(input_group(matrix), digits_of(matrix) == 2 ? kLongestUnit / 2 : kLongestUnit);
  return matrix.group_scales == nullptr ? most : std::min(most, matrix.group);
}
// Inputs whose products are added before they are multiplied by the scale of the inputs: some units.
inline int64_t span_of(const Matrix& matrix) { return std::max(unit_of(matrix), std::min(input_group(matrix), kSpan)); }

// Bytes of the rounded inputs of a token, and more; those of M tokens take `most_inputs(M)` times as much.
inline int64_t rounded_bytes(int64_t K) { return (kMostDigits + 1) * padded_inputs(K); }

// The rounded inputs of M tokens. Input k of token m is the number of its digits times the scale of its group.
struct RoundedInputs {
  int64_t width, num_tokens;  // tokens side by side; tokens with padding
  int count;                  // D
  int32_t most;               // the largest number
  int64_t stride;             // K with padding
  int64_t sum_stride;         // sums of a digit of a token
  int64_t group, groups;      // inputs that share a scale; groups of a token
  int8_t* digits;             // (num_tokens / width, stride / kWholeStep, D, width, kWholeStep), the highest digit first
  float* scales;              // (groups, num_tokens)
  int32_t* sums;              // (D, num_tokens, sum_stride): of a digit of the inputs of a group before each kSummed ones, and of all

  RoundedInputs(const Matrix& matrix, void* memory, int64_t M)
      : width(std::min<int64_t>(M, kTileTokens)), num_tokens(M <= kTileTokens ? M : most_inputs(M)), count(digits_of(matrix)),
        most(count == 1 ? 127 : count == 2 ? 32639 : 8355711), stride(padded_inputs(matrix.cols)),
        group(input_group(matrix)), groups((stride + group - 1) / group), digits(static_cast<int8_t*>(memory)) {
    sum_stride = stride / kSummed + groups;
    sums = reinterpret_cast<int32_t*>(digits + count * num_tokens * stride);
    scales = reinterpret_cast<float*>(sums + count * num_tokens * sum_stride);
  }
  int8_t* at(int digit, int64_t m, int64_t k) const {
    return digits + m / width * width * count * stride + k / kWholeStep * step_size() + (digit * width + m % width) * kWholeStep + k % kWholeStep;
  }
  const float* scales_at(int64_t m, int64_t k) const { return scales + k / group * num_tokens + m; }
  int64_t step_size() const { return count * width * kWholeStep; }  // digits of a step of `width` tokens
  // The sum of a digit of count * kSummed inputs of a group from k on.
  int32_t sum(int digit, int64_t m, int64_t k, int64_t count) const {
    const int32_t* own = sums + (digit * num_tokens + m) * sum_stride + k / kSummed + k / group;
    return own[count] - *own;
  }

  // Rounds the elements of token m of other inputs in one group, in a matrix's order.
  template <class X>
  void round(const X& x, int64_t m, const Matrix& matrix, int64_t g) const {
    const int64_t K = matrix.cols;
    const int32_t* const order = matrix.input_order;
    const int64_t first = g * group, last = std::min(first + group, stride);
    Lanes near[kKept / kLanes];  // the first elements
    const auto load = [&](int64_t k) {
      if (order == nullptr && k + kLanes <= K) return x.load(m, k);
      Lanes values{};
      for (int i = 0; i < kLanes && k + i < K; ++i) values[i] = to_float(*x.at(m, order == nullptr ? k + i : order[k + i]));
      return values;
    };
    Lanes sizes{}, odd{};  // odd: 0, or NaN if an input is infinite or NaN
    for (int64_t k = first; k < last; k += kLanes) {
      const Lanes values = load(k);
      if (k < first + kKept) near[(k - first) / kLanes] = values;
      sizes = greater(sizes, greater(values, -values));
      odd += values - values;
    }
    const float size = greatest_lane(sizes), rest = sum_of_lanes(odd);
    const bool is_zero = !(size >= kLeast);
    const float factor = is_zero || rest != rest ? 0.0f : float(most) / size;
    scales[g * num_tokens + m] = rest != rest ? NAN : is_zero ? 0.0f : size / float(most);
    for (int64_t k = first; k < last; k += kLanes) {
      const Lanes values = k < first + kKept ? near[(k - first) / kLanes] : load(k);
      put(m, k, values * factor);
    }
  }
  // Adds up the digits of token m in one group.
  void add_up(int64_t m, int64_t g) const {
    for (int d = 0; d < count; ++d) {
      int32_t* out = sums + (d * num_tokens + m) * sum_stride + g * group / kSummed + g;
      *out = 0;
      for (int64_t k = g * group; k < std::min((g + 1) * group, stride); k += kSummed, ++out) {
        const int8_t* own = at(d, m, k);
        int32_t total = *out;
        for (int i = 0; i < kSummed; ++i) total += own[i];
        out[1] = total;
      }
    }
  }

 private:
  void put(int64_t m, int64_t k, Lanes values) const {
    typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
    IntLanes numbers = nearest(values);
    numbers = numbers > most ? IntLanes{} + most : numbers < -most ? IntLanes{} - most : numbers;
    int8_t* out = at(0, m, k);
    for (int d = count - 1; d >= 0; --d) {
      const IntLanes digit = d == 0 ? numbers : (numbers << 24) >> 24;
      *reinterpret_cast<Bytes*>(out + d * width * kWholeStep) = __builtin_convertvector(digit, Bytes);
      numbers = (numbers - digit) >> 8;
    }
  }
};

#if defined(FORETOKEN_TILES)

// `RoundedInputs::round` for the tokens of a tile from m on, which stand in the lanes of registers.
inline void round_tile(const RoundedInputs& out, const TileInputs& x, int64_t m, int64_t K, int64_t g) {
  const int64_t first = g * out.group, last = std::min(first + out.group, out.stride);
  const __mmask16 tokens = __mmask16((uint32_t(1) << x.width) - 1);
  const auto pair = [&](int64_t k) {  // elements k and k + 1 of each token
    if (k >= K) return _mm512_setzero_si512();
    const __m512i both = _mm512_maskz_loadu_epi32(tokens, x.at(m, k));
    return k + 1 < K ? both : _mm512_and_si512(both, _mm512_set1_epi32(0xffff));
  };
  __m512i top = _mm512_setzero_si512();
  for (int64_t k = first; k < last; k += 2) top = _mm512_max_epu16(top, _mm512_and_si512(pair(k), _mm512_set1_epi16(0x7fff)));
  top = _mm512_slli_epi32(_mm512_max_epu32(_mm512_and_si512(top, _mm512_set1_epi32(0xffff)), _mm512_srli_epi32(top, 16)), 16);
  const __m512 size = _mm512_castsi512_ps(top), most = _mm512_set1_ps(float(out.most));
  const __mmask16 is_odd = _mm512_cmpge_epu32_mask(top, _mm512_set1_epi32(0x7f800000));  // infinite, or NaN
  const __mmask16 is_large = _mm512_cmp_ps_mask(size, _mm512_set1_ps(kLeast), _CMP_GE_OQ) & __mmask16(~is_odd);
  const __m512 factor = _mm512_maskz_div_ps(is_large, most, size);
  _mm512_mask_storeu_ps(out.scales + g * out.num_tokens + m, tokens, _mm512_mask_mov_ps(_mm512_maskz_div_ps(is_large, size, most), is_odd, _mm512_set1_ps(NAN)));
  const __m512i limit = _mm512_set1_epi32(out.most), low = _mm512_set1_epi32(0xff);
  for (int64_t start = first; start < last; start += kWholeStep) {
    __m512 words[kMostDigits][16];
    for (int q = 0; q < 16; ++q) {
      const __m512i early = pair(start + q * kQuad), late = pair(start + q * kQuad + 2), upper = _mm512_set1_epi32(int32_t(0xffff0000));
      __m512i numbers[kQuad] = {_mm512_slli_epi32(early, 16), _mm512_and_si512(early, upper), _mm512_slli_epi32(late, 16), _mm512_and_si512(late, upper)};
#pragma GCC unroll 4
      for (__m512i& each : numbers) {
        each = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(each), factor));
        each = _mm512_max_epi32(_mm512_min_epi32(each, limit), _mm512_sub_epi32(_mm512_setzero_si512(), limit));
      }
      for (int d = out.count - 1; d >= 0; --d) {
        __m512i word = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int i = 0; i < kQuad; ++i) {
          const __m512i digit = d == 0 ? numbers[i] : _mm512_srai_epi32(_mm512_slli_epi32(numbers[i], 24), 24);
          word = _mm512_or_si512(word, _mm512_slli_epi32(_mm512_and_si512(digit, low), 8 * i));
          numbers[i] = _mm512_srai_epi32(_mm512_sub_epi32(numbers[i], digit), 8);
        }
        words[d][q] = _mm512_castsi512_ps(word);
      }
    }
    for (int d = 0; d < out.count; ++d) {
      transpose(words[d]);
      int8_t* to = out.at(d, m, start);
      for (int64_t t = 0; t < x.width; ++t) _mm512_storeu_ps(to + t * kWholeStep, words[d][t]);
    }
  }
}

#endif

// Rounds the inputs of a matrix in integers, and of others that round them alike, all threads together; a barrier has to
// follow. has_offsets: whether one of these has group offsets.
template <class X>
void round_inputs(const X& x, int64_t M, const Matrix& matrix, bool has_offsets) {
  const RoundedInputs out(matrix, x.rounded, M);
  const bool needs_sums = has_offsets || M < kFewestOfTiles;
  const bool is_tiled = std::is_same_v<X, TileInputs> && M >= kFewestOfTiles && matrix.input_order == nullptr;
  const int64_t block = is_tiled ? out.width : 1;
  const Share share((M + block - 1) / block * out.groups, 1);
  for (int64_t i = share.begin; i < share.end; ++i) {
    const int64_t first = i / out.groups * block, g = i % out.groups;
#if defined(FORETOKEN_TILES)
    if constexpr (std::is_same_v<X, TileInputs>) {
      if (is_tiled) round_tile(out, x, first, matrix.cols, g);
    }
#endif
    for (int64_t m = first; m < std::min(first + block, M); ++m) {
      if (!is_tiled) out.round(x, m, matrix, g);
      if (needs_sums) out.add_up(m, g);
    }
  }
}

// Rounds inputs for those of some matrices that are in integers, which round them alike (`native_model.py` checks it),
// and waits for all threads.
template <class X, class AnyBarrier>
void round_inputs_of(std::initializer_list<const Matrix*> matrices, const X& x, int64_t M, AnyBarrier& barrier) {
  const auto found = std::find_if(matrices.begin(), matrices.end(), [](const Matrix* each) { return each->bits != 0; });
  if (found == matrices.end()) return;
  round_inputs(x, M, **found, std::any_of(matrices.begin(), matrices.end(), [](const Matrix* each) { return each->group_offsets != nullptr; }));
  barrier.wait();
}

// Writes a row (cols,) of a matrix in integers: the bits of `QuantizedMatrix.dequantized`, then rounded to the dtype.
template <int kBits>
void decode_row(const Matrix& table, bool is_bfloat16, int64_t row, float* out) {
  const int64_t panel = row / kPanelRows, at = row % kPanelRows;
  const uint8_t* numbers = static_cast<const uint8_t*>(table.weight) + panel * panel_bytes(table) + at * kQuad;
  const int lift = table.offsets_are_lowest ? Packing<kBits>::kZero : 0;
  for (int64_t begin = 0; begin < table.cols; begin += kSummed) {  // weights that share all scales
    const float scale = table.group_scales == nullptr ? 1.0f : group_value(table, false, panel, begin / table.group, at);
    const float offset = table.group_offsets == nullptr ? 0.0f : group_value(table, true, panel, begin / table.group, at);
    for (int64_t k = begin; k < std::min<int64_t>(begin + kSummed, table.cols); ++k) {
      float value = float(double(number_at<kBits>(numbers, k) + lift) * scale);  // in double, so that no compiler fuses it with the sum
      if (table.group_offsets != nullptr) value += offset;
      if (table.scales != nullptr) value *= table.scales[row];
      if (is_bfloat16) {
        Bfloat16 rounded;
        assign(rounded, value);
        value = to_float(rounded);
      }
      out[table.input_order == nullptr ? k : table.input_order[k]] = value;
    }
  }
}

inline void decode_row(const Matrix& table, bool is_bfloat16, int64_t row, float* out) {
  with_bits(table.bits, [&](auto bits) { decode_row<decltype(bits)::value>(table, is_bfloat16, row, out); });
}

// Calls work(row) with a row of a table. A row in integers is decoded into `scratch` (cols,), which is not used otherwise.
// is_bfloat16: the dtype of the table, or the dtype that decoded weights are rounded to; otherwise float32.
template <class Work>
void with_row(const Matrix& table, bool is_bfloat16, int64_t row, float* scratch, Work&& work) {
  if (table.bits != 0) {
    decode_row(table, is_bfloat16, row, scratch);
    work(static_cast<const float*>(scratch));
  } else if (is_bfloat16) {
    work(static_cast<const Bfloat16*>(table.weight) + row * table.cols);
  } else {
    work(static_cast<const float*>(table.weight) + row * table.cols);
  }
}

}  // namespace

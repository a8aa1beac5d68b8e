// Weights in 4 or 8 bits. A thread decodes some rows at a time into its own memory, in the dtype of the inputs; the
// kernels for this dtype then multiply them. A product has the bits of the same product with the decoded weights.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#include "interface.h"
#include "vectors.h"

namespace {

// Numbers of 4 bits that are stored together: byte i of 32 has number i in its lower half and number 32 + i in the upper.
constexpr int64_t kTogether = 64;
constexpr int64_t kNibble = 16;  // values of 4 bits; a number stands for itself less kZero
constexpr int kZero = 8;
// Bytes of decoded rows, for up to and for more than `kFewTokens` tokens. A choice: half a first cache, a sixteenth of a
// second one; at least one block of rows of the kernels.
constexpr int64_t kNearRows = 32 << 10, kFarRows = 128 << 10;

inline int64_t num_bytes(const Matrix& matrix) {  // of a row of numbers
  return matrix.bits == 4 ? (matrix.cols + kTogether - 1) / kTogether * kTogether / 2 : matrix.cols;
}

// Elements of memory for `rows` decoded rows. Decoding a row writes up to kTogether - 1 elements past its end, where the
// next row is decoded afterwards.
inline int64_t decoded_size(const Matrix& matrix, int64_t rows) { return rows * matrix.cols + kTogether; }

// This thread's memory, valid until the next call.
inline void* thread_memory(size_t bytes) {
  static thread_local std::unique_ptr<void, decltype(&std::free)> memory(nullptr, &std::free);
  static thread_local size_t size = 0;
  if (bytes > size) {
    memory.reset(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    if (memory == nullptr) throw std::bad_alloc();
    size = bytes;
  }
  return memory.get();
}

inline float half_to_float(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, size = bits & 0x7fff;
  if (size >= 0x7c00) {  // infinite, or NaN
    const uint32_t word = sign | 0x7f800000 | (size & 0x3ff) << 13;
    float result;
    std::memcpy(&result, &word, sizeof result);
    return result;
  }
  const float value = size >= 0x400 ? std::ldexp(float(0x400 | (size & 0x3ff)), int(size >> 10) - 25) : std::ldexp(float(size), -24);
  return sign ? -value : value;
#endif
}

// Scales, or offsets, of the groups of a row in float32: in place, or converted to `memory`. Null without any.
inline const float* group_numbers(const Matrix& matrix, const void* numbers, int64_t n, float* memory) {
  if (numbers == nullptr) return nullptr;
  const int64_t count = (matrix.cols + matrix.group - 1) / matrix.group;
  if (!matrix.groups_are_half) return static_cast<const float*>(numbers) + n * count;
  const uint16_t* halves = static_cast<const uint16_t*>(numbers) + n * count;
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + kLanes <= count; i += kLanes) _mm512_storeu_ps(memory + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + i))));
#endif
  for (; i < count; ++i) memory[i] = half_to_float(halves[i]);
  return memory;
}

// number * scale + offset, rounded once.
inline Lanes scaled(Lanes numbers, float scale, float offset) {
#if defined(__FMA__) || defined(__AVX512F__)
  return multiply_add(numbers, in_all_lanes(scale), in_all_lanes(offset));
#else
  for (int i = 0; i < kLanes; ++i) numbers[i] = float(double(numbers[i]) * scale + offset);
  return numbers;
#endif
}

// What each number of 4 bits of a group stands for.
template <class E>
struct Table {
  alignas(kBytes) E values[kNibble];

  Table(float scale, float offset) {
    for (int i = 0; i < kNibble; i += kLanes) {
      Lanes numbers;
      for (int j = 0; j < kLanes; ++j) numbers[j] = float(i + j - kZero);
      store_lanes(values + i, scaled(numbers, scale, offset));
    }
  }
  // Decodes kTogether numbers, of two groups or of one.
  static void decode(const Table& first, const Table& second, const uint8_t* bytes, E* out) {
    for (int i = 0; i < kTogether / 2; ++i) {
      out[i] = first.values[bytes[i] & 15];
      out[kTogether / 2 + i] = second.values[bytes[i] >> 4];
    }
  }
};
#if defined(__AVX512BW__)
template <>
struct Table<Bfloat16> {
  __m512i words;  // all values twice: the lookup reads five bits

  Table(float scale, float offset) {
    const Lanes values = scaled((Lanes)_mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7), scale, offset);
#if defined(__AVX512BF16__)
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)values);
#else
    const __m256i halves = _mm512_cvtepi32_epi16((__m512i)rounded(values));
#endif
    words = _mm512_broadcast_i64x4(halves);
  }
  static void decode(const Table& first, const Table& second, const uint8_t* bytes, Bfloat16* out) {
    const __m512i numbers = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(numbers, first.words));
    _mm512_storeu_si512(out + kTogether / 2, _mm512_permutexvar_epi16(_mm512_srli_epi16(numbers, 4), second.words));
  }
};
#elif defined(__AVX2__)
template <>
struct Table<Bfloat16> {
  __m256i lower, upper;  // bytes of all values, twice: a lookup stays within 16 bytes

  Table(float scale, float offset) {
    alignas(32) Bfloat16 values[kNibble];
    for (int i = 0; i < kNibble; i += kLanes) {
      const __m256 numbers = _mm256_add_ps(_mm256_set1_ps(float(i - kZero)), _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7));
      store_lanes(values + i, scaled((Lanes)numbers, scale, offset));
    }
    const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(values)), low = _mm256_set1_epi16(0xff);
    const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(words, low), _mm256_srli_epi16(words, 8));  // of each half: lower, upper
    lower = _mm256_permute4x64_epi64(bytes, 0x88);
    upper = _mm256_permute4x64_epi64(bytes, 0xdd);
  }
  static void decode(const Table& first, const Table& second, const uint8_t* bytes, Bfloat16* out) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)), low = _mm256_set1_epi8(15);
    first.look_up(_mm256_and_si256(both, low), out);
    second.look_up(_mm256_and_si256(_mm256_srli_epi16(both, 4), low), out + kTogether / 2);
  }

 private:
  void look_up(__m256i numbers, Bfloat16* out) const {
    const __m256i low = _mm256_shuffle_epi8(lower, numbers), high = _mm256_shuffle_epi8(upper, numbers);
    const __m256i even = _mm256_unpacklo_epi8(low, high), odd = _mm256_unpackhi_epi8(low, high);  // of each half: its lower, its upper words
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), _mm256_permute2x128_si256(even, odd, 0x31));
  }
};
#endif

// Fetches the numbers that come `ahead` bytes after these.
FORETOKEN_INLINE void fetch_numbers(const void* numbers, int64_t ahead) {
  __builtin_prefetch(static_cast<const char*>(numbers) + ahead, 0, 2);  // a prefetch past the end is harmless
}

template <class E>
void decode_nibbles(int64_t size, int64_t group, const uint8_t* bytes, int64_t ahead, const float* scales, const float* offsets, E* out) {
  const int shift = __builtin_ctzll(uint64_t(group));
  const auto table = [&](int64_t k) { return Table<E>(scales[k >> shift], offsets == nullptr ? 0.0f : offsets[k >> shift]); };
  for (int64_t k = 0; k < size; k += kTogether, bytes += kTogether / 2, out += kTogether) {
    if (k % (2 * kTogether) == 0) fetch_numbers(bytes, ahead);
    const Table<E> first = table(k);
    if (group < kTogether && k + group < size) {
      Table<E>::decode(first, table(k + group), bytes, out);
    } else {
      Table<E>::decode(first, first, bytes, out);
    }
  }
}

template <class E>
void decode_bytes(const Matrix& matrix, const Int8* numbers, int64_t ahead, const float* scales, const float* offsets, E* out) {
  const int64_t group = scales == nullptr ? matrix.cols : matrix.group;
  for (int64_t first = 0, g = 0; first < matrix.cols; first += group, ++g) {
    const float scale = scales == nullptr ? 1.0f : scales[g], offset = offsets == nullptr ? 0.0f : offsets[g];
    const int64_t end = std::min(first + group, matrix.cols);
    const auto value = [&](Lanes x) { return scales == nullptr ? x : scaled(x, scale, offset); };
    int64_t k = first;
    for (; k + 2 * kLanes <= end; k += 2 * kLanes) {
      if (k % 64 == 0) fetch_numbers(numbers + k, ahead);
      store_pair(out + k, value(load_lanes(numbers + k)), value(load_lanes(numbers + k + kLanes)));
    }
    for (; k < end; ++k) assign(out[k], value(Lanes{} + to_float(numbers[k]))[0]);
  }
}

// The rows n..n + count of a matrix in E.
template <class E>
Matrix rows_of(const Matrix& matrix, int64_t n, int64_t count) {
  Matrix part = matrix;
  part.weight = static_cast<const E*>(matrix.weight) + n * matrix.cols;
  part.bias = matrix.bias == nullptr ? nullptr : matrix.bias + n;
  part.scales = matrix.scales == nullptr ? nullptr : matrix.scales + n;
  part.rows = count;
  part.pass_bytes = 0;
  part.first = matrix.first + n;
  return part;
}

// Decodes the rows n..n + count into `memory`, which has room for `decoded_size` elements. Returns them as a matrix in E.
template <class E>
[[gnu::noinline]] Matrix decoded(const Matrix& matrix, int64_t n, int64_t count, E* memory) {
  const int64_t bytes = num_bytes(matrix), groups = matrix.group_scales == nullptr ? 0 : (matrix.cols + matrix.group - 1) / matrix.group;
  float* const numbers = reinterpret_cast<float*>(memory + (decoded_size(matrix, count) + 31) / 32 * 32);
  for (int64_t r = 0; r < count; ++r) {
    const float* scales = group_numbers(matrix, matrix.group_scales, n + r, numbers);
    const float* offsets = group_numbers(matrix, matrix.group_offsets, n + r, numbers + groups);
    const char* row = static_cast<const char*>(matrix.weight) + (n + r) * bytes;
    if (matrix.bits == 4) {
      decode_nibbles(matrix.cols, matrix.group, reinterpret_cast<const uint8_t*>(row), count * bytes, scales, offsets, memory + r * matrix.cols);
    } else {
      decode_bytes(matrix, reinterpret_cast<const Int8*>(row), count * bytes, scales, offsets, memory + r * matrix.cols);
    }
  }
  Matrix part = rows_of<E>(matrix, n, count);
  part.weight = memory;
  part.bits = 0;
  return part;
}

// Calls work(parts, begin, end) for the rows begin..end of some matrices of one size. The parts are the matrices
// themselves, or, if numbers have to be decoded into E, some rows of each: `unit` rows in all, or up to four times as
// many if they take no more than `budget` bytes.
template <class E, int kCount, class Work>
void for_each_part(const Matrix (&matrices)[kCount], int64_t begin, int64_t end, int64_t unit, int64_t budget, Work&& work) {
  bool are_plain = true;
  for (const Matrix& each : matrices) are_plain = are_plain && each.bits == 0;
  if (are_plain) return work(matrices, begin, end);
  const Matrix& first = matrices[0];
  const int64_t least = unit / kCount, fit = budget / (first.cols * int64_t(sizeof(E)) * kCount) / least * least, rows = std::clamp(fit, least, 4 * least);
  const int64_t numbers = 2 * (first.cols / 32 + 2);  // scales and offsets of a row
  const int64_t size = ((decoded_size(first, rows) + 31) / 32 * 32 * int64_t(sizeof(E)) + numbers * int64_t(sizeof(float)) + 63) / 64 * 64;
  char* memory = static_cast<char*>(thread_memory(size_t(size * kCount)));
  for (int64_t n = begin; n < end; n += rows) {
    const int64_t count = std::min(rows, end - n);
    Matrix parts[kCount];
    for (int i = 0; i < kCount; ++i) {
      E* const own = reinterpret_cast<E*>(memory + i * size);
      parts[i] = matrices[i].bits == 0 ? rows_of<E>(matrices[i], n, count) : decoded<E>(matrices[i], n, count, own);
    }
    work(parts, int64_t(0), count);
  }
}

}  // namespace

// Products of weights and inputs in integers on matrix units (AMX), see `quantized.h`; and which way a matrix takes.
//
// A tile of inputs holds one digit of up to sixteen tokens, a tile of weights one panel; both cover the same 64 inputs, or
// 32. Weights of fewer than 8 bits are decoded into int8 first, for all tokens.
//
// Letters: M tokens, K inputs, D digits of an input, P panels whose sums are in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "gemm.h"
#include "integers.h"
#include "interface.h"
#include "quantized.h"
#include "tiles.h"
#include "vectors.h"

namespace {

#if defined(FORETOKEN_TILES) && defined(__AMX_INT8__)

constexpr int64_t kNearPanels = 8 << 10;  // bytes of panels in int8 that are multiplied with all tokens; 16 KiB leave the first cache, see `benchmarks/NOTES.md`

// Registers of a product of inputs with D digits: sums of kPanels panels for each digit; then the digits of the tokens,
// then weights.
template <int D>
class RoundedRegisters : TileRegisters {
 public:
  static constexpr int kPanels = D == 1 ? 4 : D == 2 ? 2 : 1;

  RoundedRegisters(int64_t tokens, int64_t step) {
    constexpr int kDigits = D * kPanels, kWeights = kDigits + D;
    for (int i = 0; i < kDigits; ++i) shape(i, tokens, 4 * kPanelRows);
    for (int i = kDigits; i < kWeights; ++i) shape(i, tokens, step);
    for (int i = kWeights; i < 8; ++i) shape(i, step / kQuad, kQuad * kPanelRows);
    use();
  }
};

// Adds the products of a step of inputs, from byte `at` of each panel on.
template <int D, int P>
FORETOKEN_INLINE void add_tiles(const int8_t* x, int64_t digit, const char* const (&panels)[P], int64_t at) {
  constexpr int64_t kRow = kQuad * kPanelRows, kToken = kWholeStep;
  if constexpr (D == 1) {
    _tile_loadd(4, x, kToken);
    _tile_loadd(5, panels[0] + at, kRow);
    _tile_dpbssd(0, 4, 5);
    _tile_loadd(6, panels[1] + at, kRow);
    _tile_dpbssd(1, 4, 6);
    _tile_loadd(7, panels[2] + at, kRow);
    _tile_dpbssd(2, 4, 7);
    _tile_loadd(5, panels[3] + at, kRow);
    _tile_dpbssd(3, 4, 5);
  } else if constexpr (D == 2) {
    _tile_loadd(4, x, kToken);
    _tile_loadd(6, panels[0] + at, kRow);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, x + digit, kToken);
    _tile_dpbssd(1, 5, 6);
    _tile_loadd(7, panels[1] + at, kRow);
    _tile_dpbssd(2, 4, 7);
    _tile_dpbssd(3, 5, 7);
  } else {
    _tile_loadd(3, x, kToken);
    _tile_loadd(4, x + digit, kToken);
    _tile_loadd(5, x + 2 * digit, kToken);
    _tile_loadd(6, panels[0] + at, kRow);
    _tile_dpbssd(0, 3, 6);
    _tile_dpbssd(1, 4, 6);
    _tile_dpbssd(2, 5, 6);
  }
}

// Stores sums (registers, tokens, kPanelRows) of three or four registers.
template <int kCount>
FORETOKEN_INLINE void store_tiles(int32_t* out) {
  constexpr int64_t kRow = 4 * kPanelRows, kTile = kPanelRows * kTileTokens;
  _tile_stored(0, out, kRow);
  _tile_stored(1, out + kTile, kRow);
  _tile_stored(2, out + 2 * kTile, kRow);
  if constexpr (kCount == 4) _tile_stored(3, out + 3 * kTile, kRow);
}

// Decodes the numbers of a panel for some inputs into int8.
template <int kBits>
void decode_panel(const char* panel, int64_t count, bool counts_from_0, char* out) {
  using Own = Packing<kBits>;
  const uint8_t zero = counts_from_0 ? 0 : Own::kZero;
  for (int64_t k = 0; k < count; k += Own::kNumbers, panel += Own::kBytes) {
#pragma GCC unroll 8
    for (int q = 0; q < Own::kQuads; ++q, out += kBlockBytes) *reinterpret_cast<ByteLanes*>(out) = Own::codes(panel, q) - zero;
  }
}

// Panels that are multiplied together, of one matrix, or of two of one kind.
template <int P>
struct Panels {
  const Matrix* matrices[P];
  int64_t numbers[P];
  const char* decoded[P];  // their numbers in int8 from an input on

  const char* at(int p, int64_t k) const {
    const Matrix& matrix = *matrices[p];
    return static_cast<const char*>(matrix.weight) + numbers[p] * panel_bytes(matrix) + kPanelRows * k * matrix.bits / 8;
  }
};

// Adds the dot products of the inputs first..last of `count` tokens from m on to totals (panels, tokens, kPanelRows), or
// writes them for the first inputs. next: bytes of each panel that are prefetched meanwhile, `fetched` of them.
template <int D, int P>
[[gnu::noinline]] void dot_tiles(const Panels<P>& panels, const RoundedInputs& x, int64_t m, int64_t count, int64_t first, int64_t last, const char* (&next)[P], int64_t fetched, float* totals) {
  constexpr int kTile = kPanelRows * kTileTokens;
  const Matrix& matrix = *panels.matrices[0];
  const int64_t unit = unit_of(matrix), step = std::min<int64_t>(unit, kWholeStep), digit = x.width * kWholeStep;
  const int8_t* const inputs = x.at(0, m, 0);
  const int64_t each = (fetched * step / (last - first) + 63) / 64 * 64;  // prefetched in a step
  // Sums of two units: those of one unit are added to the span while matrix units multiply the next one.
  alignas(64) int32_t sums[2][P * D * kTile];
  alignas(64) float parts[P * kTile];
  const int64_t span = span_of(matrix);
  StripScales scales[P];
  for (int p = 0; p < P; ++p) scales[p].begin(*panels.matrices[p], panels.numbers[p], 0);
  const auto add_unit = [&](int64_t begin, const int32_t* unit_sums) {
    const int64_t end = std::min(begin + unit, last), start = (begin - first) / span * span + first, group = (begin - start) / unit;
    const bool is_last = end == last || end - start == span;
    const float* const input_scales = x.scales_at(m, start);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      if (group == 0) scales[p].load(start, std::min(span, last - start));
      const Lanes scale = scales[p].scales[group], offset = scales[p].offsets[group];
      float *part = parts + p * kTile, *total = totals + p * kTile;
      const int32_t* own = unit_sums + p * D * kTile;
#pragma GCC unroll 4
      for (int64_t t = 0; t < count; ++t, part += kPanelRows, total += kPanelRows, own += kPanelRows) {
        Lanes value = multiply_add(joined<D>([&](int d) { return *reinterpret_cast<const IntLanes*>(own + d * kTile); }), scale, group == 0 ? Lanes{} : load_lanes(part));
        if (matrix.group_offsets != nullptr) value = multiply_add(in_all_lanes(joined_sum<D>(x, m + t, begin, (end - begin) / kSummed)), offset, value);
        if (is_last) {
          store_lanes(total, multiply_add(value, in_all_lanes(input_scales[t]), start == 0 ? Lanes{} : load_lanes(total)));
        } else {
          store_lanes(part, value);
        }
      }
    }
  };
  int32_t *own = sums[0], *waiting = sums[1];
  for (int64_t begin = first; begin < last; begin += unit, std::swap(own, waiting)) {
    const int64_t end = std::min(begin + unit, last);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    if constexpr (P * D == 4) _tile_zero(3);
    for (int64_t k = begin; k < end; k += step) {
      for (int p = 0; p < P; next[p] += each, ++p) {
        for (int64_t i = 0; i < each; i += 64) __builtin_prefetch(next[p] + i, 0, 2);  // past the end it is harmless
      }
      add_tiles<D>(inputs + k / kWholeStep * x.step_size() + k % kWholeStep, digit, panels.decoded, (k - first) * kPanelRows);
    }
    if (begin > first) add_unit(begin - unit, waiting);
    store_tiles<P * D>(own);
    fence();
  }
  add_unit(first + (last - first - 1) / unit * unit, waiting);
}

// Multiplies the panels of the rows begin..end of some matrices of one kind on matrix units; take(m, count, panel, totals,
// distance) gets the dot products of tokens with the rows of a panel of each, (count, kPanelRows), `distance` numbers from
// one matrix to the next.
template <int D, int kCount, class Take>
void multiply_panels(const Matrix* const (&matrices)[kCount], const RoundedInputs& x, int64_t M, int64_t begin, int64_t end, Take&& take) {
  constexpr int P = RoundedRegisters<D>::kPanels, kEach = P / kCount, kTile = kPanelRows * kTileTokens;
  const Matrix& matrix = *matrices[0];
  const int64_t part = std::max(kNearPanels / (P * kPanelRows), unit_of(matrix));  // inputs that are multiplied with all tokens before the next ones
  const RoundedRegisters<D> registers(std::min<int64_t>(M, kTileTokens), std::min<int64_t>(unit_of(matrix), kWholeStep));
  const int64_t last = (matrix.rows - 1) / kPanelRows;
  // Inputs that all panels of a thread read before the next inputs; they stay in the second cache.
  const int64_t most = std::max<int64_t>(kPanelBytes / (D * x.stride) / kTileTokens * kTileTokens, kTileTokens);
  const int64_t blocks = (std::min(M, most) + kTileTokens - 1) / kTileTokens;
  char* const memory = thread_memory(size_t(P * part * kPanelRows) + size_t(blocks * P * kTile) * sizeof(float));
  float* const totals = reinterpret_cast<float*>(memory + P * part * kPanelRows);
  for (int64_t first = 0; first < M; first += most) {
    const int64_t past = std::min(M, first + most);
    for (int64_t panel = begin / kPanelRows; panel * kPanelRows < end; panel += kEach) {
      Panels<P> panels;
      for (int p = 0; p < P; ++p) {
        panels.matrices[p] = matrices[p / kEach];
        panels.numbers[p] = std::min(panel + p % kEach, last);
      }
      for (int64_t k = 0; k < x.stride; k += part) {
        const int64_t stop = std::min(k + part, x.stride);
        const char* next[P];
        for (int p = 0; p < P; ++p) {
          char* own = memory + p * part * kPanelRows;
          if (matrix.bits < 8) with_bits(matrix.bits, [&](auto bits) { decode_panel<decltype(bits)::value>(panels.at(p, k), stop - k, matrix.offsets_are_lowest, own); });
          next[p] = panels.at(p, k) + kEach * panel_bytes(matrix);
          panels.decoded[p] = matrix.bits < 8 ? own : panels.at(p, k);
        }
        fence();
        // Each tile of tokens prefetches a part: few cache lines can be on their way at once.
        const int64_t fetched = first > 0 ? 0 : (stop - k) * kPanelRows * matrix.bits / 8 / ((past - first + kTileTokens - 1) / kTileTokens);
        float* total = totals;
        for (int64_t m = first; m < past; m += kTileTokens, total += P * kTile) {
          dot_tiles<D>(panels, x, m, std::min<int64_t>(kTileTokens, past - m), k, stop, next, fetched, total);
        }
      }
      float* total = totals;
      for (int64_t m = first; m < past; m += kTileTokens, total += P * kTile) {
        for (int p = 0; p < kEach && (panel + p) * kPanelRows < end; ++p) take(m, std::min<int64_t>(kTileTokens, past - m), panel + p, total + p * kTile, int64_t(kEach * kTile));
      }
    }
  }
}

// Whether two matrices in integers are of one kind and size.
inline bool are_alike(const Matrix& a, const Matrix& b) {
  return a.bits == b.bits && a.input_bits == b.input_bits && a.input_group == b.input_group && a.group == b.group && a.scale_kind == b.scale_kind && a.offsets_are_lowest == b.offsets_are_lowest &&
         (a.group_offsets == nullptr) == (b.group_offsets == nullptr) && a.rows == b.rows && a.cols == b.cols;
}

// Whether `multiply_rounded_gated` multiplies these matrices.
inline bool is_gated_fast(const Matrix& gate, const Matrix& up, int64_t M) {
  return gate.bits != 0 && M >= kFewestOfTiles && digits_of(gate) < 3 && are_alike(gate, up);
}

// See `multiply_gated`; two matrices in integers of one kind, whose inputs are rounded.
template <class Function>
void multiply_rounded_gated(const Matrix& gate, const Matrix& up, void* rounded, int64_t M, const TileInputs& inner, Function f) {
  const RoundedInputs x(gate, rounded, M);
  const Share share(gate.rows, 4 * kPanelRows);
  if (share.begin >= share.end) return;
  const auto take = [&](int64_t m, int64_t count, int64_t panel, float* totals, int64_t distance) {
    const int64_t n = panel * kPanelRows, rows = std::min<int64_t>(kPanelRows, gate.rows - n);
    alignas(64) float values[kTileTokens * kPanelRows];
    for (int64_t t = 0; t < count; ++t) {
      float *own = totals + t * kPanelRows, *other = own + distance;
      emit_panel(gate, panel, 0, gate.rows, 0, own, [](auto...) {});
      emit_panel(up, panel, 0, up.rows, 0, other, [](auto...) {});
      store_lanes(values + t * kPanelRows, f(load_lanes(own)) * load_lanes(other));
    }
    if (rows < kPanelRows) {
      for (int64_t i = 0; i < count * kPanelRows; ++i) {
        if (i % kPanelRows < rows) inner.put(m + i / kPanelRows, n + i % kPanelRows, values[i]);
      }
      return;
    }
    transpose(values, kTileTokens, values);
    put_pairs(values, kTileTokens, inner, m, n);
  };
  const Matrix* const matrices[] = {&gate, &up};
  digits_of(gate) == 1 ? multiply_panels<1>(matrices, x, M, share.begin, share.end, take) : multiply_panels<2>(matrices, x, M, share.begin, share.end, take);
}

#endif

// See `multiply`; a matrix in integers, rows begin..end.
template <class Emit>
void multiply_rounded(const Matrix& matrix, void* rounded, int64_t M, int64_t begin, int64_t end, Emit&& emit) {
  const RoundedInputs x(matrix, rounded, M);
  const auto run = [&](auto digits) {
    constexpr int D = decltype(digits)::value;
#if defined(FORETOKEN_TILES) && defined(__AMX_INT8__)
    if (M >= kFewestOfTiles) {
      const Matrix* const matrices[] = {&matrix};
      const auto take = [&](int64_t m, int64_t count, int64_t panel, float* totals, int64_t) {
        for (int64_t t = 0; t < count; ++t) emit_panel(matrix, panel, begin, end, m + t, totals + t * kPanelRows, emit);
      };
      return multiply_panels<D>(matrices, x, M, begin, end, take);
    }
#endif
    multiply_strips<D>(matrix, x, M, begin, end, emit);
  };
  switch (digits_of(matrix)) {
    case 1: return run(std::integral_constant<int, 1>());
    case 2: return run(std::integral_constant<int, 2>());
    default: return run(std::integral_constant<int, 3>());
  }
}

}  // namespace

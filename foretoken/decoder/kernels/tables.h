// Rows of tables, such as embeddings: in float32, in bfloat16 or in integers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm.h"
#include "interface.h"
#include "packed.h"
#include "rounded_inputs.h"
#include "vectors.h"

namespace {

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

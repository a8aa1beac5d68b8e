// Rows of tables, such as embeddings: in float32, in bfloat16 or in integers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm.h"
#include "interface.h"
#include "rounded_inputs.h"
#include "vectors.h"

namespace {

// Number k of a row of a matrix in integers, from the row's first byte on; see `Matrix`.
inline int number_at(const uint8_t* row, int64_t bits, int64_t k) {
  const int64_t count = bits == 4 ? 2 * kQuad : kQuad;  // numbers of a row in a block
  const uint8_t byte = row[k / count * kPanelRows * kQuad + k % kQuad];
  return bits == 4 ? (byte >> k % count / kQuad * 4 & 15) - 8 : int8_t(byte);
}

// Writes a row (cols,) of a matrix in integers: the bits of `QuantizedMatrix.dequantized`, then rounded to the dtype.
inline void decode_row(const Matrix& table, bool is_bfloat16, int64_t row, float* out) {
  const int64_t panel = row / kPanelRows, at = row % kPanelRows;
  const uint8_t* numbers = static_cast<const uint8_t*>(table.weight) + panel * panel_bytes(table) + at * kQuad;
  const int64_t groups = num_groups(table);
  const auto of_group = [&](const void* values, int64_t group) {
    const int64_t i = (panel * groups + group) * kPanelRows + at;
    return table.groups_are_half ? half_to_float(static_cast<const uint16_t*>(values)[i]) : static_cast<const float*>(values)[i];
  };
  for (int64_t begin = 0; begin < table.cols; begin += kSummed) {  // weights that share all scales
    const float scale = groups == 0 ? 1.0f : of_group(table.group_scales, begin / table.group);
    const float offset = table.group_offsets == nullptr ? 0.0f : of_group(table.group_offsets, begin / table.group);
    for (int64_t k = begin; k < std::min<int64_t>(begin + kSummed, table.cols); ++k) {
      float value = float(double(number_at(numbers, table.bits, k)) * scale);  // in double, so that no compiler fuses it with the sum
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

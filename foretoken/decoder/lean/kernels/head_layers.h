// Linear layers of draft heads, each with its own dtype, and LM heads over a part of the vocabulary.
//
// Letters: M rows, V vocabulary.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "barrier.h"
#include "elementwise.h"
#include "head_interface.h"
#include "inputs.h"
#include "interface.h"
#include "tiles.h"
#include "vectors.h"

namespace {

// Writes a row of `size` elements times a factor to an input, from element `first` on.
template <class X, class E>
void put_row(const X& inputs, int64_t m, int64_t first, const E* row, int64_t size, float factor) {
  int64_t k = 0;
  if (first % kLanes == 0) {
    for (; k + kLanes <= size; k += kLanes) inputs.put(m, first + k, load_lanes(row + k) * factor);
  }
  for (; k < size; ++k) inputs.put(m, first + k, to_float(row[k]) * factor);
}

// Writes rows of `size` contiguous elements.
struct PutRows {
  const float* rows;
  int64_t size;
  template <class X>
  void operator()(int64_t m, const X& inputs) const {
    put_row(inputs, m, 0, rows + m * size, size, 1.0f);
  }
};

// Calls work(row) with the row at an element of a table in bfloat16 or float32.
template <class Work>
void with_row(const void* table, bool is_bfloat16, int64_t first, Work&& work) {
  if (is_bfloat16) {
    work(static_cast<const Bfloat16*>(table) + first);
  } else {
    work(static_cast<const float*>(table) + first);
  }
}

// An LM head with its model's scale and cap of logits.
struct LmHead {
  const HeadMatrix& matrix;
  const int64_t* token_map;  // the token of each row; null: row i is token i
  int64_t vocab;             // V
  float scale, softcap;      // scale 1: none, cap 0: none
};

class HeadLayers {
 public:
  // inputs: room for the inputs of any layer in the widest dtype.
  explicit HeadLayers(float* inputs) : inputs_(inputs) {}

  // out (M, rows) = M inputs times the transposed matrix; put(m, inputs) sets input m. Ends with a barrier.
  template <class Put>
  void project(const HeadMatrix& matrix, int64_t M, Put&& put, float* out) const {
    set_inputs(matrix, M, put);
    multiply_all(matrix, M, out);
  }

  // out (M, V), -inf for tokens without a row. Ends with a barrier.
  template <class Put>
  void logits(const LmHead& head, int64_t M, Put&& put, float* out) const {
    const int64_t V = head.vocab;
    share(head.token_map == nullptr ? 0 : M, [&](int64_t m) { std::fill_n(out + m * V, V, -INFINITY); });
    set_inputs(head.matrix, M, put);
    const bool is_plain = head.token_map == nullptr && head.scale == 1.0f && head.softcap == 0.0f;
    is_plain ? multiply_all(head.matrix, M, out) : multiply_logits(head, M, out);
  }

 private:
  template <class T>
  MatrixInputs<T> inputs(const Matrix& matrix, int64_t M) const {
    return {reinterpret_cast<typename MatrixInputs<T>::Token*>(inputs_), M, matrix.cols};
  }

  // Calls run(inputs) with inputs in the dtype of a matrix.
  template <class Run>
  void with_inputs(const HeadMatrix& matrix, int64_t M, Run&& run) const {
    if (matrix.matrix.scales != nullptr) {
      run(inputs<Int8>(matrix.matrix, M));
    } else {
      matrix.is_bfloat16 ? run(inputs<Bfloat16>(matrix.matrix, M)) : run(inputs<float>(matrix.matrix, M));
    }
    barrier_.wait();
  }

  template <class Put>
  void set_inputs(const HeadMatrix& matrix, int64_t M, Put&& put) const {
    with_inputs(matrix, M, [&](const auto& inputs) { share(M, [&](int64_t m) { put(m, inputs); }); });
  }

  // These two do not depend on the caller's `put`, so they are compiled once.
  void multiply_all(const HeadMatrix& matrix, int64_t M, float* out) const {
    with_inputs(matrix, M, [&](const auto& inputs) { multiply_into(matrix.matrix, inputs, M, out); });
  }

  void multiply_logits(const LmHead& head, int64_t M, float* out) const {
    with_inputs(head.matrix, M, [&](const auto& inputs) {
      multiply(head.matrix.matrix, inputs, M, [&](int64_t m, int64_t n, auto count, const float* values) {
        for (int i = 0; i < count; ++i) {
          const float value = values[i] * head.scale, cap = head.softcap;
          out[m * head.vocab + (head.token_map == nullptr ? n + i : head.token_map[n + i])] =
              cap > 0 ? std::tanh(value / cap) * cap : value;
        }
      });
    });
  }

  float* inputs_;
  mutable Barrier barrier_;
};

}  // namespace

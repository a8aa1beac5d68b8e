// Norms, activations and rotations of the rows of a pass. A row's result does not depend on other rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <omp.h>

#include "interface.h"
#include "vectors.h"

namespace {

constexpr int kPortion = 512;  // elements of a row for one thread's activation

// Calls work(i) for this thread's share of 0..count - 1.
template <class Work>
void share(int64_t count, Work&& work) {
  for (int64_t i = omp_get_thread_num(); i < count; i += omp_get_num_threads()) work(i);
}

// The factor that scales a row to a root mean square of 1.
float norm_factor(const float* x, int64_t size, float epsilon) {
  Lanes squares{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) squares = multiply_add(load_lanes(x + i), load_lanes(x + i), squares);
  float sum = sum_of_lanes(squares);
  for (; i < size; ++i) sum = std::fma(x[i], x[i], sum);
  return 1.0f / std::sqrt(sum / float(size) + epsilon);
}

// Mean of a row, and the factor that scales it to a standard deviation of 1.
struct Moments {
  float mean, factor;
};
Moments moments(const float* x, int64_t size, float epsilon) {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < size; ++i) sum += x[i];
  const double mean = sum / double(size);
  for (int64_t i = 0; i < size; ++i) squares += (x[i] - mean) * (x[i] - mean);
  return {float(mean), float(1.0 / std::sqrt(squares / double(size) + epsilon))};
}

// Elements begin..end of the norm of a row, or of the row itself without a norm; put(k, values) takes a register or an
// element at a time.
template <class Put>
void normalise_elements(const Norm& norm, const float* x, int64_t size, int64_t begin, int64_t end, Put&& put) {
  const float *weight = norm.weight, *bias = norm.bias;
  int64_t k = begin;
  if (weight == nullptr) {
    for (; k + kLanes <= end; k += kLanes) put(k, load_lanes(x + k));
    for (; k < end; ++k) put(k, x[k]);
  } else if (norm.kind == kLayerNorm) {
    const auto [mean, factor] = moments(x, size, norm.epsilon);
    for (; k < end; ++k) put(k, std::fma((x[k] - mean) * factor, weight[k], bias == nullptr ? 0.0f : bias[k]));
  } else {
    const float factor = norm_factor(x, size, norm.epsilon);
    for (; k + kLanes <= end; k += kLanes) put(k, load_lanes(x + k) * factor * load_lanes(weight + k));
    for (; k < end; ++k) put(k, x[k] * factor * weight[k]);
  }
}

// The norm of a whole row.
template <class Put>
void normalise_row(const Norm& norm, const float* x, int64_t size, Put&& put) {
  normalise_elements(norm, x, size, 0, size, put);
}

// The norm of one head, or of all heads of a token, in place.
void normalise_head(const Norm& norm, float* x, int64_t size) {
  if (norm.weight == nullptr) return;
  if (norm.kind == kLayerNorm) {
    normalise_row(norm, x, size, [&](int64_t k, auto value) {
      if constexpr (std::is_same_v<decltype(value), float>) x[k] = value;
    });
    return;
  }
  const float factor = norm_factor(x, size, norm.epsilon);
  for (int64_t i = 0; i < size; ++i) x[i] *= factor * norm.weight[i];
}

// Rotary embedding of one head: element i turns with element i + pairs. By std::fma: several places inline this, and a
// compiler may join a product with a sum in one of them and not in another.
void rotate(float* x, const float* cos, const float* sin, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = x[i], b = x[i + pairs];
    x[i] = std::fma(a, cos[i], -(b * sin[i]));
    x[i + pairs] = std::fma(b, cos[i], a * sin[i]);
  }
}

// Calls run(f) with an activation.
template <class Run>
void with_activation(int64_t activation, Run&& run) {
  switch (activation) {
    case kGeluTanh: return run([](Lanes x) { return gelu_tanh(x); });
    case kGelu: return run([](Lanes x) { return gelu(x); });
    default: return run([](Lanes x) { return silu(x); });
  }
}

// Writes elements begin..end of row m of `inner`: f(gate) * up, or f(up) without a gate.
template <class X, class Function>
void activate_portion(const X& inner, int64_t m, const float* gate, const float* up, int64_t begin, int64_t end, Function f) {
  int64_t k = begin;
  if (gate == nullptr) {
    for (; k + kLanes <= end; k += kLanes) inner.put(m, k, f(load_lanes(up + k)));
    for (; k < end; ++k) inner.put(m, k, f(Lanes{} + up[k])[0]);
  } else {
    for (; k + kLanes <= end; k += kLanes) inner.put(m, k, f(load_lanes(gate + k)) * load_lanes(up + k));
    for (; k < end; ++k) inner.put(m, k, f(Lanes{} + gate[k])[0] * up[k]);
  }
}

inline int64_t portions_of(int64_t size) { return (size + kPortion - 1) / kPortion; }

}  // namespace

// Operations on single rows, which threads share: norms, activations, rotations, and the choice of a token from logits. A
// row's result does not depend on other rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>

#include <omp.h>

#include "interface.h"
#include "vectors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Waiting threads spin for as long as a step of a pass takes, and then sleep. OpenMP's barrier spins for milliseconds:
// beside another busy process, which delays one of our threads, ours would spend their share of the processor on
// spinning at every barrier.
class Barrier {
 public:
  // Returns when all threads of the parallel region have called it; earlier writes are visible afterwards.
  void wait() {
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(omp_get_num_threads())) {
      arrived_.store(0, std::memory_order_relaxed);
      // In the order of all threads: `notify_all` looks whether anyone sleeps, and a look before the store is seen would
      // leave a thread asleep that has looked at the old phase.
      phase_.store(phase + 1, std::memory_order_seq_cst);
      wake();
      return;
    }
    for (int i = 0; i < kLooks; ++i) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      pause();
    }
    while (phase_.load(std::memory_order_acquire) == phase) sleep(phase);
  }

 private:
  static constexpr int kLooks = 2000;  // some 20 to 100 microseconds; a choice, see NOTES, "Waiting threads"

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
#if defined(__cpp_lib_atomic_wait)
  void sleep(uint32_t phase) { phase_.wait(phase, std::memory_order_acquire); }
  void wake() { phase_.notify_all(); }
#else
  void sleep(uint32_t) { std::this_thread::yield(); }
  void wake() {}
#endif

  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

constexpr int kPortion = 512;  // elements of a row for one thread's activation; a choice: a barrier costs more than fewer elements

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
  int64_t i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    const Lanes a = load_lanes(x + i), b = load_lanes(x + i + pairs), c = load_lanes(cos + i), s = load_lanes(sin + i);
    store_lanes(x + i, multiply_add(a, c, -(b * s)));
    store_lanes(x + i + pairs, multiply_add(b, c, a * s));
  }
  for (; i < pairs; ++i) {
    const float a = x[i], b = x[i + pairs];
    x[i] = std::fma(a, cos[i], -(b * sin[i]));
    x[i + pairs] = std::fma(b, cos[i], a * sin[i]);
  }
}

inline Lanes squared_relu(Lanes x) {
  const Lanes positive = x > 0 ? x : Lanes{};
  return positive * positive;
}

// Calls run(f) with an activation of its input times a factor.
template <class Run>
void with_activation(int64_t activation, float factor, Run&& run) {
  switch (activation) {
    case kGeluTanh: return run([=](Lanes x) { return gelu_tanh(x * factor); });
    case kGelu: return run([=](Lanes x) { return gelu(x * factor); });
    case kReluSquared: return run([=](Lanes x) { return squared_relu(x * factor); });
    default: return run([=](Lanes x) { return silu(x * factor); });
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

typedef uint64_t Words __attribute__((vector_size(kLanes * 8)));

// Largest of many values, lane by lane, and whether one of them is NaN.
class Tops {
 public:
  void take(Lanes values) {
    tops_ = values > tops_ ? values : tops_;
    is_odd_ |= values != values;
  }
  // The largest value; NaN if one is NaN.
  float greatest() const {
    float top = -INFINITY;
    bool is_odd = false;
    for (int i = 0; i < kLanes; ++i) {
      top = std::max(top, tops_[i]);
      is_odd |= is_odd_[i] != 0;
    }
    return is_odd ? NAN : top;
  }
  // The largest value; NaN if it is not finite.
  float value() const {
    const float top = greatest();
    return std::isfinite(top) ? top : NAN;
  }

 private:
  Lanes tops_ = Lanes{} - INFINITY;
  IntLanes is_odd_{};
};

// A register of a row from k on; the rest is -inf, which is never chosen.
inline Lanes load_filled(const float* x, int64_t k, int64_t size) {
  if (k + kLanes <= size) return load_lanes(x + k);
  Lanes values = Lanes{} - INFINITY;
  for (int i = 0; k + i < size; ++i) values[i] = x[k + i];
  return values;
}

// Index of the largest of some values, the lowest among equals; -1 if it is not finite, or one of them is NaN.
inline int64_t greatest(const float* x, int64_t size) {
  Tops tops;
  for (int64_t k = 0; k < size; k += kLanes) tops.take(load_filled(x, k, size));
  const float top = tops.value();
  return top != top ? -1 : std::find(x, x + size, top) - x;
}

// SplitMix64's finaliser; see `noise.mix`.
template <class Word>
inline Word mixed(Word z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;

enum Purpose : uint64_t { kTarget = 0, kDraft = 2 };  // see `noise.Purpose`

// The key of a number; see `KeyedNoise._keys`.
inline uint64_t noise_key(int64_t seed, int64_t position, Purpose purpose, int64_t lane) {
  const uint64_t key = mixed(mixed(uint64_t(seed) + kGamma) ^ (uint64_t(position) * kGamma));
  return mixed(key ^ ((uint64_t(lane) * 8 + purpose + 1) * 0x94D049BB133111EBu));
}

// The key of the target's token at a position.
inline uint64_t target_key(int64_t seed, int64_t position) { return noise_key(seed, position, kTarget, 0); }

inline Lanes logarithm(Lanes x) {  // natural, of positive normal numbers; relative error below 3e-7, and 1e-7 near 1
  const IntLanes bits = reinterpret_cast<const IntLanes&>(x) - 0x3F3504F3;  // of the square root of a half
  const Lanes exponent = __builtin_convertvector(bits >> 23, Lanes);
  const IntLanes fraction = (bits & 0x007FFFFF) + 0x3F3504F3;
  const Lanes f = reinterpret_cast<const Lanes&>(fraction) - 1.0f, square = f * f;
  Lanes p = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const Lanes rest = p * f * square + exponent * -2.12194440e-4f - 0.5f * square;
  return f + rest + exponent * 0.693359375f;
}

// Standard Gumbel noise of tokens first, first + 1, ... under a key; see `KeyedNoise.gumbel`.
inline Lanes gumbel(uint64_t key, uint64_t first) {
  Words counters;
  for (int i = 0; i < kLanes; ++i) counters[i] = uint64_t(i) + 1;
  const Words bits = mixed((counters + first) * kGamma + key) >> 11;
  const Lanes most = Lanes{} + (1.0f - 0x1p-24f);
  Lanes v = (__builtin_convertvector(bits, Lanes) + 0.5f) * 0x1p-53f;
  v = v > most ? most : v;
  // log1p(-v) by Goldberg's method: with u = 1 - v as rounded, log(u) * v / (1 - u) corrects the rounding of u.
  const Lanes u = 1.0f - v, lost = 1.0f - u, zeros{};
  const Lanes exponential = lost == zeros ? v : logarithm(u) * (v / -lost);
  return -logarithm(exponential);
}

// A draw from softmax(scale * logits): the token with the largest scaled logit plus noise; -1 as in `greatest`.
inline int64_t drawn(const float* logits, int64_t size, float scale, uint64_t key) {
  Tops tops;
  Lanes best = Lanes{} - INFINITY;
  IntLanes place{};  // of each lane's best
  for (int64_t k = 0; k < size; k += kLanes) {
    const Lanes values = load_filled(logits, k, size);
    tops.take(values);
    const Lanes score = values * scale + gumbel(key, uint64_t(k));
    const IntLanes is_better = score > best;
    best = is_better ? score : best;
    place = is_better ? IntLanes{} + int32_t(k) : place;
  }
  if (std::isnan(tops.value())) return -1;
  int64_t token = -1;
  float top = -INFINITY;
  for (int i = 0; i < kLanes; ++i) {
    const int64_t candidate = place[i] + i;
    if (best[i] > top || (best[i] == top && candidate < token)) {
      top = best[i];
      token = candidate;
    }
  }
  return token;
}

// Copies row rows[i] of `bytes` bytes to row i.
inline void copy_listed(const char* from, char* to, const int64_t* rows, int64_t count, int64_t bytes) {
  constexpr int64_t kAhead = 16;  // rows; a choice: so many reads of memory wait together
  for (int64_t i = 0; i < count; ++i, to += bytes) {
    if (i + kAhead < count) {
      for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + rows[i + kAhead] * bytes + line);
    }
    std::memcpy(to, from + rows[i] * bytes, size_t(bytes));
  }
}

}  // namespace

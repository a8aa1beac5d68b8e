// The token after a row of logits: the largest, or a draw by Gumbel-max with the noise of `foretoken.sampling.noise`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace {

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

}  // namespace

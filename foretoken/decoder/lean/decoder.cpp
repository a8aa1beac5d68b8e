// The forward pass of a pre-norm decoder on the CPU, written for few tokens at a time: one token, or a tree of them.
//
// Weights are used where transformers put them: row-major, never copied, each read once a pass. A row of weights times a
// token is one dot product, and a weight that is in a register meets every token of the tree before the next is loaded,
// so that a pass costs the reading of the weights until arithmetic takes longer than memory.
//
// Every sum is taken in an order that depends on the model alone, not on how many tokens or sequences share the pass:
// a token's logits are the same, bit for bit, whether it is decoded alone or in a tree beside others. (Hence std::fma in
// the scalar loops: a compiler that vectorises some of their steps would round those twice.)
//
// Letters: S sequences, M tokens of a pass, W nodes of its trees, R rows of logits, K and N inputs and outputs of a matrix.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>

#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

extern "C" {

// A row-major matrix (rows, cols) in the model's dtype, and its bias (rows,) or null.
struct Matrix {
  const void* weight;
  const float* bias;
  int64_t rows, cols;
};

struct Layer {
  Matrix query, key, value, output, gate, up, down;
  const float *attention_norm, *mlp_norm;  // (hidden,)
  const float *query_norm, *key_norm;      // (head_dim,) or null
  void *keys, *values;                     // (slots, kv_heads, capacity, head_dim)
  int64_t window;                          // keys less than this many positions back are seen; 0 for all
};

struct Model {
  int64_t is_bfloat16, num_layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, capacity, num_slots, num_positions;
  float epsilon, scale;
  const void* embedding;     // (vocab, hidden)
  const float *cos, *sin;    // (num_positions, head_dim / 2)
  const float* final_norm;   // (hidden,)
  Matrix head;
  const Layer* layers;
};

// New tokens of several sequences, one sequence after another. Behind its prefix a sequence has a tree of nodes: first those
// that earlier passes fed, then a node for each new token. A node sees the prefix, its ancestors and itself.
struct Pass {
  int64_t num_threads, num_sequences, num_logits;
  const int64_t* tokens;                 // (M,)
  const float* inputs;                   // (M, hidden) in the place of the tokens' embeddings; or null
  const int64_t *positions, *parents;    // (W,), a parent is a node of the same sequence, -1 where there is none
  const int64_t *slots, *prefix;         // (S,)
  const int64_t *starts, *node_starts;   // (S + 1,), where each sequence's tokens and nodes begin
  const int64_t* logit_rows;             // (R,) ascending, the tokens whose logits are wanted
  float* logits;                         // (R, vocab), or null
  const int64_t* taps;                   // (F,) ascending boundary indices; layers + 1 means after the final norm
  int64_t num_taps;
  float* features;                       // (F, M, hidden)
  void* workspace;                       // of at least `foretoken_workspace_bytes`
};

}  // extern "C"

// What a call returns: 0, or what of its arguments would have been read or written out of bounds. `structures.py` has the
// same numbers.
enum class Status : int64_t {
  kDone = 0,
  kNoMemory = 1,
  kMissing = 2,
  kThreads = 3,
  kTokens = 4,
  kPositions = 5,
  kSlots = 6,
  kCacheRows = 7,
  kParents = 8,
  kSequences = 9,
  kLogitRows = 10,
};

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;        // of a vector register
constexpr int kTokens = 4;        // tokens that meet a weight while it is in a register
constexpr int kKeys = 6;          // keys that meet as many queries likewise
#else
constexpr int kBytes = 32;
constexpr int kTokens = 2;
constexpr int kKeys = 4;
#endif
constexpr int kLanes = kBytes / int(sizeof(float));
typedef float Lanes __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(kBytes), aligned(4), may_alias));
constexpr int kRows = 6;          // rows of weights that meet a token likewise: 24 sums of 32 registers, or 12 of 16
constexpr int kLongRows = 4;      // likewise where kRows of them are more than kNear bytes
constexpr int kNear = 24 * 1024;  // bytes that stay in the nearest cache beside what passes by
constexpr int kRowsOfOne = 8;     // rows side by side when there is one token
constexpr int kShare = 24;        // rows are dealt out to threads in multiples of this
constexpr int kPortion = 512;     // elements of a row that one thread activates

struct Bfloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void assign(float& to, float x) { to = x; }
inline void assign(Bfloat16& to, float x) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Lanes load_lanes(const float* p) { return *reinterpret_cast<const Lanes*>(p); }
inline Lanes load_lanes(const Bfloat16* p) {
  typedef uint16_t Halves __attribute__((vector_size(kBytes / 2), aligned(2), may_alias));
  typedef uint32_t Words __attribute__((vector_size(kBytes)));
  const Words words = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Words) << 16;
  return reinterpret_cast<const Lanes&>(words);
}
inline void store_lanes(float* p, Lanes x) { *reinterpret_cast<Lanes*>(p) = x; }
inline void store_lanes(Bfloat16* p, Lanes x) {
  for (int i = 0; i < kLanes; ++i) assign(p[i], x[i]);
}

// a * b + sum, rounded once wherever the processor can: left to itself a compiler rounds twice in some loops and not in
// others.
inline Lanes multiply_add(Lanes a, Lanes b, Lanes sum) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return a * b + sum;
#endif
}

// As many weights as a register holds, the same elements of a token, and sums of their products. Tokens are kept in the
// model's dtype where the processor multiplies that, else in float32, and in the order in which weights are widened.
template <class T>
constexpr int kStep = kBytes / int(sizeof(T));
template <class T>
struct Fragment;
template <>
struct Fragment<float> {
  using Token = float;
  Lanes lanes;
  static constexpr int64_t place(int64_t k) { return k; }  // of an element of a token among those of a step
  static Fragment load(const float* p) {
    Lanes lanes = load_lanes(p);
#if defined(__AVX2__)
    __asm__("" : "+v"(lanes));  // or the compiler loads it anew for every use, and loads are what the loop waits for
#endif
    return {lanes};
  }
  Lanes add_product(const Fragment& other, Lanes sum) const { return multiply_add(lanes, other.lanes, sum); }
};
#if defined(__AVX512BF16__)
template <>
struct Fragment<Bfloat16> {
  using Token = Bfloat16;
  __m512bh pairs;
  static constexpr int64_t place(int64_t k) { return k; }
  static Fragment load(const Bfloat16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
  Lanes add_product(const Fragment& other, Lanes sum) const {
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, pairs, other.pairs);
  }
};
#else
template <>
struct Fragment<Bfloat16> {
  using Token = float;
  Lanes low, high;  // the first and the last four of every eight elements: what processors widen in one instruction each
  static constexpr int64_t place(int64_t k) { return k % 8 / 4 * kLanes + k / 8 * 4 + k % 4; }
  static Fragment load(const Bfloat16* p) {
    typedef uint16_t Halves __attribute__((vector_size(kBytes), aligned(2), may_alias));
    const Halves halves = *reinterpret_cast<const Halves*>(p), zeros{};
#if defined(__AVX512BW__)
    return {(Lanes)_mm512_unpacklo_epi16((__m512i)zeros, (__m512i)halves),
            (Lanes)_mm512_unpackhi_epi16((__m512i)zeros, (__m512i)halves)};
#elif defined(__AVX2__)
    return {(Lanes)_mm256_unpacklo_epi16((__m256i)zeros, (__m256i)halves),
            (Lanes)_mm256_unpackhi_epi16((__m256i)zeros, (__m256i)halves)};
#else
    Fragment result;
    for (int i = 0; i < kLanes; ++i) {
      result.low[i] = to_float(p[i / 4 * 8 + i % 4]);
      result.high[i] = to_float(p[i / 4 * 8 + 4 + i % 4]);
    }
    return result;
#endif
  }
  static Fragment load(const float* p) { return {load_lanes(p), load_lanes(p + kLanes)}; }
  Lanes add_product(const Fragment& other, Lanes sum) const {
    return multiply_add(high, other.high, multiply_add(low, other.low, sum));
  }
};
#endif

// The sum over the lanes of up to kLanes vectors: lane i of the result belongs to vector i, all by the same tree of
// additions.
#if defined(__AVX512F__)
template <int kCount>
inline Lanes sums_over_lanes(const Lanes* v) {
  const auto pairs = [](Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  };
  const auto quads = [](Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  };
  const auto quarters = [](Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  };
  Lanes four[4] = {};
#pragma GCC unroll 4
  for (int i = 0; i < kCount / 4; ++i) four[i] = quads(pairs(v[4 * i], v[4 * i + 1]), pairs(v[4 * i + 2], v[4 * i + 3]));
  const Lanes upper = kCount > 8 ? quarters(four[2], four[3]) : Lanes{};
  return quarters(quarters(four[0], four[1]), upper);
}
#else
template <int kCount>
inline Lanes sums_over_lanes(const Lanes* v) {
  const auto pairs = [](Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
  };
  const auto halves = [](Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  };
  const Lanes lower = pairs(pairs(v[0], v[1]), pairs(v[2], v[3]));
  if constexpr (kCount <= 4) {
    return halves(lower, lower);
  } else {
    return halves(lower, pairs(pairs(v[4], v[5]), pairs(v[6], v[7])));
  }
}
#endif

inline Lanes exponential(Lanes x) {  // relative error below 2e-7; 0 below -87
  const Lanes low = Lanes{} - 87.0f, high = Lanes{} + 88.0f;
  const IntLanes underflows = x < low;
  x = underflows ? low : x;
  x = x > high ? high : x;
  const Lanes magic = Lanes{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Lanes shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
  const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes p = Lanes{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntLanes power = (__builtin_convertvector(n, IntLanes) + 127) << 23;
  const Lanes result = p * reinterpret_cast<const Lanes&>(power);
  return underflows ? Lanes{} : result;
}

inline Lanes silu(Lanes x) { return x / (1.0f + exponential(-x)); }

inline float sum_of_lanes(Lanes x) {
  const Lanes v[4] = {x};
  return sums_over_lanes<4>(v)[0];
}

// Inputs of a matrix in the order in which they are read. A step's elements of kTokens tokens stand side by side, then come
// the next elements of these tokens; a single token is one step after another.
template <class T>
struct Inputs {
  using Token = typename Fragment<T>::Token;
  Token* data;
  int64_t block, step;  // from one block of tokens, one step, to the next

  Inputs(Token* data, int64_t K, bool is_single)
      : data(data), block(kTokens * padded(K)), step(is_single ? kStep<T> : kTokens * kStep<T>) {}
  Token* at(int64_t m, int64_t k) const {
    return data + m / kTokens * block + k / kStep<T> * step + m % kTokens * kStep<T> + Fragment<T>::place(k % kStep<T>);
  }
  void put(int64_t m, int64_t k, float value) const { assign(*at(m, k), value); }
  void put(int64_t m, int64_t k, Lanes values) const {  // k: a multiple of kLanes
    if constexpr (std::is_same_v<Token, T>) {
      store_lanes(at(m, k), values);
    } else {
      for (int i = 0; i < kLanes; i += 4) std::memcpy(at(m, k + i), reinterpret_cast<const float*>(&values) + i, 16);
    }
  }
  static int64_t padded(int64_t K) { return (K + kStep<T> - 1) / kStep<T> * kStep<T>; }
  static int64_t size(int64_t M, int64_t K) { return (M + kTokens - 1) / kTokens * kTokens * padded(K); }
};

// Dot products of R rows of weights with C tokens, (C, R). Fetches `lines` cache lines from `ahead` on a step meanwhile.
template <class T, int R, int C>
inline void dot_block(const T* const* w, const typename Fragment<T>::Token* x, int64_t K, const char* ahead, int lines, float* out) {
  static_assert(R * C % 4 == 0 && R * C <= 2 * kLanes);
  Lanes sums[R * C] = {};
  int64_t k = 0;
  for (; k + kStep<T> <= K; k += kStep<T>, x += C * kStep<T>) {
    for (int i = 0; i < lines; ++i, ahead += kBytes) __builtin_prefetch(ahead);
    Fragment<T> tokens[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) tokens[c] = Fragment<T>::load(x + c * kStep<T>);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Fragment<T> row = Fragment<T>::load(w[r] + k);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) sums[c * R + r] = row.add_product(tokens[c], sums[c * R + r]);
    }
  }
  store_lanes(out, sums_over_lanes<std::min(R * C, kLanes)>(sums));
  if constexpr (R * C > kLanes) store_lanes(out + kLanes, sums_over_lanes<R * C - kLanes>(sums + kLanes));
  for (int i = 0; k + i < K; ++i) {
    for (int c = 0; c < C; ++c) {
      for (int r = 0; r < R; ++r) {
        out[c * R + r] = std::fma(to_float(w[r][k + i]), to_float(x[c * kStep<T> + Fragment<T>::place(i)]), out[c * R + r]);
      }
    }
  }
}

// The block at row n and token m; rows past the end repeat the last one.
template <class T, int R, int C>
inline void block(const Matrix& matrix, const Inputs<T>& x, int64_t n, int64_t m, int lines, float* out) {
  const T* w[R];
  for (int r = 0; r < R; ++r) w[r] = static_cast<const T*>(matrix.weight) + std::min(n + r, matrix.rows - 1) * matrix.cols;
  // Each block of tokens fetches its share of the rows after these; a prefetch past the end is harmless.
  const char* next = reinterpret_cast<const char*>(w[0] + R * matrix.cols) + m / C * (matrix.cols / kStep<T>) * lines * kBytes;
  dot_block<T, R, C>(w, x.at(m, 0), matrix.cols, next, lines, out);
  if (matrix.bias != nullptr) {
    for (int c = 0; c < C; ++c) {
      for (int r = 0; r < R; ++r) out[c * R + r] += matrix.bias[std::min(n + r, matrix.rows - 1)];
    }
  }
}

// See `multiply`; for rows begin..end.
template <class T, int R, int C, class Emit>
void multiply_rows(const Matrix& matrix, const Inputs<T>& x, int64_t M, int64_t begin, int64_t end, Emit&& emit) {
  const int64_t blocks = (M + C - 1) / C;
  const int lines = int((R + blocks - 1) / blocks);
  float out[2 * kLanes];
  for (int64_t n = begin; n < end; n += R) {
    for (int64_t m = 0; m < M; m += C) {
      block<T, R, C>(matrix, x, n, m, m / C < R ? lines : 0, out);
      for (int c = 0; c < std::min<int64_t>(C, M - m); ++c) {
        if (n + R <= end) {
          emit(m + c, n, std::integral_constant<int, R>(), out + c * R);
        } else {
          emit(m + c, n, int(end - n), out + c * R);
        }
      }
    }
  }
}

// x (M, K) times the transposed matrix, this thread's share of the rows. emit(m, n, count, values) takes the outputs of
// token m at `count` rows from n on.
template <class T, class Emit>
void multiply(const Matrix& matrix, const Inputs<T>& x, int64_t M, Emit&& emit) {
  const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
  const int64_t units = (matrix.rows + kShare - 1) / kShare;
  const int64_t begin = units * thread / threads * kShare;
  const int64_t end = std::min(units * (thread + 1) / threads * kShare, matrix.rows);
  if (M == 1) {
    multiply_rows<T, kRowsOfOne, 1>(matrix, x, M, begin, end, emit);
  } else if (matrix.cols * kRows * int64_t(sizeof(T)) <= kNear) {
    multiply_rows<T, kRows, kTokens>(matrix, x, M, begin, end, emit);
  } else {
    multiply_rows<T, kLongRows, kTokens>(matrix, x, M, begin, end, emit);
  }
}

// The factor that gives a row a root mean square of 1.
float norm_factor(const float* x, int64_t size, float epsilon) {
  Lanes squares{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) squares = multiply_add(load_lanes(x + i), load_lanes(x + i), squares);
  float sum = sum_of_lanes(squares);
  for (; i < size; ++i) sum = std::fma(x[i], x[i], sum);
  return 1.0f / std::sqrt(sum / float(size) + epsilon);
}

template <class Work>
void share(int64_t count, Work&& work) {
  for (int64_t i = omp_get_thread_num(); i < count; i += omp_get_num_threads()) work(i);
}

// What one token sees: the cache rows low..prefix of its sequence, then `count` scratch rows, numbered from the prefix.
struct View {
  int64_t low, prefix, count;
  const int32_t* scratch;

  int64_t size() const { return prefix - low + count; }
};

// What node t of sequence s sees; `runs` says of each node how many nodes before it are its nearest ancestors.
View view_of(const Pass& pass, const int32_t* runs, int64_t window, int64_t s, int64_t t, int32_t* scratch) {
  const int64_t first = pass.node_starts[s], prefix = pass.prefix[s], position = pass.positions[first + t];
  const int64_t low = window > 0 ? std::min(std::max<int64_t>(0, position - window + 1), prefix) : 0;
  const int64_t *parents = pass.parents + first, *positions = pass.positions + first;
  int64_t count = 0;
  if (window > 0) {
    for (int64_t node = t; node >= 0 && position - positions[node] < window; node = parents[node]) scratch[count++] = int32_t(node);
  } else {
    for (int64_t node = t; node >= 0;) {
      const int64_t last = node - runs[first + node];
      for (int64_t i = node; i >= last; --i) scratch[count + node - i] = int32_t(i);
      count += node - last + 1;
      node = parents[last];
    }
  }
  std::reverse(scratch, scratch + count);
  return {low, prefix, count, scratch};
}

// Attention of up to kTokens queries that share keys and values: (rows, D) of one head of one sequence. What a query gets
// does not depend on the others: its keys are taken in the order of its view.
template <class T>
class SharedAttention {
 public:
  SharedAttention(const View* views, int count, const T* keys, const T* values, int64_t D, float* scores, int64_t stride)
      : views_(views), count_(count), keys_(keys), values_(values), D_(D), scores_(scores), stride_(stride) {
    for (int c = 0; c < count; ++c) {
      first_ = std::min(first_, views[c].low);
      common_ = std::max(common_, views[c].low);
      if (views[c].count > 0) scratch_ = std::max<int64_t>(scratch_, views[c].scratch[views[c].count - 1] + 1);
    }
  }

  // Scores of all queries, `queries` being in the order of `Inputs`; then what exp leaves of them, and 1 / its sum.
  void score(const typename Fragment<T>::Token* queries, float scale) {
    const int64_t prefix = views_[0].prefix;
    float out[2 * kLanes];
    for (int64_t row = first_; row < prefix; row += kKeys) {
      dot(queries, row, prefix, out);
      const bool is_shared = row >= common_ && row + kKeys <= prefix;
      for (int c = 0; c < count_; ++c) {
        float* scores = of(c) + row - views_[c].low;
        if (is_shared) {
          std::copy_n(out + c * kKeys, kKeys, scores);
        } else {
          for (int r = 0; r < kKeys; ++r) {
            if (row + r >= views_[c].low && row + r < prefix) scores[r] = out[c * kKeys + r];
          }
        }
      }
    }
    int64_t next[kTokens] = {};
    for (int64_t row = 0; row < scratch_; row += kKeys) {
      dot(queries, prefix + row, prefix + scratch_, out);
      for (int c = 0; c < count_; ++c) {
        const View& view = views_[c];
        float* scores = of(c) + prefix - view.low;
        for (; next[c] < view.count && view.scratch[next[c]] < row + kKeys; ++next[c]) {
          scores[next[c]] = out[c * kKeys + view.scratch[next[c]] - row];
        }
      }
    }
    for (int c = 0; c < count_; ++c) factors_[c] = 1.0f / soften(of(c), views_[c].size(), scale);
  }

  // Calls emit(query, d, values...) with the values' mixture: kLanes at a time, the last ones of an odd D one by one.
  template <class Emit>
  void mix(Emit&& emit) const {
    int64_t d = 0;
    for (; d + 4 * kLanes <= D_; d += 4 * kLanes) mix_lanes<4>(d, emit);
    for (; d + 2 * kLanes <= D_; d += 2 * kLanes) mix_lanes<2>(d, emit);
    for (; d + kLanes <= D_; d += kLanes) mix_lanes<1>(d, emit);
    for (; d < D_; ++d) {
      for (int c = 0; c < count_; ++c) {
        float sum = 0;
        const auto add = [&](float weight, const T* value) { sum = std::fma(weight, to_float(value[d]), sum); };
        walk(c, views_[c].low, views_[c].prefix, add);
        walk_scratch(c, add);
        emit(c, d, sum * factors_[c]);
      }
    }
  }

 private:
  float* of(int c) const { return scores_ + c * stride_; }

  // Dot products of the queries with kKeys keys from `row` on; keys from `end` on repeat the last one.
  void dot(const typename Fragment<T>::Token* queries, int64_t row, int64_t end, float* out) const {
    const T* rows[kKeys];
    for (int r = 0; r < kKeys; ++r) rows[r] = keys_ + std::min(row + r, end - 1) * D_;
    dot_block<T, kKeys, kTokens>(rows, queries, D_, nullptr, 0, out);
  }

  // Turns scores into the numerators of a softmax and gives the denominator.
  static float soften(float* scores, int64_t size, float scale) {
    const int64_t padded = (size + kLanes - 1) / kLanes * kLanes;
    for (int64_t j = size; j < padded; ++j) scores[j] = -INFINITY;
    Lanes greatest = Lanes{} - INFINITY;
    for (int64_t j = 0; j < padded; j += kLanes) {
      const Lanes s = load_lanes(scores + j) * scale;
      store_lanes(scores + j, s);
      greatest = s > greatest ? s : greatest;
    }
    float top = greatest[0];
    for (int i = 1; i < kLanes; ++i) top = std::max(top, greatest[i]);
    Lanes sum{};
    for (int64_t j = 0; j < padded; j += kLanes) {
      const Lanes e = exponential(load_lanes(scores + j) - top);
      store_lanes(scores + j, e);
      sum += e;
    }
    return sum_of_lanes(sum);
  }

  template <class Step>
  void walk(int c, int64_t begin, int64_t end, Step&& step) const {
    for (int64_t row = begin; row < end; ++row) step(of(c)[row - views_[c].low], values_ + row * D_);
  }

  template <class Step>
  void walk_scratch(int c, Step&& step) const {
    const View& view = views_[c];
    const float* weights = of(c) + view.prefix - view.low;
    for (int64_t j = 0; j < view.count; ++j) step(weights[j], values_ + (view.prefix + view.scratch[j]) * D_);
  }

  template <int kRegisters, class Emit>
  void mix_lanes(int64_t d, Emit&& emit) const {
    Lanes sums[kTokens][kRegisters] = {};
    const auto add = [&](int c) {
      return [&, c](float weight, const T* value) {
        for (int i = 0; i < kRegisters; ++i) sums[c][i] = multiply_add(Lanes{} + weight, load_lanes(value + d + i * kLanes), sums[c][i]);
      };
    };
    for (int c = 0; c < count_; ++c) walk(c, views_[c].low, common_, add(c));
    if (count_ == kTokens) {
      add_common<kTokens>(d, sums);
    } else {
      for (int c = 0; c < count_; ++c) walk(c, common_, views_[c].prefix, add(c));
    }
    for (int c = 0; c < count_; ++c) {
      walk_scratch(c, add(c));
      for (int i = 0; i < kRegisters; ++i) emit(c, d + i * kLanes, sums[c][i] * factors_[c]);
    }
  }

  // The rows that all queries see: each value is loaded once for all of them.
  template <int kCount, int kRegisters>
  void add_common(int64_t d, Lanes (&totals)[kTokens][kRegisters]) const {
    Lanes sums[kCount][kRegisters];
    const float* weights[kCount];
    for (int c = 0; c < kCount; ++c) {
      weights[c] = of(c) - views_[c].low;
      for (int i = 0; i < kRegisters; ++i) sums[c][i] = totals[c][i];
    }
    for (int64_t row = common_; row < views_[0].prefix; ++row) {
      const T* value = values_ + row * D_ + d;
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        const Lanes v = load_lanes(value + i * kLanes);
#pragma GCC unroll 4
        for (int c = 0; c < kCount; ++c) sums[c][i] = multiply_add(Lanes{} + weights[c][row], v, sums[c][i]);
      }
    }
    for (int c = 0; c < kCount; ++c) {
      for (int i = 0; i < kRegisters; ++i) totals[c][i] = sums[c][i];
    }
  }

  const View* views_;
  const int count_;
  const T *keys_, *values_;
  const int64_t D_;
  float* const scores_;
  const int64_t stride_;
  int64_t first_ = INT64_MAX, common_ = 0, scratch_ = 0;
  float factors_[kTokens];
};

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t greatest_rows(const Model& model) {
  return model.capacity + kLanes;  // keys one token can see, padded
}

int64_t group_size(const Model& model) { return model.heads / model.kv_heads; }

// Buffers of a pass; `size` is what they take.
template <class T>
struct Workspace {
  float *residual, *query, *key, *value, *gate, *up;
  typename Fragment<T>::Token *normed, *rotated, *mixed, *inner;
  float* scores;      // kTokens rows a thread
  int32_t* scratch;   // likewise
  int32_t* runs;      // (W,), see `view_of`
  int64_t *sequence;  // (M,), of each token
  int64_t *units;     // (S + 1,), where each sequence's portions of attention begin
  int64_t size = 0;  // -1 where it is beyond what 64 bits count

  // M: tokens or nodes, whichever is more.
  Workspace(const Model& model, int64_t M, int64_t threads, void* base) {
    const int64_t q = model.heads * model.head_dim, kv = model.kv_heads * model.head_dim;
    if (M > std::numeric_limits<int64_t>::max() - kTokens) size = -1;
    const int64_t padded_M = size < 0 ? 0 : (M + kTokens - 1) / kTokens * kTokens;
    take(base, residual, M, model.hidden);
    take(base, query, M, q);
    take(base, key, M, kv);
    take(base, value, M, kv);
    take(base, gate, M, model.intermediate);
    take(base, up, M, model.intermediate);
    take(base, rotated, M, model.kv_heads * Inputs<T>::size(group_size(model), model.head_dim));
    take(base, normed, padded_M, Inputs<T>::padded(model.hidden));
    take(base, mixed, padded_M, Inputs<T>::padded(q));
    take(base, inner, padded_M, Inputs<T>::padded(model.intermediate));
    take(base, scores, threads, kTokens * greatest_rows(model));
    take(base, scratch, threads, kTokens * greatest_rows(model));
    take(base, runs, M, 1);
    take(base, sequence, M, 1);
    take(base, units, padded_M + 1, 1);
  }

 private:
  template <class E>
  void take(void* base, E*& part, int64_t rows, int64_t cols) {
    part = base == nullptr ? nullptr : reinterpret_cast<E*>(static_cast<char*>(base) + size);
    int64_t bytes;
    if (size < 0 || __builtin_mul_overflow(rows, cols * int64_t(sizeof(E)), &bytes) ||
        bytes > std::numeric_limits<int64_t>::max() - 63 || __builtin_add_overflow(size, aligned(bytes), &size)) {
      size = -1;
    }
  }
};

template <class T>
class Decoder {
 public:
  Decoder(const Model& model, const Pass& pass)
      : model_(model),
        pass_(pass),
        rows_(pass.starts[pass.num_sequences]),
        space_(model, pass.node_starts[pass.num_sequences], pass.num_threads, pass.workspace),
        normed_(space_.normed, model.hidden, rows_ == 1),
        mixed_(space_.mixed, model.heads * model.head_dim, rows_ == 1),
        inner_(space_.inner, model.intermediate, rows_ == 1),
        group_(group_size(model)) {
    space_.units[0] = 0;
    for (int64_t s = 0; s < pass.num_sequences; ++s) {
      std::fill(space_.sequence + pass.starts[s], space_.sequence + pass.starts[s + 1], s);
      space_.units[s + 1] = space_.units[s] + model.kv_heads * chunks_of(s);
      const int64_t first = pass.node_starts[s];
      for (int64_t g = first; g < pass.node_starts[s + 1]; ++g) {
        const bool follows = g > first && pass.parents[g] == g - first - 1;
        space_.runs[g] = follows ? space_.runs[g - 1] + 1 : 0;
      }
    }
  }

  // Runs inside a parallel region, all threads together.
  void run() {
    embed();
    for (int64_t i = 0; i < model_.num_layers; ++i) {
      keep_features(i);
      attend(model_.layers[i]);
      feed_forward(model_.layers[i]);
    }
    keep_features(model_.num_layers);
    const bool has_all_logits = pass_.logits != nullptr && pass_.num_logits == rows_;
    if (has_all_logits || wants(model_.num_layers + 1)) normalise(model_.final_norm);
    if (wants(model_.num_layers + 1)) keep_final();
    if (has_all_logits) {
      project(model_.head, normed_, rows_, pass_.logits);
    } else if (pass_.logits != nullptr) {
#pragma omp barrier
      const Inputs<T> chosen(space_.normed, model_.hidden, pass_.num_logits == 1);
      normalise(model_.final_norm, chosen, pass_.num_logits, [&](int64_t r) { return pass_.logit_rows[r]; });
      project(model_.head, chosen, pass_.num_logits, pass_.logits);
    }
  }

 private:
  void embed() {
    share(rows_, [&](int64_t m) {
      float* out = space_.residual + m * model_.hidden;
      if (pass_.inputs != nullptr) {
        std::copy_n(pass_.inputs + m * model_.hidden, model_.hidden, out);
        return;
      }
      const T* row = static_cast<const T*>(model_.embedding) + pass_.tokens[m] * model_.hidden;
      for (int64_t i = 0; i < model_.hidden; ++i) out[i] = to_float(row[i]);
    });
#pragma omp barrier
  }

  void attend(const Layer& layer) {
    normalise(layer.attention_norm);
    project(layer.query, normed_, rows_, space_.query);
    project(layer.key, normed_, rows_, space_.key);
    project(layer.value, normed_, rows_, space_.value);
#pragma omp barrier
    share(rows_, [&](int64_t m) { place(layer, m); });
#pragma omp barrier
    const int64_t* ends = space_.units + 1;
    share(space_.units[pass_.num_sequences], [&](int64_t unit) {
      const int64_t s = std::upper_bound(ends, ends + pass_.num_sequences, unit) - ends;
      const int64_t chunks = chunks_of(s), place = unit - space_.units[s];
      attend(layer, s, place / chunks, place % chunks * kTokens);
    });
#pragma omp barrier
    add(layer.output, mixed_);
  }

  void feed_forward(const Layer& layer) {
    normalise(layer.mlp_norm);
    project(layer.gate, normed_, rows_, space_.gate);
    project(layer.up, normed_, rows_, space_.up);
#pragma omp barrier
    const int64_t I = model_.intermediate, portions = (I + kPortion - 1) / kPortion;
    share(rows_ * portions, [&](int64_t unit) {
      const int64_t m = unit / portions, begin = unit % portions * kPortion, end = std::min(begin + kPortion, I);
      const float *gate = space_.gate + m * I, *up = space_.up + m * I;
      int64_t k = begin;
      for (; k + kLanes <= end; k += kLanes) inner_.put(m, k, silu(load_lanes(gate + k)) * load_lanes(up + k));
      for (; k < end; ++k) inner_.put(m, k, silu(Lanes{} + gate[k])[0] * up[k]);
    });
#pragma omp barrier
    add(layer.down, inner_);
  }

  void normalise(const float* weight) {
    normalise(weight, normed_, rows_, [](int64_t m) { return m; });
  }

  // The RMS norm of `count` tokens; token(i) is the i-th of them.
  template <class Token>
  void normalise(const float* weight, const Inputs<T>& out, int64_t count, Token&& token) {
    share(count, [&](int64_t i) {
      const float* x = space_.residual + token(i) * model_.hidden;
      const float factor = norm_factor(x, model_.hidden, model_.epsilon);
      int64_t k = 0;
      for (; k + kLanes <= model_.hidden; k += kLanes) {
        out.put(i, k, load_lanes(x + k) * factor * load_lanes(weight + k));
      }
      for (; k < model_.hidden; ++k) out.put(i, k, x[k] * factor * weight[k]);
    });
#pragma omp barrier
  }

  // out = x (M, K) times the transposed matrix.
  void project(const Matrix& matrix, const Inputs<T>& x, int64_t M, float* out) {
    multiply(matrix, x, M, [&](int64_t m, int64_t n, auto count, const float* values) {
      for (int i = 0; i < count; ++i) out[m * matrix.rows + n + i] = values[i];
    });
  }

  // Adds x times the transposed matrix to the residual stream.
  void add(const Matrix& matrix, const Inputs<T>& x) {
    multiply(matrix, x, rows_, [&](int64_t m, int64_t n, auto count, const float* values) {
      for (int i = 0; i < count; ++i) space_.residual[m * model_.hidden + n + i] += values[i];
    });
#pragma omp barrier
  }

  // Rotates a token's queries and keys, and writes its keys and values to their cache rows.
  void place(const Layer& layer, int64_t m) {
    const int64_t D = model_.head_dim, s = space_.sequence[m], t = m - pass_.starts[s], node = num_earlier(s) + t;
    const int64_t row = pass_.prefix[s] + node, position = pass_.positions[pass_.node_starts[s] + node];
    for (int64_t h = 0; h < model_.heads; ++h) {
      float* query = space_.query + (m * model_.heads + h) * D;
      rotate(query, layer.query_norm, position);
      const Inputs<T> queries = queries_of(s, h / group_);
      for (int64_t i = 0; i < D; ++i) queries.put(t * group_ + h % group_, i, query[i]);
    }
    for (int64_t h = 0; h < model_.kv_heads; ++h) {
      float *key = space_.key + (m * model_.kv_heads + h) * D, *value = space_.value + (m * model_.kv_heads + h) * D;
      rotate(key, layer.key_norm, position);
      const int64_t at = cache_row(s, h, row);
      for (int64_t i = 0; i < D; ++i) assign(static_cast<T*>(layer.keys)[at + i], key[i]);
      for (int64_t i = 0; i < D; ++i) assign(static_cast<T*>(layer.values)[at + i], value[i]);
    }
  }

  // Norm, where the architecture has one, and rotary embedding of one head of a token.
  void rotate(float* x, const float* norm, int64_t position) {
    const int64_t D = model_.head_dim, half = D / 2;
    if (norm != nullptr) {
      const float factor = norm_factor(x, D, model_.epsilon);
      for (int64_t i = 0; i < D; ++i) x[i] *= factor * norm[i];
    }
    const float *cos = model_.cos + position * half, *sin = model_.sin + position * half;
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cos[i] - b * sin[i];
      x[i + half] = b * cos[i] + a * sin[i];
    }
  }

  // Attention of the queries first.. of the group of heads that shares a KV head; query t * group + h is head h of the
  // sequence's token t.
  void attend(const Layer& layer, int64_t s, int64_t kv_head, int64_t first) {
    const int64_t D = model_.head_dim, thread = omp_get_thread_num(), stride = greatest_rows(model_);
    const int count = int(std::min<int64_t>(kTokens, group_ * num_tokens(s) - first));
    View views[kTokens];
    for (int c = 0; c < count; ++c) {
      int32_t* scratch = space_.scratch + (thread * kTokens + c) * stride;
      views[c] = view_of(pass_, space_.runs, layer.window, s, num_earlier(s) + (first + c) / group_, scratch);
    }
    const int64_t start = cache_row(s, kv_head, 0);
    SharedAttention<T> attention(views, count, static_cast<const T*>(layer.keys) + start,
                                 static_cast<const T*>(layer.values) + start, D,
                                 space_.scores + thread * kTokens * stride, stride);
    attention.score(queries_of(s, kv_head).at(first, 0), model_.scale);
    attention.mix([&](int c, int64_t d, auto values) {
      const int64_t m = pass_.starts[s] + (first + c) / group_, k = (kv_head * group_ + (first + c) % group_) * D + d;
      if constexpr (std::is_same_v<decltype(values), float>) {
        mixed_.put(m, k, values);
      } else if (k % kLanes == 0) {
        mixed_.put(m, k, values);
      } else {
        for (int i = 0; i < kLanes; ++i) mixed_.put(m, k + i, values[i]);
      }
    });
  }

  // Rotated queries of all tokens of a sequence and of the heads that share a KV head. They take no more than as many
  // times the room of one token's queries.
  Inputs<T> queries_of(int64_t s, int64_t kv_head) const {
    const int64_t D = model_.head_dim, first = pass_.starts[s] * model_.kv_heads * Inputs<T>::size(group_, D);
    return {space_.rotated + first + kv_head * Inputs<T>::size(group_ * num_tokens(s), D), D, false};
  }

  int64_t cache_row(int64_t s, int64_t head, int64_t row) const {
    return ((pass_.slots[s] * model_.kv_heads + head) * model_.capacity + row) * model_.head_dim;
  }

  int64_t num_tokens(int64_t s) const { return pass_.starts[s + 1] - pass_.starts[s]; }
  int64_t num_earlier(int64_t s) const { return pass_.node_starts[s + 1] - pass_.node_starts[s] - num_tokens(s); }
  int64_t chunks_of(int64_t s) const { return (group_ * num_tokens(s) + kTokens - 1) / kTokens; }  // portions of kTokens queries

  bool wants(int64_t tap) const { return std::binary_search(pass_.taps, pass_.taps + pass_.num_taps, tap); }

  float* features(int64_t tap) const {
    const int64_t index = std::lower_bound(pass_.taps, pass_.taps + pass_.num_taps, tap) - pass_.taps;
    return pass_.features + index * rows_ * model_.hidden;
  }

  void keep_features(int64_t tap) {
    if (!wants(tap)) return;
    float* out = features(tap);
    share(rows_, [&](int64_t m) {
      std::copy_n(space_.residual + m * model_.hidden, model_.hidden, out + m * model_.hidden);
    });
  }

  void keep_final() {
    float* out = features(model_.num_layers + 1);
    share(rows_, [&](int64_t m) {
      for (int64_t k = 0; k < model_.hidden; ++k) out[m * model_.hidden + k] = to_float(*normed_.at(m, k));
    });
  }

  const Model& model_;
  const Pass& pass_;
  const int64_t rows_;
  const Workspace<T> space_;
  const Inputs<T> normed_, mixed_, inner_;
  const int64_t group_;  // query heads a KV head
};

bool all_within(const int64_t* values, int64_t count, int64_t end) {
  // One comparison a value: a negative one is a large unsigned one.
  return std::all_of(values, values + count, [&](int64_t value) { return uint64_t(value) < uint64_t(end); });
}

// Whether a pass stays within the model's tables, the cache and its own buffers.
Status check(const Model& model, const Pass& pass) {
  if ((pass.tokens == nullptr && pass.inputs == nullptr) || pass.positions == nullptr || pass.parents == nullptr ||
      pass.slots == nullptr || pass.prefix == nullptr || pass.starts == nullptr || pass.node_starts == nullptr ||
      pass.workspace == nullptr || (pass.num_taps > 0 && pass.features == nullptr) ||
      (pass.logits != nullptr && pass.logit_rows == nullptr)) {
    return Status::kMissing;
  }
  const int64_t S = pass.num_sequences, *starts = pass.starts, *node_starts = pass.node_starts;
  if (starts[0] != 0 || node_starts[0] != 0) return Status::kSequences;
  for (int64_t s = 0; s < S; ++s) {
    const int64_t count = starts[s + 1] - starts[s], nodes = node_starts[s + 1] - node_starts[s];
    if (count < 1 || nodes < count) return Status::kSequences;
    if (nodes > model.capacity || pass.prefix[s] < 0 || pass.prefix[s] > model.capacity - nodes) return Status::kCacheRows;
    for (int64_t t = 0; t < nodes; ++t) {
      const int64_t parent = pass.parents[node_starts[s] + t];
      if (parent < -1 || parent >= t) return Status::kParents;  // ancestors come before
    }
  }
  const int64_t M = starts[S];
  if (pass.num_threads < 1 || pass.num_threads > std::numeric_limits<int>::max()) return Status::kThreads;
  if (pass.inputs == nullptr && !all_within(pass.tokens, M, model.vocab)) return Status::kTokens;
  if (!all_within(pass.positions, node_starts[S], model.num_positions)) return Status::kPositions;
  if (!all_within(pass.slots, S, model.num_slots)) return Status::kSlots;
  if (pass.logits == nullptr) return Status::kDone;
  int64_t last = -1;  // ascending, so that there are at most M
  for (int64_t r = 0; r < pass.num_logits; ++r) {
    if (pass.logit_rows[r] <= last || pass.logit_rows[r] >= M) return Status::kLogitRows;
    last = pass.logit_rows[r];
  }
  return pass.num_logits < 1 ? Status::kLogitRows : Status::kDone;
}

template <class T>
void decode(const Model& model, const Pass& pass) {
  Decoder<T> decoder(model, pass);
#pragma omp parallel num_threads(int(pass.num_threads))
  decoder.run();
}

}  // namespace

extern "C" {

// -1 where that is beyond what 64 bits count.
int64_t foretoken_workspace_bytes(const Model* model, int64_t num_nodes, int64_t num_threads) {
  return model->is_bfloat16 ? Workspace<Bfloat16>(*model, num_nodes, num_threads, nullptr).size
                            : Workspace<float>(*model, num_nodes, num_threads, nullptr).size;
}

// Gives a `Status`; a pass that is refused has written nothing.
Status foretoken_decode(const Model* model, const Pass* pass) {
  if (pass->num_sequences < 1) return Status::kDone;
  const Status status = check(*model, *pass);
  if (status != Status::kDone) return status;
  model->is_bfloat16 ? decode<Bfloat16>(*model, *pass) : decode<float>(*model, *pass);
  return Status::kDone;
}

// y (M, rows) = x (M, cols) times the transposed matrix, and its bias; x and y row-major. Gives a `Status`.
Status foretoken_linear(const Matrix* matrix, int64_t is_bfloat16, const float* x, int64_t M, float* y, int64_t num_threads) {
  if (M < 1 || matrix->rows < 1) return Status::kDone;
  if (matrix->weight == nullptr || x == nullptr || y == nullptr) return Status::kMissing;
  if (num_threads < 1 || num_threads > std::numeric_limits<int>::max()) return Status::kThreads;
  const auto run = [&](auto type) {
    using T = decltype(type);
    std::vector<typename Inputs<T>::Token> data(size_t(M == 1 ? Inputs<T>::padded(matrix->cols) : Inputs<T>::size(M, matrix->cols)));
    const Inputs<T> inputs(data.data(), matrix->cols, M == 1);
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t k = 0; k < matrix->cols; ++k) inputs.put(m, k, x[m * matrix->cols + k]);
    }
#pragma omp parallel num_threads(int(num_threads))
    multiply(*matrix, inputs, M, [&](int64_t m, int64_t n, auto count, const float* values) {
      for (int i = 0; i < count; ++i) y[m * matrix->rows + n + i] = values[i];
    });
  };
  try {
    is_bfloat16 ? run(Bfloat16{}) : run(float{});
  } catch (const std::exception&) {  // of the allocation: it must not cross into C
    return Status::kNoMemory;
  }
  return Status::kDone;
}

}  // extern "C"

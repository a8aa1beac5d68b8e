// The forward pass of a decoder on the CPU, for few tokens at a time: one token, or a tree of tokens.
//
// Weights stay where the caller keeps them, not copied, each read once a pass: row-major, or in integers. A row of
// weights times a token is one dot product. A weight in a register is multiplied with every token of the tree before the
// next weight is loaded. A pass therefore costs the reading of the weights, until arithmetic takes longer than memory.
//
// The order of every sum depends on the model alone, not on the number of tokens or sequences in the pass. A token's
// logits have the same bits, whether it is decoded alone or in a tree beside others. (Scalar loops call std::fma for
// this reason: a compiler that vectorises some of their steps would round those twice.)
//
// Letters: S sequences, M tokens of a pass, W nodes of its trees, R rows of logits, K and N inputs and outputs of a
// matrix.

#include <atomic>
#include <cstdint>
#include <exception>
#include <iterator>
#include <limits>
#include <memory>

#include <omp.h>

#include "decoder.h"
#include "gemm.h"
#include "integer_tiles.h"
#include "interface.h"
#include "quantized.h"
#include "rows.h"
#include "stored_blocks.h"
#include "tiles.h"
#include "workspace.h"

namespace {

// Calls run(T) with the dtype of a model.
template <class Run>
auto with_dtype(const Model& model, Run&& run) {
  return model.is_bfloat16 ? run(Bfloat16{}) : run(float{});
}

}  // namespace

extern "C" {

// -1 if 64 bits cannot count the bytes.
int64_t foretoken_workspace_bytes(const Model* model, int64_t num_nodes, int64_t num_threads, int64_t num_attention, int64_t num_replayed) {
  return with_dtype(*model, [&](auto type) {
    return Workspace<decltype(type)>(*model, num_nodes, num_threads, nullptr, num_attention, num_replayed).size;
  });
}

// Returns a `Status`; a refused pass writes nothing.
Status foretoken_decode(const Model* model, const Pass* pass) {
  if (pass->num_sequences < 1) return Status::kDone;
  const Status status = check(*model, *pass);
  if (status != Status::kDone) return status;
  with_dtype(*model, [&](auto type) {
    Decoder<decltype(type)> decoder(*model, *pass);
#pragma omp parallel num_threads(int(pass->num_threads))
    decoder.run();
  });
  return Status::kDone;
}

// y (M, rows) = x (M, cols) times the transposed matrix, plus its bias; x and y row-major. is_bfloat16: the dtype of the
// matrix; for one in integers, the dtype that inputs take before they are rounded to integers. Returns a `Status`.
Status foretoken_linear(const Matrix* matrix, int64_t is_bfloat16, const float* x, int64_t M, float* y, int64_t num_threads) {
  if (M < 1 || matrix->rows < 1) return Status::kDone;
  if (matrix->weight == nullptr || x == nullptr || y == nullptr) return Status::kMissing;
  if (num_threads < 1 || num_threads > std::numeric_limits<int>::max()) return Status::kThreads;
  const auto run = [&](auto type) {
    using T = decltype(type);
    using Token = typename MatrixInputs<T>::Token;
    const int64_t K = matrix->cols;
    const std::unique_ptr<Token[]> data(new Token[size_t(MatrixInputs<T>::size(M, K))]);
    const std::unique_ptr<char[]> rounded(matrix->bits == 0 ? nullptr : new char[size_t(most_inputs(M) * rounded_bytes(K))]);
    const MatrixInputs<T> inputs(data.get(), M, K, rounded.get());
    Barrier barrier;
#pragma omp parallel num_threads(int(num_threads))
    {
      share(M, [&](int64_t m) {
        normalise_row(Norm{}, x + m * K, K, [&](int64_t k, auto values) { inputs.put(m, k, values); });
      });
      barrier.wait();
      if (matrix->bits != 0) {
        round_inputs(inputs, M, *matrix, matrix->group_offsets != nullptr);
        barrier.wait();
      }
      multiply_into(*matrix, inputs, M, y);
    }
  };
  try {
    is_bfloat16 ? run(Bfloat16{}) : run(float{});
  } catch (const std::exception&) {  // the allocation failed; exceptions must not cross into C
    return Status::kNoMemory;
  }
  return Status::kDone;
}

// Copies listed rows of P parts, such as the keys of one head: row lists[p][i] of part p becomes row i of `to`. lists:
// (P,) addresses of (count,) rows below `capacity`; row_bytes: (P,). Returns a `Status`; a refused call copies nothing.
Status foretoken_gather(const char* const* from, char* const* to, const int64_t* const* lists, const int64_t* row_bytes, int64_t P, int64_t count, int64_t capacity, int64_t num_threads) {
  for (int64_t p = 0; p < P; ++p) {
    if ((p == 0 || lists[p] != lists[p - 1]) && !all_within(lists[p], count, capacity)) return Status::kCacheRows;
  }
#pragma omp parallel num_threads(int(num_threads))
  share(P, [&](int64_t p) { copy_listed(from[p], to[p], lists[p], count, row_bytes[p]); });
  return Status::kDone;
}

// Stores a matrix of a GGUF file in panels. Returns a `Status`: `kNotFinite` for scales that are NaN or infinite.
Status foretoken_store_blocks(const StoredBlocks* stored, int64_t num_threads) {
  if (stored->kind < 0 || stored->kind >= std::ssize(kBlockForms) || stored->cols % kBlockForms[stored->kind].weights != 0) return Status::kShape;
  const BlockForm& form = kBlockForms[stored->kind];
  if (form.has_table && stored->table == nullptr) return Status::kMissing;
  if (form.scale_kind == kCoded && (stored->super_scales == nullptr || (form.has_offsets && stored->super_offsets == nullptr))) return Status::kMissing;
  if (stored->order != nullptr && !all_within(stored->order, stored->rows, stored->rows)) return Status::kShape;
  std::atomic<bool> is_finite{true};
#pragma omp parallel num_threads(int(num_threads))
  share((stored->rows + kPanelRows - 1) / kPanelRows, [&](int64_t panel) {
    if (!StoredPanel(*stored, panel).fill()) is_finite = false;
  });
  return is_finite ? Status::kDone : Status::kNotFinite;
}

// Writes the weights (rows, cols) that a matrix in integers stands for, in float32.
Status foretoken_dequantize(const Matrix* matrix, float* weights, int64_t num_threads) {
#pragma omp parallel num_threads(int(num_threads))
  share(matrix->rows, [&](int64_t row) { decode_row(*matrix, false, row, weights + row * matrix->cols); });
  return Status::kDone;
}

}  // extern "C"

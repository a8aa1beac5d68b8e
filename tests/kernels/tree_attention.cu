// Attention of tree nodes over a slot cache, written for plainness: what the Triton kernels are checked against.
//
// One block per (node, query head, sequence). The block lists the cache rows that its node sees: the prefix inside the
// sliding window, then the node itself and its ancestors, found by walking `parents`. So there is no mask, and no other
// row is ever read. Scores of a chunk of those keys lie in shared memory; chunks are joined by an online softmax.
//
// No header and no warp intrinsic: NVRTC compiles it without an include path, and a C++ compiler for the CPU, where
// tests run this very text. Number formats are converted by hand for the same reason.

struct TreeAttention {
    const void *query, *keys, *values;
    void *output;          // (B, T, H, Dv), contiguous
    const int *slots;      // (B,)
    const int *prefix;     // (B,)
    const int *positions;  // (B, T)
    const int *parents;    // (B, T), -1 at the root and at padding; null: causal, the parent of t is t - 1
    const float *sinks;    // (H,), or null
    long long query_strides[3], key_strides[3], value_strides[3];  // in elements; the last dimension is contiguous
    int kv_heads, key_width, value_width;
    int window;            // 0: none
    int chunk;             // keys whose scores fit in shared memory at once
    float scale;
    float softcap;         // 0: none
};

struct Half {
    unsigned short bits;
};

struct Bfloat16 {
    unsigned short bits;
};

__device__ inline float to_float(float value) { return value; }

__device__ inline float to_float(Bfloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }

__device__ inline float to_float(Half value) {
    const unsigned sign = (value.bits & 0x8000u) << 16, rest = (value.bits & 0x7fffu) << 13;
    if ((value.bits & 0x7c00u) == 0x7c00u) return __uint_as_float(sign | 0x7f800000u | rest);  // infinities, NaN
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest) * 0x1p112f));  // exponent bias 15 to 127
}

__device__ inline void store(float *to, float value) { *to = value; }

__device__ inline void store(Bfloat16 *to, float value) {
    const unsigned bits = __float_as_uint(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to->bits = is_nan ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;  // nearest, ties to even
}

__device__ inline void store(Half *to, float value) {
    const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    unsigned half;
    if (rest > 0x7f800000u) {
        half = 0x7fffu;
    } else if (rest < 0x38800000u) {  // subnormal halves are multiples of 2^-24, the last place of floats in [0.5, 1)
        half = __float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000u;
    } else {
        half = (rest + 0xfffu + (rest >> 13 & 1u) - 0x38000000u) >> 13;  // nearest, ties to even
        half = half < 0x7c00u ? half : 0x7c00u;
    }
    to->bits = sign | half;
}

struct Sum {
    __device__ float operator()(float left, float right) const { return left + right; }
};

struct Maximum {
    __device__ float operator()(float left, float right) const { return fmaxf(left, right); }
};

// The threads' values combined, for every thread. `partial` holds a float per thread; their number is a power of two.
template <typename Combine>
__device__ float block_reduce(float value, float *partial, Combine combine) {
    partial[threadIdx.x] = value;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) partial[threadIdx.x] = combine(partial[threadIdx.x], partial[threadIdx.x + half]);
    }
    __syncthreads();
    const float result = partial[0];
    __syncthreads();  // all have read it before the next reduction writes
    return result;
}

// The scratch rows that a node sees: itself and its ancestors, less those outside the window.
__device__ inline int list_path(int window, const int *parents, const int *positions, int node, int *path) {
    int length = 0;
    for (int row = node; row >= 0; row = parents ? parents[row] : row - 1) {
        if (window == 0 || positions[node] - positions[row] < window) path[length++] = row;
    }
    return length;
}

template <typename Element>
__device__ void attend(const TreeAttention &pass) {
    const int node = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
    const int nodes = gridDim.x, heads = gridDim.y, threads = blockDim.x, thread = threadIdx.x;
    const int kv_head = head / (heads / pass.kv_heads);
    const int *positions = pass.positions + static_cast<long long>(sequence) * nodes;
    const int *parents = pass.parents ? pass.parents + static_cast<long long>(sequence) * nodes : nullptr;
    const long long slot = pass.slots[sequence];
    const int prefix = pass.prefix[sequence];
    const Element *keys =
        static_cast<const Element *>(pass.keys) + slot * pass.key_strides[0] + kv_head * pass.key_strides[1];
    const Element *values =
        static_cast<const Element *>(pass.values) + slot * pass.value_strides[0] + kv_head * pass.value_strides[1];
    const Element *query_row = static_cast<const Element *>(pass.query) + sequence * pass.query_strides[0] +
                               head * pass.query_strides[1] + node * pass.query_strides[2];

    extern __shared__ float shared_memory[];
    float *query = shared_memory;                     // key_width
    float *mixture = query + pass.key_width;          // value_width: the weighted sum of values so far
    float *partial = mixture + pass.value_width;      // a float per thread
    float *weights = partial + threads;               // chunk: scores, then their exponentials
    int *path_length = reinterpret_cast<int *>(weights + pass.chunk);
    int *path = path_length + 1;                      // nodes

    for (int column = thread; column < pass.key_width; column += threads) query[column] = to_float(query_row[column]);
    for (int column = thread; column < pass.value_width; column += threads) mixture[column] = 0.0f;
    if (thread == 0) *path_length = list_path(pass.window, parents, positions, node, path);
    __syncthreads();

    // Row r of the prefix holds position r.
    const int reach = pass.window == 0 ? 0 : positions[node] - pass.window + 1;
    const int first = reach < 0 ? 0 : reach < prefix ? reach : prefix;
    const int seen_prefix = prefix - first, num_keys = seen_prefix + *path_length;
    const auto cache_row = [&](int key) -> long long {
        return key < seen_prefix ? first + key : prefix + path[key - seen_prefix];
    };

    // A sink is a key with a score and no value.
    float maximum = pass.sinks ? pass.sinks[head] : -__uint_as_float(0x7f800000u);
    float total = pass.sinks ? 1.0f : 0.0f;
    for (int start = 0; start < num_keys; start += pass.chunk) {
        const int count = num_keys - start < pass.chunk ? num_keys - start : pass.chunk;
        float highest = maximum;
        for (int index = thread; index < count; index += threads) {
            const Element *key = keys + cache_row(start + index) * pass.key_strides[2];
            float score = 0.0f;
            for (int column = 0; column < pass.key_width; ++column) score += query[column] * to_float(key[column]);
            score *= pass.scale;
            if (pass.softcap != 0.0f) score = tanhf(score / pass.softcap) * pass.softcap;
            weights[index] = score;
            highest = fmaxf(highest, score);
        }
        highest = block_reduce(highest, partial, Maximum());

        float sum = 0.0f;
        for (int index = thread; index < count; index += threads) {
            weights[index] = expf(weights[index] - highest);
            sum += weights[index];
        }
        const float rescale = expf(maximum - highest);
        total = total * rescale + block_reduce(sum, partial, Sum());
        maximum = highest;

        for (int column = thread; column < pass.value_width; column += threads) {
            float mixed = mixture[column] * rescale;
            for (int index = 0; index < count; ++index) {
                mixed += weights[index] * to_float(values[cache_row(start + index) * pass.value_strides[2] + column]);
            }
            mixture[column] = mixed;
        }
        __syncthreads();  // all weights are used before the next chunk's scores
    }

    Element *output = static_cast<Element *>(pass.output) +
                      ((static_cast<long long>(sequence) * nodes + node) * heads + head) * pass.value_width;
    for (int column = thread; column < pass.value_width; column += threads) {
        store(output + column, mixture[column] / total);
    }
}

extern "C" __global__ void tree_attention_float32(TreeAttention pass) { attend<float>(pass); }

extern "C" __global__ void tree_attention_float16(TreeAttention pass) { attend<Half>(pass); }

extern "C" __global__ void tree_attention_bfloat16(TreeAttention pass) { attend<Bfloat16>(pass); }

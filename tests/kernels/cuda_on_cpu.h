// Runs CUDA kernels on the CPU: included before a .cu file, it makes of it a shared library with a CUDA driver inside.
//
// A block's threads are threads, __syncthreads is a barrier, blocks run one after the other. The driver's functions
// are those that foretoken/attention/cuda_compile.py calls. The image of a module is the path of this very library.
// Each call is checked as far as it can be: sizes within a GPU's limits, a context current, shared memory not overrun.
// Kernels take one struct by value and use no warp intrinsic; their shared memory is `float shared_memory[]`.

#pragma once

#include <algorithm>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <thread>
#include <vector>

struct Dimensions {
    unsigned x, y, z;
};

inline thread_local Dimensions threadIdx, blockIdx, blockDim, gridDim;

constexpr size_t SHARED_BYTES = 227 * 1024, ORDINARY_SHARED_BYTES = 48 * 1024, GUARD_BYTES = 4096;
float shared_memory[(SHARED_BYTES + GUARD_BYTES) / sizeof(float)];

inline std::unique_ptr<std::barrier<>> block_barrier;
inline int skipped_line = 0;  // tests of the barriers themselves leave out the one in this line

inline void synchronize_threads(int line) {
    if (line != skipped_line) block_barrier->arrive_and_wait();
}

#define __global__
#define __device__
#define __shared__
#define __syncthreads() synchronize_threads(__LINE__)

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }

// Bytes of value 0xff: uninitialised shared memory reads as NaN, or as -1.
inline bool guard_is_whole(size_t shared_bytes) {
    const auto *bytes = reinterpret_cast<const unsigned char *>(shared_memory);
    const auto is_poison = [](unsigned char byte) { return byte == 0xff; };
    return std::all_of(bytes + shared_bytes, bytes + shared_bytes + GUARD_BYTES, is_poison);
}

// Returns whether every block stayed within its shared memory.
template <typename Argument>
bool run_kernel(void (*kernel)(Argument), const Argument &argument, Dimensions grid, unsigned threads,
                size_t shared_bytes) {
    block_barrier = std::make_unique<std::barrier<>>(threads);
    bool is_whole = true;
    const auto run_thread = [&](unsigned thread) {
        threadIdx = {thread, 0, 0}, blockDim = {threads, 1, 1}, gridDim = grid;
        for (unsigned block = 0; block < grid.x * grid.y * grid.z; ++block) {
            blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
            if (thread == 0) std::memset(shared_memory, 0xff, shared_bytes + GUARD_BYTES);
            block_barrier->arrive_and_wait();
            kernel(argument);
            block_barrier->arrive_and_wait();
            if (thread == 0) is_whole &= guard_is_whole(shared_bytes);
        }
    };
    std::vector<std::thread> block;
    for (unsigned thread = 0; thread < threads; ++thread) block.emplace_back(run_thread, thread);
    for (auto &thread : block) thread.join();
    return is_whole;
}

enum Status {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    OVERRUN = 700,
};

inline int current_contexts = 0;
inline size_t allowed_shared_bytes = ORDINARY_SHARED_BYTES;

int launch_on_cpu(void *kernel, Dimensions grid, unsigned threads, size_t shared_bytes, void *argument);

// Stands after the kernels, where their struct is known.
#define KERNELS_TAKE(Argument)                                                                                     \
    int launch_on_cpu(void *kernel, Dimensions grid, unsigned threads, size_t shared_bytes, void *argument) {      \
        const auto entry = reinterpret_cast<void (*)(Argument)>(kernel);                                           \
        const bool is_whole = run_kernel(entry, *static_cast<Argument *>(argument), grid, threads, shared_bytes);  \
        return is_whole ? SUCCESS : OVERRUN;                                                                       \
    }                                                                                                              \
    extern "C" size_t argument_bytes() { return sizeof(Argument); }

extern "C" {

int cuInit(unsigned flags) { return flags == 0 ? SUCCESS : INVALID_VALUE; }

int cuDeviceGet(int *device, int ordinal) {
    *device = 70 + ordinal;  // a handle is no index
    return ordinal == 0 ? SUCCESS : INVALID_VALUE;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = SHARED_BYTES;
    return attribute == 97 && device == 70 ? SUCCESS : INVALID_VALUE;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &current_contexts;
    return device == 70 ? SUCCESS : INVALID_VALUE;
}

int cuCtxPushCurrent_v2(void *context) {
    ++current_contexts;
    return context == &current_contexts ? SUCCESS : INVALID_CONTEXT;
}

int cuCtxPopCurrent_v2(void **context) {
    *context = &current_contexts;
    return current_contexts-- == 1 ? SUCCESS : INVALID_CONTEXT;
}

int cuModuleLoadData(void **module, const char *image) {
    if (current_contexts != 1) return INVALID_CONTEXT;
    *module = dlopen(image, RTLD_NOW | RTLD_NOLOAD);
    return *module ? SUCCESS : INVALID_IMAGE;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    if (current_contexts != 1) return INVALID_CONTEXT;
    *function = dlsym(module, name);
    return *function ? SUCCESS : NOT_FOUND;
}

int cuFuncSetAttribute(void *, int attribute, int value) {
    if (attribute != 8 || value > static_cast<int>(SHARED_BYTES)) return INVALID_VALUE;
    allowed_shared_bytes = value;
    return SUCCESS;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters,
                   void **extra) {
    if (current_contexts != 1) return INVALID_CONTEXT;
    const bool is_valid = grid_x > 0 && grid_y > 0 && grid_y < 65536 && grid_z > 0 && grid_z < 65536 && threads > 0 &&
                          threads <= 1024 && block_y == 1 && block_z == 1 && shared_bytes <= allowed_shared_bytes;
    allowed_shared_bytes = ORDINARY_SHARED_BYTES;
    if (!is_valid || stream != nullptr || extra != nullptr) return INVALID_VALUE;
    return launch_on_cpu(function, {grid_x, grid_y, grid_z}, threads, shared_bytes, parameters[0]);
}

int cuGetErrorString(int status, const char **text) {
    *text = status == OVERRUN ? "a block wrote past its shared memory" : "refused by the driver of the tests";
    return SUCCESS;
}
}

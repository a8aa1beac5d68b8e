// Runs CUDA kernels on the CPU: included before a .cu file, it makes of it a shared library with a CUDA driver inside.
//
// A block's threads take turns, each up to the next __syncthreads, and blocks run one after the other. Under
// ThreadSanitizer they are threads, and __syncthreads is a barrier. The driver's functions are those that
// foretoken/attention/cuda_tree.py calls. The image of a module is the path of this very library.
// Each call is checked as far as it can be: sizes within a GPU's limits, a context current, shared memory not overrun.
// Kernels take one struct by value and use no warp intrinsic; their shared memory is `float shared_memory[]`.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <memory>
#include <vector>

#ifdef __SANITIZE_THREAD__
#include <barrier>
#include <thread>
#else
#include <ucontext.h>
#endif

enum Status {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    OVERRUN = 700,
    DIVERGED = 719,
};

struct Dimensions {
    unsigned x, y, z;
};

inline thread_local Dimensions threadIdx, blockIdx, blockDim, gridDim;

constexpr size_t SHARED_BYTES = 227 * 1024, ORDINARY_SHARED_BYTES = 48 * 1024, GUARD_BYTES = 4096;
float shared_memory[(SHARED_BYTES + GUARD_BYTES) / sizeof(float)];

inline int skipped_line = 0;  // tests of the barriers themselves leave out the one in this line

#ifdef __SANITIZE_THREAD__

inline std::unique_ptr<std::barrier<>> block_barrier;

inline void synchronize_threads(int line) {
    if (line != skipped_line) block_barrier->arrive_and_wait();
}

inline Status run_block(unsigned threads, const std::function<void()> &body) {
    block_barrier = std::make_unique<std::barrier<>>(threads);
    const Dimensions index = blockIdx, block = blockDim, grid = gridDim;
    std::vector<std::thread> all;
    for (unsigned thread = 0; thread < threads; ++thread) {
        all.emplace_back([&, thread] {
            threadIdx = {thread, 0, 0}, blockIdx = index, blockDim = block, gridDim = grid;
            body();
        });
    }
    for (auto &thread : all) thread.join();
    return SUCCESS;
}

#else

constexpr size_t STACK_BYTES = 64 * 1024;

struct Turn {
    ucontext_t context;
    std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(STACK_BYTES);
    bool is_done = false;
};

inline std::vector<Turn> turns;  // of the block's threads
inline ucontext_t between_turns;
inline const std::function<void()> *whole_turn;

inline void synchronize_threads(int line) {
    if (line != skipped_line) swapcontext(&turns[threadIdx.x].context, &between_turns);
}

inline void take_whole_turn() {
    (*whole_turn)();
    turns[threadIdx.x].is_done = true;
}

// Between two barriers threads run from the last to the first, and then from the first to the last: what one has to
// have done before another is not done by luck.
inline Status run_block(unsigned threads, const std::function<void()> &body) {
    turns.resize(threads), whole_turn = &body;
    for (Turn &turn : turns) {
        getcontext(&turn.context);
        turn.context.uc_stack = {turn.stack.get(), 0, STACK_BYTES}, turn.context.uc_link = &between_turns;
        makecontext(&turn.context, take_whole_turn, 0);
        turn.is_done = false;
    }
    for (bool is_backwards = true;; is_backwards = !is_backwards) {
        for (unsigned place = 0; place < threads; ++place) {
            threadIdx = {is_backwards ? threads - 1 - place : place, 0, 0};
            swapcontext(&between_turns, &turns[threadIdx.x].context);
        }
        const auto num_done = std::count_if(turns.begin(), turns.end(), [](const Turn &turn) { return turn.is_done; });
        if (num_done) return num_done == threads ? SUCCESS : DIVERGED;
    }
}

#endif

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

// Refuses a block that left its shared memory, and one of which some threads ended where others wait.
template <typename Argument>
Status run_kernel(void (*kernel)(Argument), const Argument &argument, Dimensions grid, unsigned threads,
                  size_t shared_bytes) {
    const std::function<void()> body = [&] { kernel(argument); };
    blockDim = {threads, 1, 1}, gridDim = grid;
    for (unsigned block = 0; block < grid.x * grid.y * grid.z; ++block) {
        blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
        std::memset(shared_memory, 0xff, shared_bytes + GUARD_BYTES);
        if (const Status status = run_block(threads, body); status != SUCCESS) return status;
        if (!guard_is_whole(shared_bytes)) return OVERRUN;
    }
    return SUCCESS;
}

inline int current_contexts = 0;
inline size_t allowed_shared_bytes = ORDINARY_SHARED_BYTES;

int launch_on_cpu(void *kernel, Dimensions grid, unsigned threads, size_t shared_bytes, void *argument);

// Stands after the kernels, where their struct is known.
#define KERNELS_TAKE(Argument)                                                                                     \
    int launch_on_cpu(void *kernel, Dimensions grid, unsigned threads, size_t shared_bytes, void *argument) {      \
        const auto entry = reinterpret_cast<void (*)(Argument)>(kernel);                                           \
        return run_kernel(entry, *static_cast<Argument *>(argument), grid, threads, shared_bytes);                 \
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
    *text = status == OVERRUN    ? "a block wrote past its shared memory"
            : status == DIVERGED ? "threads of a block ended while others waited for them"
                                 : "refused by the driver of the tests";
    return SUCCESS;
}
}

// Barrier of the threads of a pass, reached several times a layer.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include <omp.h>

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
      phase_.store(phase + 1, std::memory_order_release);
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
  static constexpr int kLooks = 2000;  // some 20 to 100 microseconds

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

}  // namespace

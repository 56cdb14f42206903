#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define STARQUILL_FORKS
#endif

namespace starquill {
namespace {

// Between two matrices of a model a few tens of microseconds pass: a worker that sleeps sooner
// would have to be woken for each of them.
constexpr auto kSpin = std::chrono::microseconds(200);

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Loop {
  Body body = nullptr;
  void* context = nullptr;
  int64_t count = 0;
  int64_t grain = 1;
};

class Pool {
 public:
  void run(int threads, const Loop& loop) {
    grow(threads - 1);
    loop_ = loop;
    next_.store(0, std::memory_order_relaxed);
    limit_.store(threads - 1, std::memory_order_relaxed);
    state_.store(kOpen, std::memory_order_release);
    turn_.fetch_add(1, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) turn_.notify_all();
    work();
    // A worker that has not come yet is not waited for: it finds the loop closed.
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    while (state_.load(std::memory_order_acquire) != 0) relax();
  }

  std::mutex taken;

 private:
  static constexpr int kOpen = 1 << 30;  // the rest of `state_` counts who has joined

  void grow(int wanted) {
    for (; workers_ < wanted; ++workers_) {
      std::thread([this, seen = turn_.load()] { serve(seen); }).detach();
    }
  }

  void work() {
    for (;;) {
      int64_t begin = next_.fetch_add(loop_.grain, std::memory_order_relaxed);
      if (begin >= loop_.count) return;
      loop_.body(loop_.context, begin, std::min(begin + loop_.grain, loop_.count));
    }
  }

  bool join() {
    int state = state_.load(std::memory_order_acquire);
    while ((state & kOpen) != 0 && (state & ~kOpen) < limit_.load(std::memory_order_relaxed))
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) return true;
    return false;
  }

  [[noreturn]] void serve(uint32_t seen) {
    for (;;) {
      seen = wait(seen);
      if (!join()) continue;
      work();
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  uint32_t wait(uint32_t seen) {
    auto until = std::chrono::steady_clock::now() + kSpin;
    for (int i = 0;; ++i) {
      uint32_t now = turn_.load(std::memory_order_acquire);
      if (now != seen) return now;
      relax();
      if (i % 64 == 63 && std::chrono::steady_clock::now() > until) break;
    }
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    turn_.wait(seen, std::memory_order_seq_cst);
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
    return turn_.load(std::memory_order_acquire);
  }

  Loop loop_;
  std::atomic<int64_t> next_{0};
  std::atomic<int> limit_{0};
  std::atomic<int> state_{0};
  std::atomic<uint32_t> turn_{0};
  std::atomic<int> sleeping_{0};
  int workers_ = 0;
};

// Never destroyed: threads may still wait on it when the process ends.
Pool* pool = new Pool;

#ifdef STARQUILL_FORKS
// A forked child has none of its parent's threads: it starts with a pool of its own.
const int forks = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
#endif

int (*openmp_pause)(int) = nullptr;
constexpr int kPauseSoft = 1;

}  // namespace

void set_openmp_pause(int (*pause)(int)) { openmp_pause = pause; }

void parallel(int threads, int64_t count, int64_t grain, Body body, void* context) {
  if (count <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  int64_t pieces = (count + grain - 1) / grain;
  threads = static_cast<int>(std::min<int64_t>(threads, pieces));
  Pool* mine = pool;
  std::unique_lock<std::mutex> lock(mine->taken, std::defer_lock);
  if (threads <= 1 || !lock.try_lock()) {
    // The same pieces as with threads: what a body computes must not depend on who else runs.
    for (int64_t begin = 0; begin < count; begin += grain)
      body(context, begin, std::min(begin + grain, count));
    return;
  }
  if (openmp_pause) openmp_pause(kPauseSoft);
  mine->run(threads, {body, context, count, grain});
}

}  // namespace starquill

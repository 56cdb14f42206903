// Threads that share a loop. One pool a process; the caller works too.
#pragma once

#include <cstdint>

namespace starquill {

using Body = void (*)(void* context, int64_t begin, int64_t end);

// Run `body` over [0, count) in pieces of `grain`, on at most `threads` threads. Returns when all
// is done. A caller that finds the pool taken by another runs its loop alone.
void parallel(int threads, int64_t count, int64_t grain, Body body, void* context);

// OpenMP's `omp_pause_resource_all`, or null. OpenMP's threads go on spinning for up to half a
// second after each of torch's parallel loops, on the cores that ours need: before a loop of ours
// the caller's are ended. They come back, in some 50 us, with torch's next loop.
void set_openmp_pause(int (*pause)(int));

template <class F>
void parallel_for(int threads, int64_t count, int64_t grain, F&& f) {
  auto body = [](void* context, int64_t begin, int64_t end) {
    (*static_cast<F*>(context))(begin, end);
  };
  parallel(threads, count, grain, body, &f);
}

// Elements that are worth a thread's while.
constexpr int64_t kElements = 1 << 14;

}  // namespace starquill

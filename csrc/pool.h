// Threads that share a loop. One pool a process; the caller works too.
#pragma once

#include <cstdint>

namespace starquill {

using Body = void (*)(void* context, int64_t begin, int64_t end);

// Run `body` over [0, count) in pieces of `grain`, on at most `threads` threads. Returns when all
// is done. A caller that finds the pool taken by another runs its loop alone.
void parallel(int threads, int64_t count, int64_t grain, Body body, void* context);

template <class F>
void parallel_for(int threads, int64_t count, int64_t grain, F&& f) {
  auto body = [](void* context, int64_t begin, int64_t end) {
    (*static_cast<F*>(context))(begin, end);
  };
  parallel(threads, count, grain, body, &f);
}

}  // namespace starquill

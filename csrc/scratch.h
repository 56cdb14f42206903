// Memory that a thread keeps from call to call, and how activations lie in it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "kernels.h"

namespace starquill {

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

class Scratch {
 public:
  uint8_t* take(int64_t bytes) {
    if (bytes > size_) {
      size_ = rounded_up(bytes, 4096);
      memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, size_)));
      if (!memory_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> memory_;
  int64_t size_ = 0;
};

// Rows of activations of `w`'s kind in memory from `at` on, which moves behind them.
inline Activations placed(const Kernels& k, const Affine& w, int64_t rows, uint8_t*& at) {
  Activations to;
  to.rows = rows;
  to.q_stride = rounded_up(w.width, layout(w.bits, k.vector_bytes).step);
  to.group_stride = rounded_up(w.groups(), 16);
  to.q = reinterpret_cast<int8_t*>(at);
  at += rounded_up(rows * to.q_stride, 64);
  to.scales = reinterpret_cast<float*>(at);
  to.sums = to.scales + rows * to.group_stride;
  at += rounded_up(8 * rows * to.group_stride, 64);
  return to;
}

inline int64_t placed_bytes(const Kernels& k, const Affine& w, int64_t rows) {
  uint8_t* end = nullptr;
  placed(k, w, rows, end);
  return reinterpret_cast<int64_t>(end);
}

}  // namespace starquill

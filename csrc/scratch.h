// Memory that a thread keeps from call to call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

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

}  // namespace starquill

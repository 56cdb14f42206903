// Two-byte floats in plain C++, and what else kernels share. Everything is local to the file that
// includes it: files are compiled for different instruction sets and must not share inline
// functions, not even the standard library's.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace starquill {
namespace {

template <class T>
inline T lesser(T a, T b) {
  return b < a ? b : a;
}

template <class T>
inline T greater(T a, T b) {
  return a < b ? b : a;
}

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof x);
  return bits;
}

inline float from_bf16(uint16_t half) { return as_float(static_cast<uint32_t>(half) << 16); }

inline float from_f16(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  uint32_t rest = half & 0x7fff;
  if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // Shifted into place the exponent is 112 too small; the product also normalises denormals.
  float scaled = as_float(rest << 13) * as_float(0x77800000);  // 2^112
  return as_float(sign | as_bits(scaled));
}

// To the nearest, ties to even. `x` is finite; past float16's range it becomes infinite.
inline uint16_t to_f16(float x) {
  uint32_t bits = as_bits(x);
  uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits >= 0x47800000) return sign | 0x7c00;
  if (bits < 0x38800000) {  // a denormal: adding 0.5 leaves its bits, rounded, at the end
    return sign | static_cast<uint16_t>(as_bits(as_float(bits) + 0.5f) - 0x3f000000);
  }
  bits += 0xfff + (bits >> 13 & 1);
  return sign | static_cast<uint16_t>((bits - 0x38000000) >> 13);
}

inline float load_float(const void* p, Float type, int64_t index) {
  if (type == Float::f32) return static_cast<const float*>(p)[index];
  uint16_t half = static_cast<const uint16_t*>(p)[index];
  return type == Float::f16 ? from_f16(half) : from_bf16(half);
}

}  // namespace
}  // namespace starquill

// Plain C++ that a compiler can vectorise: the reference for the tests, and what runs where no
// faster kernel is written. Vectors of 32 bytes, as arrays.
#pragma once

#include <cstring>

#include "half.h"
#include "kernels.h"

namespace {

struct Simd {
  static constexpr int lanes = 8;
  static constexpr int bytes = 32;
  struct F {
    float v[lanes];
  };
  struct I {
    union {
      uint8_t u8[bytes];
      int8_t s8[bytes];
      int32_t v[lanes];
    };
  };

  static F zero() { return set(0); }
  static I zero_i() {
    I x;
    for (int i = 0; i < lanes; ++i) x.v[i] = 0;
    return x;
  }
  static F set(float value) {
    F x;
    for (int i = 0; i < lanes; ++i) x.v[i] = value;
    return x;
  }
  static F load(const float* p) { return load_as<F>(p); }
  static void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
  static I load_i(const void* p) { return load_as<I>(p); }
  static void store_i(void* p, I x) { std::memcpy(p, &x, sizeof x); }
  static void store_some(float* p, F x, int n) {
    std::memcpy(p, &x, sizeof(float) * (n < lanes ? n : lanes));
  }
  static I repeat4(const int8_t* p) {
    I x;
    for (int i = 0; i < lanes; ++i) std::memcpy(&x.v[i], p, 4);
    return x;
  }
  static F add(F a, F b) {
    for (int i = 0; i < lanes; ++i) a.v[i] += b.v[i];
    return a;
  }
  static F mul(F a, F b) {
    for (int i = 0; i < lanes; ++i) a.v[i] *= b.v[i];
    return a;
  }
  static F fma(F a, F b, F c) {
    for (int i = 0; i < lanes; ++i) c.v[i] += a.v[i] * b.v[i];
    return c;
  }
  static F to_float(I x) {
    F y;
    for (int i = 0; i < lanes; ++i) y.v[i] = static_cast<float>(x.v[i]);
    return y;
  }
  static F permute(F x, I index) {
    F y;
    for (int i = 0; i < lanes; ++i) y.v[i] = x.v[index.v[i]];
    return y;
  }
  static float sum(F x) {
    float total = 0;
    for (int i = 0; i < lanes; ++i) total += x.v[i];
    return total;
  }

  // acc + the products of unsigned weights and signed activations, four to a lane.
  template <int Bits>
  static I dot(I acc, I w, I x) {
    for (int i = 0; i < lanes; ++i)
      for (int k = 0; k < 4; ++k) acc.v[i] += w.u8[4 * i + k] * x.s8[4 * i + k];
    return acc;
  }

  // n ≤ 8 floats from any stored type; the rest zeros.
  static F load_floats(const void* p, starquill::Float type, int64_t index, int n) {
    F x = zero();
    for (int i = 0; i < n && i < lanes; ++i) x.v[i] = starquill::load_float(p, type, index + i);
    return x;
  }

  // The bytes of one step of `Bits` to planes of one value a byte (see Layout). `n` bytes of the
  // row are left; what lies behind them is not read.
  template <int Bits>
  static void unpack(const uint8_t* p, int64_t n, I* out) {
    constexpr int planes = Bits == 2 || Bits == 4 ? 8 / Bits : 1;
    constexpr int step = bytes * planes * Bits / 8;
    uint8_t raw[step] = {};
    std::memcpy(raw, p, n < step ? n : step);
    if constexpr (Bits == 8 || planes > 1) {
      for (int plane = 0; plane < planes; ++plane)
        for (int i = 0; i < bytes; ++i) out[plane].u8[i] = (raw[i] >> (plane * Bits)) & kTop<Bits>;
    } else {
      for (int i = 0; i < bytes / 8; ++i) {  // eight values are `Bits` whole bytes
        uint64_t eight = 0;
        for (int k = 0; k < Bits; ++k) eight |= static_cast<uint64_t>(raw[Bits * i + k]) << (8 * k);
        for (int k = 0; k < 8; ++k) out[0].u8[8 * i + k] = (eight >> (k * Bits)) & kTop<Bits>;
      }
    }
  }

  // Lane j of vector i becomes lane i of vector j.
  static void transpose(I* v) {
    for (int i = 0; i < lanes; ++i)
      for (int j = 0; j < i; ++j) {
        int32_t kept = v[i].v[j];
        v[i].v[j] = v[j].v[i];
        v[j].v[i] = kept;
      }
  }

 private:
  template <int Bits>
  static constexpr int kTop = (1 << Bits) - 1;

  template <class T>
  static T load_as(const void* p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
};

}  // namespace

// AVX2 with FMA, F16C and BMI2: vectors of 32 bytes.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels.h"

namespace {

struct Simd {
  using I = __m256i;  // 32 bytes, or 8 int32
  using F = __m256;   // 8 floats
  static constexpr int lanes = 8;
  static constexpr int bytes = 32;

  static F zero() { return _mm256_setzero_ps(); }
  static I zero_i() { return _mm256_setzero_si256(); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static I load_i(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
  static void store_i(void* p, I x) { _mm256_storeu_si256(static_cast<I*>(p), x); }
  static void store_some(float* p, F x, int n) {
    float all[lanes];
    store(all, x);
    std::memcpy(p, all, sizeof(float) * (n < lanes ? n : lanes));
  }
  static I load_bytes(const uint8_t* p, int64_t n) {
    if (n >= bytes) return load_i(p);
    uint8_t all[bytes] = {};
    std::memcpy(all, p, n);
    return load_i(all);
  }
  // Four bytes of activations, in every lane.
  static I repeat4(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
  }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
  static F permute(F x, I index) { return _mm256_permutevar8x32_ps(x, index); }
  static float sum(F x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

  // acc + the products of unsigned weights and signed activations, four to a lane.
  template <int Bits>
  static I dot(I acc, I w, I x) {
    const I ones = _mm256_set1_epi16(1);
    if constexpr (Bits < 8) {  // 63·127·2 fits in the 16 bits between
      return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), ones));
    } else {  // q = (q - 128) + 128, each half of which fits
      const I middle = _mm256_set1_epi8(-128);
      I centred = _mm256_xor_si256(w, middle);
      I low = _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(x, centred));
      I high = _mm256_maddubs_epi16(middle, x);
      acc = _mm256_add_epi32(acc, _mm256_madd_epi16(low, ones));
      return _mm256_add_epi32(acc, _mm256_madd_epi16(high, ones));
    }
  }

  // n ≤ 8 floats from any stored type; the rest zeros.
  static F load_floats(const void* p, starquill::Float type, int64_t index, int n) {
    if (n > lanes) n = lanes;
    if (type == starquill::Float::f32) {
      float some[lanes] = {};
      std::memcpy(some, static_cast<const float*>(p) + index, sizeof(float) * n);
      return load(some);
    }
    uint16_t some[lanes] = {};
    const uint16_t* from = static_cast<const uint16_t*>(p) + index;
    if (n < lanes) {
      std::memcpy(some, from, sizeof(uint16_t) * n);
      from = some;
    }
    __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    if (type == starquill::Float::f16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }

  // The bytes of one step of `Bits` to planes of one value a byte (see Layout). `n` bytes of the
  // row are left; what lies behind them is not read.
  template <int Bits>
  static void unpack(const uint8_t* p, int64_t n, I* out) {
    if constexpr (Bits == 8) {
      out[0] = load_bytes(p, n);
    } else if constexpr (Bits == 4 || Bits == 2) {
      const I low = _mm256_set1_epi8((1 << Bits) - 1);
      I raw = load_bytes(p, n);
      for (int plane = 0; plane < 8 / Bits; ++plane)
        out[plane] = _mm256_and_si256(_mm256_srli_epi16(raw, plane * Bits), low);
    } else {
      // Eight values are `Bits` whole bytes, which a bit deposit spreads to eight.
      constexpr uint64_t low = 0x0101010101010101ull * ((1 << Bits) - 1);
      uint64_t values[4];
      uint8_t some[4 * Bits] = {};
      const uint8_t* from = p;
      if (n < 4 * Bits) {
        std::memcpy(some, p, n);
        from = some;
      }
      for (int i = 0; i < 4; ++i) {
        // Eight bytes that do not pass the step's end: nothing may lie behind a row.
        const int at = i * Bits < 4 * Bits - 8 ? i * Bits : 4 * Bits - 8;
        uint64_t eight;
        std::memcpy(&eight, from + at, 8);
        values[i] = _pdep_u64(eight >> (8 * (i * Bits - at)), low);
      }
      out[0] = _mm256_set_epi64x(values[3], values[2], values[1], values[0]);
    }
  }

  // Lane j of vector i becomes lane i of vector j.
  static void transpose(I* v) {
    I t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
      t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
      u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
      u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
      u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      v[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
      v[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
    }
  }
};

}  // namespace

// AVX-512 with VNNI and VBMI: vectors of 64 bytes.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels.h"

// AddressSanitizer does not see masked loads and stores: in its build the bytes are read first.
#ifdef __SANITIZE_ADDRESS__
#define STARQUILL_TOUCH(p, n) \
  for (int64_t i = 0; i < (n); ++i) (void)reinterpret_cast<const volatile uint8_t*>(p)[i]
#else
#define STARQUILL_TOUCH(p, n)
#endif

namespace {

struct Simd {
  using I = __m512i;  // 64 bytes, or 16 int32
  using F = __m512;   // 16 floats
  static constexpr int lanes = 16;
  static constexpr int bytes = 64;

  static F zero() { return _mm512_setzero_ps(); }
  static I zero_i() { return _mm512_setzero_si512(); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static I load_i(const void* p) { return _mm512_loadu_si512(p); }
  static void store_i(void* p, I x) { _mm512_storeu_si512(p, x); }
  static void store_some(float* p, F x, int n) {
    STARQUILL_TOUCH(p, n < lanes ? 4 * n : bytes);
    _mm512_mask_storeu_ps(p, mask(n), x);
  }
  static I load_bytes(const uint8_t* p, int n) {
    STARQUILL_TOUCH(p, n < bytes ? n : bytes);
    return _mm512_maskz_loadu_epi8(n >= 64 ? ~0ull : (1ull << n) - 1, p);
  }
  // Four bytes of activations, in every lane.
  static I repeat4(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
  }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static F permute(F x, I index) { return _mm512_permutexvar_ps(index, x); }
  static float sum(F x) { return _mm512_reduce_add_ps(x); }

  // acc + the products of unsigned weights and signed activations, four to a lane.
  template <int Bits>
  static I dot(I acc, I w, I x) {
    // With the intrinsic GCC 12 copies every sum before and after: 24 moves for 12 products.
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "vm"(x));
    return acc;
  }

  // n ≤ 16 floats from any stored type; the rest zeros.
  static F load_floats(const void* p, starquill::Float type, int64_t index, int n) {
    __mmask16 m = mask(n);
    if (type == starquill::Float::f32) {
      STARQUILL_TOUCH(static_cast<const float*>(p) + index, n < lanes ? 4 * n : bytes);
      return _mm512_maskz_loadu_ps(m, static_cast<const float*>(p) + index);
    }
    STARQUILL_TOUCH(static_cast<const uint16_t*>(p) + index, n < lanes ? 2 * n : bytes / 2);
    __m256i half = _mm256_maskz_loadu_epi16(m, static_cast<const uint16_t*>(p) + index);
    if (type == starquill::Float::f16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }

  // The bytes of one step of `Bits` to planes of one value a byte (see Layout). `n` bytes of the
  // row are left; what lies behind them is not read.
  template <int Bits>
  static void unpack(const uint8_t* p, int64_t n, I* out) {
    constexpr int step = Bits == 2 || Bits == 4 || Bits == 8 ? 64 : 8 * Bits;
    I raw = n >= step ? load_bytes(p, step) : load_bytes(p, static_cast<int>(n));
    if constexpr (Bits == 8) {
      out[0] = raw;
    } else if constexpr (Bits == 4 || Bits == 2) {
      const I low = _mm512_set1_epi8((1 << Bits) - 1);
      for (int plane = 0; plane < 8 / Bits; ++plane)
        out[plane] = _mm512_and_si512(_mm512_srli_epi16(raw, plane * Bits), low);
    } else {
      // Eight values are `Bits` whole bytes: give each 64-bit lane its bytes, then pick the bits.
      alignas(64) static constexpr Picks<Bits> picks{};
      I spread = _mm512_permutexvar_epi8(load_i(picks.place), raw);
      I picked = _mm512_multishift_epi64_epi8(load_i(picks.shift), spread);
      out[0] = _mm512_and_si512(picked, _mm512_set1_epi8((1 << Bits) - 1));
    }
  }

  // Lane j of vector i becomes lane i of vector j.
  static void transpose(I* v) {
    I t[16];
    for (int i = 0; i < 16; i += 4) {
      I a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
      I c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
      t[i] = _mm512_unpacklo_epi64(a, c);
      t[i + 1] = _mm512_unpackhi_epi64(a, c);
      t[i + 2] = _mm512_unpacklo_epi64(b, d);
      t[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; ++i) {
      I a = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
      I c = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
      I d = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
      v[i] = _mm512_shuffle_i32x4(a, c, 0x88);
      v[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
      v[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
      v[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
  }

 private:
  static __mmask16 mask(int n) { return n >= 16 ? 0xffff : static_cast<__mmask16>((1 << n) - 1); }

  template <int Bits>
  struct Picks {
    uint8_t place[64] = {};
    uint8_t shift[64] = {};
    constexpr Picks() {
      for (int lane = 0; lane < 8; ++lane)
        for (int k = 0; k < 8; ++k) {
          place[8 * lane + k] = static_cast<uint8_t>(lane * Bits + (k < Bits ? k : 0));
          shift[8 * lane + k] = static_cast<uint8_t>(k * Bits);
        }
    }
  };
};

}  // namespace

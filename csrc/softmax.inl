// A block of keys against queries, with a running softmax (Dao et al., arXiv 2205.14135): what both
// ways of attention share; over `Simd`. What a query gets does not depend on the others.
#include "half.h"
#include "kernels.h"

namespace starquill {
namespace {

// e^x to 2 units in the last place; below -87 it is 0, above 87 e^87. Written to be vectorised.
inline float exponential(float x) {
  const float above = x > -87.0f ? x : -87.0f;  // NaN too: an integer of it has no meaning
  const float clamped = above < 87.0f ? above : 87.0f;
  const float n = nearest(clamped * 1.44269504f);
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float scaled = p * as_float(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
  return x > -87.0f ? scaled : x == x ? 0.0f : x;
}

constexpr int kRowsAtOnce = L == 16 ? 6 : 4;  // what fits in registers with kVectors
constexpr int kVectors = L == 16 ? 4 : 2;

// c [R, kVectors·L] (+)= a [R, depth] · b [depth, kVectors·L]
template <int R>
void gemm_block(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                int64_t depth, bool add) {
  F acc[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = add ? Simd::load(c + r * ldc + v * L) : Simd::zero();
  for (int64_t k = 0; k < depth; ++k) {
    F row[kVectors];
    for (int v = 0; v < kVectors; ++v) row[v] = Simd::load(b + k * ldb + v * L);
    for (int r = 0; r < R; ++r) {
      const F one = Simd::set(a[r * lda + k]);
      for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::fma(one, row[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) Simd::store(c + r * ldc + v * L, acc[r][v]);
}

// The same for any rows of the columns past the last whole block, one by one.
__attribute__((noinline)) void gemm_rest(const float* a, int64_t lda, const float* b, int64_t ldb,
                                         float* c, int64_t ldc, int64_t rows, int64_t columns,
                                         int64_t depth, bool add) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t column = 0; column < columns; ++column) {
      float sum = add ? c[i * ldc + column] : 0;
      for (int64_t k = 0; k < depth; ++k) sum += a[i * lda + k] * b[k * ldb + column];
      c[i * ldc + column] = sum;
    }
}

// The same for any rows and columns.
void gemm(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
          int64_t rows, int64_t columns, int64_t depth, bool add) {
  constexpr int kColumns = kVectors * L;
  for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
    const int64_t some = lesser<int64_t>(kRowsAtOnce, rows - r);
    int64_t j = 0;
    for (; j + kColumns <= columns; j += kColumns) {
      if (some == kRowsAtOnce) {
        gemm_block<kRowsAtOnce>(a + r * lda, lda, b + j, ldb, c + r * ldc + j, ldc, depth, add);
      } else {
        for (int64_t i = r; i < r + some; ++i)
          gemm_block<1>(a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, depth, add);
      }
    }
    if (j < columns)
      gemm_rest(a + r * lda, lda, b + j, ldb, c + r * ldc + j, ldc, some, columns - j, depth, add);
  }
}

// Asks for what will be read soon, into the second level of cache: the first is full.
inline void ask_for(const float* p, int64_t floats) {
  for (int64_t i = 0; i < floats; i += 16) __builtin_prefetch(p + i, 0, 2);
}

// Keys [keys, n] to [n, kBlock], zeros behind the last: then each lane is a key. Meanwhile asks for
// as many at `soon`.
void transpose_keys(const float* k, int64_t n, int64_t keys, float* to, const float* soon) {
  for (int64_t first = 0; first < kBlock; first += L)
    for (int64_t d = 0; d < n; d += L) {
      ask_for(soon, L * L), soon += L * L;
      const int width = static_cast<int>(lesser<int64_t>(L, n - d));
      I tile[L];
      for (int i = 0; i < L; ++i) {
        float row[L];
        Simd::store(row, first + i < keys ? Simd::load_floats(k, Float::f32, (first + i) * n + d, width)
                                          : Simd::zero());
        tile[i] = Simd::load_i(row);
      }
      Simd::transpose(tile);
      for (int i = 0; i < width; ++i) Simd::store_i(to + (d + i) * kBlock + first, tile[i]);
    }
}

// Scores of one query with `n` keys, of which it sees [low, high), to probabilities of this block;
// returns by what earlier sums shrink.
float soften(float scale, float* s, int64_t n, int64_t low, int64_t high, float* most, float* total) {
  const float never = -as_float(0x7f800000);
  for (int64_t i = 0; i < n; ++i) s[i] *= scale;
  for (int64_t i = 0; i < lesser(low, n); ++i) s[i] = never;
  for (int64_t i = greater<int64_t>(high, 0); i < n; ++i) s[i] = never;
  for (int64_t i = n; i < kBlock; ++i) s[i] = never;
  float top = *most;
  for (int i = 0; i < kBlock; ++i) top = s[i] > top ? s[i] : top;
  if (top == never) {  // nothing seen yet
    for (int i = 0; i < kBlock; ++i) s[i] = s[i] == s[i] ? 0.0f : s[i];
    return 1;
  }
  Sums sum;
  for (int i = 0; i < kBlock; i += kSums)
    for (int k = 0; k < kSums; ++k) {
      const float p = exponential(s[i + k] - top);
      s[i + k] = p;
      sum.one[k] += p;
    }
  const float shrink = exponential(*most - top);
  *most = top;
  *total = *total * shrink + sum.total();
  return shrink;
}

}  // namespace
}  // namespace starquill

// Attention of many queries over many keys, block by block with a running softmax (Dao et al.,
// arXiv 2205.14135); over `Simd`.
#include "half.h"
#include "kernels.h"

namespace starquill {
namespace {

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

struct FlashScratch {
  float* transposed;  // [Dh, kBlock]
  float* scores;      // [kFlashQueries, kBlock]
  float* most;        // [heads, kFlashQueries]
  float* total;
  FlashScratch(float* memory, int64_t head_dim, int64_t heads)
      : transposed(memory), scores(transposed + head_dim * kBlock),
        most(scores + kFlashQueries * kBlock), total(most + heads * kFlashQueries) {}
};

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

// Queries [first, first + count) of a row, all heads that share key head `head`.
void flash_tile(const Flash& job, int64_t row, int64_t head, int64_t first, int64_t count,
                float* memory) {
  const int64_t n = job.head_dim, heads = job.query_heads / job.key_heads;
  const int64_t stride = job.query_heads * n;
  const FlashScratch to(memory, n, heads);
  const int64_t query = job.starts[row] + first, end = query + count;  // positions
  float* out = job.out + (row * job.queries + first) * stride + head * heads * n;
  for (int64_t i = 0; i < heads * kFlashQueries; ++i) to.most[i] = -as_float(0x7f800000), to.total[i] = 0;
  for (int64_t t = 0; t < count; ++t)
    for (int64_t i = 0; i < heads * n; ++i) out[t * stride + i] = 0;
  const int64_t seen = greater<int64_t>(query + 1 - job.window, 0);
  for (int64_t start = seen / kBlock * kBlock; start < end; start += kBlock) {
    const int64_t keys = lesser<int64_t>(kBlock, end - start);
    const int64_t place = job.tables.place(row, start, job.key_heads, head) * n;
    const float* k = job.k + place;
    const float* v = job.v + place;
    for (int64_t d = 0; d < n; ++d)
      for (int64_t i = 0; i < kBlock; ++i) to.transposed[d * kBlock + i] = i < keys ? k[i * n + d] : 0;
    for (int64_t h = 0; h < heads; ++h) {
      const float* q = job.q + ((row * job.query_heads + head * heads + h) * job.queries + first) * n;
      gemm(q, n, to.transposed, kBlock, to.scores, kBlock, count, kBlock, n, false);
      for (int64_t t = 0; t < count; ++t) {
        const int64_t at = h * kFlashQueries + t, high = query + t + 1 - start;
        const float shrink = soften(job.scale, to.scores + t * kBlock, keys, high - job.window, high,
                                    to.most + at, to.total + at);
        float* sums = out + t * stride + h * n;
        if (shrink != 1)
          for (int64_t i = 0; i < n; ++i) sums[i] *= shrink;
      }
      gemm(to.scores, kBlock, v, n, out + h * n, stride, count, n, keys, true);
    }
  }
  for (int64_t t = 0; t < count; ++t)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < n; ++i)
        out[t * stride + h * n + i] /= to.total[h * kFlashQueries + t];
}

// Pieces are (row, key head, tile of queries) triples.
void flash(const Flash& job, int64_t begin, int64_t end, float* memory) {
  const int64_t tiles = (job.queries + kFlashQueries - 1) / kFlashQueries;
  for (int64_t piece = begin; piece < end; ++piece) {
    // The last tiles see the most: they come first, so that no thread is left with one at the end.
    const int64_t tile = tiles - 1 - piece / (job.rows * job.key_heads);
    const int64_t pair = piece % (job.rows * job.key_heads), first = tile * kFlashQueries;
    const int64_t count = lesser<int64_t>(kFlashQueries, job.queries - first);
    flash_tile(job, pair / job.key_heads, pair % job.key_heads, first, count, memory);
  }
}

}  // namespace
}  // namespace starquill

// Attention of many queries over many keys, a tile of queries at a time; over `Simd`.
#include "half.h"
#include "kernels.h"

namespace starquill {
namespace {

struct FlashScratch {
  float* transposed;  // [Dh, kBlock]
  float* scores;      // [kFlashQueries, kBlock]
  float* most;        // [heads, kFlashQueries]
  float* total;
  FlashScratch(float* memory, int64_t head_dim, int64_t heads)
      : transposed(memory), scores(transposed + head_dim * kBlock),
        most(scores + kFlashQueries * kBlock), total(most + heads * kFlashQueries) {}
};

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
    const float* v = job.v + place;
    transpose_keys(job.k + place, n, keys, to.transposed, v);
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

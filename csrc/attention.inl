// One query a row against its cached keys and values, over `Simd`. Queries that share a key head, and
// rows of one sequence, are worked on together, so that keys and values are read once.
#include "half.h"
#include "kernels.h"

namespace starquill {
namespace {

void rotate(const float* x, const float* cos, const float* sin, int64_t n, float* out) {
  const int64_t half = n / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float low = x[i], high = x[i + half];
    out[i] = low * cos[i] - high * sin[i];
    out[i + half] = high * cos[i + half] + low * sin[i + half];
  }
}

struct AttentionScratch {
  float* queries;     // [queries, Dh], rotated
  float* transposed;  // [Dh, kBlock]
  float* scores;      // [queries, kBlock]
  float* most;        // [queries]
  float* total;
  AttentionScratch(float* memory, int64_t queries_, int64_t head_dim)
      : queries(memory), transposed(queries + queries_ * head_dim),
        scores(transposed + head_dim * kBlock), most(scores + queries_ * kBlock),
        total(most + queries_) {}
};

// Rows [first, end), which are of one sequence, one behind the other: their query heads that share
// key head `head`. A block of keys and values is read once for all of them.
void attend_rows(const Attention& job, int64_t first, int64_t end, int64_t head, float* memory) {
  const int64_t n = job.head_dim, heads = job.query_heads / job.key_heads;
  const int64_t queries = (end - first) * heads, last = job.positions[end - 1];
  const AttentionScratch to(memory, queries, n);
  const auto out = [&](int64_t row) { return job.out + (row * job.query_heads + head * heads) * n; };
  for (int64_t row = first; row < end; ++row)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t query = (row - first) * heads + h;
      rotate(job.q + (row * job.query_heads + head * heads + h) * n, job.cos + row * n,
             job.sin + row * n, n, to.queries + query * n);
      to.most[query] = -as_float(0x7f800000), to.total[query] = 0;
      for (int64_t i = 0; i < n; ++i) out(row)[h * n + i] = 0;
    }
  const int64_t seen = greater<int64_t>(job.positions[first] + 1 - job.window, 0);
  const auto place = [&](int64_t start) {
    return job.tables.place(first, start, job.key_heads, head) * n;
  };
  const int64_t begin = seen / kBlock * kBlock;
  for (int64_t start = begin, here = place(begin); start <= last;) {
    const int64_t keys = lesser<int64_t>(kBlock, last + 1 - start), after = start + kBlock;
    const int64_t next = after <= last ? place(after) : here;
    // Memory is slower than this: while a block is worked on, the next one is asked for.
    const float* soon = start == begin ? job.v + here : job.k + next;
    transpose_keys(job.k + here, n, keys, to.transposed, soon);
    gemm(to.queries, n, to.transposed, kBlock, to.scores, kBlock, queries, kBlock, n, false);
    const int64_t share = kBlock * n / queries;
    for (int64_t row = first; row < end; ++row) {
      const int64_t high = job.positions[row] + 1 - start, query = (row - first) * heads;
      for (int64_t h = 0; h < heads; ++h) {
        ask_for(job.v + next + (query + h) * share, share);
        const float shrink = soften(job.scale, to.scores + (query + h) * kBlock, keys, high - job.window,
                                    high, to.most + query + h, to.total + query + h);
        if (shrink != 1)
          for (int64_t i = 0; i < n; ++i) out(row)[h * n + i] *= shrink;
      }
      gemm(to.scores + query * kBlock, kBlock, job.v + here, n, out(row), n, heads, n, keys, true);
    }
    start = after, here = next;
  }
  for (int64_t row = first; row < end; ++row)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < n; ++i) out(row)[h * n + i] /= to.total[(row - first) * heads + h];
}

// Stores keys and values. Pieces are (row, key head) pairs.
void remember(const Attention& job, int64_t begin, int64_t end) {
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece / job.key_heads, head = piece % job.key_heads, n = job.head_dim;
    const int64_t place = job.tables.place(row, job.positions[row], job.key_heads, head) * n;
    rotate(job.new_k + piece * n, job.cos + row * n, job.sin + row * n, n, job.k + place);
    for (int64_t i = 0; i < n; ++i) job.v[place + i] = job.new_v[piece * n + i];
  }
}

// Pieces are (run of rows, key head) pairs.
void attend(const Attention& job, int64_t begin, int64_t end, float* memory) {
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t run = piece / job.key_heads;
    attend_rows(job, job.runs[run], job.runs[run + 1], piece % job.key_heads, memory);
  }
}

}  // namespace
}  // namespace starquill

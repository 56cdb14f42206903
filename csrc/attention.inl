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
  AttentionScratch(float* memory, int64_t count, int64_t head_dim)
      : queries(memory), transposed(queries + count * head_dim),
        scores(transposed + head_dim * kBlock), most(scores + count * kBlock), total(most + count) {}
};

// What a key head's queries come to in one of several pieces: sums of values [queries, Dh], and by
// what they are to be divided.
struct AttentionPartial {
  float* values;
  float* most;
  float* total;
  AttentionPartial(const Attention& job, const AttentionPiece& piece, int64_t head)
      : values(piece.partial + head * partial_floats(job, piece)),
        most(values + (piece.end - piece.first) * job.heads() * job.head_dim),
        total(most + (piece.end - piece.first) * job.heads()) {}
};

// The query heads of a piece's rows that share key head `head`. A block of keys and values is read
// once for all of them.
void attend_piece(const Attention& job, const AttentionPiece& piece, int64_t head, float* memory) {
  const int64_t n = job.head_dim, heads = job.heads(), first = piece.first, end = piece.end;
  const int64_t queries = (end - first) * heads, last = lesser(job.positions[end - 1], piece.stop - 1);
  AttentionScratch to(memory, queries, n);
  float* values = nullptr;
  if (piece.partial) {
    const AttentionPartial partial(job, piece, head);
    values = partial.values, to.most = partial.most, to.total = partial.total;
  }
  const auto out = [&](int64_t row) {
    if (values) return values + (row - first) * heads * n;
    return job.out + (row * job.query_heads + head * heads) * n;
  };
  for (int64_t row = first; row < end; ++row)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t query = (row - first) * heads + h;
      rotate(job.q + (row * job.query_heads + head * heads + h) * n, job.cos + row * n,
             job.sin + row * n, n, to.queries + query * n);
      to.most[query] = -as_float(0x7f800000), to.total[query] = 0;
      for (int64_t i = 0; i < n; ++i) out(row)[h * n + i] = 0;
    }
  const auto place = [&](int64_t start) {
    return job.tables.place(first, start, job.key_heads, head) * n;
  };
  for (int64_t start = piece.start, here = place(start); start <= last;) {
    const int64_t keys = lesser<int64_t>(kBlock, last + 1 - start), after = start + kBlock;
    const int64_t next = after <= last ? place(after) : here;
    // Memory is slower than this: while a block is worked on, the next one is asked for.
    const float* soon = start == piece.start ? job.v + here : job.k + next;
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
  if (values) return;
  for (int64_t row = first; row < end; ++row)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < n; ++i) out(row)[h * n + i] /= to.total[(row - first) * heads + h];
}

// The pieces [begin, end) of one run, in their order, for the queries of key head `head`.
void merge_pieces(const Attention& job, int64_t begin, int64_t end, int64_t head) {
  const AttentionPiece& run = job.pieces[begin];
  const int64_t n = job.head_dim, heads = job.heads();
  for (int64_t query = 0; query < (run.end - run.first) * heads; ++query) {
    const int64_t row = run.first + query / heads;
    float* out = job.out + (row * job.query_heads + head * heads + query % heads) * n;
    float most = -as_float(0x7f800000), total = 0;
    for (int64_t i = begin; i < end; ++i)
      most = greater(most, AttentionPartial(job, job.pieces[i], head).most[query]);
    for (int64_t d = 0; d < n; ++d) out[d] = 0;
    for (int64_t i = begin; i < end; ++i) {
      const AttentionPartial partial(job, job.pieces[i], head);
      const float weight = exponential(partial.most[query] - most);
      total += weight * partial.total[query];
      for (int64_t d = 0; d < n; ++d) out[d] += weight * partial.values[query * n + d];
    }
    for (int64_t d = 0; d < n; ++d) out[d] /= total;
  }
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

// Of pairs of a piece and a key head.
void attend(const Attention& job, int64_t begin, int64_t end, float* memory) {
  for (int64_t pair = begin; pair < end; ++pair)
    attend_piece(job, job.pieces[pair / job.key_heads], pair % job.key_heads, memory);
}

// Of pairs of a run and a key head.
void merge(const Attention& job, int64_t begin, int64_t end) {
  for (int64_t pair = begin; pair < end; ++pair) {
    const int64_t* run = job.runs + pair / job.key_heads;
    if (run[1] - run[0] > 1) merge_pieces(job, run[0], run[1], pair % job.key_heads);
  }
}

}  // namespace
}  // namespace starquill

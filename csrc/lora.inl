// What adapters add to a product: y += weight·scale·B(A x) for the rows that each acts on. In two
// steps, over threads each: `shrink` makes A x, `expand` adds the rest.
#include "half.h"
#include "kernels.h"

namespace starquill {
namespace {

template <class Use>
void with_type(Float type, Use use) {
  switch (type) {
    case Float::f32: return use([](const void* p, int64_t i, int n) { return Simd::load_floats(p, Float::f32, i, n); });
    case Float::f16: return use([](const void* p, int64_t i, int n) { return Simd::load_floats(p, Float::f16, i, n); });
    default: return use([](const void* p, int64_t i, int n) { return Simd::load_floats(p, Float::bf16, i, n); });
  }
}

// Some of A's rows times a tile of x's rows; each sum is `dense`'s, whatever lies beside it.
void shrink_piece(const Lora& job, const LoraEntry& e, float* h, int64_t tile, int64_t ranks) {
  const int64_t first = tile * kLoraTile, rows = lesser<int64_t>(kLoraTile, e.rows - first);
  const float* x = job.x + (e.first + first) * job.width;
  float sums[kLoraTile];
  with_type(e.a_type, [&](auto load_from) {
    for (int64_t r = ranks * kLoraRanks; r < lesser(e.rank, (ranks + 1) * kLoraRanks); ++r) {
      auto load = [&](int64_t i, int n) { return load_from(e.a, r * job.width + i, n); };
      dot_all(load, x, rows, job.width, job.width, sums);
      for (int64_t m = 0; m < rows; ++m)
        h[(first + m) * e.rank + r] = sums[m] * (e.scale * e.weight(first + m));
    }
  });
}

void shrink(const Lora& job, int64_t begin, int64_t end) {
  float* h = job.h;
  int64_t at = 0;  // the number of the entry's first piece
  for (int64_t i = 0; i < job.count && at < end; ++i) {
    const LoraEntry& e = job.entries[i];
    const int64_t blocks = e.rank_blocks(), pieces = e.pieces();
    for (int64_t p = greater(begin, at); p < lesser(end, at + pieces); ++p)
      shrink_piece(job, e, h, (p - at) / blocks, (p - at) % blocks);
    at += pieces;
    h += e.rows * e.rank;
  }
}

// Outputs [o, o + n) of one row, n ≤ V·L: all that `count` entries of the same rows add to it.
template <int V>
void expand_row(const Lora& job, const LoraEntry* entries, int64_t count, const float* h, int64_t m,
                int64_t o, int n) {
  float* y = job.y + (entries->first + m) * job.outputs;
  auto load = [&](const float* p, int v) { return Simd::load_floats(p, Float::f32, o + v * L, n - v * L); };
  const F minus = Simd::set(-1);
  F base[V], acc[V];
  for (int v = 0; v < V; ++v) acc[v] = base[v] = load(y, v);
  for (int64_t i = 0; i < count; h += entries[i].rows * entries[i].rank, ++i) {
    const LoraEntry& e = entries[i];
    const float weight = e.weight(m);
    if (weight == 0) continue;  // such a row stays the base's, to the bit
    const float* own = h + m * e.rank;
    with_type(e.b_type, [&](auto load_from) {
      for (int64_t r = 0; r < e.rank; ++r) {
        const F times = Simd::set(own[r]);
        for (int v = 0; v < V; ++v)
          acc[v] = Simd::fma(load_from(e.b, r * job.outputs + o + v * L, n - v * L), times, acc[v]);
      }
    });
    const F w = Simd::set(weight);
    for (int v = 0; v < V && e.gain; ++v) {
      const F product = job.bias ? Simd::fma(minus, load(job.bias, v), base[v]) : base[v];
      acc[v] = Simd::fma(Simd::mul(w, load(e.gain, v)), product, acc[v]);
    }
    for (int v = 0; v < V && e.shift; ++v) acc[v] = Simd::fma(w, load(e.shift, v), acc[v]);
  }
  for (int v = 0; v < V; ++v) Simd::store_some(y + o + v * L, acc[v], n - v * L);
}

void expand(const Lora& job, int64_t begin, int64_t end) {
  constexpr int kTogether = 4;
  const float* h = job.h;
  for (int64_t i = 0, next; i < job.count; i = next) {
    const LoraEntry& e = job.entries[i];
    int64_t floats = 0;
    for (next = i; next < job.count && job.entries[next].first == e.first; ++next)
      floats += job.entries[next].rows * job.entries[next].rank;
    for (int64_t o = begin; o < end;) {
      const bool whole = end - o >= kTogether * L;
      const int n = whole ? kTogether * L : static_cast<int>(lesser<int64_t>(L, end - o));
      for (int64_t m = 0; m < e.rows; ++m) {
        if (whole) expand_row<kTogether>(job, &e, next - i, h, m, o, kTogether * L);
        else expand_row<1>(job, &e, next - i, h, m, o, n);
      }
      o += n;
    }
    h += floats;
  }
}

}  // namespace
}  // namespace starquill

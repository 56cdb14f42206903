// One query a row against its cached keys and values, over `Simd`. Queries that share a key head
// are worked on together, so that keys and values are read once.
#include "half.h"
#include "kernels.h"

namespace starquill {
namespace {

constexpr int kHeads = 16;  // query heads at a time

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

float dot(const float* a, const float* b, int64_t n) {
  F acc[2] = {Simd::zero(), Simd::zero()};
  int64_t i = 0;
  for (; i + 2 * L <= n; i += 2 * L)
    for (int s = 0; s < 2; ++s)
      acc[s] = Simd::fma(Simd::load(a + i + s * L), Simd::load(b + i + s * L), acc[s]);
  for (; i < n; i += L) {
    const int left = static_cast<int>(lesser<int64_t>(L, n - i));
    acc[0] = Simd::fma(Simd::load_floats(a, Float::f32, i, left),
                       Simd::load_floats(b, Float::f32, i, left), acc[0]);
  }
  return Simd::sum(Simd::add(acc[0], acc[1]));
}

// out += weight·v, after out has been scaled.
void accumulate(float* out, float scale, const float* weights, const float* v, int64_t keys,
                int64_t n) {
  int64_t i = 0;
  for (; i + L <= n; i += L) {
    F acc = Simd::mul(Simd::load(out + i), Simd::set(scale));
    for (int64_t k = 0; k < keys; ++k)
      acc = Simd::fma(Simd::set(weights[k]), Simd::load(v + k * n + i), acc);
    Simd::store(out + i, acc);
  }
  for (; i < n; ++i) {
    float acc = out[i] * scale;
    for (int64_t k = 0; k < keys; ++k) acc += weights[k] * v[k * n + i];
    out[i] = acc;
  }
}

void rotate(const float* x, const float* cos, const float* sin, int64_t n, float* out) {
  const int64_t half = n / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float low = x[i], high = x[i + half];
    out[i] = low * cos[i] - high * sin[i];
    out[i + half] = high * cos[i + half] + low * sin[i + half];
  }
}

// Query heads [first, first + heads) of one row, which share key head `head` (a running softmax).
void attend_heads(const Attention& job, int64_t row, int64_t head, int64_t first, int heads) {
  const int64_t n = job.head_dim, end = job.positions[row] + 1;
  float* out = job.out + (row * job.query_heads + first) * n;
  float q[kHeads * kMostHeadDim];
  for (int h = 0; h < heads; ++h)
    rotate(job.q + (row * job.query_heads + first + h) * n, job.cos + row * n, job.sin + row * n, n,
           q + h * n);
  float most[kHeads], total[kHeads];
  for (int h = 0; h < heads; ++h) most[h] = -as_float(0x7f800000), total[h] = 0;
  for (int64_t i = 0; i < heads * n; ++i) out[i] = 0;
  for (int64_t start = greater<int64_t>(end - job.window, 0), keys; start < end; start += keys) {
    keys = lesser<int64_t>(kBlock - start % kBlock, end - start);
    const int64_t place = job.tables.place(row, start, job.key_heads, head) * n;
    const float* k = job.k + place;
    const float* v = job.v + place;
    float scores[kHeads][kBlock];
    for (int64_t i = 0; i < keys; ++i)
      for (int h = 0; h < heads; ++h) scores[h][i] = dot(q + h * n, k + i * n, n) * job.scale;
    for (int h = 0; h < heads; ++h) {
      float top = most[h], sum = 0;
      for (int64_t i = 0; i < keys; ++i) top = scores[h][i] > top ? scores[h][i] : top;
      for (int64_t i = 0; i < keys; ++i) scores[h][i] = exponential(scores[h][i] - top);
      for (int64_t i = 0; i < keys; ++i) sum += scores[h][i];
      const float shrink = exponential(most[h] - top);
      most[h] = top;
      total[h] = total[h] * shrink + sum;
      accumulate(out + h * n, shrink, scores[h], v, keys, n);
    }
  }
  for (int h = 0; h < heads; ++h)
    for (int64_t i = 0; i < n; ++i) out[h * n + i] /= total[h];
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

// Pieces are (row, key head) pairs.
void attend(const Attention& job, int64_t begin, int64_t end) {
  const int64_t group = job.query_heads / job.key_heads;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece / job.key_heads, head = piece % job.key_heads;
    for (int64_t h = 0; h < group; h += kHeads)
      attend_heads(job, row, head, head * group + h, static_cast<int>(lesser<int64_t>(kHeads, group - h)));
  }
}

}  // namespace
}  // namespace starquill

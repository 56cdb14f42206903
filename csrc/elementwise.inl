// What is done to every value between products.
#include "half.h"
#include "kernels.h"

namespace starquill {
namespace {

void layer_norm(const LayerNorm& job, int64_t begin, int64_t end) {
  const int64_t n = job.width, whole = n / kSums * kSums;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = job.x + row * n;
    Sums sum, squares;
    for (int64_t i = 0; i < whole; i += kSums)
      for (int k = 0; k < kSums; ++k) sum.one[k] += x[i + k];
    for (int64_t i = whole; i < n; ++i) sum.one[0] += x[i];
    const float mean = sum.total() / static_cast<float>(n);
    for (int64_t i = 0; i < whole; i += kSums)
      for (int k = 0; k < kSums; ++k) {
        const float off = x[i + k] - mean;
        squares.one[k] += off * off;
      }
    for (int64_t i = whole; i < n; ++i) squares.one[0] += (x[i] - mean) * (x[i] - mean);
    const float inverse = 1.0f / __builtin_sqrtf(squares.total() / static_cast<float>(n) + job.eps);
    float* y = job.y + row * n;
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * inverse * job.weight[i] + job.bias[i];
  }
}

void rotation(const Rotation& job, int64_t begin, int64_t end) {
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t t = piece % job.tokens, h = piece / job.tokens % job.heads;
    const int64_t row = piece / job.tokens / job.heads, angle = (row * job.tokens + t) * job.head_dim;
    rotate(job.x + row * job.row_stride + h * job.head_stride + t * job.token_stride, job.cos + angle,
           job.sin + angle, job.head_dim, job.y + piece * job.head_dim);
  }
}

// x·Φ(x) by its tanh approximation, which is x / (1 + e^(-2u)).
void gelu(const float* x, float* y, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float v = x[i], u = 0.79788456f * (v + 0.044715f * v * v * v);
    y[i] = v / (1.0f + exponential(-2.0f * u));
  }
}

void store(const Store& job, int64_t begin, int64_t end) {
  const int64_t n = job.head_dim;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t t = piece % job.tokens, pair = piece / job.tokens;
    const int64_t row = pair / job.heads, head = pair % job.heads;
    const float* from = job.fresh + row * job.row_stride + head * job.head_stride + t * job.token_stride;
    const int64_t place = job.tables.place(row, job.starts[row] + t, job.heads, head);
    std::memcpy(job.cache + place * n, from, sizeof(float) * n);
  }
}

void add(const float* x, const float* y, float* sum, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) sum[i] = x[i] + y[i];
}

}  // namespace
}  // namespace starquill

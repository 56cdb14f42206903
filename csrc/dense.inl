// Dense two-byte weights, and quantized ones against float32 activations; over `Simd`.
#include "half.h"
#include "kernels.h"

namespace starquill {
namespace {

// Σ_i w[i]·x[m, i] for M rows: four sums each, for the latency of an addition. The order of a row's
// additions does not depend on M: a row has the same sum in whatever company.
template <int M, class Load>
void dot_rows(Load load, const float* x, int64_t stride, int64_t width, float* out) {
  constexpr int kSums = 4;
  F acc[M][kSums];
  for (int m = 0; m < M; ++m)
    for (int s = 0; s < kSums; ++s) acc[m][s] = Simd::zero();
  int64_t i = 0;
  for (; i + kSums * L <= width; i += kSums * L)
    for (int s = 0; s < kSums; ++s) {
      const F w = load(i + s * L, L);
      for (int m = 0; m < M; ++m)
        acc[m][s] = Simd::fma(w, Simd::load(x + m * stride + i + s * L), acc[m][s]);
    }
  for (; i < width; i += L) {
    const int n = static_cast<int>(lesser<int64_t>(L, width - i));
    const F w = load(i, n);
    for (int m = 0; m < M; ++m)
      acc[m][0] = Simd::fma(w, Simd::load_floats(x + m * stride, Float::f32, i, n), acc[m][0]);
  }
  for (int m = 0; m < M; ++m) {
    for (int s = 1; s < kSums; ++s) acc[m][0] = Simd::add(acc[m][0], acc[m][s]);
    out[m] = Simd::sum(acc[m][0]);
  }
}

template <class Load>
void dot_all(Load load, const float* x, int64_t rows, int64_t stride, int64_t width, float* out) {
  constexpr int kTogether = L == 16 ? 4 : 2;  // what fits in registers
  for (int64_t m = 0; m < rows; m += kTogether) switch (lesser<int64_t>(kTogether, rows - m)) {
      case 1: dot_rows<1>(load, x + m * stride, stride, width, out + m); break;
      case 2: dot_rows<2>(load, x + m * stride, stride, width, out + m); break;
      case 3: dot_rows<3>(load, x + m * stride, stride, width, out + m); break;
      default: dot_rows<4>(load, x + m * stride, stride, width, out + m);
    }
}

// Row `row` of a weight, which `load` gives, with every row of x.
template <class Load>
void multiply_row(Load load, const Product& job, int64_t width, int64_t row) {
  float sums[kDenseRows];
  for (int64_t m = 0; m < job.x_rows; m += kDenseRows) {
    const int64_t n = lesser<int64_t>(kDenseRows, job.x_rows - m);
    dot_all(load, job.x + m * job.x_stride, n, job.x_stride, width, sums);
    for (int64_t k = 0; k < n; ++k)
      job.out[(m + k) * job.out_stride + row] = job.bias ? sums[k] + job.bias[row] : sums[k];
  }
}

void dense(const DenseMatmul& job, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * job.width;
    auto load = [&](int64_t i, int count) {
      return Simd::load_floats(job.weight, job.type, first + i, count);
    };
    multiply_row(load, job.rows, job.width, row);
  }
}

// Eight values are `bits` whole bytes.
void unpack_row(const uint8_t* p, int bits, int64_t width, uint8_t* q) {
  const uint64_t top = (1u << bits) - 1;
  for (int64_t i = 0; i < width; i += 8, p += bits) {
    uint64_t eight = 0;
    std::memcpy(&eight, p, bits);  // little-endian, as every machine this runs on
    for (int k = 0; k < 8; ++k) q[i + k] = static_cast<uint8_t>(eight >> (k * bits) & top);
  }
}

void dequantize_row(const Affine& w, int64_t row, float* out) {
  const uint8_t* p = w.packed + row * w.row_bytes();
  for (int64_t g = 0; g < w.groups(); ++g, p += w.group * w.bits / 8) {
    uint8_t q[128];
    unpack_row(p, w.bits, w.group, q);
    const float scale = load_float(w.scales, w.scale_type, row * w.groups() + g);
    const float bias = load_float(w.biases, w.scale_type, row * w.groups() + g);
    float* to = out + g * w.group;
    for (int i = 0; i < w.group; ++i) to[i] = scale * static_cast<float>(q[i]) + bias;
  }
}

void dequantize(const Affine& w, float* out, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) dequantize_row(w, row, out + (row - begin) * w.width);
}

// Float32 activations: a row of weights is written out, then multiplied with every row of `x`.
void exact(const Exact& job, int64_t begin, int64_t end, float* scratch) {
  auto load = [&](int64_t i, int count) { return Simd::load_floats(scratch, Float::f32, i, count); };
  for (int64_t row = begin; row < end; ++row) {
    dequantize_row(job.weight, row, scratch);
    multiply_row(load, job.rows, job.weight.width, row);
  }
}

}  // namespace
}  // namespace starquill

// The method `rtn`: for each group several shares of its range are tried, each refitted by
// weighted least squares, and the best by weighted squared error kept. The same steps as
// `starquill/quant/quantize.py`, group by group.
#include "half.h"
#include "kernels.h"

namespace starquill {
namespace {

struct Fit {
  float scale;
  float bias;
};

// Sums run in kSums parallel ones, in the same order whatever the instruction set.
constexpr int kSums = 16;

struct Sums {
  float one[kSums] = {};
  float total() const {
    float t[kSums];
    for (int i = 0; i < kSums; ++i) t[i] = one[i];
    for (int half = kSums / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) t[i] += t[i + half];
    return t[0];
  }
};

void levels(const float* w, int n, Fit fit, float top, float* q) {
  const float inverse = fit.scale == 0 ? 0.0f : 1.0f / fit.scale;
  for (int i = 0; i < n; ++i)
    q[i] = lesser(greater(nearest((w[i] - fit.bias) * inverse), 0.0f), top);
}

float error(const float* w, const float* m, const float* q, int n, Fit fit) {
  Sums sum;
  for (int i = 0; i < n; i += kSums)
    for (int k = 0; k < kSums; ++k) {
      const float off = fit.bias + q[i + k] * fit.scale - w[i + k];
      sum.one[k] += off * off * m[i + k];
    }
  return sum.total();
}

Fit least_squares(const float* w, const float* m, const float* q, int n) {
  Sums all, sq, sqq, sw, sqw;
  for (int i = 0; i < n; i += kSums)
    for (int k = 0; k < kSums; ++k) {
      const float weight = m[i + k], level = q[i + k], value = w[i + k], mq = weight * level;
      all.one[k] += weight;
      sq.one[k] += mq;
      sqq.one[k] += mq * level;
      sw.one[k] += weight * value;
      sqw.one[k] += mq * value;
    }
  const float t = all.total(), q1 = sq.total(), q2 = sqq.total();
  const float w1 = sw.total(), qw = sqw.total();
  const float spread = t * q2 - q1 * q1;
  if (spread <= 1e-9f * t * q2) return {0, w1 / t};
  return {(t * qw - q1 * w1) / spread, (q2 * w1 - q1 * qw) / spread};
}

Fit range(float low, float high, float share, float top) {
  return {(high * share - low * share) / top, low * share};
}

Fit search(const Quantize& job, const float* w, const float* m) {
  const float top = static_cast<float>((1 << job.bits) - 1);
  float low = w[0], high = w[0];
  for (int i = 1; i < job.group; ++i) {
    low = lesser(low, w[i]);
    high = greater(high, w[i]);
  }
  Fit best{};
  float least = 0, q[128];
  for (int s = 0; s < job.share_count; ++s) {
    levels(w, job.group, range(low, high, job.shares[s], top), top, q);
    const Fit fit = least_squares(w, m, q, job.group);
    const float off = job.share_count > 1 ? error(w, m, q, job.group, fit) : 0;
    if (s == 0 || off < least) {
      best = fit;
      least = off;
    }
  }
  return best;
}

// As it will be stored.
float store(const Quantize& job, void* to, int64_t index, float value) {
  if (job.halves) {
    const uint16_t half = to_f16(value);
    static_cast<uint16_t*>(to)[index] = half;
    return from_f16(half);
  }
  static_cast<float*>(to)[index] = value * job.unit;
  return value;
}

// Eight values at a time are `bits` whole bytes.
void pack_group(const float* q, int n, int bits, uint8_t* to) {
  for (int i = 0; i < n; i += 8, to += bits) {
    uint64_t eight = 0;
    for (int k = 0; k < 8; ++k) eight |= static_cast<uint64_t>(q[i + k]) << (k * bits);
    std::memcpy(to, &eight, bits);
  }
}

void quantize(const Quantize& job, int64_t begin, int64_t end) {
  const int64_t groups = job.width / job.group;
  const float top = static_cast<float>((1 << job.bits) - 1);
  float ones[128];
  for (float& one : ones) one = 1;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t g = 0; g < groups; ++g) {
      float w[128], q[128];
      const int64_t first = row * job.width + g * job.group, index = row * groups + g;
      for (int i = 0; i < job.group; ++i) w[i] = load_float(job.weight, job.type, first + i);
      if (job.unit != 1.0f)
        for (int i = 0; i < job.group; ++i) w[i] /= job.unit;
      const float* m = job.importance ? job.importance + g * job.group : ones;
      Fit fit = search(job, w, m);
      fit = {store(job, job.scales, index, fit.scale), store(job, job.biases, index, fit.bias)};
      levels(w, job.group, fit, top, q);
      pack_group(q, job.group, job.bits, job.packed + first * job.bits / 8);
    }
}

// As bits, magnitudes are ordered with NaN and infinity on top.
float largest(const void* w, Float type, int64_t begin, int64_t end) {
  uint32_t most = 0;
  if (type == Float::f32) {
    for (int64_t i = begin; i < end; ++i)
      most = greater(most, static_cast<const uint32_t*>(w)[i] & 0x7fffffff);
    return as_float(most);
  }
  uint16_t half = 0;
  for (int64_t i = begin; i < end; ++i)
    half = greater<uint16_t>(half, static_cast<const uint16_t*>(w)[i] & 0x7fff);
  return type == Float::f16 ? from_f16(half) : from_bf16(half);
}

}  // namespace
}  // namespace starquill

// The methods `rtn` and `hqq` without correlations, group by group: the same steps as
// `starquill/quant/quantize.py` and `hqq.py`, which say why. `rtn` tries several shares of a group's
// range, each refitted by weighted least squares, and keeps the best by weighted squared error.
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

// x^p for x > 0, to about 1e-6 of it.
inline float power(float x, float p) {
  const uint32_t bits = as_bits(x);
  const int32_t exponent = static_cast<int32_t>(bits >> 23) - 127;
  // The mantissa m in [1, 2): ln m = 2 atanh((m - 1) / (m + 1)).
  const float m = as_float((bits & 0x7fffff) | 0x3f800000);
  const float t = (m - 1.0f) / (m + 1.0f), u = t * t;
  const float series = 1 + u * (1.0f / 3 + u * (1.0f / 5 + u * (1.0f / 7 + u * (1.0f / 9 + u / 11))));
  const float log2 = static_cast<float>(exponent) + 2.88539008f * t * series;
  const float y = lesser(greater(log2 * p, -126.0f), 126.0f), n = nearest(y), r = (y - n) * 0.693147181f;
  const float e = 1 + r * (1 + r * (1.0f / 2 + r * (1.0f / 6 + r * (1.0f / 24 + r / 120))));
  return e * as_float(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}

// Half-quadratic: see hqq.py. `m` is the importance.
Fit half_quadratic(const float* w, const float* m, int n, float top, Fit fit) {
  constexpr float kNorm = 0.7f, kKappa = 1.01f;
  float beta = 10, size = 0, q[128], target[128];
  for (int i = 0; i < n; ++i) size += w[i] < 0 ? -w[i] : w[i];
  const float unit = greater(size / static_cast<float>(n), 1e-30f);
  Fit best = fit;
  float least = 0;
  for (int round = 0; round < 20; ++round, beta *= kKappa) {
    levels(w, n, fit, top, q);
    Sums sum;
    for (int i = 0; i < n; i += kSums)
      for (int k = 0; k < kSums; ++k) {
        const int j = i + k;
        const float off = (w[j] - (fit.bias + q[j] * fit.scale)) / unit;
        const float far = off < 0 ? -off : off, root = power(greater(far, 1e-8f), kNorm - 1);
        sum.one[k] += (far > 0 ? root * greater(far, 1e-8f) : 0) * m[j];
        const float outlier = greater(far - root / beta, 0.0f);
        target[j] = w[j] - (off < 0 ? -outlier : outlier) * unit;
      }
    const float error = sum.total();
    if (round > 0 && !(error < least)) break;
    best = fit;
    least = error;
    fit = least_squares(target, m, q, n);
  }
  return best;
}

// l_2.5 error of `fit`; leaves levels in `q` and the root of each one's distance in `roots`.
float rounded(const float* w, const float* m, int n, float top, Fit fit, float* q, float* roots) {
  levels(w, n, fit, top, q);
  Sums sum;
  for (int i = 0; i < n; i += kSums)
    for (int k = 0; k < kSums; ++k) {
      const int j = i + k;
      const float off = fit.bias + q[j] * fit.scale - w[j], far = off < 0 ? -off : off;
      roots[j] = __builtin_sqrtf(far);
      sum.one[k] += far * far * roots[j] * m[j];
    }
  return sum.total();
}

// The least l_2.5 error among the range search, the half-quadratic fit, and refits of both.
Fit refined(const float* w, const float* importance, int n, float top, Fit searched) {
  float m[128], q[128], roots[128], weights[128], largest = 0;
  for (int i = 0; i < n; ++i) largest = greater(largest, importance[i]);
  for (int i = 0; i < n; ++i) m[i] = importance[i] / largest;
  float low = w[0], high = w[0];
  for (int i = 1; i < n; ++i) low = lesser(low, w[i]), high = greater(high, w[i]);
  Fit best = range(low, high, 1, top);
  float least = rounded(w, m, n, top, best, q, roots);
  const Fit starts[2] = {searched, half_quadratic(w, m, n, top, best)};
  for (Fit fit : starts)
    for (int round = 0; round < 7; ++round) {
      const float error = rounded(w, m, n, top, fit, q, roots);
      if (error < least) best = fit, least = error;
      float mean = 0;
      for (int i = 0; i < n; ++i) mean += roots[i];
      mean = mean / static_cast<float>(n) * 0.1f + 1e-30f;
      for (int i = 0; i < n; ++i) weights[i] = (roots[i] + mean) * m[i];
      fit = least_squares(w, weights, q, n);
    }
  return best;
}

// As it will be stored.
float store(const Quantize& job, void* to, int64_t index, float value) {
  if (job.halves) {
    const uint16_t half = to_f16(lesser(greater(value, -65504.0f), 65504.0f));
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
      if (job.hqq) fit = refined(w, m, job.group, top, fit);
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

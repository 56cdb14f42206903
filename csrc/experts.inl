// What is done in a mixture between its experts' products, and the choice of experts.
#include "half.h"
#include "kernels.h"

namespace starquill {
namespace {

// gate = act(gate)·up, or act(gate) where there is no `up`.
void gated(float* gate, const float* up, Act act, int64_t n) {
  if (act == Act::silu) {
    for (int64_t i = 0; i < n; ++i) gate[i] = gate[i] / (1.0f + exponential(-gate[i]));
  } else if (act == Act::gelu) {
    gelu(gate, gate, 0, n);
  } else {
    for (int64_t i = 0; i < n; ++i) gate[i] = gate[i] < 0.0f ? 0.0f : gate[i];  // NaN stays
  }
  if (up)
    for (int64_t i = 0; i < n; ++i) gate[i] *= up[i];
}

void add_scaled(float* sum, const float* x, float weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i] * weight;
}

void rms_norm(const LayerNorm& job, int64_t begin, int64_t end) {
  const int64_t n = job.width, whole = n / kSums * kSums;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = job.x + row * n;
    Sums squares;
    for (int64_t i = 0; i < whole; i += kSums)
      for (int k = 0; k < kSums; ++k) squares.one[k] += x[i + k] * x[i + k];
    for (int64_t i = whole; i < n; ++i) squares.one[0] += x[i] * x[i];
    const float inverse = 1.0f / __builtin_sqrtf(squares.total() / static_cast<float>(n) + job.eps);
    float* y = job.y + row * n;
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * inverse * job.weight[i];
  }
}

// The likeliest of a row of logits by a softmax over all, the best first; of equals the first.
// A row with NaN has NaN weights, and experts that exist.
void route(const Routing& job, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* logits = job.logits + row * job.experts;
    float* chance = job.scratch + row * job.experts;
    float top = logits[0];
    for (int64_t e = 1; e < job.experts; ++e) top = greater(top, logits[e]);
    for (int64_t e = 0; e < job.experts; ++e) chance[e] = exponential(logits[e] - top);
    float total = 0;
    for (int64_t e = 0; e < job.experts; ++e) total += chance[e];
    float* weights = job.weights + row * job.top;
    int64_t* chosen = job.chosen + row * job.top;
    float sum = 0;
    for (int64_t rank = 0; rank < job.top; ++rank) {
      int64_t best = -1;
      for (int64_t e = 0; e < job.experts; ++e)
        if (chance[e] != kTaken && (best < 0 || chance[e] > chance[best])) best = e;
      chosen[rank] = best;
      weights[rank] = chance[best] / total;
      sum += weights[rank];
      chance[best] = kTaken;
    }
    if (job.normalise)
      for (int64_t rank = 0; rank < job.top; ++rank) weights[rank] /= sum;
  }
}

// Two experts as nn/router.py says. A row with NaN has NaN weights, and experts that exist.
void sparsemixer(const Routing& job, int64_t begin, int64_t end) {
  const float never = -as_float(0x7f800000);
  for (int64_t row = begin; row < end; ++row) {
    const float* logits = job.logits + row * job.experts;
    float* left = job.scratch + row * job.experts;
    bool sound = true;
    for (int64_t e = 0; e < job.experts; ++e) {
      left[e] = logits[e];
      sound = sound && logits[e] == logits[e];
    }
    for (int64_t rank = 0; rank < 2; ++rank) {
      int64_t best = 0;
      for (int64_t e = 1; e < job.experts; ++e)
        if (left[e] > left[best]) best = e;
      float total = 0;
      for (int64_t e = 0; e < job.experts; ++e) {
        const float size = logits[e] < 0 ? -logits[e] : logits[e];
        const bool far = (left[best] - logits[e]) / greater(size, left[best]) > 2 * job.jitter;
        total += far ? 0.0f : exponential(left[e] - left[best]);
      }
      job.chosen[row * 2 + rank] = best;
      job.weights[row * 2 + rank] = sound ? 1.0f / total : as_float(0x7fc00000);
      left[best] = never;
    }
  }
}

}  // namespace
}  // namespace starquill

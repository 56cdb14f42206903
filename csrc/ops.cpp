#include "ops.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "pool.h"
#include "scratch.h"

namespace starquill {
namespace {

// Rows of activations at a time in prefill: they stay in the last level of cache.
constexpr int64_t kPrefillRows = 512;

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found{&portable_kernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  auto has = [](auto... features) { return (features && ...); };
  if (has(__builtin_cpu_supports("avx2"), __builtin_cpu_supports("fma"),
          __builtin_cpu_supports("f16c"), __builtin_cpu_supports("bmi2"))) {
    found.push_back(&avx2_kernels);
    if (has(__builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"),
            __builtin_cpu_supports("avx512vl"), __builtin_cpu_supports("avx512dq"),
            __builtin_cpu_supports("avx512vbmi"), __builtin_cpu_supports("avx512vnni")))
      found.push_back(&avx512_kernels);
  }
#endif
  return found;
}

const Kernels* by_name(const std::string& name) {
  std::string valid;
  for (const Kernels* kernels : available()) {
    if (name == kernels->name) return kernels;
    valid += (valid.empty() ? "" : ", ") + std::string(kernels->name);
  }
  throw std::invalid_argument("instruction set " + name + " is not one of this machine's (" + valid + ")");
}

const Kernels* kernels = available().back();

thread_local Scratch activation_scratch, row_scratch, lora_scratch;

Activations quantized(const Kernels& k, const Affine& w, const Product& job, int threads) {
  uint8_t* at = activation_scratch.take(placed_bytes(k, w, job.x_rows));
  const Activations to = placed(k, w, job.x_rows, at);
  parallel_for(threads, to.rows, 8, [&](int64_t begin, int64_t end) {
    k.quantize_activations(job.x, job.x_stride, w, to, begin, end);
  });
  return to;
}

// The rows of x that are worked on at once, from `first` on.
Product rows_from(const Product& job, int64_t first) {
  Product part = job;
  part.x += first * job.x_stride;
  part.out += first * job.out_stride;
  part.x_rows = std::min(kPrefillRows, job.x_rows - first);
  return part;
}

// Pieces small enough that a thread which starts late costs little.
int64_t grain(int64_t rows, int threads, int64_t multiple) {
  return rounded_up(std::max<int64_t>(rows / (threads * 8), 1), multiple);
}

}  // namespace

std::vector<std::string> isa_levels() {
  std::vector<std::string> names;
  for (const Kernels* level : available()) names.push_back(level->name);
  return names;
}

std::string isa() { return kernels->name; }

const Kernels& chosen_kernels() { return *kernels; }

void select_isa(const std::string& name) { kernels = by_name(name); }

void affine_together(std::span<const Multiplication> all, int threads) {
  const Kernels& k = *kernels;
  const Affine& like = all.front().weight;
  int64_t height = 0;
  for (const Multiplication& one : all) height += one.weight.rows;
  for (int64_t first = 0; first < all.front().product.x_rows; first += kPrefillRows) {
    const Activations x = quantized(k, like, rows_from(all.front().product, first), threads);
    parallel_for(threads, height, grain(height, threads, 16), [&](int64_t begin, int64_t end) {
      for (const auto& [weight, product] : all) {
        const int64_t last = std::min(end, weight.rows);
        float* out = product.out + first * product.out_stride;
        if (begin < last) k.decode({weight, x, product.bias, out, product.out_stride}, begin, last);
        begin = std::max<int64_t>(begin - weight.rows, 0), end -= weight.rows;
        if (end <= 0) return;
      }
    });
  }
}

void affine_matmul(const Affine& w, const Product& job, Way way, int threads) {
  const Kernels& k = *kernels;
  if (way == Way::rows) {
    const Multiplication one{w, job};
    return affine_together({&one, 1}, threads);
  }
  if (way == Way::exact) {
    const Exact all{w, job};
    return parallel_for(threads, w.rows, grain(w.rows, threads, 16), [&](int64_t begin, int64_t end) {
      float* scratch = reinterpret_cast<float*>(row_scratch.take(4 * w.width));
      k.exact(all, begin, end, scratch);
    });
  }
  for (int64_t first = 0; first < job.x_rows; first += kPrefillRows) {
    const Product part = rows_from(job, first);
    const Matmul all{w, quantized(k, w, part, threads), job.bias, part.out, job.out_stride};
    parallel_for(threads, w.rows, band_rows(k), [&](int64_t begin, int64_t end) {
      k.prefill(all, begin, end, row_scratch.take(band_bytes(k, w)));
    });
  }
}

void affine_experts(const Affine& weight, const int64_t* counts, int64_t experts, const Product& job,
                    Way way, int threads) {
  Affine w = weight;
  Product part = job;
  const int64_t scale_bytes = bytes_of(w.scale_type);
  for (int64_t e = 0; e < experts; ++e) {
    part.x_rows = counts[e];
    if (counts[e] > 0) affine_matmul(w, part, way, threads);
    part.x += counts[e] * part.x_stride;
    part.out += counts[e] * part.out_stride;
    w.packed += w.rows * w.row_bytes();
    w.scales = static_cast<const uint8_t*>(w.scales) + w.rows * w.groups() * scale_bytes;
    w.biases = static_cast<const uint8_t*>(w.biases) + w.rows * w.groups() * scale_bytes;
  }
}

void affine_dequantize(const Affine& w, float* out, int threads) {
  parallel_for(threads, w.rows, grain(w.rows, threads, 16),
               [&](int64_t begin, int64_t end) {
                 kernels->dequantize(w, out + begin * w.width, begin, end);
               });
}

void affine_rows(const Affine& w, const int64_t* ids, int64_t count, float* out, int threads) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= w.rows) throw std::out_of_range("a row is not in the matrix");
  parallel_for(threads, count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kernels->dequantize(w, out + i * w.width, ids[i], ids[i] + 1);
  });
}

void dense_matmul(const void* weight, Float type, int64_t rows, int64_t width, const Product& job,
                  int threads) {
  const DenseMatmul all{weight, type, width, job};
  parallel_for(threads, rows, grain(rows, threads, 16),
               [&](int64_t begin, int64_t end) { kernels->dense(all, begin, end); });
}

void quantize(const Quantize& job, int64_t rows, int threads) {
  parallel_for(threads, rows, grain(rows, threads, 1),
               [&](int64_t begin, int64_t end) { kernels->quantize(job, begin, end); });
}

namespace {

// How attention is cut into pieces.
struct Cut {
  std::vector<AttentionPiece> pieces;
  std::vector<int64_t> runs;
  Scratch partials;

  // Rows whose blocks are the same, at positions that follow each other, are of one sequence.
  void make(const Attention& job) {
    pieces.clear(), runs.clear();
    const auto table = [&](int64_t row) { return job.tables.block + row * job.tables.width; };
    for (int64_t first = 0, row = 1; row <= job.rows; ++row) {
      const bool follows = row < job.rows && job.positions[row] == job.positions[row - 1] + 1 &&
                           row - first < kRun &&
                           std::equal(table(row), table(row) + job.tables.width, table(row - 1));
      if (follows) continue;
      add_run(job, first, row);
      first = row;
    }
    runs.push_back(static_cast<int64_t>(pieces.size()));
    take_memory(job);
  }

 private:
  void add_run(const Attention& job, int64_t first, int64_t end) {
    runs.push_back(static_cast<int64_t>(pieces.size()));
    const int64_t seen = std::max<int64_t>(job.positions[first] + 1 - job.window, 0);
    const int64_t last = job.positions[end - 1];
    for (int64_t start = seen / kBlock * kBlock; start <= last;) {
      const int64_t stop = (start / kSpan + 1) * kSpan;
      pieces.push_back({first, end, start, stop, nullptr});
      start = stop;
    }
  }

  // For the pieces of runs that have several.
  void take_memory(const Attention& job) {
    offsets_.assign(pieces.size(), -1);
    int64_t floats = 0;
    for (size_t run = 0; run + 1 < runs.size(); ++run)
      for (int64_t i = runs[run]; i < runs[run + 1] && runs[run + 1] - runs[run] > 1; ++i) {
        offsets_[i] = floats;
        floats += job.key_heads * partial_floats(job, pieces[i]);
      }
    float* memory = reinterpret_cast<float*>(partials.take(4 * floats));
    for (size_t i = 0; i < pieces.size(); ++i)
      if (offsets_[i] >= 0) pieces[i].partial = memory + offsets_[i];
  }

  std::vector<int64_t> offsets_;
};

thread_local Cut cut;

}  // namespace

void attend(const Attention& job, int threads) {
  const int64_t pairs = job.rows * job.key_heads;
  parallel_for(threads, pairs, kElements / job.head_dim + 1,
               [&](int64_t begin, int64_t end) { kernels->remember(job, begin, end); });
  cut.make(job);
  Attention all = job;
  all.pieces = cut.pieces.data();
  all.runs = cut.runs.data();
  const int64_t pieces = static_cast<int64_t>(cut.pieces.size());
  parallel_for(threads, pieces * job.key_heads, 1, [&](int64_t begin, int64_t end) {
    float* scratch = reinterpret_cast<float*>(row_scratch.take(4 * attention_floats(job)));
    kernels->attend(all, begin, end, scratch);
  });
  const int64_t runs = static_cast<int64_t>(cut.runs.size()) - 1;
  if (pieces == runs) return;
  const int64_t floats = pieces * job.heads() * job.head_dim;
  parallel_for(threads, runs * job.key_heads, kElements * runs / floats + 1,
               [&](int64_t begin, int64_t end) { kernels->merge(all, begin, end); });
}

void flash(const Flash& job, int threads) {
  parallel_for(threads, flash_pieces(job), 1, [&](int64_t begin, int64_t end) {
    float* scratch = reinterpret_cast<float*>(row_scratch.take(4 * flash_floats(job)));
    kernels->flash(job, begin, end, scratch);
  });
}

void layer_norm(const LayerNorm& job, int64_t rows, int threads) {
  parallel_for(threads, rows, kElements / job.width + 1,
               [&](int64_t begin, int64_t end) { kernels->layer_norm(job, begin, end); });
}

void rms_norm(const LayerNorm& job, int64_t rows, int threads) {
  parallel_for(threads, rows, kElements / job.width + 1,
               [&](int64_t begin, int64_t end) { kernels->rms_norm(job, begin, end); });
}

void rotation(const Rotation& job, int threads) {
  parallel_for(threads, job.rows * job.heads * job.tokens, kElements / job.head_dim + 1,
               [&](int64_t begin, int64_t end) { kernels->rotation(job, begin, end); });
}

void store(const Store& job, int threads) {
  parallel_for(threads, job.rows * job.heads * job.tokens, kElements / job.head_dim + 1,
               [&](int64_t begin, int64_t end) { kernels->store(job, begin, end); });
}

void add(const float* x, const float* y, float* sum, int64_t count, int threads) {
  parallel_for(threads, count, kElements,
               [&](int64_t begin, int64_t end) { kernels->add(x, y, sum, begin, end); });
}

void gelu(const float* x, float* y, int64_t count, int threads) {
  parallel_for(threads, count, kElements,
               [&](int64_t begin, int64_t end) { kernels->gelu(x, y, begin, end); });
}

void gated(const float* gate, const float* up, Act act, float* y, int64_t count, int threads) {
  parallel_for(threads, count, kElements, [&](int64_t begin, int64_t end) {
    std::copy(gate + begin, gate + end, y + begin);
    kernels->gated(y + begin, up ? up + begin : nullptr, act, end - begin);
  });
}

void lora(Lora job, int threads) {
  int64_t pieces = 0, floats = 0;
  for (int64_t i = 0; i < job.count; ++i) {
    pieces += job.entries[i].pieces();
    floats += job.entries[i].rows * job.entries[i].rank;
  }
  job.h = reinterpret_cast<float*>(lora_scratch.take(4 * floats));
  parallel_for(threads, pieces, kElements / (kLoraRanks * job.width) + 1,
               [&](int64_t begin, int64_t end) { kernels->shrink(job, begin, end); });
  constexpr int64_t kOutputs = 64;  // whole vectors of every instruction set, four at a time
  parallel_for(threads, job.outputs, rounded_up(kElements / std::max<int64_t>(floats, 1) + 1, kOutputs),
               [&](int64_t begin, int64_t end) { kernels->expand(job, begin, end); });
}

float largest(const void* w, Float type, int64_t count, int threads) {
  constexpr int64_t kPiece = 1 << 18;
  const int64_t pieces = (count + kPiece - 1) / kPiece;
  std::vector<float> found(pieces);
  parallel_for(threads, pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      found[i] = kernels->largest(w, type, i * kPiece, std::min(count, (i + 1) * kPiece));
  });
  float most = 0;
  for (float one : found) most = one > most || one != one ? one : most;
  return most;
}

}  // namespace starquill

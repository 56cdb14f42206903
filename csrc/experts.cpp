// A layer's experts in one operation: the matrices of those that were chosen are gone over by all
// threads together, with a handful of loops instead of some for each expert.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "ops.h"
#include "pool.h"
#include "scratch.h"

namespace starquill {
namespace {

constexpr int64_t kTokensAtOnce = 512;  // bounds the memory for what lies between the products

// Rows are pairs of a token and one of its experts, in the experts' order.
struct Rows {
  std::vector<int64_t> used;   // the experts that have rows
  std::vector<int64_t> start;  // the first row of each of them, and the end of the last
  std::vector<int64_t> pair;   // of each row: token·top + rank
  std::vector<int64_t> place;  // of each pair: its row

  void sort(const int64_t* chosen, int64_t pairs, int64_t experts) {
    counts_.assign(experts, 0);
    for (int64_t i = 0; i < pairs; ++i) {
      if (chosen[i] < 0 || chosen[i] >= experts) throw std::out_of_range("an expert is not in the stack");
      ++counts_[chosen[i]];
    }
    used.clear(), start.assign(1, 0);
    int64_t at = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t count = counts_[e];
      counts_[e] = at;
      if (count == 0) continue;
      used.push_back(e), start.push_back(at += count);
    }
    pair.resize(pairs), place.resize(pairs);
    for (int64_t i = 0; i < pairs; ++i) place[i] = counts_[chosen[i]]++, pair[place[i]] = i;
  }

 private:
  std::vector<int64_t> counts_;
};

Activations some_rows(const Activations& all, int64_t first, int64_t end) {
  return {all.q + first * all.q_stride, all.scales + first * all.group_stride,
          all.sums + first * all.group_stride, end - first, all.q_stride, all.group_stride};
}

// Rows [first, first + rows) of a matrix.
Affine rows_of(const Affine& w, int64_t first, int64_t rows) {
  const int64_t floats = first * w.groups() * bytes_of(w.scale_type);
  Affine part = w;
  part.packed += first * w.row_bytes();
  part.scales = static_cast<const uint8_t*>(w.scales) + floats;
  part.biases = static_cast<const uint8_t*>(w.biases) + floats;
  part.rows = rows;
  return part;
}

bool alike(const Affine& a, const Affine& b) { return a.bits == b.bits && a.group == b.group; }

thread_local Scratch between, band_scratch, tile_scratch;

class Work {
 public:
  Work(const Mixture& job, Way way, int threads)
      : job_(job), k_(chosen_kernels()), bands_(way == Way::bands), threads_(threads),
        inner_(job.up->rows / job.experts), width_(job.down->rows / job.experts) {}

  void run() {
    rows_.sort(job_.chosen, job_.tokens * job_.top, job_.experts);
    take_memory();
    const Activations up_x = inputs(*job_.up, x_);
    const bool other = job_.gate && !alike(*job_.gate, *job_.up);
    inner(other ? inputs(*job_.gate, gate_x_) : up_x, up_x);
    parallel_for(threads_, pairs(), kElements / inner_ + 1, [&](int64_t begin, int64_t end) {
      k_.quantize_activations(h_, inner_, *job_.down, down_x_, begin, end);
    });
    if (bands_) return add_columns();
    outer();
    add_rows();
  }

 private:
  // Where activations are quantized, and where they are put in the order of rows.
  struct Inputs {
    Activations tokens, rows;
  };

  int64_t pairs() const { return job_.tokens * job_.top; }

  void take_memory() {
    const Affine *gate = job_.gate, *up = job_.up;
    const bool other = gate && !alike(*gate, *up);
    int64_t bytes = placed_bytes(k_, *up, job_.tokens + pairs()) + 256;
    if (other) bytes += placed_bytes(k_, *gate, job_.tokens + pairs()) + 256;
    bytes += placed_bytes(k_, *job_.down, pairs()) + 4 * pairs() * inner_ + 64;
    if (!bands_) bytes += 4 * pairs() * width_;
    uint8_t* at = between.take(bytes);
    x_ = {placed(k_, *up, job_.tokens, at), placed(k_, *up, pairs(), at)};
    if (other) gate_x_ = {placed(k_, *gate, job_.tokens, at), placed(k_, *gate, pairs(), at)};
    down_x_ = placed(k_, *job_.down, pairs(), at);
    h_ = reinterpret_cast<float*>(at);
    made_ = h_ + rounded_up(pairs() * inner_, 16);
  }

  // A single token has the same activations for all of its experts: nothing is copied.
  Activations inputs(const Affine& w, const Inputs& to) {
    parallel_for(threads_, job_.tokens, kElements / w.width + 1, [&](int64_t begin, int64_t end) {
      k_.quantize_activations(job_.x, w.width, w, to.tokens, begin, end);
    });
    if (job_.tokens == 1) return to.tokens;
    const Activations &from = to.tokens, &rows = to.rows;
    parallel_for(threads_, pairs(), kElements / w.width + 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t token = rows_.pair[row] / job_.top, floats = from.group_stride;
        std::memcpy(rows.q + row * rows.q_stride, from.q + token * from.q_stride, from.q_stride);
        std::memcpy(rows.scales + row * floats, from.scales + token * floats, 4 * floats);
        std::memcpy(rows.sums + row * floats, from.sums + token * floats, 4 * floats);
      }
    });
    return rows;
  }

  Activations of_expert(const Activations& x, int64_t number) const {
    const bool shared = job_.tokens == 1 && x.rows == 1;
    return shared ? x : some_rows(x, rows_.start[number], rows_.start[number + 1]);
  }

  // Outputs [first, end) of an expert's matrix, to `out` whose rows are `stride` floats apart.
  void multiply(const Affine& stack, const float* bias, int64_t expert, int64_t first, int64_t end,
                const Activations& x, float* out, int64_t stride) const {
    const int64_t height = stack.rows / job_.experts, at = expert * height + first;
    const Matmul all{rows_of(stack, at, end - first), x, bias ? bias + at : nullptr, out, stride};
    if (bands_)
      k_.prefill(all, 0, end - first, band_scratch.take(band_bytes(k_, stack)));
    else
      k_.decode(all, 0, end - first);
  }

  // Outputs of a matrix `height` high that are one piece of work.
  int64_t slice(int64_t height, int64_t experts) const {
    const int64_t multiple = bands_ ? band_rows(k_) : 16;
    const int64_t share = height * experts / (threads_ * 32);
    return std::min<int64_t>(rounded_up(std::max<int64_t>(share, 1), multiple), 256);
  }

  template <class F>
  void over_pieces(int64_t height, F&& f) const {
    const int64_t used = static_cast<int64_t>(rows_.used.size()), size = slice(height, used);
    const int64_t slices = (height + size - 1) / size;
    parallel_for(threads_, used * slices, 1, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t first = piece % slices * size;
        f(piece / slices, first, std::min(first + size, height));
      }
    });
  }

  void inner(const Activations& gate_x, const Activations& up_x) const {
    over_pieces(inner_, [&](int64_t number, int64_t first, int64_t end) {
      const int64_t expert = rows_.used[number], start = rows_.start[number];
      const int64_t count = rows_.start[number + 1] - start, n = end - first;
      float* h = h_ + start * inner_ + first;
      const Activations up = of_expert(up_x, number);
      if (!job_.gate) {
        multiply(*job_.up, job_.up_bias, expert, first, end, up, h, inner_);
        for (int64_t m = 0; m < count; ++m) k_.gated(h + m * inner_, nullptr, job_.act, n);
        return;
      }
      const Activations gate = of_expert(gate_x, number);
      float* tile = reinterpret_cast<float*>(tile_scratch.take(4 * count * n));
      multiply(*job_.gate, job_.gate_bias, expert, first, end, gate, h, inner_);
      multiply(*job_.up, job_.up_bias, expert, first, end, up, tile, n);
      for (int64_t m = 0; m < count; ++m) k_.gated(h + m * inner_, tile + m * n, job_.act, n);
    });
  }

  void outer() const {
    over_pieces(width_, [&](int64_t number, int64_t first, int64_t end) {
      const int64_t start = rows_.start[number];
      multiply(*job_.down, job_.down_bias, rows_.used[number], first, end,
               some_rows(down_x_, start, rows_.start[number + 1]), made_ + start * width_ + first,
               width_);
    });
  }

  // A token's sum goes by rank.
  void add_rows() const {
    parallel_for(threads_, job_.tokens, kElements / (width_ * job_.top) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        float* out = job_.out + token * width_;
        std::memset(out, 0, 4 * width_);
        for (int64_t i = token * job_.top; i < (token + 1) * job_.top; ++i)
          k_.add_scaled(out, made_ + rows_.place[i] * width_, job_.weights[i], width_);
      }
    });
  }

  // Some columns of all experts, one after the other, so that no two threads add to one value: a
  // token's sum goes by its experts' numbers.
  void add_columns() const {
    const int64_t size = slice(width_, 1), slices = (width_ + size - 1) / size;
    parallel_for(threads_, slices, 1, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t first = piece * size, last = std::min(first + size, width_), n = last - first;
        for (int64_t t = 0; t < job_.tokens; ++t) std::memset(job_.out + t * width_ + first, 0, 4 * n);
        for (size_t number = 0; number < rows_.used.size(); ++number) {
          const int64_t start = rows_.start[number], rows = rows_.start[number + 1] - start;
          float* tile = reinterpret_cast<float*>(tile_scratch.take(4 * rows * n));
          multiply(*job_.down, job_.down_bias, rows_.used[number], first, last,
                   some_rows(down_x_, start, start + rows), tile, n);
          for (int64_t m = 0; m < rows; ++m) {
            const int64_t i = rows_.pair[start + m];
            k_.add_scaled(job_.out + i / job_.top * width_ + first, tile + m * n, job_.weights[i], n);
          }
        }
      }
    });
  }

  const Mixture& job_;
  const Kernels& k_;
  const bool bands_;
  const int threads_;
  const int64_t inner_, width_;
  Rows rows_;
  Inputs x_, gate_x_;
  Activations down_x_;
  float* h_ = nullptr;     // [pairs, inner_]
  float* made_ = nullptr;  // [pairs, width_]
};

// Experts of rows of logits, by one of the two ways.
void choose(Routing job, int64_t rows, int threads, decltype(Kernels::route) kernel) {
  job.scratch = reinterpret_cast<float*>(between.take(4 * rows * job.experts));
  parallel_for(threads, rows, kElements / (job.experts * job.top) + 1,
               [&](int64_t begin, int64_t end) { kernel(job, begin, end); });
}

}  // namespace

void mixture(const Mixture& job, Way way, int threads) {
  const int64_t width = job.down->rows / job.experts;
  for (int64_t first = 0; first < job.tokens; first += kTokensAtOnce) {
    Mixture part = job;
    part.x += first * width;
    part.out += first * width;
    part.chosen += first * job.top;
    part.weights += first * job.top;
    part.tokens = std::min(kTokensAtOnce, job.tokens - first);
    Work(part, way, threads).run();
  }
}

void route(Routing job, int64_t rows, int threads) {
  choose(job, rows, threads, chosen_kernels().route);
}

void sparsemixer(Routing job, int64_t rows, int threads) {
  choose(job, rows, threads, chosen_kernels().sparsemixer);
}

}  // namespace starquill

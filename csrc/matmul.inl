// Products with a quantized matrix, written once over `Simd`; each instruction set includes it.
//
// Weights are read as integers and multiplied with int8 activations: for each group
//   scale·Σ q·x + bias·Σ x,  x = sx·qx  ->  (scale·sx)·Σ q·qx + bias·(sx·Σ qx),
// the first sum exact in int32.
#include "half.h"
#include "kernels.h"

namespace starquill {
namespace {

using F = Simd::F;
using I = Simd::I;
constexpr int L = Simd::lanes;
// Bytes of weights that are asked for before they are needed: with one row of activations by a
// loop that waits for memory, with more by one that needs the first level of cache for them.
constexpr int kAheadOfOne = 4096, kAhead = 2048;
constexpr int64_t kActivations = 16384;  // bytes of activations that leave weights room beside them
constexpr int64_t kPart = 3072;  // inputs at a time where there are more
constexpr int64_t kPlenty = 128;   // bytes left: more than any step reads
constexpr int kTokens = 4;        // rows of activations that share one reading of weights
constexpr int64_t kRowsTogether = 8;  // rows of weights that share one reading of activations
constexpr int kDenseRows = 16;   // rows of float activations whose sums are kept at once
constexpr int kTile = 6;          // the same in prefill: what fits in registers
constexpr int kBand = 2 * L;      // rows of weights in a prefill band

template <int Bits>
struct Step {
  static constexpr int planes = Bits == 2 || Bits == 4 ? 8 / Bits : 1;
  static constexpr int elements = planes * Simd::bytes;
  static constexpr int stored = elements * Bits / 8;  // bytes in a row of weights
};

// How a group lies in the order of unpacking: `parts` steps (one, if it is not longer than a
// step), in each of them `span` lanes of every plane.
struct Group {
  int parts;
  int span;
  Group(int width, int planes, int elements)
      : parts(greater(1, width / elements)), span(lesser(width, elements) / (4 * planes)) {}
};

// In which group, counted from the block's first, each lane of each step of a block lies. A block
// is L groups: as many scales as a vector holds.
template <int Bits>
struct Lanes {
  alignas(64) int32_t group[4096 / Simd::bytes][L];
  int steps;
  explicit Lanes(int width) : steps(greater(1, L * width / Step<Bits>::elements)) {
    for (int s = 0; s < steps; ++s)
      for (int l = 0; l < L; ++l)
        group[s][l] = lesser((s * Step<Bits>::elements + 4 * l * Step<Bits>::planes) / width, L - 1);
  }
};

// What a row of weights comes to with M rows of activations: two sums, for the latency of an
// addition.
template <int M>
struct RowSums {
  F even[M], odd[M];
  RowSums() {
    for (int m = 0; m < M; ++m) even[m] = odd[m] = Simd::zero();
  }
};

// Adds to `sums` the groups [g, end) of a row of weights, g being a block's first, times M rows of
// activations from `first` on. At `soon` lie as many bytes of weights that are needed later. Part
// of its callers, so that sums are in registers.
template <int Bits, int M, bool Whole>
__attribute__((always_inline)) inline RowSums<M> decode_part(
    const Matmul& job, const Lanes<Bits>& lanes, int64_t row, int64_t first, int64_t g, int64_t end,
    const uint8_t* soon, RowSums<M> sums) {
  using S = Step<Bits>;
  const Affine& w = job.weight;
  const Activations& x = job.x;
  const int64_t at = row * w.groups(), skip = g * w.group * Bits / 8;
  const uint8_t* packed = w.packed + row * w.row_bytes() + skip;
  const int8_t* q = x.q + first * x.q_stride + skip / S::stored * S::elements;
  // n groups from g on: `steps` whole steps, and one that the row's end cuts to `rest` bytes.
  const auto block = [&](int n, int steps, int64_t rest) __attribute__((always_inline)) {
    const F scale = Simd::load_floats(w.scales, w.scale_type, at + g, n);
    const F bias = Simd::load_floats(w.biases, w.scale_type, at + g, n);
    F factor[M];
    for (int m = 0; m < M; ++m) {
      const int64_t group = (first + m) * x.group_stride + g;
      factor[m] = Simd::mul(scale, Simd::load(x.scales + group));
      sums.even[m] = Simd::fma(bias, Simd::load(x.sums + group), sums.even[m]);
    }
    const auto step = [&](int s, int64_t left, F* to) __attribute__((always_inline)) {
      I planes[S::planes];
      Simd::template unpack<Bits>(packed, left, planes);
      __builtin_prefetch(soon, 0, Whole ? 0 : 3);  // parts wait longer until they are used
      soon += S::stored;
      const I index = Simd::load_i(lanes.group[s]);
      for (int m = 0; m < M; ++m) {
        I dot = Simd::zero_i();
        for (int p = 0; p < S::planes; ++p)
          dot = Simd::template dot<Bits>(dot, planes[p],
                                         Simd::load_i(q + m * x.q_stride + p * Simd::bytes));
        to[m] = Simd::fma(Simd::to_float(dot), Simd::permute(factor[m], index), to[m]);
      }
      packed += S::stored;
      q += S::elements;
    };
    int s = 0;
    for (; s + 2 <= steps; s += 2) {
      step(s, kPlenty, sums.even);
      step(s + 1, kPlenty, sums.odd);
    }
    if (s < steps) step(s, kPlenty, sums.even);
    if (rest > 0) step(steps, rest, sums.even);
  };
  int64_t whole = (w.row_bytes() - skip) / S::stored;  // steps to come, but for one that is cut short
  const int64_t rest = (w.row_bytes() - skip) % S::stored;
  // A constant number of groups: what loads them then needs no mask.
  for (; g + L <= end; g += L) {
    const int steps = static_cast<int>(lesser<int64_t>(lanes.steps, whole));
    block(L, steps, steps < lanes.steps ? rest : 0);
    whole -= steps;
  }
  if (g < end) block(static_cast<int>(end - g), static_cast<int>(whole), rest);
  return sums;
}

template <int M>
void put_sums(const Matmul& job, int64_t row, int64_t first, const RowSums<M>& sums) {
  for (int m = 0; m < M; ++m) {
    const float y = Simd::sum(Simd::add(sums.even[m], sums.odd[m]));
    job.out[(first + m) * job.out_stride + row] = job.bias ? y + job.bias[row] : y;
  }
}

// Scales and biases lie apart from a row's integers: asked for a few rows before they are needed.
inline void ask_for_scales(const Affine& w, int64_t row) {
  const int64_t bytes = w.groups() * bytes_of(w.scale_type), skip = row * bytes;
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(static_cast<const char*>(w.scales) + skip + i, 0, 3);
    __builtin_prefetch(static_cast<const char*>(w.biases) + skip + i, 0, 3);
  }
}

// Rows of weights [begin, end), at most kRowsTogether, times M rows of activations from `first` on.
template <int Bits, int M>
void decode_rows(const Matmul& job, const Lanes<Bits>& lanes, int64_t begin, int64_t end,
                 int64_t first) {
  const Affine& w = job.weight;
  const int64_t groups = w.groups();
  const uint8_t* packed = w.packed + begin * w.row_bytes();
  if (M == 1 || M * w.width <= kActivations) {
    packed += M == 1 ? kAheadOfOne : kAhead;  // rows follow each other
    for (int64_t row = begin; row < end; ++row, packed += w.row_bytes()) {
      if (first == 0) ask_for_scales(w, row + kRowsTogether);
      put_sums<M>(job, row, first,
                  decode_part<Bits, M, true>(job, lanes, row, first, 0, groups, packed, {}));
    }
    return;
  }
  // Activations in parts that stay in the first level of cache while the weights pass by: these
  // come from the second, into which the next rows are read in the order that memory is best at.
  const int64_t part = L * greater<int64_t>(1, kPart / (L * w.group));
  RowSums<M> sums[kRowsTogether];
  const uint8_t* soon = packed + (end - begin) * w.row_bytes();
  for (int64_t g = 0; g < groups; g += part) {
    const int64_t last = lesser(g + part, groups);
    for (int64_t row = begin; row < end; ++row, soon += (last - g) * w.group * Bits / 8) {
      RowSums<M>& sum = sums[row - begin];
      sum = decode_part<Bits, M, false>(job, lanes, row, first, g, last, soon, sum);
    }
  }
  for (int64_t row = begin; row < end; ++row) put_sums<M>(job, row, first, sums[row - begin]);
}

template <int Bits>
void decode_bits(const Matmul& job, int64_t begin, int64_t end) {
  const Lanes<Bits> lanes(job.weight.group);
  // A few rows of weights at a time, so that they stay in the first level of cache until all rows
  // of activations have met them.
  for (int64_t first = begin; first < end; first += kRowsTogether) {
    const int64_t last = lesser(first + kRowsTogether, end);
    for (int64_t m = 0; m < job.x.rows; m += kTokens)
      switch (lesser<int64_t>(kTokens, job.x.rows - m)) {
        case 1: decode_rows<Bits, 1>(job, lanes, first, last, m); break;
        case 2: decode_rows<Bits, 2>(job, lanes, first, last, m); break;
        case 3: decode_rows<Bits, 3>(job, lanes, first, last, m); break;
        default: decode_rows<Bits, 4>(job, lanes, first, last, m);
      }
  }
}

// A band of weights for prefill: a value a byte, [unit][row][4], where a unit is four elements of
// one group that lie side by side in the activations; units of a group follow each other.
struct Band {
  uint8_t* q;
  float* scales;  // [groups][kBand]
  float* biases;
  explicit Band(uint8_t* scratch, const Affine& w)
      : q(scratch), scales(reinterpret_cast<float*>(q + w.width * kBand)),
        biases(scales + w.groups() * kBand) {}
};

// L rows of `width` integers from `first` on, to the band's half: transposed step by step.
template <int Bits>
void fill_half(const Affine& w, int64_t first, int rows, uint8_t* to) {
  using S = Step<Bits>;
  const Group group(w.group, S::planes, S::elements);
  const int together = greater(1, S::elements / w.group);  // groups in a step
  for (int64_t start = 0; start < w.width; start += S::elements) {
    I planes[S::planes][L];
    const int64_t skip = start * Bits / 8;
    for (int r = 0; r < L; ++r) {
      I one[S::planes];
      for (int p = 0; p < S::planes; ++p) one[p] = Simd::zero_i();
      if (r < rows)
        Simd::template unpack<Bits>(w.packed + (first + r) * w.row_bytes() + skip,
                                    w.row_bytes() - skip, one);
      for (int p = 0; p < S::planes; ++p) planes[p][r] = one[p];
    }
    for (int p = 0; p < S::planes; ++p) Simd::transpose(planes[p]);
    // Of a step that the row's end cuts short, only whole groups are there.
    for (int g = 0; g < together && start + g * w.group < w.width; ++g)
      for (int p = 0; p < S::planes; ++p)
        for (int l = 0; l < group.span && start + 4 * S::planes * l < w.width; ++l, to += kBand * 4)
          Simd::store_i(to, planes[p][g * group.span + l]);
  }
}

// The scales (or biases) of L rows, transposed too: `to` is [groups][kBand].
void fill_floats(const Affine& w, const void* floats, int64_t first, int rows, float* to) {
  for (int64_t g = 0; g < w.groups(); g += L) {
    const int n = static_cast<int>(lesser<int64_t>(L, w.groups() - g));
    I block[L];
    for (int r = 0; r < L; ++r) {
      float row[L];
      Simd::store(row, r < rows ? Simd::load_floats(floats, w.scale_type, (first + r) * w.groups() + g, n)
                                : Simd::zero());
      block[r] = Simd::load_i(row);
    }
    Simd::transpose(block);
    for (int i = 0; i < n; ++i) Simd::store_i(to + (g + i) * kBand, block[i]);
  }
}

template <int Bits>
void fill_band(const Affine& w, int64_t first, int64_t end, const Band& band) {
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first + half * L;
    const int rows = static_cast<int>(lesser<int64_t>(greater<int64_t>(end - row, 0), L));
    fill_half<Bits>(w, row, rows, band.q + half * Simd::bytes);
    fill_floats(w, w.scales, row, rows, band.scales + half * L);
    fill_floats(w, w.biases, row, rows, band.biases + half * L);
  }
}

template <int Bits, int T>
void prefill_tile(const Matmul& job, const Band& band, int64_t row, int64_t rows, int64_t token) {
  using S = Step<Bits>;
  const Affine& w = job.weight;
  const Activations& x = job.x;
  const Group group(w.group, S::planes, S::elements);
  F acc[2][T];
  for (int t = 0; t < T; ++t) acc[0][t] = acc[1][t] = Simd::zero();
  const uint8_t* q = band.q;
  for (int64_t g = 0; g < w.groups(); ++g) {
    I dot[2][T];
    for (int t = 0; t < T; ++t) dot[0][t] = dot[1][t] = Simd::zero_i();
    const int64_t element = g * w.group, step = element / S::elements * S::elements;
    const int8_t* at = x.q + token * x.q_stride + step + (element - step) / S::planes;
    for (int p = 0; p < group.parts * S::planes; ++p, at += Simd::bytes)
      for (int l = 0; l < group.span; ++l, q += 2 * Simd::bytes) {
        const I low = Simd::load_i(q), high = Simd::load_i(q + Simd::bytes);
        for (int t = 0; t < T; ++t) {
          const I four = Simd::repeat4(at + t * x.q_stride + 4 * l);
          dot[0][t] = Simd::template dot<Bits>(dot[0][t], low, four);
          dot[1][t] = Simd::template dot<Bits>(dot[1][t], high, four);
        }
      }
    for (int half = 0; half < 2; ++half) {
      const F scale = Simd::load(band.scales + (2 * g + half) * L);
      const F bias = Simd::load(band.biases + (2 * g + half) * L);
      for (int t = 0; t < T; ++t) {
        const int64_t place = (token + t) * x.group_stride + g;
        const F factor = Simd::mul(scale, Simd::set(x.scales[place]));
        acc[half][t] = Simd::fma(Simd::to_float(dot[half][t]), factor, acc[half][t]);
        acc[half][t] = Simd::fma(bias, Simd::set(x.sums[place]), acc[half][t]);
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int n = static_cast<int>(lesser<int64_t>(greater<int64_t>(rows - half * L, 0), L));
    if (n == 0) break;
    const int64_t first = row + half * L;
    const F add = job.bias ? Simd::load_floats(job.bias, Float::f32, first, n) : Simd::zero();
    for (int t = 0; t < T; ++t)
      Simd::store_some(job.out + (token + t) * job.out_stride + first, Simd::add(acc[half][t], add), n);
  }
}

template <int Bits>
void prefill_bits(const Matmul& job, int64_t begin, int64_t end, uint8_t* scratch) {
  const Band band(scratch, job.weight);
  for (int64_t row = begin; row < end; row += kBand) {
    fill_band<Bits>(job.weight, row, end, band);
    const int64_t rows = lesser<int64_t>(kBand, end - row);
    for (int64_t t = 0; t < job.x.rows; t += kTile) switch (lesser<int64_t>(kTile, job.x.rows - t)) {
        case 1: prefill_tile<Bits, 1>(job, band, row, rows, t); break;
        case 2: prefill_tile<Bits, 2>(job, band, row, rows, t); break;
        case 3: prefill_tile<Bits, 3>(job, band, row, rows, t); break;
        case 4: prefill_tile<Bits, 4>(job, band, row, rows, t); break;
        case 5: prefill_tile<Bits, 5>(job, band, row, rows, t); break;
        default: prefill_tile<Bits, 6>(job, band, row, rows, t);
      }
  }
}

// Rounds to the nearest, ties to even, for |x| < 2^22: written so that compilers vectorise it.
inline float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }

// int8 with the largest at ±127; a group with NaN or infinity gets a NaN scale, so that it shows.
template <int Width>
void quantize_group(const float* x, int8_t* q, float* scale, float* sum) {
  uint32_t top = 0;
  for (int i = 0; i < Width; ++i) top = greater(top, as_bits(x[i]) & 0x7fffffff);
  const float most = as_float(top);
  const bool finite = top < 0x7f800000;
  // Smaller ones have no inverse in float32; they count as zeros.
  const float inverse = finite && most > 1e-36f ? 127.0f / most : 0.0f;
  int32_t total = 0;
  if (inverse == 0) {
    std::memset(q, 0, Width);
  } else {
    for (int i = 0; i < Width; ++i) {
      const int32_t level = static_cast<int32_t>(nearest(x[i] * inverse));
      q[i] = static_cast<int8_t>(level);
      total += level;
    }
  }
  *scale = finite ? most / 127.0f : as_float(0x7fc00000);
  *sum = *scale * static_cast<float>(total);
}

template <int N>
void part(const int8_t* from, int8_t* even, int8_t* odd) {
  for (int i = 0; i < N / 2; ++i) even[i] = from[2 * i], odd[i] = from[2 * i + 1];
}

// N values to their planes, a vector apart: by halves, for which compilers have shuffles.
template <int N, int Planes>
void to_planes(const int8_t* from, int8_t* to) {
  constexpr int kNext = Simd::bytes;
  if constexpr (Planes == 1) {
    std::memcpy(to, from, N);
  } else if constexpr (Planes == 2) {
    part<N>(from, to, to + kNext);
  } else {
    int8_t even[N / 2], odd[N / 2];
    part<N>(from, even, odd);
    part<N / 2>(even, to, to + 2 * kNext);
    part<N / 2>(odd, to + kNext, to + 3 * kNext);
  }
}

// A row of activations, in the order of `Layout`. Widths are constants so that loops need no rests.
template <int Width, int Planes>
void quantize_row(const float* x, int64_t groups, int8_t* q, float* scales, float* sums) {
  constexpr int kStep = Planes * Simd::bytes, kInside = Width < kStep ? Width : kStep;
  for (int64_t g = 0; g < groups; ++g) {
    int8_t level[Width];
    quantize_group<Width>(x + g * Width, level, scales + g, sums + g);
    for (int from = 0; from < Width; from += kInside) {
      const int64_t element = g * Width + from, start = element / kStep * kStep;
      to_planes<kInside, Planes>(level + from, q + start + (element - start) / Planes);
    }
  }
}

template <int Planes>
void quantize_row(const float* x, const Affine& w, int8_t* q, float* scales, float* sums) {
  switch (w.group) {
    case 16: return quantize_row<16, Planes>(x, w.groups(), q, scales, sums);
    case 32: return quantize_row<32, Planes>(x, w.groups(), q, scales, sums);
    case 64: return quantize_row<64, Planes>(x, w.groups(), q, scales, sums);
    default: return quantize_row<128, Planes>(x, w.groups(), q, scales, sums);
  }
}

void quantize_activations(const float* x, int64_t x_stride, const Affine& w, const Activations& to,
                          int64_t begin, int64_t end) {
  const int planes = layout(w.bits, Simd::bytes).planes;
  for (int64_t m = begin; m < end; ++m) {
    const float* from = x + m * x_stride;
    int8_t* q = to.q + m * to.q_stride;
    std::memset(q + w.width, 0, to.q_stride - w.width);
    float* scales = to.scales + m * to.group_stride;
    float* sums = to.sums + m * to.group_stride;
    for (int64_t g = w.groups(); g < to.group_stride; ++g) scales[g] = sums[g] = 0;
    switch (planes) {
      case 1: quantize_row<1>(from, w, q, scales, sums); break;
      case 2: quantize_row<2>(from, w, q, scales, sums); break;
      default: quantize_row<4>(from, w, q, scales, sums);
    }
  }
}

void decode(const Matmul& job, int64_t begin, int64_t end) {
  switch (job.weight.bits) {
    case 2: return decode_bits<2>(job, begin, end);
    case 3: return decode_bits<3>(job, begin, end);
    case 4: return decode_bits<4>(job, begin, end);
    case 5: return decode_bits<5>(job, begin, end);
    case 6: return decode_bits<6>(job, begin, end);
    default: return decode_bits<8>(job, begin, end);
  }
}

void prefill(const Matmul& job, int64_t begin, int64_t end, uint8_t* scratch) {
  switch (job.weight.bits) {
    case 2: return prefill_bits<2>(job, begin, end, scratch);
    case 3: return prefill_bits<3>(job, begin, end, scratch);
    case 4: return prefill_bits<4>(job, begin, end, scratch);
    case 5: return prefill_bits<5>(job, begin, end, scratch);
    case 6: return prefill_bits<6>(job, begin, end, scratch);
    default: return prefill_bits<8>(job, begin, end, scratch);
  }
}

}  // namespace
}  // namespace starquill

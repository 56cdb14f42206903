// The data that kernels work on, and the table of kernels that each instruction set fills.
#pragma once

#include <cstdint>

namespace starquill {

enum class Float : int { f32, f16, bf16 };
inline int64_t bytes_of(Float type) { return type == Float::f32 ? 4 : 2; }

// A quantized matrix as Python holds it: w = scale·q + bias, one pair for each `group` inputs.
// A row of `packed` is one stream of bits, least significant first (MLX's layout).
struct Affine {
  const uint8_t* packed;
  const void* scales;
  const void* biases;
  Float scale_type;
  int bits;
  int group;
  int64_t rows;
  int64_t width;

  int64_t row_bytes() const { return width * bits / 8; }
  int64_t groups() const { return width / group; }
};

// Rows of activations as int8 with a scale per group, in the order that a kernel's unpacking
// gives (see `Layout`). `sums` are scale·Σq of each group: what a weight's bias multiplies.
// Padded with zeros: a row of `q` to `q_stride`, one of `scales` and `sums` to `group_stride`.
struct Activations {
  int8_t* q;
  float* scales;
  float* sums;
  int64_t rows;
  int64_t q_stride;
  int64_t group_stride;
};

// out[m, o] = Σ_i x[m, i]·w[o, i] + bias[o]; `out` has `out_stride` floats a row.
struct Matmul {
  Affine weight;
  Activations x;
  const float* bias;  // or null
  float* out;
  int64_t out_stride;
};

// Rows of x [m, width] float32, `x_stride` floats apart, times a weight, into out [m, rows].
struct Product {
  const float* x;
  int64_t x_rows;
  int64_t x_stride;
  const float* bias;  // or null
  float* out;
  int64_t out_stride;
};

// A product with a dense matrix.
struct DenseMatmul {
  const void* weight;
  Float type;
  int64_t width;
  Product rows;
};

// The same with a quantized matrix whose values are written out, for activations as they are.
struct Exact {
  Affine weight;
  Product rows;
};

// Finding scales, biases and integers for a dense matrix: see quantize.inl.
struct Quantize {
  const void* weight;
  Float type;
  int64_t width;
  int bits;
  int group;
  const float* shares;
  int share_count;
  bool hqq;
  const float* importance;  // [width], or null for all alike
  float unit;               // weights are divided by it first, so that squares stay in range
  bool halves;              // scales and biases are stored as float16, else float32
  uint8_t* packed;
  void* scales;
  void* biases;
};

constexpr int kMostHeadDim = 256;

// A cache of keys or values is [blocks, Hk, kBlock, Dh]. A row of `tables` [B, table_width] names the
// blocks of one sequence: position p is at p % kBlock of block p / kBlock. Of blocks that no query
// sees any number may stand there.
constexpr int kBlock = 64;
struct Tables {
  const int64_t* block;
  int64_t width;

  // Where keys of `head` from position `p` on lie, up to the end of p's block, in vectors of Dh.
  int64_t place(int64_t row, int64_t p, int64_t heads, int64_t head) const {
    return (block[row * width + p / kBlock] * heads + head) * kBlock + p % kBlock;
  }
};

// A run of rows [first, end) of one sequence, at most kRun, against keys [start, stop), whole blocks:
// so much that many threads have work where there are few heads. Pieces end where positions are
// multiples of kSpan, so that what a row gets does not depend on others, nor on threads.
struct AttentionPiece {
  int64_t first, end, start, stop;
  float* partial;  // of each key head partial_floats; or null, where a run has but one piece
};

// A new token of each row, at `positions`: query and key are rotated (dimension i with i + Dh/2),
// key and value are stored, and the query sees the last `window` positions. Several rows may be
// of one sequence: all are stored before any query looks.
struct Attention {
  const float* q;         // [B, Hq, Dh]
  const float* new_k;     // [B, Hk, Dh]
  const float* new_v;     // [B, Hk, Dh]
  const float* cos;       // [B, Dh]
  const float* sin;       // [B, Dh]
  float* k;
  float* v;
  Tables tables;
  const int64_t* positions;  // [B]
  float* out;             // [B, Hq, Dh]
  int64_t rows, query_heads, key_heads, head_dim, window;
  float scale;
  const AttentionPiece* pieces = nullptr;
  const int64_t* runs = nullptr;  // where the pieces of each run begin, and behind the last

  int64_t heads() const { return query_heads / key_heads; }
};

constexpr int64_t kRun = 8;
constexpr int64_t kSpan = 8 * kBlock;  // positions of a piece
// What a key head's queries come to in a piece: [queries, Dh], and two numbers of each.
inline int64_t partial_floats(const Attention& job, const AttentionPiece& piece) {
  return (piece.end - piece.first) * job.heads() * (job.head_dim + 2);
}
inline int64_t attention_floats(const Attention& job) {
  const int64_t queries = kRun * job.heads();
  return queries * (job.head_dim + kBlock + 2) + job.head_dim * kBlock;
}

// y = (x - mean)/√(variance + eps)·weight + bias for each row of `width`.
struct LayerNorm {
  const float* x;
  const float* weight;
  const float* bias;
  float* y;
  int64_t width;
  float eps;
};

// y = x/√(mean of x² + eps)·weight likewise: `rms_norm`, which takes the same and no bias.

// Rotary embedding of x [B, H, T, Dh] (with strides in floats; Dh contiguous) into y, contiguous.
struct Rotation {
  const float* x;
  const float* cos;  // [B, T, Dh]
  const float* sin;
  float* y;
  int64_t rows, heads, tokens, head_dim;
  int64_t row_stride, head_stride, token_stride;
};

// New keys or values [B, Hk, T, Dh] (with strides in floats; Dh contiguous) into a cache: those of
// row b from position starts[b] on.
struct Store {
  const float* fresh;
  float* cache;
  Tables tables;
  const int64_t* starts;
  int64_t rows, heads, tokens, head_dim;
  int64_t row_stride, head_stride, token_stride;
};

// T queries of each row, from position starts[b] on, against a cache: each sees the last `window`
// positions, itself included.
struct Flash {
  const float* q;  // [B, Hq, T, Dh]
  const float* k;
  const float* v;
  Tables tables;
  const int64_t* starts;
  float* out;  // [B, T, Hq·Dh]
  int64_t rows, query_heads, key_heads, queries, head_dim, window;
  float scale;
};

constexpr int kFlashQueries = 48;  // queries at a time
inline int64_t flash_pieces(const Flash& job) {
  return job.rows * job.key_heads * ((job.queries + kFlashQueries - 1) / kFlashQueries);
}
inline int64_t flash_floats(const Flash& job) {
  const int64_t heads = job.query_heads / job.key_heads;
  return (job.head_dim + kFlashQueries) * kBlock + 2 * heads * kFlashQueries;
}

// What one adapter adds to rows [first, first + rows) of a product: weight·(scale·B(A x) +
// gain·(y - bias) + shift), y being the base's. Laid out as kernels/lora.py packs it.
constexpr int kLoraTile = 16, kLoraRanks = 4;  // rows of x, and of A, in one piece of work
struct LoraEntry {
  const void* a;  // [rank, width]
  const void* b;  // [rank, outputs]
  const float* gain;   // [outputs], or null
  const float* shift;  // [outputs], or null
  const float* weights;  // of the first row; the next is `weight_stride` floats on
  int64_t weight_stride, first, rows, rank;
  Float a_type, b_type;
  double scale;

  float weight(int64_t row) const { return weights[row * weight_stride]; }
  int64_t rank_blocks() const { return (rank + kLoraRanks - 1) / kLoraRanks; }
  int64_t pieces() const { return rank_blocks() * ((rows + kLoraTile - 1) / kLoraTile); }
};
static_assert(sizeof(LoraEntry) == 88);

// Entries that act on the same rows lie one behind the other; others' rows do not overlap.
struct Lora {
  const LoraEntry* entries;
  int64_t count;
  const float* x;     // [rows, width]
  const float* bias;  // of the product, or null
  float* y;           // [rows, outputs]
  int64_t width, outputs;
  float* h;  // A x of each entry: [rows, rank] one behind the other
};

// A mixture's activation; `gelu` by its tanh approximation.
enum class Act : int { silu, gelu, relu };

// The `top` experts of each row of logits [rows, experts] and their weights, [rows, top]; with
// `normalise` these sum to 1. `scratch` is as large as the logits.
constexpr float kTaken = -1;
struct Routing {
  const float* logits;
  float* scratch;
  int64_t* chosen;
  float* weights;
  int64_t experts, top;
  bool normalise;
  float jitter;  // of `sparsemixer`, whose top is 2; other fields are the same
};

struct Kernels {
  const char* name;
  int vector_bytes;
  // Each works on rows [begin, end) of its matrix; different ranges may run on different threads.
  void (*quantize)(const Quantize&, int64_t begin, int64_t end);
  float (*largest)(const void* w, Float type, int64_t begin, int64_t end);  // of |w|; or NaN
  void (*quantize_activations)(const float* x, int64_t x_stride, const Affine&, const Activations&,
                               int64_t begin, int64_t end);
  void (*decode)(const Matmul&, int64_t begin, int64_t end);
  void (*prefill)(const Matmul&, int64_t begin, int64_t end, uint8_t* scratch);
  void (*dequantize)(const Affine&, float* out, int64_t begin, int64_t end);  // out: row `begin`
  void (*exact)(const Exact&, int64_t begin, int64_t end, float* scratch);  // [width] scratch
  void (*dense)(const DenseMatmul&, int64_t begin, int64_t end);
  void (*remember)(const Attention&, int64_t begin, int64_t end);  // of rows times key heads
  // Of pieces times key heads; attention_floats of scratch.
  void (*attend)(const Attention&, int64_t begin, int64_t end, float* scratch);
  void (*merge)(const Attention&, int64_t begin, int64_t end);  // of runs times key heads
  void (*flash)(const Flash&, int64_t begin, int64_t end, float* scratch);  // of flash_pieces
  void (*layer_norm)(const LayerNorm&, int64_t begin, int64_t end);
  void (*rotation)(const Rotation&, int64_t begin, int64_t end);  // of rows times heads times tokens
  void (*store)(const Store&, int64_t begin, int64_t end);  // of rows times heads times tokens
  void (*add)(const float* x, const float* y, float* sum, int64_t begin, int64_t end);
  void (*gelu)(const float* x, float* y, int64_t begin, int64_t end);
  void (*shrink)(const Lora&, int64_t begin, int64_t end);  // of the entries' pieces
  void (*expand)(const Lora&, int64_t begin, int64_t end);  // of outputs
  void (*gated)(float* gate, const float* up, Act, int64_t count);  // `up` or null
  void (*add_scaled)(float* sum, const float* x, float weight, int64_t count);
  void (*rms_norm)(const LayerNorm&, int64_t begin, int64_t end);
  void (*route)(const Routing&, int64_t begin, int64_t end);
  void (*sparsemixer)(const Routing&, int64_t begin, int64_t end);
};

// Rows of a weight that `prefill` works on at once, and the bytes of scratch that it needs.
inline int64_t band_rows(const Kernels& kernels) { return kernels.vector_bytes / 2; }
inline int64_t band_bytes(const Kernels& kernels, const Affine& w) {
  return band_rows(kernels) * (w.width + 8 * w.groups());
}

// Elements that one unpacking step of `bits` yields, split over planes of a vector each: element k
// of a step lies in plane k % planes at byte k / planes. Planes let 2 and 4 bits be unpacked by a
// shift and a mask. A width is padded to whole steps.
struct Layout {
  int planes;
  int step;
};
inline Layout layout(int bits, int vector_bytes) {
  int planes = bits == 2 || bits == 4 ? 8 / bits : 1;
  return {planes, planes * vector_bytes};
}

// Those that the machine at hand cannot run are never called; on others than x86 only the first
// is there.
extern const Kernels portable_kernels;
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;

}  // namespace starquill

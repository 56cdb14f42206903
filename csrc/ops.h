// Whole operations over threads: what the module offers to Python.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kernels.h"

namespace starquill {

// The instruction sets that this machine has kernels for, slowest first, and the one in use.
std::vector<std::string> isa_levels();
std::string isa();
const Kernels& chosen_kernels();
void select_isa(const std::string& name);  // throws std::invalid_argument

// How a product goes over its rows of x. Each row comes out the same whatever rows are beside it.
enum class Way {
  rows,   // each row of x with every row of the weight: for few
  bands,  // weights are unpacked once for all rows of x, and summed in another order
  exact,  // like `rows`, with activations as they are
};

void affine_matmul(const Affine&, const Product&, Way, int threads);
// Several matrices of one width, bits and group times the same rows of x, the way `rows` goes.
struct Multiplication {
  Affine weight;
  Product product;
};
void affine_together(std::span<const Multiplication>, int threads);
// A stack of matrices, [experts, rows, width] one behind the other, each times its own rows of x:
// the first counts[0] for the first, and so on. `weight` is the first; `bias` goes to all of them.
void affine_experts(const Affine& weight, const int64_t* counts, int64_t experts, const Product&, Way,
                    int threads);
void affine_dequantize(const Affine&, float* out, int threads);
// Rows `ids` of a weight to out [count, width]; throws std::out_of_range.
void affine_rows(const Affine&, const int64_t* ids, int64_t count, float* out, int threads);
void dense_matmul(const void* weight, Float type, int64_t rows, int64_t width, const Product&,
                  int threads);
void quantize(const Quantize&, int64_t rows, int threads);

void attend(const Attention&, int threads);
void flash(const Flash&, int threads);
void layer_norm(const LayerNorm&, int64_t rows, int threads);
void rms_norm(const LayerNorm&, int64_t rows, int threads);
void rotation(const Rotation&, int threads);
void store(const Store&, int threads);
void add(const float* x, const float* y, float* sum, int64_t count, int threads);
void gelu(const float* x, float* y, int64_t count, int threads);
void gated(const float* gate, const float* up, Act, float* y, int64_t count, int threads);
void lora(Lora, int threads);  // makes room for `h`

// The experts of a layer as three stacks, each [experts·rows, width]: for each token the weighted sum
// of down(act(gate x)·up x) over those that it chose, or of down(act(up x)) without a gate.
struct Mixture {
  const Affine* gate;  // or null
  const Affine* up;
  const Affine* down;
  const float* gate_bias;  // [experts, rows] each, or null
  const float* up_bias;
  const float* down_bias;
  int64_t experts;
  Act act;
  const float* x;         // [tokens, width]
  const int64_t* chosen;  // [tokens, top]
  const float* weights;   // [tokens, top]
  float* out;             // [tokens, width]
  int64_t tokens, top;
};

// `way` is rows or bands. Throws std::out_of_range for an expert that is not there.
void mixture(const Mixture&, Way, int threads);
void route(Routing, int64_t rows, int threads);  // makes room for `scratch`
void sparsemixer(Routing, int64_t rows, int threads);  // the same

// The largest |w|, NaN if any is: `count` values.
float largest(const void* w, Float type, int64_t count, int threads);

}  // namespace starquill

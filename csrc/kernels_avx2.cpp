#include "simd_avx2.h"

#include "matmul.inl"

#include "dense.inl"
#include "lora.inl"
#include "quantize.inl"
#include "softmax.inl"

#include "attention.inl"
#include "flash.inl"

#include "elementwise.inl"

#include "experts.inl"

namespace starquill {

const Kernels avx2_kernels = {
    "avx2",   Simd::bytes, quantize, largest, quantize_activations,
    decode,  prefill,     dequantize, exact, dense, remember, attend, merge,
    flash,   layer_norm,  rotation, store, add, gelu,
    shrink,  expand,     gated,   add_scaled, rms_norm, route,
    sparsemixer,
};

}  // namespace starquill

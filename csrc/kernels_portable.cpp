#include "simd_portable.h"

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

const Kernels portable_kernels = {
    "portable",   Simd::bytes, quantize, largest, quantize_activations,
    decode,  prefill,     dequantize, exact, dense, remember, attend, merge,
    flash,   layer_norm,  rotation, store, add, gelu,
    shrink,  expand,     gated,   add_scaled, rms_norm, route,
    sparsemixer,
};

}  // namespace starquill

// The Python module `starquill.kernels._native`. Buffers come in through DLPack and are checked
// here; everything behind works on plain pointers, without the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "ops.h"
#include "pool.h"
#include "program.h"

namespace nb = nanobind;
using namespace starquill;

namespace {

using Buffer = nb::ndarray<nb::device::cpu, nb::c_contig>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::device::cpu, nb::c_contig>;
using Out = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;

void check(bool good, const char* what) {
  if (!good) throw std::invalid_argument(what);
}

Float float_type(const Buffer& buffer) {
  const nb::dlpack::dtype type = buffer.dtype();
  if (type == nb::dtype<float>()) return Float::f32;
  check(type.lanes == 1 && type.bits == 16, "expected float32, float16 or bfloat16");
  if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)) return Float::f16;
  check(type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat),
        "expected float32, float16 or bfloat16");
  return Float::bf16;
}

thread_local Program* recording = nullptr;

// Does an operation, and writes it down where a step is being recorded.
template <class F>
void perform(const Operands& operands, int threads, F operation) {
  if (recording) recording->add(operands, operation);
  nb::gil_scoped_release free;
  operation(threads);
}

// Before what no recorded step may do.
void refuse(const char* what) {
  if (recording) recording->refuse(what);
}

template <class T>
void check_aligned(const T* p) {
  check(reinterpret_cast<uintptr_t>(p) % alignof(T) == 0, "a buffer is not aligned to its type");
}

Product product(const Rows& x, const nb::object& bias, const Out& out, int64_t rows, int64_t width) {
  check(static_cast<int64_t>(x.shape(1)) == width, "x is not as wide as the weight");
  check(x.stride(1) == 1 || width == 1, "x is not contiguous along its rows");
  check(out.shape(0) == x.shape(0) && static_cast<int64_t>(out.shape(1)) == rows,
        "out has not one value for each row of x and of the weight");
  check(out.stride(1) == 1 || rows == 1, "out is not contiguous along its rows");
  check_aligned(x.data());
  check_aligned(out.data());
  Product job{x.data(),   static_cast<int64_t>(x.shape(0)), x.stride(0), nullptr, out.data(),
              out.stride(0)};
  if (!bias.is_none()) {
    const Vector vector = nb::cast<Vector>(bias);
    check(static_cast<int64_t>(vector.shape(0)) == rows, "bias has not one value for each row");
    job.bias = vector.data();
  }
  return job;
}

Act checked_act(int act) {
  check(act >= 0 && act <= 2, "act is not 0 (silu), 1 (gelu) or 2 (relu)");
  return static_cast<Act>(act);
}

Way checked_way(int way) {
  check(way >= 0 && way <= 2, "way is not 0 (rows), 1 (bands) or 2 (exact)");
  return static_cast<Way>(way);
}

// A quantized matrix: keeps its buffers alive, so that a product needs no more checks of them.
class AffineHandle {
 public:
  AffineHandle(Buffer packed, Buffer scales, Buffer biases, int bits, int group)
      : packed_(std::move(packed)), scales_(std::move(scales)), biases_(std::move(biases)) {
    check(bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8,
          "bits is not one of 2, 3, 4, 5, 6, 8");
    check(group == 16 || group == 32 || group == 64 || group == 128,
          "group is not one of 16, 32, 64, 128");
    check(packed_.dtype() == nb::dtype<uint8_t>(), "packed is not uint8");
    check(packed_.ndim() == 2 && scales_.ndim() == 2 && biases_.ndim() == 2,
          "packed, scales and biases are not matrices");
    check(scales_.dtype() == biases_.dtype(), "scales and biases differ in dtype");
    for (int axis = 0; axis < 2; ++axis)
      check(scales_.shape(axis) == biases_.shape(axis), "scales and biases differ in shape");
    check(packed_.shape(0) == scales_.shape(0), "packed and scales differ in rows");
    weight_ = {static_cast<const uint8_t*>(packed_.data()),
               scales_.data(),
               biases_.data(),
               float_type(scales_),
               bits,
               group,
               static_cast<int64_t>(scales_.shape(0)),
               static_cast<int64_t>(scales_.shape(1)) * group};
    check(static_cast<int64_t>(packed_.shape(1)) == weight_.row_bytes(),
          "a row of packed has not the bytes of its groups");
    check(reinterpret_cast<uintptr_t>(scales_.data()) % bytes_of(weight_.scale_type) == 0,
          "scales are not aligned to their type");
  }

  void matmul(const Rows& x, const nb::object& bias, const Out& out, int way, int threads) const {
    const Product job = product(x, bias, out, weight_.rows, weight_.width);
    const Way checked = checked_way(way);
    nb::gil_scoped_release free;
    affine_matmul(weight_, job, checked, threads);
  }

  // Where Python has checked the buffers: a step has hundreds of products, each DLPack exchange takes
  // microseconds, and Python code that it runs would lose a KeyboardInterrupt. Both are contiguous
  // float32; bias too, or null.
  void matmul_at(uintptr_t x, int64_t x_rows, uintptr_t bias, uintptr_t out, int way, int threads) const {
    const Product job{reinterpret_cast<const float*>(x), x_rows, weight_.width,
                      reinterpret_cast<const float*>(bias), reinterpret_cast<float*>(out),
                      weight_.rows};
    const Way checked = checked_way(way);
    if (recording && checked == Way::rows) {
      recording->add({{job.x}, {job.out}}, weight_, job);
    } else if (recording) {
      recording->add({{job.x}, {job.out}}, [weight = weight_, job, checked](int count) {
        affine_matmul(weight, job, checked, count);
      });
    }
    nb::gil_scoped_release free;
    affine_matmul(weight_, job, checked, threads);
  }

  // The matrix as `experts` of equal height, one behind the other; `counts` int64, one for each.
  void experts_at(const std::array<uintptr_t, 4>& at, const std::array<int64_t, 2>& shape, int way,
                  int threads) const {
    const auto [experts, x_rows] = shape;
    check(experts > 0 && weight_.rows % experts == 0, "the experts are not of equal height");
    Affine first = weight_;
    first.rows = weight_.rows / experts;
    const Product job{reinterpret_cast<const float*>(at[0]), x_rows, weight_.width,
                      reinterpret_cast<const float*>(at[2]), reinterpret_cast<float*>(at[3]),
                      first.rows};
    const Way checked = checked_way(way);
    refuse("experts one by one");  // their counts are known to Python
    nb::gil_scoped_release free;
    affine_experts(first, reinterpret_cast<const int64_t*>(at[1]), experts, job, checked, threads);
  }

  void rows_at(uintptr_t ids, int64_t count, uintptr_t out, int threads) const {
    const auto* from = reinterpret_cast<const int64_t*>(ids);
    auto* to = reinterpret_cast<float*>(out);
    perform({{from}, {to}}, threads, [weight = weight_, from, count, to](int n) {
      affine_rows(weight, from, count, to, n);
    });
  }

  const Affine& weight() const { return weight_; }

  void dequantize(const Out& out, int threads) const {
    check(static_cast<int64_t>(out.shape(0)) == weight_.rows &&
              static_cast<int64_t>(out.shape(1)) == weight_.width && out.stride(1) == 1 &&
              out.stride(0) == weight_.width,
          "out is not a contiguous matrix of the weight's shape");
    nb::gil_scoped_release free;
    affine_dequantize(weight_, out.data(), threads);
  }

 private:
  Buffer packed_, scales_, biases_;
  Affine weight_;
};

Float checked_type(int type) {
  check(type >= 0 && type <= 2, "type is not 0 (float32), 1 (float16) or 2 (bfloat16)");
  return static_cast<Float>(type);
}

// Addresses of weight, x, bias (or null) and out; `shape` is out, in and rows of x. All contiguous,
// checked by the caller. `type` is the weight's.
void dense_matmul_at(const std::array<uintptr_t, 4>& at, const std::array<int64_t, 3>& shape, int type,
                     int threads) {
  const Float checked = checked_type(type);
  const auto [rows, width, x_rows] = shape;
  const Product job{reinterpret_cast<const float*>(at[1]), x_rows, width,
                    reinterpret_cast<const float*>(at[2]), reinterpret_cast<float*>(at[3]), rows};
  perform({{job.x}, {job.out}}, threads,
          [weight = reinterpret_cast<const void*>(at[0]), checked, rows, width, job](int n) {
            dense_matmul(weight, checked, rows, width, job, n);
          });
}

float largest_at(uintptr_t weight, int type, int64_t count, int threads) {
  const Float checked = checked_type(type);
  nb::gil_scoped_release free;
  return largest(reinterpret_cast<const void*>(weight), checked, count, threads);
}

// `settings` are bits, group and whether hqq; `shares` of the range are tried. Writes packed, scales
// and biases.
void quantize_buffers(const Buffer& weight, const std::array<int, 3>& settings, const std::vector<float>& shares,
              const nb::object& importance, float unit, const Buffer& packed, const Buffer& scales,
              const Buffer& biases, int threads) {
  const auto [bits, group, hqq] = settings;
  check(weight.ndim() == 2, "weight is not a matrix");
  const int64_t rows = weight.shape(0), width = weight.shape(1);
  check(bits >= 2 && bits <= 8 && bits != 7, "bits is not one of 2, 3, 4, 5, 6, 8");
  check(group >= 16 && group <= 128 && (group & (group - 1)) == 0 && width % group == 0,
        "group does not divide the width, or is not one of 16, 32, 64, 128");
  const Float type = float_type(scales);
  check(type != Float::bf16 && scales.dtype() == biases.dtype(), "scales are not float16 or float32");
  const size_t groups = static_cast<size_t>(rows * width / group);
  check(scales.size() == groups && biases.size() == groups, "scales or biases have the wrong size");
  check(packed.dtype() == nb::dtype<uint8_t>() &&
            packed.size() == static_cast<size_t>(rows * width * bits / 8),
        "packed has the wrong size or is not uint8");
  Quantize job{weight.data(), float_type(weight), width, bits, group, shares.data(),
               static_cast<int>(shares.size()), hqq != 0, nullptr, unit, type == Float::f16,
               static_cast<uint8_t*>(packed.data()), scales.data(), biases.data()};
  if (!importance.is_none()) {
    const Vector vector = nb::cast<Vector>(importance);
    check(static_cast<int64_t>(vector.shape(0)) == width, "importance has not one value an input");
    job.importance = vector.data();
  }
  nb::gil_scoped_release free;
  starquill::quantize(job, rows, threads);
}

// Addresses of what `Attention` lists, in its order, checked by the caller: contiguous float32 and
// int64. `shape` is B, Hq, Hk, a table's width, Dh and the window.
void attend_at(const std::array<uintptr_t, 10>& at, const std::array<int64_t, 6>& shape, float scale,
               int threads) {
  auto floats = [&](int i) { return reinterpret_cast<float*>(at[i]); };
  auto integers = [&](int i) { return reinterpret_cast<const int64_t*>(at[i]); };
  const auto [rows, query_heads, key_heads, table_width, head_dim, window] = shape;
  const Attention job{floats(0), floats(1), floats(2), floats(3), floats(4), floats(5), floats(6),
                      Tables{integers(7), table_width}, integers(8), floats(9), rows, query_heads,
                      key_heads, head_dim, window, scale};
  perform({{job.q, job.new_k, job.new_v, job.cos, job.sin, job.tables.block, job.positions}, {job.out}},
          threads, [job](int n) { attend(job, n); });
}

// Addresses of what `Flash` lists, in its order. `shape` is B, Hq, Hk, T, a table's width, Dh and the
// window.
void flash_at(const std::array<uintptr_t, 6>& at, const std::array<int64_t, 7>& shape, float scale,
              int threads) {
  auto floats = [&](int i) { return reinterpret_cast<float*>(at[i]); };
  auto integers = [&](int i) { return reinterpret_cast<const int64_t*>(at[i]); };
  const auto [rows, query_heads, key_heads, queries, table_width, head_dim, window] = shape;
  const Flash job{floats(0), floats(1), floats(2), Tables{integers(3), table_width}, integers(4),
                  floats(5), rows, query_heads, key_heads, queries, head_dim, window, scale};
  perform({{job.q, job.tables.block, job.starts}, {job.out}}, threads, [job](int n) { flash(job, n); });
}

void layer_norm_at(const std::array<uintptr_t, 4>& at, const std::array<int64_t, 2>& shape, float eps,
                   int threads) {
  auto floats = [&](int i) { return reinterpret_cast<float*>(at[i]); };
  const LayerNorm job{floats(0), floats(1), floats(2), floats(3), shape[1], eps};
  perform({{job.x}, {job.y}}, threads, [job, rows = shape[0]](int n) { layer_norm(job, rows, n); });
}

void rms_norm_at(const std::array<uintptr_t, 3>& at, const std::array<int64_t, 2>& shape, float eps,
                 int threads) {
  auto floats = [&](int i) { return reinterpret_cast<float*>(at[i]); };
  const LayerNorm job{floats(0), floats(1), nullptr, floats(2), shape[1], eps};
  perform({{job.x}, {job.y}}, threads, [job, rows = shape[0]](int n) { rms_norm(job, rows, n); });
}

// Stacks of gate (or None), up and down; addresses of their biases (or null), x, the chosen experts
// (int64), their weights and out, checked by the caller. `shape` is experts, tokens and top.
void mixture_at(const AffineHandle* gate, const AffineHandle& up, const AffineHandle& down,
                const std::array<uintptr_t, 7>& at, const std::array<int64_t, 3>& shape, int act, int way,
                int threads) {
  auto floats = [&](int i) { return reinterpret_cast<float*>(at[i]); };
  const auto [experts, tokens, top] = shape;
  const Affine *g = gate ? &gate->weight() : nullptr, *u = &up.weight(), *d = &down.weight();
  check(experts > 0 && u->rows % experts == 0 && d->rows % experts == 0,
        "the experts are not of equal height");
  check(d->width * experts == u->rows && u->width * experts == d->rows,
        "down does not lead back from where up leads");
  check(!g || (g->rows == u->rows && g->width == u->width), "gate and up differ in shape");
  const Way checked = checked_way(way);
  check(checked != Way::exact, "experts in one operation round their activations");
  const Mixture job{g, u, d, floats(0), floats(1), floats(2), experts, checked_act(act), floats(3),
                    reinterpret_cast<const int64_t*>(at[4]), floats(5), floats(6), tokens, top};
  perform({{job.x, job.chosen, job.weights}, {job.out}}, threads, [job, checked](int n) {
    mixture(job, checked, n);
  });
}

// Logits [rows, experts], the chosen experts (int64) and their weights [rows, top]; `shape` is rows,
// experts and top.
void route_at(const std::array<uintptr_t, 3>& at, const std::array<int64_t, 3>& shape, bool normalise,
              int threads) {
  const auto [rows, experts, top] = shape;
  check(top > 0 && top <= experts, "top is not one of the experts' number");
  const Routing job{reinterpret_cast<const float*>(at[0]), nullptr, reinterpret_cast<int64_t*>(at[1]),
                    reinterpret_cast<float*>(at[2]), experts, top, normalise, 0};
  perform({{job.logits}, {job.chosen, job.weights}}, threads,
          [job, rows = shape[0]](int n) { route(job, rows, n); });
}

// The same for `sparsemixer`; `shape` is rows and experts.
void sparsemixer_at(const std::array<uintptr_t, 3>& at, const std::array<int64_t, 2>& shape, float jitter,
                    int threads) {
  const auto [rows, experts] = shape;
  check(experts >= 2, "there are not two experts");
  const Routing job{reinterpret_cast<const float*>(at[0]), nullptr, reinterpret_cast<int64_t*>(at[1]),
                    reinterpret_cast<float*>(at[2]), experts, 2, false, jitter};
  perform({{job.logits}, {job.chosen, job.weights}}, threads,
          [job, rows = shape[0]](int n) { sparsemixer(job, rows, n); });
}

// x, cos, sin and y; `shape` is B, H, T, Dh and x's strides of the first three.
void rotation_at(const std::array<uintptr_t, 4>& at, const std::array<int64_t, 7>& shape, int threads) {
  auto floats = [&](int i) { return reinterpret_cast<float*>(at[i]); };
  const Rotation job{floats(0), floats(1), floats(2), floats(3), shape[0], shape[1],
                     shape[2],  shape[3],  shape[4],  shape[5],  shape[6]};
  perform({{job.x, job.cos, job.sin}, {job.y}}, threads, [job](int n) { rotation(job, n); });
}

// New values, cache, tables and starts; `shape` is B, Hk, T, a table's width, Dh and the new
// values' strides of the first three dimensions.
void store_at(const std::array<uintptr_t, 4>& at, const std::array<int64_t, 8>& shape, int threads) {
  auto integers = [&](int i) { return reinterpret_cast<const int64_t*>(at[i]); };
  const Store job{reinterpret_cast<const float*>(at[0]), reinterpret_cast<float*>(at[1]),
                  Tables{integers(2), shape[3]}, integers(3), shape[0], shape[1], shape[2], shape[4],
                  shape[5], shape[6], shape[7]};
  perform({{job.fresh, job.tables.block, job.starts}, {}}, threads, [job](int n) { store(job, n); });
}

void add_at(uintptr_t x, uintptr_t y, uintptr_t sum, int64_t count, int threads) {
  const auto *one = reinterpret_cast<const float*>(x), *other = reinterpret_cast<const float*>(y);
  auto* to = reinterpret_cast<float*>(sum);
  perform({{one, other}, {to}}, threads, [=](int n) { add(one, other, to, count, n); });
}

void gelu_at(uintptr_t x, uintptr_t y, int64_t count, int threads) {
  const auto* from = reinterpret_cast<const float*>(x);
  auto* to = reinterpret_cast<float*>(y);
  perform({{from}, {to}}, threads, [=](int n) { gelu(from, to, count, n); });
}

// Addresses of gate, up (or null) and y.
void gated_at(const std::array<uintptr_t, 3>& at, int64_t count, int act, int threads) {
  auto floats = [&](int i) { return reinterpret_cast<float*>(at[i]); };
  const float *gate = floats(0), *up = floats(1);
  float* to = floats(2);
  const Act checked = checked_act(act);
  perform({{gate, up ? up : gate}, {to}}, threads,
          [=](int n) { gated(gate, up, checked, to, count, n); });
}

// Addresses of x, the product's bias (or null) and y, contiguous float32; `entries` are `LoraEntry`s
// packed one behind the other by the caller, who has checked all that they point to.
void lora_at(const std::array<uintptr_t, 3>& at, const std::array<int64_t, 2>& shape,
             const nb::bytes& entries, int threads) {
  check(entries.size() % sizeof(LoraEntry) == 0, "entries are not packed as LoraEntry");
  if (entries.size() == 0) return;  // nothing acts on any row
  std::vector<LoraEntry> all(entries.size() / sizeof(LoraEntry));
  std::memcpy(all.data(), entries.c_str(), entries.size());
  const Lora job{nullptr, static_cast<int64_t>(all.size()), reinterpret_cast<const float*>(at[0]),
                 reinterpret_cast<const float*>(at[1]), reinterpret_cast<float*>(at[2]), shape[0],
                 shape[1], nullptr};
  perform({{job.x, job.y}, {job.y}}, threads, [job, all = std::move(all)](int n) {
    Lora mine = job;
    mine.entries = all.data();
    lora(mine, n);
  });
}

}  // namespace

NB_MODULE(_native, m) {
  // Weights may outlive the interpreter's end, held by modules; that is no fault to report.
  nb::set_leak_warnings(false);
  m.doc() = "Native kernels; see csrc/. Use them through starquill.kernels.";
  if (const char* wanted = std::getenv("STARQUILL_ISA")) select_isa(wanted);
  m.def("set_openmp_pause", [](uintptr_t at) {
    set_openmp_pause(reinterpret_cast<int (*)(int)>(at));
  });
  m.def("isa", &isa);
  m.def("isa_levels", &isa_levels);
  m.def("select_isa", &select_isa);
  // No conversions: a silent copy of an output would be written instead of it.
  const auto buffer = nb::arg().noconvert();
  m.def("dense_matmul_at", &dense_matmul_at);
  m.def("largest_at", &largest_at);
  m.def("quantize", &quantize_buffers, buffer, nb::arg(), nb::arg(), nb::arg().none().noconvert(), nb::arg(),
        buffer, buffer, buffer, nb::arg());
  m.def("attend_at", &attend_at);
  m.def("flash_at", &flash_at);
  m.def("layer_norm_at", &layer_norm_at);
  m.def("rms_norm_at", &rms_norm_at);
  m.def("rotation_at", &rotation_at);
  m.def("store_at", &store_at);
  m.def("add_at", &add_at);
  m.def("gelu_at", &gelu_at);
  m.def("gated_at", &gated_at);
  m.def("lora_at", &lora_at);
  nb::class_<AffineHandle>(m, "Affine")
      .def(nb::init<Buffer, Buffer, Buffer, int, int>(), buffer, buffer, buffer, nb::arg(), nb::arg())
      .def("matmul", &AffineHandle::matmul, buffer, nb::arg().none().noconvert(), buffer, nb::arg(),
           nb::arg())
      .def("matmul_at", &AffineHandle::matmul_at)
      .def("rows_at", &AffineHandle::rows_at)
      .def("experts_at", &AffineHandle::experts_at)
      .def("dequantize", &AffineHandle::dequantize, buffer, nb::arg());
  m.def("mixture_at", &mixture_at, nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg());
  m.def("route_at", &route_at);
  m.def("sparsemixer_at", &sparsemixer_at);
  nb::class_<Program>(m, "Program")
      .def(nb::init<>())
      .def("own", [](Program& program, uintptr_t at, int64_t bytes) {
        program.own(reinterpret_cast<const void*>(at), bytes);
      })
      .def("refuse", &Program::refuse)
      .def_prop_ro("refusal", &Program::refusal)
      .def("begin", [](Program& program) { recording = &program; })
      .def("end", [](Program&) { recording = nullptr; })
      .def("run", [](const Program& program, int threads) {
        nb::gil_scoped_release free;
        program.run(threads);
      });
}

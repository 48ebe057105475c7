// The operators on the CPU: tensors, threads and the choice of instruction set around the loops.
//
// Results do not depend on the number of threads: rows are independent, and sums over rows are taken in chunks that
// depend on the shape alone, then added in order.

#include "operators.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "layer_norm_gelu.h"

namespace cvt_kernels {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kGrain = 16384;       // elements that are worth a thread
constexpr int64_t kBlock = 4096;        // elements of a gelu without bias that are taken together
constexpr int64_t kChunks = 128;        // partial sums over rows, at most
constexpr int64_t kMinChunkRows = 16;   // rows of a partial sum, at least

Activation activation_of(const std::string& name) {
  if (name == "identity") return Activation::identity;
  if (name == "none") return Activation::none;
  if (name == "tanh") return Activation::tanh;
  STD_TORCH_CHECK(name == "quick", "activation: got '", name, "', expected identity, none, tanh or quick");
  return Activation::quick;
}

DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Double: return DType::float64;
    case ScalarType::Float: return DType::float32;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    default: STD_TORCH_CHECK(false, "x: expected float64, float32, bfloat16 or float16");
  }
}

ScalarType accumulator_of(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

int64_t channels_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() > 0 && x.size(x.dim() - 1) > 0, "x: expected (..., channels)");
  return x.size(x.dim() - 1);
}

Tensor contiguous_like(const char* name, const Tensor& tensor, const Tensor& x) {
  const auto sizes = tensor.sizes(), expected = x.sizes();
  STD_TORCH_CHECK(std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end()), name,
                  ": expected the shape of x");
  STD_TORCH_CHECK(tensor.scalar_type() == x.scalar_type(), name, ": expected the dtype of x");
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// A vector over the channels in the accumulator's type; `absent` throughout if there is none.
Tensor parameter(const char* name, const std::optional<Tensor>& tensor, const Tensor& x, double absent) {
  const int64_t channels = channels_of(x);
  if (!tensor.has_value()) return torch::stable::full({channels}, absent, accumulator_of(x));
  STD_TORCH_CHECK(tensor->dim() == 1 && tensor->size(0) == channels, name, ": expected (channels,)");
  if (tensor->scalar_type() == accumulator_of(x)) {
    return tensor->is_contiguous() ? *tensor : torch::stable::contiguous(*tensor);
  }
  return torch::stable::contiguous(torch::stable::to(*tensor, accumulator_of(x)));
}

// The gradient of a parameter, in its type; empty if there is no such parameter.
Tensor gradient_of(const std::optional<Tensor>& parameter, const Tensor& sums, int64_t index) {
  if (!parameter.has_value()) return torch::stable::new_empty(sums, {0});
  const Tensor gradient = torch::stable::clone(torch::stable::select(sums, 0, index));
  if (parameter->scalar_type() == sums.scalar_type()) return gradient;
  return torch::stable::to(gradient, parameter->scalar_type());
}

const Kernels& choose_kernels() {
  const char* requested = std::getenv("CVT_KERNELS_CPU");
  const std::string name = requested == nullptr ? "" : requested;
#ifdef __x86_64__
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && (name.empty() || name == "avx512")) return kernels_avx512;
  if (avx2 && (name.empty() || name == "avx2")) return kernels_avx2;
#endif
  STD_TORCH_CHECK(name.empty() || name == "plain", "CVT_KERNELS_CPU: got '", name,
                  "', expected plain, or avx2 or avx512 on a CPU that has it");
  return kernels_plain;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose_kernels();
  return chosen;
}

template <class F>
void for_rows(int64_t rows, int64_t channels, const F& f) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / channels), f);
}

// Calls f(begin, end) for the same blocks of a flat tensor, however many threads share them.
template <class F>
void for_blocks(int64_t size, const F& f) {
  torch::stable::parallel_for(0, (size + kBlock - 1) / kBlock, kGrain / kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) f(block * kBlock, std::min(size, (block + 1) * kBlock));
  });
}

template <class A>
void add_partial_sums(const Tensor& partial) {
  const int64_t chunks = partial.size(0), size = partial.numel() / chunks;
  A* sums = static_cast<A*>(partial.mutable_data_ptr());
  for (int64_t chunk = 1; chunk < chunks; chunk++) {
    for (int64_t i = 0; i < size; i++) sums[i] += sums[chunk * size + i];
  }
}

// Calls f(begin, end, sums) for chunks of rows, each with `vectors` zeroed vectors over the channels to add to.
// Returns their totals, (vectors, channels).
template <class F>
Tensor sum_over_rows(const Tensor& x, int64_t rows, int64_t vectors, const F& f) {
  const int64_t channels = channels_of(x);
  const int64_t chunk_rows = std::max(kMinChunkRows, (rows + kChunks - 1) / kChunks);
  const int64_t chunks = std::max<int64_t>(1, (rows + chunk_rows - 1) / chunk_rows);
  Tensor partial = torch::stable::empty({chunks, vectors, channels}, accumulator_of(x));
  torch::stable::zero_(partial);
  char* sums = static_cast<char*>(partial.mutable_data_ptr());
  const int64_t stride = vectors * channels * static_cast<int64_t>(partial.element_size());
  const int64_t grain = std::max<int64_t>(1, kGrain / (chunk_rows * channels));
  torch::stable::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; chunk++) {
      f(chunk * chunk_rows, std::min(rows, (chunk + 1) * chunk_rows), sums + chunk * stride);
    }
  });
  if (partial.scalar_type() == ScalarType::Double) add_partial_sums<double>(partial);
  else add_partial_sums<float>(partial);
  return torch::stable::select(partial, 0, 0);
}

struct Normalised {
  Tensor h, out, mean, rstd;
};

Normalised normalise(const Tensor& input, const std::optional<Tensor>& residual, const std::optional<Tensor>& weight,
                     const std::optional<Tensor>& bias, double eps, Activation activation) {
  const Kernels& loops = kernels();
  const DType dtype = dtype_of(input);
  const int64_t channels = channels_of(input);
  const int64_t rows = input.numel() / channels;
  const Tensor x = contiguous_like("x", input, input);
  const bool adds = residual.has_value();
  const Tensor addend = adds ? contiguous_like("residual", *residual, x) : x;
  const Tensor scale = parameter("weight", weight, x, 1), shift = parameter("bias", bias, x, 0);
  const auto sizes = x.sizes();
  const Tensor out = torch::stable::empty(sizes, x.scalar_type());
  const Tensor h = adds ? torch::stable::empty(sizes, x.scalar_type()) : x;
  const auto row_sizes = sizes.slice(0, sizes.size() - 1);
  const Tensor mean = torch::stable::empty(row_sizes, accumulator_of(x));
  const Tensor rstd = torch::stable::empty(row_sizes, accumulator_of(x));
  const LayerNormForward call{
      .x = x.const_data_ptr(),
      .residual = adds ? addend.const_data_ptr() : nullptr,
      .weight = scale.const_data_ptr(),
      .bias = shift.const_data_ptr(),
      .eps = eps,
      .channels = channels,
      .h = adds ? h.mutable_data_ptr() : nullptr,
      .out = out.mutable_data_ptr(),
      .mean = mean.mutable_data_ptr(),
      .rstd = rstd.mutable_data_ptr(),
  };
  for_rows(rows, channels, [&](int64_t begin, int64_t end) {
    std::vector<double> scratch(channels);
    loops.layer_norm(dtype, activation, call, begin, end, scratch.data());
  });
  return {h, out, mean, rstd};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, double eps,
                                              const std::string& activation) {
  const auto [h, out, mean, rstd] = normalise(x, std::nullopt, weight, bias, eps, activation_of(activation));
  return {out, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                                          const std::optional<Tensor>& weight,
                                                          const std::optional<Tensor>& bias, double eps) {
  const auto [h, out, mean, rstd] = normalise(x, residual, weight, bias, eps, Activation::identity);
  return {h, out, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dout, const std::optional<Tensor>& dh,
                                                       const Tensor& h, const Tensor& mean, const Tensor& rstd,
                                                       const std::optional<Tensor>& weight,
                                                       const std::optional<Tensor>& bias,
                                                       const std::string& activation) {
  const Kernels& loops = kernels();
  const DType dtype = dtype_of(h);
  const Activation kind = activation_of(activation);
  const int64_t channels = channels_of(h);
  const int64_t rows = h.numel() / channels;
  for (const Tensor& statistic : {mean, rstd}) {
    STD_TORCH_CHECK(statistic.numel() == rows && statistic.scalar_type() == accumulator_of(h) &&
                        statistic.is_contiguous(),
                    "mean and rstd: expected one accumulator per row");
  }
  const Tensor values = contiguous_like("h", h, h), doutput = contiguous_like("dout", dout, h);
  const Tensor addend = dh.has_value() ? contiguous_like("dh", *dh, h) : values;
  const Tensor scale = parameter("weight", weight, h, 1), shift = parameter("bias", bias, h, 0);
  const Tensor dx = torch::stable::empty(h.sizes(), h.scalar_type());
  const LayerNormBackward call{
      .dout = doutput.const_data_ptr(),
      .dh = dh.has_value() ? addend.const_data_ptr() : nullptr,
      .h = values.const_data_ptr(),
      .mean = mean.const_data_ptr(),
      .rstd = rstd.const_data_ptr(),
      .weight = scale.const_data_ptr(),
      .bias = shift.const_data_ptr(),
      .channels = channels,
      .dx = dx.mutable_data_ptr(),
  };
  const Tensor sums = sum_over_rows(h, rows, 2, [&](int64_t begin, int64_t end, void* partial) {
    std::vector<double> scratch(channels);
    loops.layer_norm_backward(dtype, kind, call, begin, end, partial, scratch.data());
  });
  return {dx, gradient_of(weight, sums, 0), gradient_of(bias, sums, 1)};
}

Tensor gelu(const Tensor& input, const std::optional<Tensor>& bias, const std::string& activation) {
  const Kernels& loops = kernels();
  const DType dtype = dtype_of(input);
  const Activation kind = activation_of(activation);
  const Tensor x = contiguous_like("x", input, input);
  const Tensor out = torch::stable::empty(x.sizes(), x.scalar_type());
  GeluForward call{x.const_data_ptr(), nullptr, 1, out.mutable_data_ptr()};
  const auto run = [&](int64_t begin, int64_t end) { loops.gelu(dtype, kind, call, begin, end); };
  if (!bias.has_value()) {
    for_blocks(x.numel(), run);
    return out;
  }
  const Tensor shift = parameter("bias", bias, x, 0);
  call.bias = shift.const_data_ptr();
  call.channels = channels_of(x);
  for_rows(x.numel() / call.channels, call.channels, run);
  return out;
}

std::tuple<Tensor, Tensor> gelu_backward(const Tensor& dout, const Tensor& input, const std::optional<Tensor>& bias,
                                         const std::string& activation) {
  const Kernels& loops = kernels();
  const DType dtype = dtype_of(input);
  const Activation kind = activation_of(activation);
  const Tensor x = contiguous_like("x", input, input), doutput = contiguous_like("dout", dout, input);
  const Tensor dx = torch::stable::empty(x.sizes(), x.scalar_type());
  GeluBackward call{doutput.const_data_ptr(), x.const_data_ptr(), nullptr, 1, dx.mutable_data_ptr()};
  if (!bias.has_value()) {
    for_blocks(x.numel(), [&](int64_t begin, int64_t end) {
      loops.gelu_backward(dtype, kind, call, begin, end, nullptr);
    });
    return {dx, torch::stable::new_empty(x, {0})};
  }
  const Tensor shift = parameter("bias", bias, x, 0);
  call.bias = shift.const_data_ptr();
  call.channels = channels_of(x);
  const Tensor sums = sum_over_rows(x, x.numel() / call.channels, 1, [&](int64_t begin, int64_t end, void* partial) {
    loops.gelu_backward(dtype, kind, call, begin, end, partial);
  });
  return {dx, gradient_of(bias, sums, 0)};
}

}  // namespace cvt_kernels

// The operators on the CPU: tensors, threads and the choice of instruction set around the loops.
//
// Results do not depend on the number of threads: rows are independent, and sums over rows are taken in chunks that
// depend on the shape alone, then added in order.

#include "tensors.h"

#include <algorithm>
#include <memory>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "cpu.h"
#include "half.h"

namespace cvt_kernels {
namespace {

constexpr int64_t kGrain = 16384;         // elements that are worth a thread
constexpr int64_t kBlock = 4096;          // elements of a gelu without bias that are taken together
constexpr int64_t kChunks = 128;          // partial sums over rows, at most
constexpr int64_t kChunkRows = 16;        // rows of a partial sum, at least
constexpr int64_t kChunkElements = 8192;  // and elements

// A vector over the channels in the accumulator's type; `absent` throughout if there is none.
class Parameter {
 public:
  Parameter(const char* name, const std::optional<Tensor>& tensor, const Tensor& x, double absent) {
    const int64_t channels = channels_of(x);
    if (!tensor.has_value()) {
      copy(x, channels, [=](int64_t) { return absent; });
      return;
    }
    check_parameter(name, *tensor, x);
    if (tensor->scalar_type() == accumulator_of(x) && tensor->is_contiguous()) {
      tensor_ = tensor;
      return;
    }
    const int64_t stride = tensor->stride(0);
    with_type(dtype_of(*tensor), [&](auto type) {
      const auto* values = static_cast<const decltype(type)*>(tensor->const_data_ptr());
      copy(x, channels, [=](int64_t c) { return load(values + c * stride); });
    });
  }

  const void* data() const { return tensor_.has_value() ? tensor_->const_data_ptr() : copy_.data(); }

 private:
  template <class F>
  void copy(const Tensor& x, int64_t channels, const F& value) {
    copy_.resize(channels);
    if (accumulator_of(x) == ScalarType::Double) {
      for (int64_t c = 0; c < channels; c++) copy_[c] = value(c);
    } else {
      float* out = reinterpret_cast<float*>(copy_.data());
      for (int64_t c = 0; c < channels; c++) out[c] = static_cast<float>(value(c));
    }
  }

  std::optional<Tensor> tensor_;
  std::vector<double> copy_;
};

// The gradient of a parameter, in its type; empty if there is no such parameter.
Tensor gradient_of(const std::optional<Tensor>& parameter, const Tensor& x, const void* sums) {
  if (!parameter.has_value()) return empty({0}, accumulator_of(x), x);
  const Tensor gradient = empty(parameter->sizes(), parameter->scalar_type(), x);
  const int64_t channels = parameter->size(0);
  with_type(dtype_of(x), [&](auto type) {
    const auto* totals = static_cast<const Accumulator<decltype(type)>*>(sums);
    with_type(dtype_of(*parameter), [&](auto stored) {
      using T = decltype(stored);
      T* out = static_cast<T*>(gradient.mutable_data_ptr());
      for (int64_t c = 0; c < channels; c++) store(out + c, static_cast<Accumulator<T>>(totals[c]));
    });
  });
  return gradient;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose(KERNEL_TABLES);
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
void add_partial_sums(A* sums, int64_t chunks, int64_t size) {
  for (int64_t chunk = 1; chunk < chunks; chunk++) {
    for (int64_t i = 0; i < size; i++) sums[i] += sums[chunk * size + i];
  }
}

using Sums = std::unique_ptr<char[]>;

// Calls f(begin, end, sums) for chunks of rows, each with `size` zeroed accumulators to add to. Returns their totals.
template <class F>
Sums sum_over_rows(const Tensor& x, int64_t rows, int64_t channels, int64_t size, const F& f) {
  const int64_t chunk_rows =
      std::max({kChunkRows, (rows + kChunks - 1) / kChunks, (kChunkElements + channels - 1) / channels});
  const int64_t chunks = std::max<int64_t>(1, (rows + chunk_rows - 1) / chunk_rows);
  const bool doubles = accumulator_of(x) == ScalarType::Double;
  const int64_t bytes = size * (doubles ? sizeof(double) : sizeof(float));
  Sums sums(new char[chunks * bytes]);
  const int64_t grain = std::max<int64_t>(1, kGrain / (chunk_rows * channels));
  torch::stable::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; chunk++) {
      char* partial = sums.get() + chunk * bytes;
      std::fill_n(partial, bytes, 0);
      f(chunk * chunk_rows, std::min(rows, (chunk + 1) * chunk_rows), partial);
    }
  });
  if (doubles) add_partial_sums(reinterpret_cast<double*>(sums.get()), chunks, size);
  else add_partial_sums(reinterpret_cast<float*>(sums.get()), chunks, size);
  return sums;
}

Normalised normalise(const Tensor& input, const std::optional<Tensor>& residual, const std::optional<Tensor>& weight,
                     const std::optional<Tensor>& bias, double eps, Activation activation, bool statistics) {
  const Kernels& loops = kernels();
  const DType dtype = dtype_of(input);
  const int64_t channels = channels_of(input);
  const int64_t rows = input.numel() / channels;
  const Tensor x = contiguous_like("x", input, input);
  std::optional<Tensor> addend;
  if (residual.has_value()) addend = contiguous_like("residual", *residual, x);
  const Parameter scale("weight", weight, x, 1), shift("bias", bias, x, 0);
  const auto sizes = x.sizes();
  Normalised made{empty(sizes, x.scalar_type(), x), std::nullopt, std::nullopt, std::nullopt};
  if (addend.has_value()) made.h = empty(sizes, x.scalar_type(), x);
  if (statistics) {
    made.mean = empty(sizes.slice(0, sizes.size() - 1), accumulator_of(x), x);
    made.rstd = empty(sizes.slice(0, sizes.size() - 1), accumulator_of(x), x);
  }
  const auto data = [](const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? tensor->mutable_data_ptr() : nullptr;
  };
  const LayerNormForward call{
      .x = x.const_data_ptr(),
      .residual = addend.has_value() ? addend->const_data_ptr() : nullptr,
      .weight = scale.data(),
      .bias = shift.data(),
      .eps = eps,
      .channels = channels,
      .h = data(made.h),
      .out = made.out.mutable_data_ptr(),
      .mean = data(made.mean),
      .rstd = data(made.rstd),
  };
  for_rows(rows, channels, [&](int64_t begin, int64_t end) {
    std::vector<double> scratch(channels);
    loops.layer_norm(dtype, activation, call, begin, end, scratch.data());
  });
  return made;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, double eps,
                                              const std::string& activation) {
  const Normalised made = normalise(x, std::nullopt, weight, bias, eps, activation_of(activation), true);
  return {made.out, *made.mean, *made.rstd};
}

Tensor layer_norm_inference(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                            double eps, const std::string& activation) {
  return normalise(x, std::nullopt, weight, bias, eps, activation_of(activation), false).out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                                          const std::optional<Tensor>& weight,
                                                          const std::optional<Tensor>& bias, double eps) {
  const Normalised made = normalise(x, residual, weight, bias, eps, Activation::identity, true);
  return {*made.h, made.out, *made.mean, *made.rstd};
}

std::tuple<Tensor, Tensor> add_layer_norm_inference(const Tensor& x, const Tensor& residual,
                                                    const std::optional<Tensor>& weight,
                                                    const std::optional<Tensor>& bias, double eps) {
  const Normalised made = normalise(x, residual, weight, bias, eps, Activation::identity, false);
  return {*made.h, made.out};
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
  check_statistics(mean, rstd, h);
  const Tensor values = contiguous_like("h", h, h), doutput = contiguous_like("dout", dout, h);
  const Tensor addend = dh.has_value() ? contiguous_like("dh", *dh, h) : values;
  const Parameter scale("weight", weight, h, 1), shift("bias", bias, h, 0);
  const Tensor dx = empty(h.sizes(), h.scalar_type(), h);
  const LayerNormBackward call{
      .dout = doutput.const_data_ptr(),
      .dh = dh.has_value() ? addend.const_data_ptr() : nullptr,
      .h = values.const_data_ptr(),
      .mean = mean.const_data_ptr(),
      .rstd = rstd.const_data_ptr(),
      .weight = scale.data(),
      .bias = shift.data(),
      .channels = channels,
      .dx = dx.mutable_data_ptr(),
  };
  const Sums sums = sum_over_rows(h, rows, channels, 2 * channels, [&](int64_t begin, int64_t end, void* partial) {
    std::vector<double> scratch(channels);
    loops.layer_norm_backward(dtype, kind, call, begin, end, partial, scratch.data());
  });
  const char* dbias = sums.get() + channels * (dtype == DType::float64 ? sizeof(double) : sizeof(float));
  return {dx, gradient_of(weight, h, sums.get()), gradient_of(bias, h, dbias)};
}

Tensor gelu(const Tensor& input, const std::optional<Tensor>& bias, const std::string& activation) {
  const Kernels& loops = kernels();
  const DType dtype = dtype_of(input);
  const Activation kind = activation_of(activation);
  const Tensor x = contiguous_like("x", input, input);
  const Tensor out = empty(x.sizes(), x.scalar_type(), x);
  GeluForward call{x.const_data_ptr(), nullptr, 1, out.mutable_data_ptr()};
  const auto run = [&](int64_t begin, int64_t end) { loops.gelu(dtype, kind, call, begin, end); };
  if (!bias.has_value()) {
    for_blocks(x.numel(), run);
    return out;
  }
  const Parameter shift("bias", bias, x, 0);
  call.bias = shift.data();
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
  const Tensor dx = empty(x.sizes(), x.scalar_type(), x);
  GeluBackward call{doutput.const_data_ptr(), x.const_data_ptr(), nullptr, 1, dx.mutable_data_ptr()};
  if (!bias.has_value()) {
    for_blocks(x.numel(), [&](int64_t begin, int64_t end) {
      loops.gelu_backward(dtype, kind, call, begin, end, nullptr);
    });
    return {dx, gradient_of(bias, x, nullptr)};
  }
  const Parameter shift("bias", bias, x, 0);
  call.bias = shift.data();
  call.channels = channels_of(x);
  const int64_t channels = call.channels, rows = x.numel() / channels;
  const Sums sums = sum_over_rows(x, rows, channels, channels, [&](int64_t begin, int64_t end, void* partial) {
    loops.gelu_backward(dtype, kind, call, begin, end, partial);
  });
  return {dx, gradient_of(bias, x, sums.get())};
}

}  // namespace
}  // namespace cvt_kernels

STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CPU, m) {
  using namespace cvt_kernels;
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("layer_norm_inference", TORCH_BOX(&layer_norm_inference));
  m.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  m.impl("add_layer_norm_inference", TORCH_BOX(&add_layer_norm_inference));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  m.impl("gelu", TORCH_BOX(&gelu));
  m.impl("gelu_backward", TORCH_BOX(&gelu_backward));
}

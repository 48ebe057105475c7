// The operators on the GPU: tensors, devices and streams around the kernels. As the CUDA half of the extension knows
// nothing of torch's own CUDA code, one binary serves torch with CUDA, of whatever version, and without.

#include "layer_norm_gelu_cuda.h"

#include <dlfcn.h>

#include <initializer_list>
#include <limits>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "tensors.h"

namespace cvt_kernels::cuda {
namespace {

using GetStream = AOTITorchError (*)(int32_t device, void** stream);

// Part of torch's stable interface, but only in builds of torch with CUDA.
GetStream find_get_stream() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
  STD_TORCH_CHECK(symbol != nullptr, "torch has no aoti_torch_get_current_cuda_stream: is it a build with CUDA?");
  return reinterpret_cast<GetStream>(symbol);
}

void* current_stream(int32_t device) {
  static const GetStream get_stream = find_get_stream();
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(get_stream(device, &stream));
  return stream;
}

// A call on the device of x and its current stream.
class Session {
 public:
  explicit Session(const Tensor& x)
      : guard_(x.get_device_index()), stream_(current_stream(x.get_device_index())), dtype_(dtype_of(x)) {
    STD_TORCH_CHECK(dtype_ != DType::float64, "x: there are no CUDA kernels for float64");
  }
  DType dtype() const { return dtype_; }
  const Kernels& kernels() const {
    switch (dtype_) {
      case DType::bfloat16: return kernels_bfloat16;
      case DType::float16: return kernels_float16;
      default: return kernels_float32;
    }
  }
  void* stream() const { return stream_; }
  int multiprocessors() const {
    int count = 0;
    check(kernels().multiprocessors(&count));
    return count;
  }
  void check(const char* error) const {
    STD_TORCH_CHECK(error == nullptr, "cvt_kernels: a CUDA kernel did not start: ", error);
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_;
  DType dtype_;
};

int channels_for_kernels(const Tensor& x) {
  const int64_t channels = channels_of(x);
  STD_TORCH_CHECK(channels <= kMaxChannels, "x: got ", channels, " channels, expected up to ", kMaxChannels);
  return static_cast<int>(channels);
}

// Whether every load of 16 bytes lies on a multiple of 16.
bool aligned(const Tensor& x, int64_t elements, std::initializer_list<const void*> pointers) {
  const bool whole = elements * static_cast<int64_t>(x.element_size()) % 16 == 0;
  return whole && std::all_of(pointers.begin(), pointers.end(),
                              [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; });
}

// Weight and bias as the kernels take them: contiguous, and either both float or both of the type of x.
class Parameters {
 public:
  Parameters(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const Tensor& x) {
    for (const auto* parameter : {&weight, &bias}) {
      is_float_ |= parameter->has_value() && (*parameter)->scalar_type() != x.scalar_type();
    }
    const ScalarType type = is_float_ ? ScalarType::Float : x.scalar_type();
    weight_ = convert("weight", weight, x, type);
    bias_ = convert("bias", bias, x, type);
  }
  const void* weight() const { return weight_.has_value() ? weight_->const_data_ptr() : nullptr; }
  const void* bias() const { return bias_.has_value() ? bias_->const_data_ptr() : nullptr; }
  bool is_float() const { return is_float_; }

 private:
  static std::optional<Tensor> convert(const char* name, const std::optional<Tensor>& tensor, const Tensor& x,
                                       ScalarType type) {
    if (!tensor.has_value()) return std::nullopt;
    check_parameter(name, *tensor, x);
    return torch::stable::contiguous(tensor->scalar_type() == type ? *tensor : torch::stable::to(*tensor, type));
  }

  std::optional<Tensor> weight_, bias_;
  bool is_float_ = false;
};

void* data(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->mutable_data_ptr() : nullptr;
}

// The gradient of a parameter, in its type, from the sums of the blocks; empty if there is no such parameter.
Tensor gradient_of(const Session& session, const std::optional<Tensor>& parameter, const Tensor& x, const Tensor& sums,
                   int64_t index) {
  if (!parameter.has_value()) return empty({0}, ScalarType::Float, x);
  const int64_t channels = channels_of(x);
  const bool same = parameter->scalar_type() == x.scalar_type();
  const Tensor gradient = empty({channels}, same ? x.scalar_type() : ScalarType::Float, x);
  const SumOverBlocks call{
      .sums = static_cast<const float*>(sums.const_data_ptr()) + index * channels,
      .out = gradient.mutable_data_ptr(),
      .stride = sums.size(1),
      .blocks = static_cast<int>(sums.size(0)),
      .channels = static_cast<int>(channels),
      .float_parameters = !same,
  };
  session.check(session.kernels().sum_over_blocks(call, session.stream()));
  if (parameter->scalar_type() == gradient.scalar_type()) return gradient;
  return torch::stable::to(gradient, parameter->scalar_type());
}

Normalised normalise(const Tensor& input, const std::optional<Tensor>& residual, const std::optional<Tensor>& weight,
                     const std::optional<Tensor>& bias, double eps, Activation activation, bool statistics) {
  const Session session(input);
  const int channels = channels_for_kernels(input);
  const Tensor x = contiguous_like("x", input, input);
  std::optional<Tensor> addend;
  if (residual.has_value()) addend = contiguous_like("residual", *residual, x);
  const Parameters parameters(weight, bias, x);
  const auto sizes = x.sizes();
  Normalised made{empty(sizes, x.scalar_type(), x), std::nullopt, std::nullopt, std::nullopt};
  if (addend.has_value()) made.h = empty(sizes, x.scalar_type(), x);
  if (statistics) {
    made.mean = empty(sizes.slice(0, sizes.size() - 1), ScalarType::Float, x);
    made.rstd = empty(sizes.slice(0, sizes.size() - 1), ScalarType::Float, x);
  }
  const LayerNormForward call{
      .x = x.const_data_ptr(),
      .residual = data(addend),
      .weight = parameters.weight(),
      .bias = parameters.bias(),
      .h = data(made.h),
      .out = made.out.mutable_data_ptr(),
      .mean = static_cast<float*>(data(made.mean)),
      .rstd = static_cast<float*>(data(made.rstd)),
      .rows = x.numel() / channels,
      .eps = static_cast<float>(eps),
      .channels = channels,
      .float_parameters = parameters.is_float(),
  };
  const bool vectors = aligned(x, channels, {call.x, call.residual, call.weight, call.bias, call.h, call.out});
  const Layout layout = layout_of(session.dtype(), channels, vectors);
  session.check(session.kernels().layer_norm(call, activation, layout, session.stream()));
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
  const Session session(h);
  const int channels = channels_for_kernels(h);
  check_statistics(mean, rstd, h);
  const Tensor values = contiguous_like("h", h, h), doutput = contiguous_like("dout", dout, h);
  std::optional<Tensor> addend;
  if (dh.has_value()) addend = contiguous_like("dh", *dh, h);
  const Parameters parameters(weight, bias, h);
  const Tensor dx = empty(h.sizes(), h.scalar_type(), h);
  LayerNormBackward call{
      .dout = doutput.const_data_ptr(),
      .dh = data(addend),
      .h = values.const_data_ptr(),
      .weight = parameters.weight(),
      .bias = parameters.bias(),
      .mean = static_cast<const float*>(mean.const_data_ptr()),
      .rstd = static_cast<const float*>(rstd.const_data_ptr()),
      .dx = dx.mutable_data_ptr(),
      .sums = nullptr,
      .rows = h.numel() / channels,
      .channels = channels,
      .float_parameters = parameters.is_float(),
  };
  const bool vectors = aligned(h, channels, {call.dout, call.dh, call.h, call.weight, call.bias, call.dx});
  const Layout layout = layout_of(session.dtype(), channels, vectors);
  const int64_t blocks = resident_blocks(layout, call.rows, session.multiprocessors());
  const Tensor sums = empty({blocks, 2 * channels}, ScalarType::Float, h);
  call.sums = static_cast<float*>(sums.mutable_data_ptr());
  session.check(
      session.kernels().layer_norm_backward(call, activation_of(activation), layout, blocks, session.stream()));
  return {dx, gradient_of(session, weight, h, sums, 0), gradient_of(session, bias, h, sums, 1)};
}

// One that there are kernels for without LayerNorm.
Activation gelu_of(const std::string& name) {
  const Activation activation = activation_of(name);
  STD_TORCH_CHECK(activation != Activation::identity, "activation: got 'identity', expected none, tanh or quick");
  return activation;
}

Tensor gelu(const Tensor& input, const std::optional<Tensor>& bias, const std::string& activation) {
  const Session session(input);
  const Activation kind = gelu_of(activation);
  const Tensor x = contiguous_like("x", input, input);
  const Tensor out = empty(x.sizes(), x.scalar_type(), x);
  const int64_t size = x.numel();
  if (!bias.has_value()) {
    const bool vectors = aligned(x, size, {x.const_data_ptr(), out.const_data_ptr()});
    const Layout layout = flat_layout(session.dtype(), vectors, false);
    const GeluForward call{x.const_data_ptr(), nullptr, out.mutable_data_ptr(), size, width_of(layout), false};
    session.check(session.kernels().gelu(call, kind, layout, session.stream()));
    return out;
  }
  const int channels = channels_for_kernels(x);
  const Parameters parameters(std::nullopt, bias, x);
  const GeluForward call{x.const_data_ptr(), parameters.bias(), out.mutable_data_ptr(),
                         size,               channels,          parameters.is_float()};
  const Layout layout = layout_of(session.dtype(), channels, aligned(x, channels, {call.x, call.bias, call.out}));
  session.check(session.kernels().gelu(call, kind, layout, session.stream()));
  return out;
}

std::tuple<Tensor, Tensor> gelu_backward(const Tensor& dout, const Tensor& input, const std::optional<Tensor>& bias,
                                         const std::string& activation) {
  const Session session(input);
  const Activation kind = gelu_of(activation);
  const Tensor x = contiguous_like("x", input, input), doutput = contiguous_like("dout", dout, input);
  const Tensor dx = empty(x.sizes(), x.scalar_type(), x);
  const Parameters parameters(std::nullopt, bias, x);
  GeluBackward call{
      .dout = doutput.const_data_ptr(),
      .x = x.const_data_ptr(),
      .bias = parameters.bias(),
      .dx = dx.mutable_data_ptr(),
      .sums = nullptr,
      .size = x.numel(),
      .channels = 0,
      .float_parameters = parameters.is_float(),
  };
  const auto run = [&](const Layout& layout, int64_t blocks) {
    session.check(session.kernels().gelu_backward(call, kind, layout, blocks, session.stream()));
  };
  if (!bias.has_value()) {
    const Layout layout = flat_layout(session.dtype(), aligned(x, call.size, {call.dout, call.x, call.dx}), true);
    call.channels = width_of(layout);
    run(layout, (call.size + call.channels - 1) / call.channels);
    return {dx, empty({0}, ScalarType::Float, x)};
  }
  call.channels = channels_for_kernels(x);
  const bool vectors = aligned(x, call.channels, {call.dout, call.x, call.bias, call.dx});
  const Layout layout = layout_of(session.dtype(), call.channels, vectors);
  const int64_t blocks = resident_blocks(layout, call.size / call.channels, session.multiprocessors());
  const Tensor sums = empty({blocks, call.channels}, ScalarType::Float, x);
  call.sums = static_cast<float*>(sums.mutable_data_ptr());
  run(layout, blocks);
  return {dx, gradient_of(session, bias, x, sums, 0)};
}

}  // namespace
}  // namespace cvt_kernels::cuda

STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CUDA, m) {
  using namespace cvt_kernels::cuda;
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("layer_norm_inference", TORCH_BOX(&layer_norm_inference));
  m.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  m.impl("add_layer_norm_inference", TORCH_BOX(&add_layer_norm_inference));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  m.impl("gelu", TORCH_BOX(&gelu));
  m.impl("gelu_backward", TORCH_BOX(&gelu_backward));
}

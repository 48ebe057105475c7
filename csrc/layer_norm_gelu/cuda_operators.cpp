// LayerNorm and GELU on the GPU: parameters, devices and streams around the kernels. As the CUDA half of the extension
// knows nothing of torch's own CUDA code, one binary serves torch with CUDA, of whatever version, and without.

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include <torch/csrc/stable/accelerator.h>

#include "layer_norm_gelu/cuda_launches.h"
#include "layer_norm_gelu/operators.h"

namespace cvt_kernels::layer_norm_gelu::cuda {
namespace {

using GetStream = AOTITorchError (*)(int32_t device, void** stream);

// Finds a function of torch's stable interface that only builds of torch with CUDA have.
GetStream find_get_stream() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
  STD_TORCH_CHECK(symbol != nullptr, "torch has no aoti_torch_get_current_cuda_stream: is it a build with CUDA?");
  return reinterpret_cast<GetStream>(symbol);
}

void* current_stream(int32_t device) {
  static const GetStream get_stream = find_get_stream();
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get_stream(device, &stream));
  return stream;
}

int channels_for_kernels(const Tensor& x) {
  const int64_t channels = channels_of("x", x);
  expect(channels <= kMaxChannels, "x", Quoted{"channels, ", channels}, "up to ", kMaxChannels, " channels");
  return static_cast<int>(channels);
}

int rows_for_kernels(int64_t rows) {
  expect(rows <= kMaxRows, "x", Quoted{"rows, ", rows}, "up to ", kMaxRows, " rows");
  return static_cast<int>(rows);
}

// Says whether every load of 16 bytes lies on a multiple of 16.
bool is_aligned(const Tensor& x, int64_t elements, std::initializer_list<const void*> pointers) {
  const bool whole = elements * static_cast<int64_t>(x.element_size()) % 16 == 0;
  return whole && std::all_of(pointers.begin(), pointers.end(),
                              [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; });
}

// A weight, bias or shift, once checked, as the kernels take it: contiguous and of the type.
std::optional<Tensor> kernel_parameter(const std::optional<Tensor>& tensor, ScalarType type) {
  if (!tensor.has_value()) return std::nullopt;
  return torch::stable::contiguous(tensor->scalar_type() == type ? *tensor : torch::stable::to(*tensor, type));
}

// Weight and bias, which are either both float or both of the type of x.
class KernelParameters {
 public:
  KernelParameters(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const Tensor& x) {
    for (const auto* parameter : {&weight, &bias}) {
      is_float_ |= parameter->has_value() && (*parameter)->scalar_type() != x.scalar_type();
    }
    const ScalarType type = is_float_ ? ScalarType::Float : x.scalar_type();
    weight_ = kernel_parameter(weight, type);
    bias_ = kernel_parameter(bias, type);
  }
  const void* weight() const { return const_data_of(weight_); }
  const void* bias() const { return const_data_of(bias_); }
  bool is_float() const { return is_float_; }

 private:
  std::optional<Tensor> weight_, bias_;
  bool is_float_ = false;
};

// A call on the device of x and its current stream.
class Gpu {
 public:
  Gpu(const char* name, const Tensor& x)
      : guard_(x.get_device_index()), stream_(current_stream(x.get_device_index())), dtype_(dtype_of(name, x)) {
    expect(dtype_ != DType::float64, name, x, "another dtype: there are no CUDA kernels for float64");
  }

  void layer_norm(const LayerNormTensors& tensors, const Parameters& parameters, double eps,
                  Activation activation) const {
    const Tensor& rows = tensors.h.has_value() ? *tensors.h : tensors.x;
    const int channels = channels_for_kernels(rows);
    const KernelParameters converted(parameters.weight, parameters.bias, rows);
    const bool float_shift = tensors.shift.has_value() && tensors.shift->scalar_type() != rows.scalar_type();
    const auto shift =
        kernel_parameter(tensors.shift, float_shift ? ScalarType::Float : rows.scalar_type());
    expect(!shift.has_value() || activation == Activation::identity, "shift", shift,
           "none: there are no CUDA kernels with an activation");
    const LayerNormForward call{
        .x = tensors.x.const_data_ptr(),
        .residual = const_data_of(tensors.residual),
        .shift = const_data_of(shift),
        .weight = converted.weight(),
        .bias = converted.bias(),
        .h = mutable_data_of(tensors.h),
        .out = tensors.out.mutable_data_ptr(),
        .mean = static_cast<float*>(mutable_data_of(tensors.mean)),
        .rstd = static_cast<float*>(mutable_data_of(tensors.rstd)),
        .rows = rows.numel() / channels,
        .eps = static_cast<float>(eps),
        .inverse = 1.0f / static_cast<float>(channels),
        .channels = channels,
        .float_parameters = converted.is_float(),
        .float_shift = float_shift,
    };
    const bool aligned = is_aligned(
        rows, channels, {call.x, call.residual, call.shift, call.weight, call.bias, call.h, call.out});
    const DType result = checked_result(tensors.out, activation, tensors.h.has_value());
    check(kernels().layer_norm(call, activation, result, layout_of(dtype_, channels, aligned), stream_));
  }

  ParameterGradients layer_norm_backward(const LayerNormBackwardTensors& tensors, const Parameters& parameters,
                                         Activation activation) const {
    const Tensor& h = tensors.h;
    const int channels = channels_for_kernels(h);
    const KernelParameters converted(parameters.weight, parameters.bias, h);
    LayerNormBackward call{
        .dout = tensors.dout.const_data_ptr(),
        .dh = const_data_of(tensors.dh),
        .h = h.const_data_ptr(),
        .weight = converted.weight(),
        .bias = converted.bias(),
        .mean = static_cast<const float*>(tensors.mean.const_data_ptr()),
        .rstd = static_cast<const float*>(tensors.rstd.const_data_ptr()),
        .dx = tensors.dx.mutable_data_ptr(),
        .dbranch = mutable_data_of(tensors.dbranch),
        .sums = nullptr,
        .rows = rows_for_kernels(h.numel() / channels),
        .inverse = 1.0f / static_cast<float>(channels),
        .channels = channels,
        .float_parameters = converted.is_float(),
    };
    const DType result = checked_result(tensors.dout, activation, tensors.dbranch.has_value());
    const bool aligned =
        is_aligned(h, channels, {call.dout, call.dh, call.h, call.weight, call.bias, call.dx, call.dbranch});
    const Layout layout = layout_of(dtype_, channels, aligned, true);
    const int64_t blocks = resident_blocks(layout, call.rows, multiprocessors());
    const Tensor sums = empty({blocks, 2 * channels}, ScalarType::Float, h);
    call.sums = static_cast<float*>(sums.mutable_data_ptr());
    check(kernels().layer_norm_backward(call, activation, result, layout, blocks, stream_));
    auto [weight, bias] = gradients_of(h, sums, parameters.weight, parameters.bias);
    return {std::move(weight), std::move(bias)};
  }

  void gelu(const GeluTensors& tensors, const std::optional<Tensor>& bias, Activation activation) const {
    check_is_gelu(activation);
    const Tensor& x = tensors.x;
    const KernelParameters converted(std::nullopt, bias, x);
    GeluForward call{
        .x = x.const_data_ptr(),
        .bias = converted.bias(),
        .out = tensors.out.mutable_data_ptr(),
        .size = x.numel(),
        .channels = 0,
        .float_parameters = converted.is_float(),
    };
    Layout layout;
    if (bias.has_value()) {
      call.channels = channels_for_kernels(x);
      layout = layout_of(dtype_, call.channels, is_aligned(x, call.channels, {call.x, call.bias, call.out}));
    } else {
      layout = flat_layout(dtype_, is_aligned(x, call.size, {call.x, call.out}), false);
    }
    check(kernels().gelu(call, activation, layout, stream_));
  }

  Tensor gelu_backward(const GeluBackwardTensors& tensors, const std::optional<Tensor>& bias,
                       Activation activation) const {
    check_is_gelu(activation);
    const Tensor& x = tensors.x;
    const KernelParameters converted(std::nullopt, bias, x);
    GeluBackward call{
        .dout = tensors.dout.const_data_ptr(),
        .x = x.const_data_ptr(),
        .bias = converted.bias(),
        .dx = tensors.dx.mutable_data_ptr(),
        .sums = nullptr,
        .size = x.numel(),
        .channels = 0,
        .float_parameters = converted.is_float(),
    };
    const auto run = [&](const Layout& layout, int64_t blocks) {
      check(kernels().gelu_backward(call, activation, layout, blocks, stream_));
    };
    if (!bias.has_value()) {
      const Layout layout = flat_layout(dtype_, is_aligned(x, call.size, {call.dout, call.x, call.dx}), true);
      run(layout, flat_blocks(layout, call.size));
      return no_gradient(x);
    }
    call.channels = channels_for_kernels(x);
    const bool aligned = is_aligned(x, call.channels, {call.dout, call.x, call.bias, call.dx});
    const Layout layout = layout_of(dtype_, call.channels, aligned);
    const int64_t blocks = resident_blocks(layout, call.size / call.channels, multiprocessors());
    const Tensor sums = empty({blocks, call.channels}, ScalarType::Float, x);
    call.sums = static_cast<float*>(sums.mutable_data_ptr());
    run(layout, blocks);
    return gradients_of(x, sums, bias)[0];
  }

 private:
  // The dtype of a result. Where it is another one than the rows', it is either 16 bits of float32 or float32 of 16 bits;
  // a sum with a residual is then a branch of 16 bits beside a stream of float32.
  DType checked_result(const Tensor& out, Activation activation, bool has_branch) const {
    const DType result = dtype_of("dtype", out);
    const bool narrows = dtype_ == DType::float32 && result != DType::float64;
    const bool widens = result == DType::float32 && !has_branch;
    expect(result == dtype_ || (activation == Activation::identity && (narrows || widens)), "dtype", out,
           "another dtype: there are no CUDA kernels for this result");
    return result;
  }

  const Kernels& kernels() const {
    switch (dtype_) {
      case DType::bfloat16: return kernels_bfloat16;
      case DType::float16: return kernels_float16;
      default: return kernels_float32;
    }
  }

  int multiprocessors() const {
    int count = 0;
    check(kernels().multiprocessors(&count));
    return count;
  }

  static void check(const char* error) {
    STD_TORCH_CHECK(error == nullptr, "cvt_kernels: a CUDA kernel did not start: ", error);
  }

  // Without LayerNorm there are no kernels for the identity.
  static void check_is_gelu(Activation activation) {
    expect(activation != Activation::identity, "activation", std::string_view("'identity'"), "none, tanh or quick");
  }

  // The gradient of a parameter as the kernels write it: in its type, or in float.
  Tensor gradient_like(const std::optional<Tensor>& parameter, const Tensor& x) const {
    if (!parameter.has_value()) return no_gradient(x);
    const bool same = parameter->scalar_type() == x.scalar_type();
    return empty({channels_of("x", x)}, same ? x.scalar_type() : ScalarType::Float, x);
  }

  // The gradients of parameters, in their types, from the sums of the blocks: (blocks, parameters, channels).
  template <class... Parameter>
  std::array<Tensor, sizeof...(Parameter)> gradients_of(const Tensor& x, const Tensor& sums,
                                                        const Parameter&... parameter) const {
    constexpr size_t count = sizeof...(Parameter);
    const std::optional<Tensor> parameters[] = {parameter...};
    std::array<Tensor, count> gradients{gradient_like(parameter, x)...};
    SumOverBlocks call{
        .sums = static_cast<const float*>(sums.const_data_ptr()),
        .outs = {},
        .is_float = {},
        .parts = static_cast<int>(count),
        .blocks = static_cast<int>(sums.size(0)),
        .channels = static_cast<int>(channels_of("x", x)),
    };
    bool wanted = false;
    for (size_t i = 0; i < count; i++) {
      if (!parameters[i].has_value()) continue;
      call.outs[i] = gradients[i].mutable_data_ptr();
      call.is_float[i] = gradients[i].scalar_type() != x.scalar_type();
      wanted = true;
    }
    if (!wanted) return gradients;
    check(kernels().sum_over_blocks(call, stream_));
    for (size_t i = 0; i < count; i++) {
      if (!parameters[i].has_value() || parameters[i]->scalar_type() == gradients[i].scalar_type()) continue;
      gradients[i] = torch::stable::to(gradients[i], parameters[i]->scalar_type());
    }
    return gradients;
  }

  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_;
  const DType dtype_;
};

}  // namespace
}  // namespace cvt_kernels::layer_norm_gelu::cuda

STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CUDA, m) {
  using namespace cvt_kernels::layer_norm_gelu;
  register_operators<cuda::Gpu>(m);
}

// LayerNorm and GELU on the GPU: parameters, devices and streams around the kernels. As the CUDA half of the extension
// knows nothing of torch's own CUDA code, one binary serves torch with CUDA, of whatever version, and without.

#include <dlfcn.h>

#include <torch/csrc/stable/accelerator.h>

#include "layer_norm_gelu/cuda_launches.h"
#include "layer_norm_gelu/operators.h"

namespace cvt_kernels::layer_norm_gelu::cuda {
namespace {

using torch::stable::to;
using GetStream = AOTITorchError (*)(int32_t device, void** stream);

// Only builds of torch with CUDA have the function of its stable interface that returns it.
void* current_stream(int32_t device) {
  static const GetStream get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    STD_TORCH_CHECK(symbol != nullptr, "torch has no aoti_torch_get_current_cuda_stream: is it a build with CUDA?");
    return reinterpret_cast<GetStream>(symbol);
  }();
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get_stream(device, &stream));
  return stream;
}

// Says whether every load of 16 bytes lies on a multiple of 16.
bool is_aligned(DType dtype, int64_t elements, std::initializer_list<const void*> pointers) {
  const bool whole = elements * (dtype == DType::float32 ? 4 : 2) % 16 == 0;
  return whole && std::all_of(pointers.begin(), pointers.end(),
                              [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; });
}

// A call on the device of x and its current stream.
class Gpu {
 public:
  using Count = int;
  using Real = float;

  // Weight and bias, which are contiguous and either both float or both of the type of x.
  class Parameters : public Given {
   public:
    Parameters(const Tensor& x, const Optional& weight, const Optional& bias, bool, const char* name = "bias")
        : Given(x, weight, bias, name) {
      for (const Optional& each : given) is_float_ |= each.has_value() && each->scalar_type() != x.scalar_type();
      const ScalarType type = is_float_ ? ScalarType::Float : x.scalar_type();
      for (int i = 0; i < 2; i++) {
        if (!given[i].has_value()) continue;
        converted_[i] = torch::stable::contiguous(given[i]->scalar_type() == type ? *given[i] : to(*given[i], type));
      }
    }
    const void* weight() const { return const_data_of(converted_[0]); }
    const void* bias() const { return const_data_of(converted_[1]); }
    bool is_float() const { return is_float_; }

   private:
    Optional converted_[2];
    bool is_float_ = false;
  };

  Gpu(const char* name, const Tensor& x)
      : guard_(x.get_device_index()), stream_(current_stream(x.get_device_index())), dtype_(dtype_of(name, x)) {
    expect(dtype_ != DType::float64, name, x, "another dtype: there are no CUDA kernels for float64");
  }

  static int channels(const char* name, const Tensor& x) {
    const int64_t channels = channels_of(name, x);
    expect(channels <= kMaxChannels, name, Quoted{"channels, ", channels}, "up to ", kMaxChannels, " channels");
    return static_cast<int>(channels);
  }

  static int rows(int64_t rows) {
    expect(rows <= kMaxRows, "x", Quoted{"rows, ", rows}, "up to ", kMaxRows, " rows");
    return static_cast<int>(rows);
  }

  void layer_norm(LayerNormForward call, const Parameters& parameters, const Parameters& shift, Activation activation,
                  ScalarType dtype, bool) const {
    expect(call.shift == nullptr || activation == Activation::identity, "shift", shift.given[1],
           "none: there are no CUDA kernels with an activation");
    call.inverse = 1.0f / static_cast<float>(call.channels);
    call.float_parameters = parameters.is_float();
    call.float_shift = shift.is_float();
    const bool aligned = is_aligned(
        dtype_, call.channels, {call.x, call.residual, call.shift, call.weight, call.bias, call.h, call.out});
    const DType result = checked_result(dtype, activation, call.residual != nullptr);
    check(kernels().layer_norm(stream_, call, activation, result, layout_of(dtype_, call.channels, aligned)));
  }

  Gradients layer_norm_backward(LayerNormBackward call, const Parameters& parameters, Activation activation,
                                ScalarType dtype, const Tensor& h) const {
    call.inverse = 1.0f / static_cast<float>(call.channels);
    call.float_parameters = parameters.is_float();
    const DType result = checked_result(dtype, activation, call.dbranch != nullptr);
    const bool aligned = is_aligned(
        dtype_, call.channels, {call.dout, call.dh, call.h, call.weight, call.bias, call.dx, call.dbranch});
    const Layout layout = layout_of(dtype_, call.channels, aligned, true);
    const int64_t blocks = resident_blocks(layout, call.rows, multiprocessors());
    const Tensor sums = empty({blocks, 2 * call.channels}, ScalarType::Float, h);
    call.sums = static_cast<float*>(sums.mutable_data_ptr());
    check(kernels().layer_norm_backward(stream_, call, activation, result, layout, blocks));
    return gradients_of(h, sums, parameters, 0);
  }

  void gelu(GeluForward call, const Parameters& parameters, Activation activation) const {
    call.float_parameters = parameters.is_float();
    const Layout layout = layout_of_gelu(call, {call.x, call.bias, call.out}, false);
    check(kernels().gelu(stream_, call, activation, layout));
  }

  Gradients gelu_backward(GeluBackward call, const Parameters& parameters, Activation activation, const Tensor& x) const {
    call.float_parameters = parameters.is_float();
    const Layout layout = layout_of_gelu(call, {call.dout, call.x, call.bias, call.dx}, true);
    if (call.bias == nullptr) {
      check(kernels().gelu_backward(stream_, call, activation, layout, flat_blocks(layout, call.size)));
      return {Tensor(), no_gradient(x)};
    }
    const int64_t blocks = resident_blocks(layout, call.size / call.channels, multiprocessors());
    const Tensor sums = empty({blocks, call.channels}, ScalarType::Float, x);
    call.sums = static_cast<float*>(sums.mutable_data_ptr());
    check(kernels().gelu_backward(stream_, call, activation, layout, blocks));
    return gradients_of(x, sums, parameters, 1);
  }

 private:
  Layout layout_of_gelu(const auto& call, std::initializer_list<const void*> pointers, bool backward) const {
    const bool has_rows = call.bias != nullptr;
    const bool aligned = is_aligned(dtype_, has_rows ? call.channels : call.size, pointers);
    return has_rows ? layout_of(dtype_, call.channels, aligned) : flat_layout(dtype_, aligned, backward);
  }

  // The dtype of a result. Where it is another one than the rows', it is either 16 bits of float32 or float32 of 16 bits;
  // a sum with a residual is then a branch of 16 bits beside a stream of float32.
  DType checked_result(ScalarType type, Activation activation, bool has_branch) const {
    const DType result = dtype_of("dtype", type);
    const bool narrows = dtype_ == DType::float32 && result != DType::float64;
    const bool widens = result == DType::float32 && !has_branch;
    expect(result == dtype_ || (activation == Activation::identity && (narrows || widens)), "dtype", type,
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

  // The gradients of the parameters from the `first` on, from the sums of the blocks: (blocks, parameters, channels). The
  // kernels write them in the type of x or in float.
  Gradients gradients_of(const Tensor& x, const Tensor& sums, const Parameters& parameters, int first) const {
    Gradients gradients;
    SumOverBlocks call{
        .sums = static_cast<const float*>(sums.const_data_ptr()),
        .outs = {},
        .is_float = {},
        .parts = 2 - first,
        .blocks = static_cast<int>(sums.size(0)),
        .channels = channels("x", x),
    };
    for (int i = first; i < 2; i++) {
      const Optional& given = parameters.given[i];
      const bool is_float = call.is_float[i - first] = given.has_value() && given->scalar_type() != x.scalar_type();
      gradients[i] = given.has_value() ? empty({call.channels}, is_float ? ScalarType::Float : x.scalar_type(), x)
                                       : no_gradient(x);
      call.outs[i - first] = given.has_value() ? gradients[i].mutable_data_ptr() : nullptr;
    }
    if (call.outs[0] == nullptr && call.outs[1] == nullptr) return gradients;
    check(kernels().sum_over_blocks(stream_, call));
    for (int i = first; i < 2; i++) {
      const Optional& given = parameters.given[i];
      if (given.has_value() && given->scalar_type() != gradients[i].scalar_type()) {
        gradients[i] = to(gradients[i], given->scalar_type());
      }
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

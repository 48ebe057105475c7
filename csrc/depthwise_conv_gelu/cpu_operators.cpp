// The operators of depthwise_conv_gelu on the CPU.
//
// Results do not depend on the number of threads: every output is a sum of its own, in one order, and the gradients of the
// parameters are sums over bands of rows, which depend on the shape alone, added in their order.

#include "common/cpu.h"
#include "depthwise_conv_gelu/cpu_loops.h"
#include "layer_norm_gelu/operators.h"

namespace cvt_kernels::depthwise_conv_gelu {
namespace {

constexpr int64_t kRowBytes = 262144;   // of three rows of accumulators, which leave room in L2 for what else is read
constexpr int64_t kLeastBlock = 128;    // channels, since neighbors in memory are read quicker
constexpr int64_t kBackwardUnits = 16;  // to cut a small batch into
constexpr int64_t kBandRows = 16;       // the fewest of a band, around which two are computed again

// A call on x (batch, tokens, channels), and the tensors that it points to. It is cut into so many units, if the channels
// allow.
struct Arguments {
  Arguments(const Tensor& input, int64_t height, int64_t width, const Tensor& kernel, const Optional& shift,
            int64_t units = 1)
      : x(with_adjacent_channels("x", input)), dtype(dtype_of("x", x)), weight(made_contiguous("weight", kernel)) {
    const Tokens tokens = tokens_of(x, height, width, 0);
    const int64_t channels = tokens.channels;
    expect_sizes("weight", weight, {channels, 1, 3, 3}, x.scalar_type(), x, "(channels, 1, 3, 3)");
    if (shift.has_value()) {
      expect_sizes("bias", *shift, {channels}, x.scalar_type(), x, "(channels,)");
      bias = made_contiguous("bias", *shift);
    }
    const int64_t fitting = std::max(kLeastBlock, kRowBytes / (3 * width * accumulator_bytes(x)));
    const int64_t wanted = std::min(units / std::max<int64_t>(1, x.size(0)), channels / kLeastBlock);
    const int64_t blocks = std::max((channels + fitting - 1) / fitting, wanted);
    const int64_t block = ((channels + blocks - 1) / blocks + kChannelStep - 1) / kChannelStep * kChannelStep;
    call = {tokens, weight.const_data_ptr(), const_data_of(bias), block};
  }

  int64_t blocks() const { return (call.channels + call.block - 1) / call.block; }

  const Tensor x;
  const DType dtype;
  const Tensor weight;
  Optional bias;
  Convolution call;
};

Tensor depthwise_conv_gelu(const Tensor& input, int64_t height, int64_t width, const Tensor& weight,
                           const Optional& bias, const std::string& activation) {
  const Activation function = layer_norm_gelu::gelu_of(activation);
  const Arguments arguments(input, height, width, weight, bias);
  const Convolution& conv = arguments.call;
  const Tensor out = empty(arguments.x.sizes(), arguments.x.scalar_type(), arguments.x);
  const Forward call{conv, out.mutable_data_ptr()};
  const int64_t bytes = parameters_size(conv) * accumulator_bytes(arguments.x);
  parallel_for_with_scratch(arguments.blocks() * conv.batch * conv.height, grain_of(conv.width * conv.block), bytes,
                            [&](int64_t begin, int64_t end, void* scratch) {
    choose(KERNEL_TABLES)->forward(arguments.dtype, function, call, begin, end, scratch);
  });
  return out;
}

template <class A>
std::tuple<Tensor, Tensor, Tensor> compute_gradients(const Arguments& arguments, const Tensor& dout, Activation activation) {
  const Convolution& conv = arguments.call;
  const Tensor& x = arguments.x;
  const Tensor dx = empty(x.sizes(), x.scalar_type(), x);
  const int64_t bands = std::clamp<int64_t>(kBackwardUnits / std::max<int64_t>(1, arguments.blocks() * conv.batch), 1,
                                            std::max<int64_t>(1, conv.height / kBandRows));
  const int64_t parts = conv.batch * bands, size = kParameters * conv.channels;
  std::vector<A> sums(product("x", {parts, size}));
  const Backward call{conv, dout.const_data_ptr(), dx.mutable_data_ptr(), bands, sums.data()};
  const int64_t bytes = backward_size(conv) * static_cast<int64_t>(sizeof(A));
  const int64_t grain = grain_of(conv.height * conv.width * conv.block / bands);
  parallel_for_with_scratch(arguments.blocks() * parts, grain, bytes, [&](int64_t begin, int64_t end, void* scratch) {
    choose(KERNEL_TABLES)->backward(arguments.dtype, activation, call, begin, end, scratch);
  });
  const std::vector<double> totals = totals_of(sums, parts, size);
  const double* of_bias = totals.data() + 9 * conv.channels;
  return {dx, gradient_of(arguments.weight, x, [&](int64_t i) { return totals[i % 9 * conv.channels + i / 9]; }),
          gradient_of(arguments.bias, x, [&](int64_t i) { return of_bias[i]; })};
}

std::tuple<Tensor, Tensor, Tensor> depthwise_conv_gelu_backward(const Tensor& dout, const Tensor& input, int64_t height,
                                                                int64_t width, const Tensor& weight, const Optional& bias,
                                                                const std::string& activation) {
  const Activation function = layer_norm_gelu::gelu_of(activation);
  const Arguments arguments(input, height, width, weight, bias, kBackwardUnits);
  const Tensor gradient = contiguous_like("dout", dout, arguments.x);
  return accumulator_of(input) == ScalarType::Double ? compute_gradients<double>(arguments, gradient, function)
                                                     : compute_gradients<float>(arguments, gradient, function);
}

IMPLEMENT("depthwise_conv_gelu", depthwise_conv_gelu)
IMPLEMENT("depthwise_conv_gelu_backward", depthwise_conv_gelu_backward)

}  // namespace
}  // namespace cvt_kernels::depthwise_conv_gelu

// The interface of the loops of the depthwise convolution with GELU on the CPU.
//
// Activations are tokens, the pixels of images row by row, `channels` adjacent values each; all is in the type of the call.
#pragma once

#include "common/instruction_sets.h"
#include "layer_norm_gelu/activation.h"

namespace cvt_kernels::depthwise_conv_gelu {

using layer_norm_gelu::Activation;

constexpr int64_t kChannelStep = 16;  // a multiple of the lanes of every instruction set
constexpr int64_t kParameters = 10;   // of a channel: nine taps and the bias

struct Convolution : Tokens {
  const void* weight;  // (channels, 3, 3)
  const void* bias;    // (channels), or null for 0
  int64_t block;       // channels that a unit of the work serves, a multiple of kChannelStep
};

struct Forward {
  Convolution conv;
  void* out;  // (batch, height · width, channels)
};

struct Backward {
  Convolution conv;
  const void* dout;  // (batch, height · width, channels), as dx
  void* dx;
  int64_t bands;  // into which the rows of an image are cut
  void* sums;     // (batch, bands, kParameters, channels), accumulators: the gradients of the parameters, of each band
};

// The accumulators of the parameters of a block.
KERNEL_INLINE int64_t parameters_size(const Convolution& conv) { return kParameters * conv.block; }

// The accumulators of the backward's scratch memory: the parameters, once more for the gradient of x, their gradients,
// and three rows of the gradient before the activation.
KERNEL_INLINE int64_t backward_size(const Convolution& conv) {
  return 3 * parameters_size(conv) + 3 * conv.width * conv.block;
}

// The loops, compiled for one instruction set; they serve the units from `begin` to `end`, blocks of channels outermost.
struct Kernels {
  // A unit is a row of outputs. `scratch` has room for parameters_size() accumulators.
  void (*forward)(DType, Activation, const Forward&, int64_t begin, int64_t end, void* scratch);
  // A unit is a band. `scratch` has room for backward_size() accumulators.
  void (*backward)(DType, Activation, const Backward&, int64_t begin, int64_t end, void* scratch);
};

DECLARE_TABLES;

}  // namespace cvt_kernels::depthwise_conv_gelu

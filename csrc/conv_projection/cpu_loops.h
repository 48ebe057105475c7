// The interface between the operator on the CPU (cpu_operators.cpp) and its loops (cpu_loops.cpp).
//
// An output is BatchNorm(depthwise convolution of x) by the running statistics. Activations are tokens, `channels`
// adjacent values each: a class token or none, then the pixels of an image row by row.
#pragma once

#include <cstdint>

#include "common/half.h"
#include "common/instruction_sets.h"

namespace cvt_kernels::conv_projection {

constexpr int kMaxKernel = 16;        // the most taps of a convolution in either direction
constexpr int64_t kChannelStep = 16;  // a multiple of the lanes of every instruction set

// A convolution and its BatchNorm.
struct Branch {
  const void* weight;  // (channels, kernel, kernel) in the type of the call
  const void* scale;   // (channels) in the type `norm`, as the next three; or null for 1
  const void* shift;   // or null for 0
  const void* mean;
  const void* variance;
  DType norm;
  double eps;
  int64_t kernel, stride, padding, dilation;
  int64_t height, width;  // of the output
  void* out;              // (batch, class_tokens + height · width, channels)
};

struct Projection {
  const void* x;
  int64_t batch_stride, token_stride;
  int64_t batch, class_tokens, height, width, channels;
  const Branch* branches;
  int64_t count;
  // The work is cut into blocks(channels) · batch · bands units. A block's rows of x are held as accumulators, as many as
  // the longest kernel reaches over (or as there are), each with `margin` zeros on both sides: the widest padding.
  int64_t block;  // channels, a multiple of kChannelStep
  int64_t bands;  // of an image's rows of output
  int64_t margin, held;
};

KERNEL_INLINE int64_t row_size(const Projection& call) { return (call.width + 2 * call.margin) * call.block; }
KERNEL_INLINE int64_t packed_size(const Projection& call, const Branch& branch) {
  return (branch.kernel * branch.kernel + 3) * call.block;
}

// The loops, compiled for one instruction set; they serve the units from `begin` to `end`.
struct Kernels {
  // `scratch` has room for the rows held and one more of row_size(), and for the packed_size() of every branch.
  void (*project)(DType, const Projection&, int64_t begin, int64_t end, void* scratch);
};

DECLARE_KERNEL_TABLES;

}  // namespace cvt_kernels::conv_projection

// The interface of the loops of the projection on the CPU.
//
// An output is BatchNorm(depthwise convolution of x) by the running statistics, or a sum of several such. Activations are tokens, `channels`
// adjacent values each: a class token or none, then the pixels of an image row by row.
#pragma once

#include "common/instruction_sets.h"

namespace cvt_kernels::conv_projection {

constexpr int kMaxKernel = 16;        // the most taps of a convolution in either direction
constexpr int kMaxSummands = 4;       // the most branches of one output
constexpr int64_t kChannelStep = 16;  // a multiple of the lanes of every instruction set

// A convolution and its BatchNorm.
struct Branch {
  const void* weight;  // (channels, kernel, kernel) in the type of the call
  const void* scale = nullptr;  // (channels) in the type `norm`, as the next three; or null for 1
  const void* shift = nullptr;  // or null for 0
  const void* mean = nullptr;
  const void* variance = nullptr;
  DType norm;
  double eps = 0;
  int64_t kernel, stride, padding, dilation;
  int64_t height, width;  // of the output
  void* out = nullptr;    // (batch, class_tokens + height · width, channels)
  // The branches from this one on whose sum is its output, all of one stride; 0 if a branch before has it in its sum.
  int64_t summands = 1;
};

struct Projection : Tokens {
  const Branch* branches = nullptr;
  int64_t count = 0;
  // The work is cut into blocks(channels) · batch · bands units. A block's rows of x are held as accumulators, as many as
  // the kernels of an output reach over (or as there are), each with `margin` zeros on both sides: the widest padding.
  int64_t block = 0;  // channels, a multiple of kChannelStep
  int64_t bands = 0;  // of an image's rows of output
  int64_t margin = 0, held = 0;
};

// The rows of x, from the first to before the end, that the first row of output of some branches reads. The rows of x
// for each next row of output lie one stride further down.
struct Reach {
  int64_t first, end;
};

KERNEL_INLINE Reach reach_of(const Branch* branches, int64_t count) {
  Reach reach{0, 0};
  for (const Branch* branch = branches; branch < branches + count; branch++) {
    const int64_t first = -branch->padding, end = first + branch->dilation * (branch->kernel - 1) + 1;
    if (branch == branches || first < reach.first) reach.first = first;
    if (branch == branches || end > reach.end) reach.end = end;
  }
  return reach;
}

// Widens some rows of x to hold those that the rows of output of some branches from `top` to before `bottom` read.
KERNEL_INLINE void widen(Reach& rows, const Branch* branches, int64_t count, int64_t top, int64_t bottom) {
  if (top == bottom) return;
  const Reach reach = reach_of(branches, count);
  const int64_t first = top * branches->stride + reach.first, end = (bottom - 1) * branches->stride + reach.end;
  rows = {first < rows.first ? first : rows.first, end > rows.end ? end : rows.end};
}

KERNEL_INLINE int64_t row_size(const Projection& call) { return (call.width + 2 * call.margin) * call.block; }
KERNEL_INLINE int64_t packed_size(const Projection& call, const Branch& branch) {
  return (branch.kernel * branch.kernel + 3) * call.block;
}

// The gradient of a branch. Its vectors are accumulators (channels): with n = (convolution − mean) / sqrt(variance + eps),
// the gradient of the convolution is (dout − mean_dout − n · mean_product) · factor. The means are null where BatchNorm has
// constants: with zeros in their place, an n that is not finite would make NaN of it.
struct BranchGradient {
  const void* dout;  // as Branch::out
  const void* mean_dout;
  const void* mean_product;
  const void* factor;
};

// Training. Its units are blocks(channels) · batch, of whole images; a branch's scale and shift are null.
struct Training {
  Projection forward;
  const BranchGradient* gradients;  // or null for the statistics
  void* dx;                         // (batch, tokens, channels), or null but for the gradients
  // What a unit sums, (batch, quantities, channels), where a branch has as many quantities as the loops say.
  void* sums;
  int64_t quantities;
};

// The accumulators of scratch memory: a row of zeros, one or two rings of rows, the packed branches, and a row of output.
KERNEL_INLINE int64_t scratch_size(const Projection& call, int64_t rings) {
  int64_t size = (rings * call.held + 1) * row_size(call), widest = 0;
  for (const Branch* branch = call.branches; branch < call.branches + call.count; branch++) {
    size += packed_size(call, *branch);
    widest = branch->width > widest ? branch->width : widest;
  }
  return size + widest * call.block;
}

// The loops, compiled for one instruction set; they serve the units from `begin` to `end`.
struct Kernels {
  // `scratch` has room for scratch_size() with one ring.
  void (*project)(DType, const Projection&, int64_t begin, int64_t end, void* scratch);
  // For training. `scratch` has room for quantities · block of what is summed, then for scratch_size() with two rings.
  // A branch's two quantities are double: the mean of the convolution and the sum of its squared deviations.
  void (*statistics)(DType, const Training&, int64_t begin, int64_t end, void* scratch);
  // The two are accumulators: the sums of dout and of dout · n.
  void (*sums)(DType, const Training&, int64_t begin, int64_t end, void* scratch);
  // Kernel² accumulators: the gradients of the taps. Writes dx.
  void (*gradients)(DType, const Training&, int64_t begin, int64_t end, void* scratch);
};

DECLARE_TABLES;

}  // namespace cvt_kernels::conv_projection

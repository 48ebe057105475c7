// The interface between the operators on rows of tokens on the CPU (cpu_operators.cpp) and their loops (cpu_loops.cpp).
//
// Rows are `channels` adjacent values. `weight`, `bias`, `mean` and `rstd` are in the accumulator's type (common/half.h);
// everything else is in the type of the call.
#pragma once

#include <cstdint>

#include "common/half.h"
#include "common/instruction_sets.h"

namespace cvt_kernels::rows {

// Rows of x (images, tokens, channels) by an index with `count` entries per image; a negative entry is a row of zeros.
struct Gather {
  const void* x;
  int64_t image_stride, token_stride;  // between images and between tokens of x, in values
  const int64_t* index;
  int64_t count, channels;
  const void* branch;  // added to them: (images, count, channels)
  const void* weight;
  const void* bias;
  double eps;
  void* h;
  void* out;   // the LayerNorm of h
  void* mean;  // or null, with rstd
  void* rstd;
};

// The loops, compiled for one instruction set.
struct Kernels {
  // Serves the rows of all images from `begin` to `end`; `scratch` has room for `channels` accumulators.
  void (*gather_add_layer_norm)(DType, const Gather&, int64_t begin, int64_t end, void* scratch);
  // out = a + b, `size` values of each.
  void (*add)(DType, const void* a, const void* b, int64_t size, void* out);
};

DECLARE_KERNEL_TABLES;

}  // namespace cvt_kernels::rows

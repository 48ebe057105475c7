// The interface of the loops of LayerNorm and GELU on the CPU.
//
// `shift`, `weight`, `bias`, `mean`, `rstd` and the sums are in the accumulator's type (common/half.h); everything else is in
// the type of the call.
#pragma once

#include "common/instruction_sets.h"
#include "layer_norm_gelu/activation.h"
#include "layer_norm_gelu/calls.h"

namespace cvt_kernels::layer_norm_gelu {

using LayerNormForward = LayerNormForwardOf<int64_t, double>;
using LayerNormBackward = LayerNormBackwardOf<int64_t>;
using GeluForward = GeluForwardOf<int64_t>;  // without a bias, a row is one number
using GeluBackward = GeluBackwardOf<int64_t>;

// The loops, compiled for one instruction set; each serves the rows from `begin` to `end`.
struct Kernels {
  // `scratch` has room for `channels` accumulators.
  void (*layer_norm)(DType, Activation, const LayerNormForward&, int64_t begin, int64_t end, void* scratch);
  // Adds the rows' part of dweight and dbias to `sums` (2, channels); `scratch` as above.
  void (*layer_norm_backward)(DType, Activation, const LayerNormBackward&, int64_t begin, int64_t end, void* sums,
                              void* scratch);
  void (*gelu)(DType, Activation, const GeluForward&, int64_t begin, int64_t end);
  // Adds the rows' part of dbias to `sums` (channels) unless the call has no bias.
  void (*gelu_backward)(DType, Activation, const GeluBackward&, int64_t begin, int64_t end, void* sums);
};

DECLARE_TABLES;

}  // namespace cvt_kernels::layer_norm_gelu

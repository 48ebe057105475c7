// The interface of the loops of LayerNorm and GELU on the CPU.
//
// Activations are `channels` adjacent values per row. `shift`, `weight`, `bias`, `mean`, `rstd` and the sums are in the
// accumulator's type (common/half.h); everything else is in the type of the call.
#pragma once

#include <cstdint>

#include "common/instruction_sets.h"
#include "layer_norm_gelu/activation.h"

namespace cvt_kernels::layer_norm_gelu {

struct LayerNormForward {
  const void* x;
  const void* residual;  // or null: h = x + residual, else h is x and not written
  const void* shift;     // or null: added to x; there is no residual then
  const void* weight;
  const void* bias;
  void* h;
  void* out;
  void* mean;  // or null, with rstd
  void* rstd;
  int64_t rows;
  double eps;
  int64_t channels;
};

struct LayerNormBackward {
  const void* dout;
  const void* dh;  // or null: added to dx
  const void* h;
  const void* weight;
  const void* bias;
  const void* mean;
  const void* rstd;
  void* dx;
  void* dbranch;  // null: a branch has the dtype of its sum
  int64_t rows, channels;
};

struct GeluForward {
  const void* x;
  const void* bias;  // or null: a row is then one number
  void* out;
  int64_t size, channels;
};

struct GeluBackward {
  const void* dout;
  const void* x;
  const void* bias;  // as above
  void* dx;
  int64_t size, channels;
};

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

DECLARE_KERNEL_TABLES;

}  // namespace cvt_kernels::layer_norm_gelu

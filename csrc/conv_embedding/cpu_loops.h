// The interface between the operator on the CPU (cpu_operators.cpp) and its loops (cpu_loops.cpp).
//
// The tokens of an image are the LayerNorm of its convolution, after a class token or none.
#pragma once

#include <cstdint>

#include "common/half.h"
#include "common/instruction_sets.h"
#include "linear/layers.h"

namespace cvt_kernels::conv_embedding {

struct Embedding {
  const void* image;  // with the steps between neighbors in elements
  int64_t image_step, channel_step, row_step, column_step;
  int64_t images, in_channels, height, width;
  int64_t kernel, stride, padding;
  int64_t out_height, out_width;
  // The weight's inputs are (kernel, kernel, in_channels) where `channels_last`, else (in_channels, kernel, kernel).
  bool channels_last;
  Linear linear;
  Norm norm;
  const float* class_token;  // or null
  int64_t tiles;             // of an image's tokens: the units that threads share
  void* out;                 // (images, tokens, channels)
};

// The loops, compiled for one instruction set. They serve all dtypes but float64.
struct Kernels {
  int64_t (*scratch_bytes)(DType, const Embedding&);
  void (*embed)(DType, const Embedding&, int64_t unit, void* scratch);
};

DECLARE_PRODUCT_TABLES;

}  // namespace cvt_kernels::conv_embedding

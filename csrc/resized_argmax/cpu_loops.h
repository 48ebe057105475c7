// The interface between the operator on the CPU (cpu_operators.cpp) and its loops (cpu_loops.cpp).
#pragma once

#include <cstdint>

#include "common/half.h"
#include "common/instruction_sets.h"

namespace cvt_kernels::resized_argmax {

constexpr int64_t kMostSide = 1 << 20;  // pixels in height and width, whose centers float tells apart well enough

// Logits of some images, the classes of a pixel adjacent; steps between neighbors are in elements.
struct Logits {
  const void* data;
  int64_t image_step, row_step, column_step;
  int64_t height, width, classes;
  int32_t* largest;  // (images, height, width): the first largest class of each pixel, or -1 where a logit is not finite
  int64_t out_height, out_width;
  int64_t* out;  // (images, out_height, out_width)
};

// The loops, compiled for one instruction set. They serve all dtypes but float64.
struct Kernels {
  // Finds the largest class of each pixel of a row; the rows of all images are counted on.
  void (*classify)(DType, const Logits&, int64_t row);
  // For `resize`.
  int64_t (*scratch_bytes)(const Logits&);
  // Finds the classes of a row of the resized logits; the rows of all images are counted on.
  void (*resize)(DType, const Logits&, int64_t row, void* scratch);
};

DECLARE_KERNEL_TABLES;

}  // namespace cvt_kernels::resized_argmax

// The interface of the loops of the depth head on the CPU.
//
// A map that is upsampled bilinearly by two, twice, passes through a 3×3 convolution, ReLU, and one to a single channel, whose
// sigmoid is the depth.
#pragma once

#include "linear/cpu_loops.h"

namespace cvt_kernels::depth_head {

constexpr int kScale = 4;  // of the result's sides
constexpr int kTaps = 9;   // of a convolution

struct Head {
  const void* data;  // (images, inputs, height, width), contiguous
  int64_t inputs, height, width;
  const float* taps;  // (channels, kTaps, inputs), by the first convolution
  const float* bias;  // (channels,)
  int64_t channels;
  const float* last;  // (channels, kTaps), by the last convolution
  float last_bias, max_depth;
  void* out;         // (images, kScale height, kScale width)
  int64_t rows = 0;  // the most of a run
};

// The loops, compiled for one instruction set. They serve all dtypes but float64.
struct Kernels {
  Loop<Head, const Run&> estimate;  // the depths of some rows of the map
};

DECLARE_TABLES;

}  // namespace cvt_kernels::depth_head

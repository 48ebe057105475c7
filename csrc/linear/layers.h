// The parameters of the layers that the loops of several folders compute between them: see layer_loops.h.
#pragma once

#include <cstdint>

namespace cvt_kernels {

namespace linear_int8 {
struct Kernels;
}

constexpr int64_t kTileRows = 112;  // the most rows that pass through a linear layer together

constexpr int64_t kAtOnce = 32;  // rows that AMX multiplies together

// Adjacent rows, tokens or pixels of an image, which a thread takes together.
struct Run {
  int64_t image, begin, end;
};

// A LayerNorm over the channels.
struct Norm {
  const float* weight;
  const float* bias;
  float eps;
};

// A linear layer, its weight packed.
struct Linear {
  const void* weight;
  const float* bias;
  int64_t inputs, outputs;
  const linear_int8::Kernels* integers = nullptr;  // of a layer of 8-bit integers, which those have packed; else none
  const float* weight_scales = nullptr;            // of its outputs
};

}  // namespace cvt_kernels

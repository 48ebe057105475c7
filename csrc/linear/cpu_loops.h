// The interface of the loops that pack weights on the CPU, and the parameters of the layers that the loops of several folders
// compute between them (layer_loops.h).
#pragma once

#include "common/instruction_sets.h"

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

namespace linear {

// The loops, compiled for one instruction set. They serve all dtypes but float64.
struct Kernels {
  // Packs a weight (outputs, inputs), whose rows lie `stride` apart, into packed_bytes(outputs, inputs).
  void (*pack)(DType, const void* weight, int64_t stride, int64_t outputs, int64_t inputs, void* out);
  int64_t (*packed_bytes)(DType, int64_t outputs, int64_t inputs);
  // Says whether products in tiles (common/tiles.h) are right in all shapes of tiles; true where there are none.
  bool (*products_are_right)();
};

DECLARE_TABLES;

}  // namespace linear
}  // namespace cvt_kernels

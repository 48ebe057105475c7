// The parameters of the layers that the loops of several folders compute between them: see layer_loops.h.
#pragma once

#include <cstdint>

namespace cvt_kernels {

constexpr int64_t kTileRows = 112;  // the most rows that pass through a linear layer together

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
};

}  // namespace cvt_kernels

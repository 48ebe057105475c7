// The common parts of both kinds of blocks: with three convolutions (cpu_loops.h), and with a reduction or none
// (pyramid_cpu_loops.h).
#pragma once

#include <cstdint>

#include "attention/cpu_loops.h"
#include "common/half.h"
#include "common/instruction_sets.h"
#include "layer_norm_gelu/activation.h"
#include "linear/layers.h"

namespace cvt_kernels::transformer_block {

using attention::kMaxHeadDim;
using layer_norm_gelu::Activation;

constexpr int64_t kHidden = 384;  // the most hidden channels that are held at once behind the activation

struct AnyBlock {
  int64_t images, height, width, channels;
  Norm norm1, norm2;
  Linear linears[3], proj, fc1, fc2;
  int64_t heads;
  double scale;
  Activation activation;
  int64_t tile_rows;  // the most queries of a run, in the step with attention
};

}  // namespace cvt_kernels::transformer_block

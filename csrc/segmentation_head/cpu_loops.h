// The interface between the operator on the CPU (cpu_operators.cpp) and its loops (cpu_loops.cpp).
//
// The maps of an image are multiplied to the same channels, resized to the first one and summed; a linear layer behind ReLU
// gives the logits of each pixel.
#pragma once

#include <cstdint>

#include "common/half.h"
#include "common/instruction_sets.h"
#include "linear/layers.h"

namespace cvt_kernels::segmentation_head {

constexpr int64_t kMostSide = 1 << 20;  // pixels in height and width, whose centers float tells apart well enough

// Maps of some images, the channels of a pixel adjacent; steps between neighbors are in elements.
struct Source {
  const void* data = nullptr;
  int64_t image_step, row_step, column_step;
  int64_t height, width;
  Linear linear;   // that of the first map has the bias of the sum, others have zeros
  float* product = nullptr;  // room for (images, height, width, linear.outputs); not of the first map
  int64_t tile_rows = 0;     // the most pixels of a run
};

struct Head {
  const Source* maps;  // the first map, then `others` that are resized to it
  int64_t others;
  int64_t segments;  // of a row of the first map: with the rows, the units that threads share
  Linear classifier;
  void* out = nullptr;  // (images, height, width, classifier.outputs)
};

// The loops, compiled for one instruction set. They serve all dtypes but float64.
struct Kernels {
  // For `project` with the map.
  int64_t (*projection_bytes)(DType, const Source&);
  // Computes the product of some pixels of a map that is resized.
  void (*project)(DType, const Source&, const Run&, void* scratch);
  int64_t (*scratch_bytes)(DType, const Head&);
  // Computes the logits of a segment; the segments of all rows and images are counted on.
  void (*classify)(DType, const Head&, int64_t unit, void* scratch);
};

DECLARE_PRODUCT_TABLES;

}  // namespace cvt_kernels::segmentation_head

// The interface between the operator on the CPU (cpu_operators.cpp) and its loops (cpu_loops.cpp), which pack weights. The
// products themselves are part of the loops of other folders (layer_loops.h).
#pragma once

#include <cstdint>

#include "common/half.h"
#include "common/instruction_sets.h"

namespace cvt_kernels::linear {

// The loops, compiled for one instruction set. They serve all dtypes but float64.
struct Kernels {
  // Packs a weight (outputs, inputs), whose rows lie `stride` apart, into packed_bytes(outputs, inputs).
  void (*pack)(DType, const void* weight, int64_t stride, int64_t outputs, int64_t inputs, void* out);
  int64_t (*packed_bytes)(DType, int64_t outputs, int64_t inputs);
  // Says whether products in tiles (common/tiles.h) are right in all shapes of tiles; true where there are none.
  bool (*products_are_right)();
};

DECLARE_PRODUCT_TABLES;

}  // namespace cvt_kernels::linear

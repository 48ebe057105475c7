// The choice of the loops for 8-bit integers. For the operators only, as common/cpu.h.
#pragma once

#include "linear/packed.h"
#include "linear_int8/cpu_loops.h"

namespace cvt_kernels::linear_int8 {

inline const Kernels& kernels() { return *choose(INTEGER_TABLES); }

// Checks a packed weight.
inline void expect_weight(const Tensor& packed, int64_t outputs, int64_t inputs) {
  expect(inputs <= kMostInputs, "x", Quoted{"inputs, ", inputs}, "up to ", kMostInputs, " for 8-bit integers");
  product("packed", {outputs, inputs});
  linear::expect_packed("packed", packed, kernels().packed_bytes(outputs, inputs), "a weight that pack_linear_int8 packed");
}

}  // namespace cvt_kernels::linear_int8

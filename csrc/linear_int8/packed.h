// The choice of the loops for 8-bit integers. For the operators only, as common/cpu.h.
#pragma once

#include "linear/packed.h"
#include "linear_int8/cpu_loops.h"

namespace cvt_kernels::linear_int8 {

inline const Kernels& kernels() {
  static const Kernels& chosen = choose(INTEGER_TABLES);
  return chosen;
}

}  // namespace cvt_kernels::linear_int8

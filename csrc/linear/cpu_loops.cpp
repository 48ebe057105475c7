// The loops that pack weights on the CPU.

#include "linear/layer_loops.h"

namespace cvt_kernels::linear {
namespace {

template <class T>
void pack_weight(const void* weight, int64_t stride, int64_t outputs, int64_t inputs, void* out) {
  pack_columns(static_cast<const T*>(weight), stride, outputs, inputs, static_cast<Factor<T>*>(out));
}

template <class T, class E = Element<T>>
int64_t packed_bytes(int64_t outputs, int64_t inputs) {
  return round_up(outputs, kLanes) * ceil_div(inputs, kDepth<E>) * sizeof(Factor<E>);
}

}  // namespace

const Kernels KERNELS{BY_FLOAT(pack_weight), BY_FLOAT(packed_bytes), products_are_right<BFloat16, Pair, float>};

}  // namespace cvt_kernels::linear

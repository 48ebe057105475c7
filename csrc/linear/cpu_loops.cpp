// The loops that pack weights on the CPU. setup.py compiles this file once per instruction set, with KERNELS naming the
// table it fills; it includes nothing whose code the linker could merge between them.

#include "linear/cpu_loops.h"

#include "linear/layer_loops.h"

namespace cvt_kernels::linear {
namespace {

// Packs a weight into panels (depth, outputs of the panel), with zeros beyond the last output.
template <class T, class E = Element<T>>
void pack_weight(const T* weight, int64_t stride, int64_t outputs, int64_t inputs, Factor<E>* out) {
  const int64_t depth = ceil_div(inputs, kDepth<E>);
  for_panels<float>(outputs, [&](int64_t start, auto vectors) LAMBDA_INLINE {
    constexpr int width = vectors * kLanes;
    Factor<E>* panel = out + start * depth;
    for (int lane = 0; lane < width; lane++) {
      const T* row = start + lane < outputs ? weight + (start + lane) * stride : nullptr;
      for (int64_t d = 0; d < depth; d++) {
        Factor<E> factor = 0;
        if constexpr (kPaired<T>) {
          if (row != nullptr) factor = row[2 * d].bits;
          if (row != nullptr && 2 * d + 1 < inputs) factor |= uint32_t{row[2 * d + 1].bits} << 16;
        } else {
          if (row != nullptr) factor = load(row + d);
        }
        panel[d * width + lane] = factor;
      }
    }
  });
}

void pack(DType dtype, const void* weight, int64_t stride, int64_t outputs, int64_t inputs, void* out) {
  with_element(dtype, [&](auto type) {
    using T = decltype(type);
    pack_weight<T>(static_cast<const T*>(weight), stride, outputs, inputs, static_cast<Factor<Element<T>>*>(out));
  });
}

int64_t packed_bytes(DType dtype, int64_t outputs, int64_t inputs) {
  int64_t bytes = 0;
  with_element(dtype, [&](auto type) {
    using E = Element<decltype(type)>;
    bytes = round_up(outputs, kLanes) * ceil_div(inputs, kDepth<E>) * sizeof(Factor<E>);
  });
  return bytes;
}

}  // namespace

const Kernels KERNELS{pack, packed_bytes};

}  // namespace cvt_kernels::linear

// The packing of weights on the CPU: tensors and the choice of instruction set around the loops.

#include <torch/csrc/stable/library.h>

#include "linear/packed.h"

namespace cvt_kernels::linear {
namespace {

Tensor pack_linear(const Tensor& weight) {
  const DType dtype = served_dtype("weight", weight);
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) > 0, "weight: expected (outputs, inputs)");
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const Tensor rows = inputs == 1 || weight.stride(1) == 1 ? weight : torch::stable::contiguous(weight);
  const Tensor out = empty({kernels().packed_bytes(dtype, outputs, inputs)}, ScalarType::Byte, weight);
  kernels().pack(dtype, rows.const_data_ptr(), rows.stride(0), outputs, inputs, out.mutable_data_ptr());
  return out;
}

}  // namespace
}  // namespace cvt_kernels::linear

STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CPU, m) {
  m.impl("pack_linear", TORCH_BOX(&cvt_kernels::linear::pack_linear));
}

// Linear layers of 8-bit integers on the CPU: tensors and threads around the loops.

#include <torch/csrc/stable/library.h>

#include "common/tensors.h"
#include "linear_int8/packed.h"

namespace cvt_kernels::linear_int8 {
namespace {

Tensor pack_linear_int8(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == ScalarType::Char && weight.size(0) > 0 &&
                      weight.size(1) > 0 && weight.size(1) <= kMostInputs,
                  "weight: expected int8 (outputs, inputs) of up to ", kMostInputs, " inputs");
  const Tensor rows = weight.is_contiguous() ? weight : torch::stable::contiguous(weight);
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const Tensor out = empty({kernels().packed_bytes(outputs, inputs)}, ScalarType::Byte, weight);
  kernels().pack(static_cast<const int8_t*>(rows.const_data_ptr()), outputs, inputs, out.mutable_data_ptr());
  return out;
}

}  // namespace
}  // namespace cvt_kernels::linear_int8

STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CPU, m) {
  m.impl("pack_linear_int8", TORCH_BOX(&cvt_kernels::linear_int8::pack_linear_int8));
}

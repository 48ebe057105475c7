// Packed weights and other parameters of layers as tensors. For the operators only, as common/cpu.h.
#pragma once

#include "common/cpu.h"
#include "common/tensors.h"
#include "linear/cpu_loops.h"
#include "linear/layers.h"

namespace cvt_kernels::linear {

inline const Kernels& kernels() {
  static const Kernels& chosen = choose(PRODUCT_TABLES);
  return chosen;
}

// The dtype of a tensor that these kernels can serve.
inline DType served_dtype(const char* name, const Tensor& tensor) {
  const DType dtype = dtype_of(tensor);
  STD_TORCH_CHECK(dtype != DType::float64, name, ": expected float32, bfloat16 or float16");
  return dtype;
}

inline const float* vector_of(const char* name, const Tensor& tensor, int64_t size) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous() && tensor.dim() == 1 &&
                      tensor.size(0) == size,
                  name, ": expected float32 of the channels of the layer");
  return static_cast<const float*>(tensor.const_data_ptr());
}

inline Linear layer_of(DType dtype, const Tensor& packed, const Tensor& bias, int64_t outputs, int64_t inputs) {
  STD_TORCH_CHECK(packed.is_contiguous() && packed.numel() == kernels().packed_bytes(dtype, outputs, inputs),
                  "packed: expected a weight that pack_linear packed, in the dtype of the call");
  return {packed.const_data_ptr(), vector_of("bias", bias, outputs), inputs, outputs};
}

}  // namespace cvt_kernels::linear

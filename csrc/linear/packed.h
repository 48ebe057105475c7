// Packed weights and other parameters of layers as tensors. For the operators only, as common/cpu.h.
#pragma once

#include "common/cpu.h"
#include "common/tensors.h"
#include "linear_int8/cpu_loops.h"

namespace cvt_kernels::linear_int8 {

inline const Kernels& kernels() { return *choose(INTEGER_TABLES); }

}  // namespace cvt_kernels::linear_int8

namespace cvt_kernels::linear {

inline const Kernels& kernels() { return *choose(PRODUCT_TABLES); }

// The dtype of a tensor that these kernels can serve.
inline DType served_dtype(const char* name, const Tensor& tensor) {
  const DType dtype = dtype_of(name, tensor);
  expect(dtype != DType::float64, name, tensor, "float32, bfloat16 or float16");
  return dtype;
}

inline const float* vector_of(const char* name, const Tensor& tensor, int64_t size) {
  expect(tensor.scalar_type() == ScalarType::Float && tensor.dim() == 1 && tensor.size(0) == size && tensor.is_contiguous(),
         name, tensor, "float32 of the channels of the layer, (", size, ",)");
  return static_cast<const float*>(tensor.const_data_ptr());
}

// Checks bytes that an operator has packed.
inline void expect_packed(const char* name, const Tensor& packed, int64_t bytes, const char* expected) {
  expect(packed.scalar_type() == ScalarType::Byte && packed.dim() == 1 && packed.size(0) == bytes && packed.is_contiguous() &&
             reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % sizeof(float) == 0,
         name, packed, expected, ", uint8 (", bytes, ",) at a multiple of 4 bytes");
}

// Checks a weight that pack_linear_int8 has packed.
inline void expect_integers(const Tensor& packed, int64_t outputs, int64_t inputs) {
  expect(inputs <= linear_int8::kMostInputs, "x", Quoted{"inputs, ", inputs}, "up to ", linear_int8::kMostInputs,
         " for 8-bit integers");
  product("packed", {outputs, inputs});
  expect_packed("packed", packed, linear_int8::kernels().packed_bytes(outputs, inputs), "a weight that pack_linear_int8 packed");
}

// A linear layer, of 8-bit integers if its weight has scales; without these, `scales` has no numbers.
inline Linear layer_of(DType dtype, const Tensor& packed, const Tensor& bias, int64_t outputs, int64_t inputs,
                       const Optional& scales = {}) {
  Linear layer{packed.const_data_ptr(), vector_of("bias", bias, outputs), inputs, outputs};
  if (scales.has_value() && scales->numel() > 0) {
    expect_integers(packed, outputs, inputs);
    layer.integers = &linear_int8::kernels();
    layer.weight_scales = vector_of("weight_scales", *scales, outputs);
  } else {
    product("packed", {outputs, inputs});
    expect_packed("packed", packed, kernels().packed_bytes(dtype, outputs, inputs),
                  "a weight that pack_linear packed, in the dtype of the call");
  }
  return layer;
}

}  // namespace cvt_kernels::linear

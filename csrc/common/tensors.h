// Checks of tensors and the making of new ones, for the operators of every family, on the CPU and on the GPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include "common/half.h"

namespace cvt_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Double: return DType::float64;
    case ScalarType::Float: return DType::float32;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    default: STD_TORCH_CHECK(false, "x: expected float64, float32, bfloat16 or float16");
  }
}

inline ScalarType accumulator_of(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline int64_t accumulator_bytes(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? sizeof(double) : sizeof(float);
}

inline int64_t channels_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() > 0 && x.size(x.dim() - 1) > 0, "x: expected (..., channels)");
  return x.size(x.dim() - 1);
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cuda() == b.is_cuda() && (!a.is_cuda() || a.get_device_index() == b.get_device_index());
}

// The tensor in contiguous memory, after a check that it has the shape and device of x, and a dtype.
inline Tensor contiguous_like(const char* name, const Tensor& tensor, const Tensor& x, ScalarType dtype) {
  const auto sizes = tensor.sizes(), expected = x.sizes();
  STD_TORCH_CHECK(std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end()), name,
                  ": expected the shape of x");
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, ": expected the dtype of ",
                  dtype == x.scalar_type() ? "x" : "the result");
  STD_TORCH_CHECK(same_device(tensor, x), name, ": expected the device of x");
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline Tensor contiguous_like(const char* name, const Tensor& tensor, const Tensor& x) {
  return contiguous_like(name, tensor, x, x.scalar_type());
}

inline std::optional<Tensor> contiguous_like(const char* name, const std::optional<Tensor>& tensor, const Tensor& x) {
  return tensor.has_value() ? std::optional(contiguous_like(name, *tensor, x)) : std::nullopt;
}

// Checks a weight or a bias of the channels of x.
inline void check_parameter(const char* name, const Tensor& tensor, const Tensor& x) {
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == channels_of(x), name, ": expected (channels,)");
  STD_TORCH_CHECK(same_device(tensor, x), name, ": expected the device of x");
}

// Makes `empty` ask PyTorch's dispatcher, where the proof of a kernel hands out guarded memory (cvt_kernels/proofs.py).
inline std::atomic<bool> dispatches_allocations{false};

// A new tensor, uninitialized and contiguous, on the device of `like`; as a rule without the search for the operator by
// its name that torch::stable::empty makes.
inline Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType dtype, const Tensor& like) {
  if (dispatches_allocations.load(std::memory_order_relaxed)) {
    return torch::stable::empty(sizes, dtype, std::nullopt, like.device());
  }
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i > 1; i--) strides[i - 2] = strides[i - 1] * std::max<int64_t>(1, sizes[i - 1]);
  int32_t device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                         strides.data(), static_cast<int32_t>(dtype), device_type,
                                                         device_index, &handle));
  return Tensor(handle);
}

}  // namespace cvt_kernels

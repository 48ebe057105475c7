// Checks of tensors and the making of new ones, for the operators of every family, on the CPU and on the GPU.
#pragma once

#include <atomic>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/shim_utils.h>

#include "common/checks.h"
#include "common/instruction_sets.h"

namespace cvt_kernels {

inline DType dtype_of(const char* name, ScalarType type) {
  switch (type) {
    case ScalarType::Double: return DType::float64;
    case ScalarType::Float: return DType::float32;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    default: refuse(name, std::string_view(shown(type)), "float64, float32, bfloat16 or float16");
  }
}

inline DType dtype_of(const char* name, const Tensor& x) { return dtype_of(name, x.scalar_type()); }

inline ScalarType accumulator_of(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline int64_t accumulator_bytes(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? sizeof(double) : sizeof(float);
}

inline int64_t numbers_of(const char* name, const Tensor& x) {
  const auto sizes = x.sizes();
  return product(name, sizes.begin(), sizes.end());
}

// The last size of a tensor; the other dimensions are rows.
inline int64_t channels_of(const char* name, const Tensor& x) {
  const int64_t rank = x.dim(), channels = rank > 0 ? x.size(rank - 1) : 0;
  expect(channels > 0, name, x, "(..., channels)");
  return channels;
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cuda() == b.is_cuda() && (!a.is_cuda() || a.get_device_index() == b.get_device_index());
}

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// Refuses a tensor that has not the sizes, by what they mean, a dtype and the device of x.
inline void expect_sizes(const char* name, const Tensor& tensor, Sizes sizes, ScalarType dtype, const Tensor& x,
                         const char* meaning) {
  const auto got = tensor.sizes();
  if (!std::equal(got.begin(), got.end(), sizes.begin(), sizes.end()) || tensor.scalar_type() != dtype) [[unlikely]] {
    refuse(name, tensor, shown(dtype), " ", meaning, ", ", listed(sizes));
  }
  expect(same_device(tensor, x), name, tensor, "the device of the others");
}

// The tensor in contiguous memory.
inline Tensor made_contiguous(const char* name, const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  numbers_of(name, tensor);
  try {
    return torch::stable::contiguous(tensor);
  } catch (const std::exception&) {  // which does not say why
    refuse(name, tensor, "one of which there is memory for a copy");
  }
}

// The same, after a check that it has the shape and device of x, and a dtype, or that of x.
inline Tensor contiguous_like(const char* name, const Tensor& tensor, const Tensor& x,
                              std::optional<ScalarType> dtype = std::nullopt) {
  expect_sizes(name, tensor, x.sizes(), dtype.value_or(x.scalar_type()), x, "of the shape of x");
  return made_contiguous(name, tensor);
}

inline Optional contiguous_like(const char* name, const Optional& tensor, const Tensor& x) {
  return tensor.has_value() ? Optional(contiguous_like(name, *tensor, x)) : std::nullopt;
}

// The tensor, or a copy, with its channels adjacent.
inline Tensor with_adjacent_channels(const char* name, const Tensor& x) {
  return channels_of(name, x) == 1 || x.stride(x.dim() - 1) == 1 ? x : made_contiguous(name, x);
}

// The address of a tensor's elements; null without a tensor.
inline const void* const_data_of(const Optional& tensor) { return tensor.has_value() ? tensor->const_data_ptr() : nullptr; }
inline void* mutable_data_of(const Optional& tensor) { return tensor.has_value() ? tensor->mutable_data_ptr() : nullptr; }

// The class tokens, up to `most`, of x (batch, tokens, channels), whose others are those of a grid; it checks the sizes.
inline int64_t class_tokens_of(const Tensor& x, int64_t height, int64_t width, int64_t most = 1) {
  expect(x.dim() == 3, "x", x, "(batch, tokens, channels)");
  expect(height > 0, "height", height, "at least 1");
  expect(width > 0, "width", width, "at least 1");
  numbers_of("x", x);
  const int64_t class_tokens = x.size(1) - product("height and width", {height, width});
  expect(class_tokens >= 0 && class_tokens <= most, "x", x, height, " · ", width, most > 0 ? " tokens, or one more" : " tokens");
  return class_tokens;
}

// The tokens of x, whose channels are adjacent, likewise.
inline Tokens tokens_of(const Tensor& x, int64_t height, int64_t width, int64_t most = 1) {
  const int64_t class_tokens = class_tokens_of(x, height, width, most);
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.size(0), class_tokens, height, width, x.size(2)};
}

// Checks a weight or a bias of the channels of x, of any floating dtype.
inline void check_parameter(const char* name, const Tensor& tensor, const Tensor& x) {
  const int64_t channels = channels_of("x", x);
  expect(tensor.dim() == 1 && tensor.size(0) == channels, name, tensor, "(channels,) of the ", channels, " channels of x");
  expect(same_device(tensor, x), name, tensor, "the device of the others");
  dtype_of(name, tensor);
}

// Refuses a tensor that shares memory with x, or another by its name, which is overwritten while the tensor is read.
inline void expect_apart(const char* name, const Tensor& tensor, const Tensor& x, const char* x_name = "x") {
  const auto end_of = [](const Tensor& t) {
    int64_t numbers = 1;
    for (int64_t i = 0; i < t.dim(); i++) numbers += (t.size(i) - 1) * t.stride(i);
    return static_cast<const char*>(t.const_data_ptr()) + numbers * static_cast<int64_t>(t.element_size());
  };
  if (tensor.numel() == 0 || x.numel() == 0) return;
  expect(end_of(tensor) <= x.const_data_ptr() || end_of(x) <= tensor.const_data_ptr(), name, tensor,
         "no memory of ", x_name, ", which is overwritten");
}

// Makes `empty` ask PyTorch's dispatcher, so that autotuning can hand out guarded memory (cvt_kernels/autotune).
inline std::atomic<bool> dispatches_allocations{false};

// A new tensor, uninitialized and contiguous, on the device of `like`; as a rule without the operator lookup by name of
// torch::stable::empty.
inline Tensor empty(Sizes sizes, ScalarType dtype, const Tensor& like) {
  const int64_t numbers = product("result", sizes.begin(), sizes.end());
  if (dispatches_allocations.load(std::memory_order_relaxed)) {
    return torch::stable::empty(sizes, dtype, std::nullopt, like.device());
  }
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i > 1; i--) strides[i - 2] = strides[i - 1] * std::max<int64_t>(1, sizes[i - 1]);
  int32_t device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle handle;
  const auto error = aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                              static_cast<int32_t>(dtype), device_type, device_index, &handle);
  if (error != TORCH_SUCCESS) [[unlikely]] {  // all else was checked
    throw std::runtime_error("out of memory for " + std::to_string(numbers) + " numbers");
  }
  return Tensor(handle);
}

// A new tensor of numbers that f(i) gives.
template <class F>
Tensor tensor_of(Sizes sizes, ScalarType type, const Tensor& like, F f) {
  const Tensor result = empty(sizes, type, like);
  with_type(dtype_of("result", type), [&](auto stored) {
    using T = decltype(stored);
    T* out = static_cast<T*>(result.mutable_data_ptr());
    for (int64_t i = 0, size = result.numel(); i < size; i++) store(out + i, static_cast<Accumulator<T>>(f(i)));
  });
  return result;
}

// The gradient of an absent parameter.
inline Tensor no_gradient(const Tensor& x) { return empty({0}, accumulator_of(x), x); }

// The gradient of a parameter, in its type, of numbers that f(i) gives.
template <class F>
Tensor gradient_of(const Optional& parameter, const Tensor& x, F f) {
  if (!parameter.has_value()) return no_gradient(x);
  return tensor_of(parameter->sizes(), parameter->scalar_type(), x, f);
}

}  // namespace cvt_kernels

// The operators of LayerNorm and GELU, written once for the CPU and the GPU: checks of the arguments, the tensors that
// they make, and their registration. The schemas and what they compute stand in module.cpp.
//
// A device (cpu_operators.cpp, cuda_operators.cpp) is a class that is made for one call, from a tensor and its name, and has
//   void layer_norm(const LayerNormTensors&, const Parameters&, double eps, Activation) const
//   ParameterGradients layer_norm_backward(const LayerNormBackwardTensors&, const Parameters&, Activation) const
//   void gelu(const GeluTensors&, const std::optional<Tensor>& bias, Activation) const
//   Tensor gelu_backward(const GeluBackwardTensors&, const std::optional<Tensor>& bias, Activation) const
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include <torch/csrc/stable/library.h>

#include "common/tensors.h"
#include "layer_norm_gelu/activation.h"

namespace cvt_kernels::layer_norm_gelu {

// The weight and bias of a LayerNorm as they come from the caller.
struct Parameters {
  const std::optional<Tensor>& weight;
  const std::optional<Tensor>& bias;
};

// The gradients of the two, in their types; empty for a parameter that is absent.
struct ParameterGradients {
  Tensor weight, bias;
};

inline void check(const Parameters& parameters, const Tensor& x) {
  if (parameters.weight.has_value()) check_parameter("weight", *parameters.weight, x);
  if (parameters.bias.has_value()) check_parameter("bias", *parameters.bias, x);
}

// The tensors below are contiguous. `out` and `dout` may have another dtype than the normalized rows (x or h); a device
// that does not support a pair of dtypes refuses the call.

struct LayerNormTensors {
  Tensor x;  // of the dtype of `out` if there is a residual
  std::optional<Tensor> residual;
  std::optional<Tensor> h;  // x + residual; made only if there is a residual
  std::optional<Tensor> shift;  // as it comes from the caller; added to x, and never beside a residual
  Tensor out;
  std::optional<Tensor> mean, rstd;
  bool served;  // on a CPU: in the threads of served models
};

struct LayerNormBackwardTensors {
  Tensor dout;
  std::optional<Tensor> dh;  // added to dx
  Tensor h;
  const Tensor& mean;
  const Tensor& rstd;
  Tensor dx;
  std::optional<Tensor> dbranch;  // dx in the dtype of dout, if it is wanted
};

struct GeluTensors {
  Tensor x, out;
};

struct GeluBackwardTensors {
  Tensor dout, x, dx;
};

inline Activation activation_of(const std::string& name) {
  if (name == "identity") return Activation::identity;
  if (name == "none") return Activation::none;
  if (name == "tanh") return Activation::tanh;
  expect(name == "quick", "activation", name, "identity, none, tanh or quick");
  return Activation::quick;
}

inline void check_statistics(const Tensor& mean, const Tensor& rstd, const Tensor& h) {
  const int64_t rows = h.numel() / channels_of("h", h);
  numbers_of("h", h);
  for (const auto& [name, statistic] : {std::pair<const char*, const Tensor&>{"mean", mean}, {"rstd", rstd}}) {
    expect(statistic.numel() == rows && statistic.scalar_type() == accumulator_of(h) && statistic.is_contiguous() &&
               same_device(statistic, h),
           name, statistic, "one accumulator for each of ", rows, " rows, contiguous");
  }
}

inline Tensor uninitialized_like(const Tensor& x) { return empty(x.sizes(), x.scalar_type(), x); }

// The gradient of an absent parameter.
inline Tensor no_gradient(const Tensor& x) { return empty({0}, accumulator_of(x), x); }

// The address of a tensor's elements; null without a tensor.
inline const void* const_data_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr() : nullptr;
}

inline void* mutable_data_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->mutable_data_ptr() : nullptr;
}

template <class Device>
LayerNormTensors normalize(const Tensor& input, const std::optional<Tensor>& residual, const Parameters& parameters,
                           double eps, Activation activation, ScalarType dtype, bool with_statistics,
                           const std::optional<Tensor>& shift = std::nullopt, bool served = false) {
  const Tensor& rows = residual.has_value() ? *residual : input;
  const Device device(residual.has_value() ? "residual" : "x", rows);
  channels_of("x", rows);
  numbers_of("x", rows);
  check(parameters, rows);
  if (shift.has_value()) check_parameter("shift", *shift, rows);
  expect_eps("eps", eps);
  dtype_of("dtype", dtype);
  const auto sizes = rows.sizes();
  const auto statistic = [&]() -> std::optional<Tensor> {
    if (!with_statistics) return std::nullopt;
    return empty(sizes.slice(0, sizes.size() - 1), accumulator_of(rows), rows);
  };
  const LayerNormTensors tensors{
      .x = contiguous_like("x", input, rows, residual.has_value() ? dtype : rows.scalar_type()),
      .residual = contiguous_like("residual", residual, rows),
      .h = residual.has_value() ? std::optional(uninitialized_like(rows)) : std::nullopt,
      .shift = shift,
      .out = empty(sizes, dtype, rows),
      .mean = statistic(),
      .rstd = statistic(),
      .served = served,
  };
  device.layer_norm(tensors, parameters, eps, activation);
  return tensors;
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, double eps,
                                              const std::string& activation, ScalarType dtype) {
  const auto made = normalize<Device>(x, std::nullopt, {weight, bias}, eps, activation_of(activation), dtype, true);
  return {made.out, *made.mean, *made.rstd};
}

template <class Device>
Tensor layer_norm_inference(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                            double eps, const std::string& activation, ScalarType dtype,
                            const std::optional<Tensor>& shift, bool served) {
  return normalize<Device>(x, std::nullopt, {weight, bias}, eps, activation_of(activation), dtype, false, shift, served)
      .out;
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                                          const std::optional<Tensor>& weight,
                                                          const std::optional<Tensor>& bias, double eps,
                                                          ScalarType dtype) {
  const auto made = normalize<Device>(x, residual, {weight, bias}, eps, Activation::identity, dtype, true);
  return {*made.h, made.out, *made.mean, *made.rstd};
}

template <class Device>
std::tuple<Tensor, Tensor> add_layer_norm_inference(const Tensor& x, const Tensor& residual,
                                                    const std::optional<Tensor>& weight,
                                                    const std::optional<Tensor>& bias, double eps, ScalarType dtype) {
  const auto made = normalize<Device>(x, residual, {weight, bias}, eps, Activation::identity, dtype, false);
  return {*made.h, made.out};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dout, const std::optional<Tensor>& dh,
                                                               const Tensor& h, const Tensor& mean, const Tensor& rstd,
                                                               const std::optional<Tensor>& weight,
                                                               const std::optional<Tensor>& bias,
                                                               const std::string& activation, bool with_dbranch) {
  const Device device("h", h);
  const Activation function = activation_of(activation);
  check_statistics(mean, rstd, h);
  check({weight, bias}, h);
  dtype_of("dout", dout);
  const LayerNormBackwardTensors tensors{
      .dout = contiguous_like("dout", dout, h, dout.scalar_type()),
      .dh = contiguous_like("dh", dh, h),
      .h = contiguous_like("h", h, h),
      .mean = mean,
      .rstd = rstd,
      .dx = uninitialized_like(h),
      .dbranch = with_dbranch ? std::optional(empty(h.sizes(), dout.scalar_type(), h)) : std::nullopt,
  };
  auto gradients = device.layer_norm_backward(tensors, {weight, bias}, function);
  return {tensors.dx, with_dbranch ? *tensors.dbranch : empty({0}, dout.scalar_type(), h),
          std::move(gradients.weight), std::move(gradients.bias)};
}

inline void check_gelu(const Tensor& x, const std::optional<Tensor>& bias) {
  if (!bias.has_value()) return;
  channels_of("x", x);
  numbers_of("x", x);
  check_parameter("bias", *bias, x);
}

template <class Device>
Tensor gelu(const Tensor& input, const std::optional<Tensor>& bias, const std::string& activation) {
  const Device device("x", input);
  const Activation function = activation_of(activation);
  check_gelu(input, bias);
  const GeluTensors tensors{.x = contiguous_like("x", input, input), .out = uninitialized_like(input)};
  device.gelu(tensors, bias, function);
  return tensors.out;
}

template <class Device>
std::tuple<Tensor, Tensor> gelu_backward(const Tensor& dout, const Tensor& input, const std::optional<Tensor>& bias,
                                         const std::string& activation) {
  const Device device("x", input);
  const Activation function = activation_of(activation);
  check_gelu(input, bias);
  const GeluBackwardTensors tensors{
      .dout = contiguous_like("dout", dout, input),
      .x = contiguous_like("x", input, input),
      .dx = uninitialized_like(input),
  };
  return {tensors.dx, device.gelu_backward(tensors, bias, function)};
}

template <class Device>
void register_operators(auto& library) {
  IMPLEMENT(library, "layer_norm", &layer_norm<Device>);
  IMPLEMENT(library, "layer_norm_inference", &layer_norm_inference<Device>);
  IMPLEMENT(library, "add_layer_norm", &add_layer_norm<Device>);
  IMPLEMENT(library, "add_layer_norm_inference", &add_layer_norm_inference<Device>);
  IMPLEMENT(library, "layer_norm_backward", &layer_norm_backward<Device>);
  IMPLEMENT(library, "gelu", &gelu<Device>);
  IMPLEMENT(library, "gelu_backward", &gelu_backward<Device>);
}

}  // namespace cvt_kernels::layer_norm_gelu

// The operators of LayerNorm and GELU, written once for the CPU and the GPU: checks of the arguments, the tensors that
// they make, and their registration. The schemas and what they compute stand in module.cpp.
//
// A device (cpu_operators.cpp, cuda_operators.cpp) is a class that is made for one call, from a tensor and its name. It has
//   Count and Real, the types of the arguments of its loops or kernels (calls.h), and channels(name, x) and rows(rows) as Count
//   Parameters(x, weight, bias, is_norm, name of the bias), a Given that has weight() and bias() as those take them:
//     without a tensor, of a LayerNorm what changes nothing where they need it, else null
//   void layer_norm(LayerNormForwardOf, const Parameters&, const Parameters& shift, Activation, ScalarType result, bool served)
//   Gradients layer_norm_backward(LayerNormBackwardOf, const Parameters&, Activation, ScalarType result, const Tensor& h)
//   void gelu(GeluForwardOf, const Parameters&, Activation)
//   Gradients gelu_backward(GeluBackwardOf, const Parameters&, Activation, const Tensor& x)
#pragma once

#include <array>
#include <tuple>

#include "common/tensors.h"
#include "layer_norm_gelu/activation.h"
#include "layer_norm_gelu/calls.h"

namespace cvt_kernels::layer_norm_gelu {

// The gradients of a weight and a bias, in their types; empty for one that is absent.
using Gradients = std::array<Tensor, 2>;

// What a LayerNorm gives: h = x + residual if there is a residual, and the statistics where they are wanted.
struct Normalized {
  Optional h;
  Tensor out;
  Optional mean, rstd;
};

// A weight and a bias as they come, after a check of both.
struct Given {
  Given(const Tensor& x, const Optional& weight, const Optional& bias, const char* name) : given{weight, bias} {
    if (weight.has_value()) check_parameter("weight", *weight, x);
    if (bias.has_value()) check_parameter(name, *bias, x);
  }

  const Optional given[2];
};

inline Activation activation_of(const std::string& name) {
  if (name == "identity") return Activation::identity;
  if (name == "none") return Activation::none;
  if (name == "tanh") return Activation::tanh;
  expect(name == "quick", "activation", name, "identity, none, tanh or quick");
  return Activation::quick;
}

inline Activation gelu_of(const std::string& name) {
  expect(name != "identity", "activation", name, "none, tanh or quick");
  return activation_of(name);
}

// Results may have another dtype than the normalized rows (x or h); a device that does not support a pair refuses the call.
template <class Device>
Normalized normalize(const Tensor& input, const Optional& residual, const Optional& weight, const Optional& bias, double eps,
                     const std::string& activation, ScalarType dtype, bool with_statistics, const Optional& shift = {},
                     bool served = false) {
  const Tensor& rows = residual.has_value() ? *residual : input;
  const Device device(residual.has_value() ? "residual" : "x", rows);
  const Activation function = activation_of(activation);
  const auto channels = device.channels("x", rows);
  const int64_t numbers = numbers_of("x", rows);
  const typename Device::Parameters parameters(rows, weight, bias, true), shifts(rows, {}, shift, false, "shift");
  expect_eps("eps", eps);
  dtype_of("dtype", dtype);
  const Tensor x = contiguous_like("x", input, rows, residual.has_value() ? dtype : rows.scalar_type());
  const Optional addend = contiguous_like("residual", residual, rows);
  const auto sizes = rows.sizes(), of_rows = sizes.slice(0, sizes.size() - 1);
  const auto made = [&](bool is_wanted, auto shape, ScalarType type) {
    return is_wanted ? Optional(empty(shape, type, rows)) : std::nullopt;
  };
  const Normalized result{made(residual.has_value(), sizes, rows.scalar_type()), empty(sizes, dtype, rows),
                          made(with_statistics, of_rows, accumulator_of(rows)),
                          made(with_statistics, of_rows, accumulator_of(rows))};
  const LayerNormForwardOf<typename Device::Count, typename Device::Real> call{
      .x = x.const_data_ptr(),
      .residual = const_data_of(addend),
      .shift = shifts.bias(),
      .weight = parameters.weight(),
      .bias = parameters.bias(),
      .h = mutable_data_of(result.h),
      .out = result.out.mutable_data_ptr(),
      .mean = mutable_data_of(result.mean),
      .rstd = mutable_data_of(result.rstd),
      .rows = numbers / channels,
      .eps = static_cast<typename Device::Real>(eps),
      .channels = channels,
  };
  device.layer_norm(call, parameters, shifts, function, dtype, served);
  return result;
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Optional& weight, const Optional& bias, double eps,
                                              const std::string& activation, ScalarType dtype) {
  const Normalized made = normalize<Device>(x, {}, weight, bias, eps, activation, dtype, true);
  return {made.out, *made.mean, *made.rstd};
}

template <class Device>
Tensor layer_norm_inference(const Tensor& x, const Optional& weight, const Optional& bias, double eps,
                            const std::string& activation, ScalarType dtype, const Optional& shift, bool served) {
  return normalize<Device>(x, {}, weight, bias, eps, activation, dtype, false, shift, served).out;
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, const Optional& weight,
                                                          const Optional& bias, double eps, ScalarType dtype) {
  const Normalized made = normalize<Device>(x, residual, weight, bias, eps, "identity", dtype, true);
  return {*made.h, made.out, *made.mean, *made.rstd};
}

template <class Device>
std::tuple<Tensor, Tensor> add_layer_norm_inference(const Tensor& x, const Tensor& residual, const Optional& weight,
                                                    const Optional& bias, double eps, ScalarType dtype) {
  const Normalized made = normalize<Device>(x, residual, weight, bias, eps, "identity", dtype, false);
  return {*made.h, made.out};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dout, const Optional& dh, const Tensor& h,
                                                               const Tensor& mean, const Tensor& rstd,
                                                               const Optional& weight, const Optional& bias,
                                                               const std::string& activation, bool with_dbranch) {
  const Device device("h", h);
  const Activation function = activation_of(activation);
  const auto channels = device.channels("h", h);
  const int64_t rows = numbers_of("h", h) / channels;
  for (const auto& [name, statistic] : {std::pair<const char*, const Tensor&>{"mean", mean}, {"rstd", rstd}}) {
    expect(statistic.numel() == rows && statistic.scalar_type() == accumulator_of(h) && statistic.is_contiguous() &&
               same_device(statistic, h),
           name, statistic, "one accumulator for each of ", rows, " rows, contiguous");
  }
  const typename Device::Parameters parameters(h, weight, bias, true);
  dtype_of("dout", dout);
  const Tensor of_out = contiguous_like("dout", dout, h, dout.scalar_type()), of_rows = contiguous_like("h", h, h);
  const Optional addend = contiguous_like("dh", dh, h);
  const Tensor dx = empty(h.sizes(), h.scalar_type(), h);
  const Tensor dbranch = with_dbranch ? empty(h.sizes(), dout.scalar_type(), h) : empty({0}, dout.scalar_type(), h);
  const LayerNormBackwardOf<typename Device::Count> call{
      .dout = of_out.const_data_ptr(),
      .dh = const_data_of(addend),
      .h = of_rows.const_data_ptr(),
      .weight = parameters.weight(),
      .bias = parameters.bias(),
      .mean = mean.const_data_ptr(),
      .rstd = rstd.const_data_ptr(),
      .dx = dx.mutable_data_ptr(),
      .dbranch = with_dbranch ? dbranch.mutable_data_ptr() : nullptr,
      .rows = device.rows(rows),
      .channels = channels,
  };
  auto [dweight, dbias] = device.layer_norm_backward(call, parameters, function, dout.scalar_type(), h);
  return {dx, dbranch, std::move(dweight), std::move(dbias)};
}

template <class Device>
Tensor gelu(const Tensor& input, const Optional& bias, const std::string& activation) {
  const Device device("x", input);
  const Activation function = gelu_of(activation);
  const typename Device::Parameters parameters(input, {}, bias, false);
  const Tensor x = contiguous_like("x", input, input), out = empty(input.sizes(), input.scalar_type(), input);
  const GeluForwardOf<typename Device::Count> call{
      .x = x.const_data_ptr(),
      .bias = parameters.bias(),
      .out = out.mutable_data_ptr(),
      .size = x.numel(),
      .channels = bias.has_value() ? device.channels("x", x) : 0,
  };
  device.gelu(call, parameters, function);
  return out;
}

template <class Device>
std::tuple<Tensor, Tensor> gelu_backward(const Tensor& dout, const Tensor& input, const Optional& bias,
                                         const std::string& activation) {
  const Device device("x", input);
  const Activation function = gelu_of(activation);
  const typename Device::Parameters parameters(input, {}, bias, false);
  const Tensor of_out = contiguous_like("dout", dout, input), x = contiguous_like("x", input, input);
  const Tensor dx = empty(input.sizes(), input.scalar_type(), input);
  const GeluBackwardOf<typename Device::Count> call{
      .dout = of_out.const_data_ptr(),
      .x = x.const_data_ptr(),
      .bias = parameters.bias(),
      .dx = dx.mutable_data_ptr(),
      .size = x.numel(),
      .channels = bias.has_value() ? device.channels("x", x) : 0,
  };
  return {dx, device.gelu_backward(call, parameters, function, x)[1]};
}

template <class Device>
void register_operators(auto& library) {
  IMPLEMENT_IN(library, "layer_norm", layer_norm<Device>);
  IMPLEMENT_IN(library, "layer_norm_inference", layer_norm_inference<Device>);
  IMPLEMENT_IN(library, "add_layer_norm", add_layer_norm<Device>);
  IMPLEMENT_IN(library, "add_layer_norm_inference", add_layer_norm_inference<Device>);
  IMPLEMENT_IN(library, "layer_norm_backward", layer_norm_backward<Device>);
  IMPLEMENT_IN(library, "gelu", gelu<Device>);
  IMPLEMENT_IN(library, "gelu_backward", gelu_backward<Device>);
}

}  // namespace cvt_kernels::layer_norm_gelu

// The operators that module.cpp registers.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include <torch/csrc/stable/tensor.h>

namespace cvt_kernels {

using torch::stable::Tensor;

// (out, mean, rstd) with out = activation(layer_norm(x)).
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, double eps,
                                              const std::string& activation);

// Its `out` alone.
Tensor layer_norm_inference(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                            double eps, const std::string& activation);

// (h, out, mean, rstd) with h = x + residual and out = layer_norm(h).
std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                                          const std::optional<Tensor>& weight,
                                                          const std::optional<Tensor>& bias, double eps);

// Its `h` and `out`.
std::tuple<Tensor, Tensor> add_layer_norm_inference(const Tensor& x, const Tensor& residual,
                                                    const std::optional<Tensor>& weight,
                                                    const std::optional<Tensor>& bias, double eps);

// (dx, dweight, dbias) of either; dh, if given, is added to dx. The gradient of an absent parameter is empty.
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dout, const std::optional<Tensor>& dh,
                                                       const Tensor& h, const Tensor& mean, const Tensor& rstd,
                                                       const std::optional<Tensor>& weight,
                                                       const std::optional<Tensor>& bias,
                                                       const std::string& activation);

// activation(x + bias).
Tensor gelu(const Tensor& x, const std::optional<Tensor>& bias, const std::string& activation);

// (dx, dbias); dbias is empty without a bias.
std::tuple<Tensor, Tensor> gelu_backward(const Tensor& dout, const Tensor& x, const std::optional<Tensor>& bias,
                                         const std::string& activation);

}  // namespace cvt_kernels

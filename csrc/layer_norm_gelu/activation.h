// The activations and their derivatives: GELU, its tanh approximation and QuickGELU. They take numbers or vectors and
// have internal linkage, as the functions of common/half.h, on which they build.
#pragma once

#include "common/half.h"

namespace cvt_kernels::layer_norm_gelu {

// The function that follows a LayerNorm or a bias: none, exact GELU, its tanh approximation, QuickGELU.
enum class Activation { identity, none, tanh, quick };

template <auto value>
using Constant = std::integral_constant<decltype(value), value>;

// Calls f with the activation as a constant, for which f is compiled: all of them, or those that are not the identity.
template <bool or_identity = true, class F>
static void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::identity:
      if constexpr (or_identity) return f(Constant<Activation::identity>{});
      return;  // never reached: the operators reject it
    case Activation::none: return f(Constant<Activation::none>{});
    case Activation::tanh: return f(Constant<Activation::tanh>{});
    case Activation::quick: return f(Constant<Activation::quick>{});
  }
}

// Keeps y within what power_of_two takes, which on a GPU is everything.
template <class T>
KERNEL_INLINE T limited(T y, float least, [[maybe_unused]] float most = 0) {
#ifndef __CUDA_ARCH__
  y = at_least(y, T(least));
  if (most > 0) y = at_most(y, T(most));
#endif
  return y;
}

// The normal distribution function Φ(x) = (1 + erf(x / √2)) / 2.
KERNEL_INLINE double normal_cdf(double x) { return 0.5 * std::erfc(x * -0.70710678118654752440); }

// Φ(-a) for a ≥ 0, as 2^(a · P(a) - 1) with P fitted on a < 6 to an absolute error of 8.0e-9, or 3.0e-7 for half
// precision (1.8e-6 with the power's error, where half of float16's last place is 2.4e-4). Beyond, the exponent goes on
// falling, to what is 0 in float. Rounded, x · Φ(x) differs from float64 by at most 1.0e-7 · |x| (measured at 2.8e7 points
// from -14 to 14, with fused multiply-add and without; PyTorch 2.13: 3.8e-7).
template <Precision precision, class F>
KERNEL_INLINE F normal_tail(F a) {
  F p;
  if constexpr (precision == Precision::full) {
    p = -2.83491272e-06f;
    p = p * a + 3.93776897e-05f;
    p = p * a - 0.000186180245f;
    p = p * a - 0.000136936360f;
    p = p * a + 0.00706342002f;
    p = p * a - 0.0524961799f;
    p = p * a - 0.459208190f;
    p = p * a - 1.15110517f;
  } else {
    p = -0.000520448724f;
    p = p * a + 0.00739746494f;
    p = p * a - 0.0525611676f;
    p = p * a - 0.459254712f;
    p = p * a - 1.15109134f;
  }
  return power_of_two<precision, -1>(limited(p * a, -126.0f));
}

// The approximations are x · sigmoid(z(x)); for the tanh one, since (1 + tanh(u)) / 2 = sigmoid(2u). This is z / ln(2).
template <Activation activation, class T>
KERNEL_INLINE T logit(T x) {
  if constexpr (activation == Activation::quick) return x * T(2.4554669595930156);  // 1.702 / ln(2)
  else return x * (x * x * T(0.1029432395800235) + T(2.302208198144325));  // 2 · sqrt(2/π) / ln(2), times 0.044715
}

// dz/dx.
template <Activation activation, class T>
KERNEL_INLINE T logit_derivative([[maybe_unused]] T x) {
  if constexpr (activation == Activation::quick) return T(1.702);
  else return x * x * T(0.21406444881780076) + T(1.5957691216057308);
}

// The root of e^(-1.702 |x|), to its last place: what the product rounds off would count hundreds of times in the power.
// Unlike the power, its root is not subnormal where x times the power is a normal number.
KERNEL_INLINE double root_of_quick_decay(double x) {
  const double a = at_most(absolute(x), 1e3), half = 0.851 * a, rest = std::fma(0.851, a, -half);
  return std::exp(-half) * (1 - rest);
}

template <Activation activation, Precision precision = Precision::full, class T>
KERNEL_INLINE T activate(T x) {
  if constexpr (activation == Activation::identity) {
    return x;
  } else if constexpr (activation == Activation::none) {
    if constexpr (std::is_same_v<T, double>) return x * normal_cdf(x);
    if constexpr (std::is_same_v<T, float>) {  // fewer instructions than below; at infinity, that must not multiply it by 0
      const float bounded = at_most(x, 3e38f);
      return at_least(x, 0.0f) - absolute(bounded) * normal_tail<precision>(absolute(bounded));
    }
    const T tail = normal_tail<precision>(absolute(x));
    return x * select(x < T(0), tail, T(1) - tail);
  } else if constexpr (activation == Activation::quick && std::is_same_v<T, double>) {
    const double root = root_of_quick_decay(x), power = root * root;
    return (x < 0 ? x * root * root : x) / (1 + power);
  } else {
    const T y = -logit<activation>(x);
    if constexpr (std::is_same_v<T, double>) return x / (1 + power_of_two(y));
    else return quotient(x, power_of_two<precision>(limited(y, -127.0f, 128.0f)) + T(1));
  }
}

template <Activation activation, Precision precision = Precision::full, class T>
KERNEL_INLINE T activation_derivative([[maybe_unused]] T x) {
  [[maybe_unused]] const auto decay = [](T y) {  // 2^y for y ≤ 0
    if constexpr (std::is_same_v<T, double>) return power_of_two(y);
    else return power_of_two<precision>(limited(y, -127.0f));
  };
  if constexpr (activation == Activation::identity) {
    return T(1);
  } else if constexpr (activation == Activation::none) {
    const T density = decay(x * x * T(-0.7213475204444817) - T(1.3257480647361592));  // exp(-x²/2) / sqrt(2π)
    if constexpr (std::is_same_v<T, double>) return normal_cdf(x) + x * density;
    const T a = absolute(x), tail = normal_tail<precision>(a) - a * density;
    return select(x < T(0), tail, T(1) - tail);
  } else if constexpr (activation == Activation::quick && std::is_same_v<T, double>) {
    const double root = root_of_quick_decay(x), inverse = 1 / (1 + root * root), slope = 1.702 * x * inverse;
    return x < 0 ? root * inverse * (1 + slope) * root : inverse * (1 + slope * root * root);
  } else {
    const T e = decay(-absolute(logit<activation>(x)));  // both s and s · (1 − s) without cancellation
    const T inverse = quotient(T(1), e + T(1));
    const T s = select(x < T(0), e * inverse, inverse);
    return s + x * (e * inverse * inverse) * logit_derivative<activation>(x);
  }
}

}  // namespace cvt_kernels::layer_norm_gelu

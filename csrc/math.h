// Scalar functions of the kernels: GELU, its approximations, their derivatives.
//
// In float they are free of branches and library calls, so that compilers vectorise loops over them; double takes the
// C library's functions. Everything has internal linkage: the file is compiled for several instruction sets, whose
// code the linker must not merge.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// A call that is left in a loop keeps it from being vectorised.
#ifdef __CUDACC__
#define KERNEL_INLINE __host__ __device__ __forceinline__ static
#else
#define KERNEL_INLINE [[gnu::always_inline]] static inline
#endif

namespace cvt_kernels {

// What follows a LayerNorm or a bias: nothing, exact GELU, its tanh approximation, QuickGELU.
enum class Activation { identity, none, tanh, quick };

KERNEL_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

KERNEL_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

KERNEL_INLINE double exponential(double x) { return std::exp(x); }

// exp(x) = 2^k · exp(r) with |r| ≤ ln(2)/2, whose Taylor series is cut where float ends.
KERNEL_INLINE float exponential(float x) {
  x = x < -104.0f ? -104.0f : x;  // exp is 0 below and infinite above; NaN passes
  x = x > 89.0f ? 89.0f : x;
  constexpr float shifter = 0x1.8p23f;  // adding it rounds to an integer, which it leaves in the low bits
  const float shifted = x * 0x1.715476p+0f + shifter;
  const float k = shifted - shifter;
  const float r = (x - k * 0x1.62ep-1f) - k * 0x1.0bfbe8p-15f;  // ln(2) in two parts; k times the first is exact
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t power = static_cast<int32_t>(bits_of(shifted) - bits_of(shifter));
  const int32_t half = power >> 1;  // in two factors, since 2^k alone may leave the range of float
  const auto two_to_the = [](int32_t n) { return float_of((static_cast<uint32_t>(n) + 127) << 23); };
  return p * two_to_the(half) * two_to_the(power - half);
}

template <class T>
KERNEL_INLINE T sigmoid(T x) {
  return T(1) / (T(1) + exponential(-x));
}

// The normal distribution function Φ(x) = (1 + erf(x / √2)) / 2.
KERNEL_INLINE double normal_cdf(double x) { return 0.5 * std::erfc(x * -0.70710678118654752440); }

// erf(x / √2) as x · P(x²) / Q(x²), fitted to a relative error of 2.2e-8 on |x| < 5.6; beyond, it is ±1 in float.
KERNEL_INLINE float normal_cdf(float x) {
  const float s = x * x;
  float p = 4.45944457e-08f;
  p = p * s + 1.25795054e-05f;
  p = p * s + 0.000337858915f;
  p = p * s + 0.00935470286f;
  p = p * s + 0.0678581607f;
  p = p * s + 0.797884544f;
  float q = 1.17964948e-06f;
  q = q * s + 7.33441194e-05f;
  q = q * s + 0.00188549327f;
  q = q * s + 0.0286775805f;
  q = q * s + 0.251713919f;
  q = q * s + 1.0f;
  float erf = x * p / q;
  erf = x >= 5.6f ? 1.0f : erf;
  erf = x <= -5.6f ? -1.0f : erf;
  erf = erf > 1.0f ? 1.0f : erf;  // by rounding
  erf = erf < -1.0f ? -1.0f : erf;
  return 0.5f + 0.5f * erf;
}

// The approximations are x · sigmoid(z(x)); for the tanh one, since (1 + tanh(u)) / 2 = sigmoid(2u).
template <Activation activation, class T>
KERNEL_INLINE T logit(T x) {
  if constexpr (activation == Activation::quick) return T(1.702) * x;
  return T(1.5957691216057308) * (x + T(0.044715) * x * x * x);  // 2 · sqrt(2/π)
}

template <Activation activation, class T>
KERNEL_INLINE T logit_derivative([[maybe_unused]] T x) {
  if constexpr (activation == Activation::quick) return T(1.702);
  return T(1.5957691216057308) * (T(1) + T(3 * 0.044715) * x * x);
}

template <Activation activation, class T>
KERNEL_INLINE T activate(T x) {
  if constexpr (activation == Activation::identity) return x;
  else if constexpr (activation == Activation::none) return x * normal_cdf(x);
  else return x * sigmoid(logit<activation>(x));
}

template <Activation activation, class T>
KERNEL_INLINE T activation_derivative([[maybe_unused]] T x) {
  if constexpr (activation == Activation::identity) {
    return T(1);
  } else if constexpr (activation == Activation::none) {
    return normal_cdf(x) + x * T(0.39894228040143267794) * exponential(T(-0.5) * x * x);  // 1/sqrt(2π)
  } else {
    const T z = logit<activation>(x);
    const T e = exponential(z < 0 ? z : -z);  // both s and s · (1 − s) without cancellation
    const T inverse = T(1) / (T(1) + e);
    const T s = (z < 0 ? e : T(1)) * inverse;
    return s + x * (e * inverse * inverse) * logit_derivative<activation>(x);
  }
}

}  // namespace cvt_kernels

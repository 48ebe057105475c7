// Scalar functions of the kernels: GELU, its approximations, their derivatives.
//
// In float they are free of branches and library calls and take float or what behaves like it (vector.h); double takes
// the C library's functions. Everything has internal linkage: the file is compiled for several instruction sets, whose
// code the linker must not merge.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// A call that is left in a loop costs more than what it does.
#ifdef __CUDACC__
#define KERNEL_INLINE __host__ __device__ __forceinline__ static
#else
#define KERNEL_INLINE [[gnu::always_inline]] static inline
#endif

namespace cvt_kernels {

// What follows a LayerNorm or a bias: nothing, exact GELU, its tanh approximation, QuickGELU.
enum class Activation { identity, none, tanh, quick };

// Of a result in float: as good as float goes, or as a result needs that will be rounded to 16 bits.
enum class Precision { full, half };

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

template <class T>
KERNEL_INLINE T select(bool condition, T yes, T no) {
  return condition ? yes : no;
}

// NaN passes.
template <class T>
KERNEL_INLINE T at_least(T x, T limit) {
  return select(x < limit, limit, x);
}

template <class T>
KERNEL_INLINE T at_most(T x, T limit) {
  return select(limit < x, limit, x);
}

// Not rounded correctly on a GPU, where that would cost more than all the rest of an activation.
template <class T>
KERNEL_INLINE T quotient(T x, T y) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, float>) return __fdividef(x, y);
#endif
  return x / y;
}

KERNEL_INLINE double absolute(double x) { return std::fabs(x); }

template <class F>
KERNEL_INLINE F absolute(F x) {
  return float_of(bits_of(x) & 0x7fffffffu);
}

KERNEL_INLINE double power_of_two(double y) { return std::exp2(y); }

// 2^(y + exponent) where -127 ≤ y + exponent ≤ 128: 0 up to -126.5, infinite from 127.5 on. Before rounding, to a
// relative error of 2.0e-9, or 2.9e-6 for half precision.
template <Precision precision, int exponent = 0, class F>
KERNEL_INLINE F power_of_two(F y) {
#ifdef __CUDA_ARCH__
  float power;  // to a relative error of 2^-22; what is not normal is 0, before and after the scaling
  asm("{.reg .f32 t; ex2.approx.ftz.f32 t, %1; mul.ftz.f32 %0, t, %2;}"
      : "=f"(power)
      : "f"(y), "f"(float_of((127 + exponent) << 23)));
  return power;
#endif
  constexpr float shifter = 0x1.8p23f + 127 + exponent;  // adding it rounds to an integer, which the low bits hold
  const F shifted = y + shifter;
  const F r = y - (shifted - shifter);
  F p;
  if constexpr (precision == Precision::full) {
    p = 0.000153533620f;
    p = p * r + 0.00133988750f;
    p = p * r + 0.00961843692f;
    p = p * r + 0.0555033237f;
    p = p * r + 0.240226477f;
    p = p * r + 0.693147182f;
  } else {
    p = 0.00958285388f;
    p = p * r + 0.0559064299f;
    p = p * r + 0.240240991f;
    p = p * r + 0.693124175f;
  }
  p = p * r + 1.0f;
  return p * float_of(bits_of(shifted) << 23);
}

// The normal distribution function Φ(x) = (1 + erf(x / √2)) / 2.
KERNEL_INLINE double normal_cdf(double x) { return 0.5 * std::erfc(x * -0.70710678118654752440); }

// Φ(-a) for a ≥ 0, as 2^(a · P(a) - 1) with P fitted on a < 6 to an absolute error of 8.0e-9, or 3.0e-7 for half
// precision (1.8e-6 with that of the power, where half of float16's last place is 2.4e-4). Beyond, the exponent goes on
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
  return power_of_two<precision, -1>(at_least(p * a, F(-126.0f)));
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

template <Activation activation, Precision precision = Precision::full, class T>
KERNEL_INLINE T activate(T x) {
  if constexpr (activation == Activation::identity) {
    return x;
  } else if constexpr (activation == Activation::none) {
    if constexpr (std::is_same_v<T, double>) return x * normal_cdf(x);
    const T tail = normal_tail<precision>(absolute(x));
    return x * select(x < T(0), tail, T(1) - tail);
  } else {
    const T y = -logit<activation>(x);
    if constexpr (std::is_same_v<T, double>) return x / (1 + power_of_two(y));
    else return quotient(x, power_of_two<precision>(at_most(at_least(y, T(-127)), T(128))) + T(1));
  }
}

template <Activation activation, Precision precision = Precision::full, class T>
KERNEL_INLINE T activation_derivative([[maybe_unused]] T x) {
  [[maybe_unused]] const auto decay = [](T y) {  // 2^y for y ≤ 0
    if constexpr (std::is_same_v<T, double>) return power_of_two(y);
    else return power_of_two<precision>(at_least(y, T(-127)));
  };
  if constexpr (activation == Activation::identity) {
    return T(1);
  } else if constexpr (activation == Activation::none) {
    const T density = decay(x * x * T(-0.7213475204444817) - T(1.3257480647361592));  // exp(-x²/2) / sqrt(2π)
    if constexpr (std::is_same_v<T, double>) return normal_cdf(x) + x * density;
    const T a = absolute(x), tail = normal_tail<precision>(a) - a * density;
    return select(x < T(0), tail, T(1) - tail);
  } else {
    const T e = decay(-absolute(logit<activation>(x)));  // both s and s · (1 − s) without cancellation
    const T inverse = quotient(T(1), e + T(1));
    const T s = select(x < T(0), e * inverse, inverse);
    return s + x * (e * inverse * inverse) * logit_derivative<activation>(x);
  }
}

}  // namespace cvt_kernels

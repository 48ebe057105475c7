// Functions of a number that the kernels of every family build on: its bits, selection, limits, powers of two.
//
// In float they are free of branches and library calls and take float or a vector of it (vector.h); double takes the C
// library's functions. Everything has internal linkage: the file is compiled for several instruction sets, whose code
// the linker must not merge.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// Inlined always: a call that is left in a loop costs more than its work.
#ifdef __CUDACC__
#define KERNEL_INLINE __host__ __device__ __forceinline__ static
#else
#define KERNEL_INLINE [[gnu::always_inline]] static inline
#endif

namespace cvt_kernels {

// How accurate a result in float must be: as accurate as float allows, or enough for rounding it to 16 bits.
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

// The larger of the two; NaN if x is NaN.
template <class T>
KERNEL_INLINE T at_least(T x, T limit) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, float>) {
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(limit));
    return x;
  }
#endif
  return select(x < limit, limit, x);
}

// The smaller of the two; NaN if x is NaN.
template <class T>
KERNEL_INLINE T at_most(T x, T limit) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, float>) {
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(limit));
    return x;
  }
#endif
  return select(limit < x, limit, x);
}

// x / y. A GPU does not round it correctly, since that would cost more than all the rest of an activation.
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

// 2^(y + exponent) where -127 ≤ y + exponent ≤ 128: 0 up to -126.5, infinite from 127.5 on. The relative error before
// rounding is at most 2.0e-9, or 2.9e-6 for half precision.
template <Precision precision, int exponent = 0, class F>
KERNEL_INLINE F power_of_two(F y) {
#ifdef __CUDA_ARCH__
  float power;  // its relative error is at most 2^-22; subnormal numbers become 0, and y may be anything
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(y + static_cast<float>(exponent)));
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

}  // namespace cvt_kernels

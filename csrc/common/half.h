// The types of elements, the two of 16 bits among them, the types that the kernels compute them in, and functions of a
// number that the kernels of every family build on: its bits, selection, limits, powers of two.
//
// In float these are free of branches and library calls and take float or a vector of it (vector.h); double takes the C
// library's functions. Everything has internal linkage: the file is compiled for several instruction sets, whose code
// the linker must not merge.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// AddressSanitizer checks what is compiled: gcc says so by this macro, clang before 20 by a feature.
#if defined __has_feature && !defined __SANITIZE_ADDRESS__
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

// Inlined always: a call that is left in a loop costs more than its work.
#ifdef __CUDACC__
#define KERNEL_INLINE __host__ __device__ __forceinline__ static
#else
#define KERNEL_INLINE [[gnu::always_inline]] static inline
#endif

namespace cvt_kernels {

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

enum class DType { float64, float32, bfloat16, float16 };

// Calls f with a value of the type, one of up to 32 bits.
template <class F>
static auto with_float(DType dtype, F f) {
  switch (dtype) {
    case DType::bfloat16: return f(BFloat16{});
    case DType::float16: return f(Half{});
    default: return f(float{});  // where the operators refuse float64
  }
}

// The same of any type.
template <class F>
static auto with_type(DType dtype, F f) {
  return dtype == DType::float64 ? f(double{}) : with_float(dtype, f);
}

// The type of sums and statistics: float for types of fewer bits, else the type itself.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double> || std::is_same_v<T, int32_t>, T, float>;

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

// The larger of the two, or the smaller; NaN if x is NaN.
template <bool larger, class T>
KERNEL_INLINE T extreme(T x, T limit) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, float>) {
    if constexpr (larger) asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(limit));
    else asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(limit));
    return x;
  }
#endif
  return select(larger ? x < limit : limit < x, limit, x);
}

template <class T>
KERNEL_INLINE T at_least(T x, T limit) {
  return extreme<true>(x, limit);
}

template <class T>
KERNEL_INLINE T at_most(T x, T limit) {
  return extreme<false>(x, limit);
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

// Conversions from the 16 bits and to them, which lie in the low half of `bits`: to nearest, ties to even.

template <class U>
KERNEL_INLINE auto float_of_bfloat16(U bits) {
  return float_of(bits << 16);
}

template <class F>
KERNEL_INLINE auto bfloat16_of(F x) {
  const auto bits = bits_of(x);
  using U = std::remove_const_t<decltype(bits)>;
  const U rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return select(x == x, rounded, U(0x7fc0u));
}

template <class U>
KERNEL_INLINE auto float_of_half(U bits) {
  const U sign = (bits & 0x8000u) << 16;
  const U magnitude = (bits & 0x7fffu) << 13;
  const U finite = bits_of(float_of(magnitude) * 0x1p112f);  // from bias 15 to bias 127, subnormals too
  return float_of(sign | select(magnitude < 0x0f800000u, finite, magnitude | 0x7f800000u));
}

template <class F>
KERNEL_INLINE auto half_of(F x) {
  const auto bits = bits_of(x);
  using U = std::remove_const_t<decltype(bits)>;
  const U magnitude = bits & 0x7fffffffu;
  const U normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const U subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;  // one unit of 0.5f is 2^-24
  U result = select(magnitude < 0x38800000u, subnormal, normal);
  result = select(magnitude < 0x477ff000u, result, U(0x7c00u));  // what rounds to 65536 or more
  result = select(x == x, result, U(0x7e00u));
  return (bits >> 16 & 0x8000u) | result;
}

KERNEL_INLINE double load(const double* x) { return *x; }
KERNEL_INLINE float load(const float* x) { return *x; }
KERNEL_INLINE float load(const BFloat16* x) { return float_of_bfloat16(uint32_t{x->bits}); }
KERNEL_INLINE float load(const Half* x) { return float_of_half(uint32_t{x->bits}); }

KERNEL_INLINE void store(double* out, double x) { *out = x; }
KERNEL_INLINE void store(float* out, float x) { *out = x; }
KERNEL_INLINE void store(BFloat16* out, float x) { out->bits = static_cast<uint16_t>(bfloat16_of(x)); }
KERNEL_INLINE void store(Half* out, float x) { out->bits = static_cast<uint16_t>(half_of(x)); }

}  // namespace cvt_kernels

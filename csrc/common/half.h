// The types of elements, the two of 16 bits among them, and the types that the kernels compute them in. Conversions take
// a number or a vector (vector.h) and have internal linkage, as the functions of scalar.h.
#pragma once

#include <type_traits>

#include "common/scalar.h"

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

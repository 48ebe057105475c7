// Storage types of 16 bits and what the kernels compute them in. Free of branches, so that loops vectorise; internal
// linkage as in math.h.
#pragma once

#include <type_traits>

#include "math.h"

namespace cvt_kernels {

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

// Sums and statistics: double for double, else float.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

KERNEL_INLINE double load(const double* x) { return *x; }
KERNEL_INLINE float load(const float* x) { return *x; }
KERNEL_INLINE float load(const BFloat16* x) { return float_of(static_cast<uint32_t>(x->bits) << 16); }

KERNEL_INLINE float load(const Half* x) {
  const uint32_t bits = x->bits;
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t magnitude = (bits & 0x7fffu) << 13;
  const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);  // from bias 15 to bias 127, subnormals too
  return float_of(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
}

KERNEL_INLINE void store(double* out, double x) { *out = x; }
KERNEL_INLINE void store(float* out, float x) { *out = x; }

// To nearest, ties to even.
KERNEL_INLINE void store(BFloat16* out, float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  out->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// To nearest, ties to even.
KERNEL_INLINE void store(Half* out, float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;  // one unit of 0.5f is 2^-24
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // what rounds to 65536 or more
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  out->bits = static_cast<uint16_t>(bits >> 16 & 0x8000u) | static_cast<uint16_t>(result);
}

}  // namespace cvt_kernels

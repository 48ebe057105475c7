// The numbers that the products of 8-bit integers take, as wide as the instruction set wants them, and those products. They
// have internal linkage, as the functions of common/vector.h, on which they build.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "common/product.h"
#include "linear_int8/cpu_loops.h"

namespace cvt_kernels {
namespace {

#if defined KERNELS_VECTOR_BYTES  // whose vectors differ from the machine's
#define INTRINSICS 0
#else
#define INTRINSICS 1
#endif

// Where the CPU multiplies four numbers of 8 bits at once, the left ones have no sign but with AMX: they are stored with
// an offset, whose part of the products is known beforehand. Elsewhere numbers are stored in 16 bits, two at once.
#if defined __AVX512VNNI__ || defined __AVXVNNI__
constexpr bool kQuads = true;
#else
constexpr bool kQuads = kTiles;
#endif
constexpr int kOffset = kQuads && !kTiles ? 128 : 0;
using LeftNumber = std::conditional_t<kQuads, std::conditional_t<kOffset == 0, int8_t, uint8_t>, int16_t>;
using RightNumber = std::conditional_t<kQuads, int8_t, int16_t>;
constexpr int kTogether = sizeof(Integers) / sizeof(LeftNumber);

using I = Vector<Integers>;

// sum + Σ a · b for the numbers in each lane. The instructions that add pairs of 8-bit products do so in 16 bits, which
// overflow.
VECTOR_INLINE I multiply_add(I a, I b, I sum) {
#if INTRINSICS && defined __AVX512VNNI__
  return (I::Type)_mm512_dpbusd_epi32((__m512i)sum.v, (__m512i)a.v, (__m512i)b.v);
#elif INTRINSICS && defined __AVXVNNI__
  return (I::Type)_mm256_dpbusd_avx_epi32((__m256i)sum.v, (__m256i)a.v, (__m256i)b.v);
#elif INTRINSICS && defined __AVX512BW__
  return sum + I((I::Type)_mm512_madd_epi16((__m512i)a.v, (__m512i)b.v));
#elif INTRINSICS && defined __AVX2__
  return sum + I((I::Type)_mm256_madd_epi16((__m256i)a.v, (__m256i)b.v));
#elif INTRINSICS && defined __SSE2__
  return sum + I((I::Type)_mm_madd_epi16((__m128i)a.v, (__m128i)b.v));
#else
  static_assert(!kQuads || kTiles);
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// x rounded to integers, half to even; |x| is small.
VECTOR_INLINE I rounded(Vector<float> x) {
#if INTRINSICS && defined __AVX512F__
  return (I::Type)_mm512_maskz_cvtps_epi32(0xffff, (__m512)x.v);
#elif INTRINSICS && defined __AVX2__
  return (I::Type)_mm256_cvtps_epi32((__m256)x.v);
#elif INTRINSICS && defined __SSE2__
  return (I::Type)_mm_cvtps_epi32((__m128)x.v);
#else
  I result;
  for (int lane = 0; lane < I::lanes; lane++) result.v[lane] = static_cast<Integers>(std::nearbyint(x.v[lane]));
  return result;
#endif
}

// Stores integers as numbers that are narrower, in which they fit.
template <class N>
VECTOR_INLINE void store_numbers(N* out, I x, Whole) {
  using Numbers = typename Native<N, I::lanes * sizeof(N)>::Type;
  Numbers numbers = __builtin_convertvector(x.v, Numbers);
#if INTRINSICS && defined __AVX2__ && !defined __AVX512F__  // the compiler does half of it number by number
  if constexpr (sizeof(N) == 1) {
    const __m128i low = _mm256_castsi256_si128((__m256i)x.v), high = _mm256_extracti128_si256((__m256i)x.v, 1);
    const __m128i words = _mm_packs_epi32(low, high);
    const __m128i bytes = std::is_signed_v<N> ? _mm_packs_epi16(words, words) : _mm_packus_epi16(words, words);
    std::memcpy(&numbers, &bytes, sizeof numbers);
  }
#endif
  std::memcpy(out, &numbers, sizeof numbers);
}

template <class N>
VECTOR_INLINE void store_numbers(N* out, I x, Part part) {
  N lanes[I::lanes];
  store_numbers(lanes, x, Whole{});
  std::memcpy(out, lanes, part.size * sizeof(N));
}

// The largest magnitude of numbers; infinity and NaN are larger than all others.
struct Magnitudes {
  I most[4] = {0, 0, 0, 0};  // as bits

  // Takes a vector of numbers; i is that of for_vectors.
  VECTOR_INLINE void take(Vector<float> x, int i) {
    const I magnitude = (I::Type)absolute(x).v;
    most[i] = select(most[i] < magnitude, magnitude, most[i]);
  }

  VECTOR_INLINE float largest() const {
    const auto larger = [](I a, I b) LAMBDA_INLINE { return select(a < b, b, a); };
    const I both = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    return cvt_kernels::float_of(static_cast<uint32_t>(cvt_kernels::largest(both)));
  }
};

// Quantizes a row, whose largest magnitude is known, as Kernels::quantize says, with `offset` added to its numbers, and
// returns its scale.
template <class T, class N>
VECTOR_INLINE float quantize_row(const T* x, int64_t inputs, float largest, N* out, int offset) {
  using F = Vector<float>;
  const bool finite = largest < INFINITY;
  if (!finite || largest < linear_int8::kLeast) {
    for (int64_t c = 0; c < inputs; c++) out[c] = static_cast<N>(offset);
    return finite ? 0 : NAN;
  }
  const F factor = linear_int8::kLimit / largest;
  const I shift = offset;
  for_vectors<F::lanes>(inputs, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
    store_numbers(out + c, rounded(load(x + c, lanes) * factor) + shift, lanes);
  });
  return largest / linear_int8::kLimit;
}

// The same of any row.
template <class T, class N>
VECTOR_INLINE float quantize_row(const T* x, int64_t inputs, N* out, int offset) {
  Magnitudes magnitudes;
  for_vectors<Vector<float>::lanes>(inputs, [&](int64_t c, auto lanes, int i) LAMBDA_INLINE {
    magnitudes.take(load(x + c, lanes), i);
  });
  return quantize_row(x, inputs, magnitudes.largest(), out, offset);
}

}  // namespace
}  // namespace cvt_kernels

#undef INTRINSICS

// Vectors as wide as the registers of the instruction set that the file is compiled for, by the vector extension of GCC
// and Clang: arithmetic, selection, loads and stores with conversion. They have internal linkage, as in half.h.
#pragma once

#ifdef __F16C__
#include <immintrin.h>
#endif

#include <utility>

#include "common/half.h"

namespace cvt_kernels {
namespace {

#if defined KERNELS_VECTOR_BYTES  // for tests of widths that their machine lacks
constexpr int kVectorBytes = KERNELS_VECTOR_BYTES;
#elif defined __AVX512F__
constexpr int kVectorBytes = 64;
#elif defined __AVX__
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

#ifdef __SANITIZE_ADDRESS__  // its checks in every inlined copy would take minutes to compile
#define VECTOR_INLINE inline
#define LAMBDA_INLINE
#else
#define VECTOR_INLINE [[gnu::always_inline]] inline
#define LAMBDA_INLINE __attribute__((always_inline))
#endif

// The compiler's vector types; written one by one, since the attribute is lost on the parameter of a template.
template <class E, int bytes>
struct Native;
#define NATIVE(E)                                       \
  template <int bytes>                                  \
  struct Native<E, bytes> {                             \
    typedef E Type __attribute__((vector_size(bytes))); \
  };
NATIVE(float)
NATIVE(double)
NATIVE(int32_t)
NATIVE(uint32_t)
NATIVE(int16_t)
NATIVE(uint16_t)
NATIVE(int8_t)
NATIVE(uint8_t)
#undef NATIVE

template <class E>
struct Vector {
  using Type = typename Native<E, kVectorBytes>::Type;
  using Mask = decltype(Type{} < Type{});
  static constexpr int lanes = kVectorBytes / sizeof(E);

  Type v;

  Vector() = default;
  VECTOR_INLINE Vector(Type v) : v(v) {}
  VECTOR_INLINE Vector(E x) : v(x - Type{}) {}  // in every lane; minus zero, since plus zero would change -0

  VECTOR_INLINE friend Vector operator+(Vector a, Vector b) { return a.v + b.v; }
  VECTOR_INLINE friend Vector operator-(Vector a, Vector b) { return a.v - b.v; }
  VECTOR_INLINE friend Vector operator*(Vector a, Vector b) { return a.v * b.v; }
  VECTOR_INLINE friend Vector operator/(Vector a, Vector b) { return a.v / b.v; }
  VECTOR_INLINE friend Vector operator-(Vector a) { return -a.v; }
  VECTOR_INLINE friend Vector operator&(Vector a, Vector b) { return a.v & b.v; }
  VECTOR_INLINE friend Vector operator|(Vector a, Vector b) { return a.v | b.v; }
  VECTOR_INLINE friend Vector operator<<(Vector a, int n) { return a.v << n; }
  VECTOR_INLINE friend Vector operator>>(Vector a, int n) { return a.v >> n; }
  VECTOR_INLINE friend Mask operator<(Vector a, Vector b) { return a.v < b.v; }
  VECTOR_INLINE friend Mask operator==(Vector a, Vector b) { return a.v == b.v; }
  VECTOR_INLINE friend Vector select(Mask mask, Vector yes, Vector no) { return mask ? yes.v : no.v; }
};

VECTOR_INLINE Vector<uint32_t> bits_of(Vector<float> x) { return (Vector<uint32_t>::Type)x.v; }
VECTOR_INLINE Vector<float> float_of(Vector<uint32_t> bits) { return (Vector<float>::Type)bits.v; }

// 16 bits per lane, and back.
using Narrow = Native<uint16_t, kVectorBytes / 2>::Type;

VECTOR_INLINE Vector<uint32_t> widen(Narrow bits) {
#if defined __AVX512F__
  return (Vector<uint32_t>::Type)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)bits);
#elif defined __AVX2__
  return (Vector<uint32_t>::Type)_mm256_cvtepu16_epi32((__m128i)bits);
#else
  return __builtin_convertvector(bits, Vector<uint32_t>::Type);
#endif
}

VECTOR_INLINE Narrow narrow(Vector<uint32_t> bits) {
#if defined __AVX512F__
  return (Narrow)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)bits.v);
#else
  return __builtin_convertvector(bits.v, Narrow);
#endif
}

#if defined __AVX512BF16__
// The 16 bits of x rounded to bfloat16; results below 2^-126 become 0.
VECTOR_INLINE Narrow narrow_bfloat16(Vector<float> x) {
  return (Narrow)_mm512_maskz_cvtneps_pbh(0xffff, (__m512)x.v);
}
#else
VECTOR_INLINE Narrow narrow_bfloat16(Vector<float> x) { return narrow(bfloat16_of(x)); }
#endif

// The general versions compile to twice the instructions of these, for Half to many times as many.
#if defined __AVX512F__
VECTOR_INLINE Vector<float> at_least(Vector<float> x, Vector<float> limit) {
  return (Vector<float>::Type)_mm512_maskz_max_ps(0xffff, (__m512)limit.v, (__m512)x.v);
}

VECTOR_INLINE Vector<float> at_most(Vector<float> x, Vector<float> limit) {
  return (Vector<float>::Type)_mm512_maskz_min_ps(0xffff, (__m512)limit.v, (__m512)x.v);
}

VECTOR_INLINE Vector<float> widen_half(Narrow bits) {
  return (Vector<float>::Type)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits);
}

VECTOR_INLINE Narrow narrow_half(Vector<float> x) {
  return (Narrow)_mm512_maskz_cvtps_ph(0xffff, (__m512)x.v, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined __F16C__
VECTOR_INLINE Vector<float> at_least(Vector<float> x, Vector<float> limit) {
  return (Vector<float>::Type)_mm256_max_ps((__m256)limit.v, (__m256)x.v);
}

VECTOR_INLINE Vector<float> at_most(Vector<float> x, Vector<float> limit) {
  return (Vector<float>::Type)_mm256_min_ps((__m256)limit.v, (__m256)x.v);
}

VECTOR_INLINE Vector<float> widen_half(Narrow bits) {
  return (Vector<float>::Type)_mm256_cvtph_ps((__m128i)bits);
}

VECTOR_INLINE Narrow narrow_half(Vector<float> x) {
  return (Narrow)_mm256_cvtps_ph((__m256)x.v, _MM_FROUND_TO_NEAREST_INT);
}
#else
VECTOR_INLINE Vector<float> widen_half(Narrow bits) { return float_of_half(widen(bits)); }
VECTOR_INLINE Narrow narrow_half(Vector<float> x) { return narrow(half_of(x)); }
#endif

// Calls f with the constants 0 to n − 1.
template <int... i, class F>
VECTOR_INLINE void unroll(std::integer_sequence<int, i...>, F f) {
  (f(std::integral_constant<int, i>{}), ...);
}

template <int n, class F>
VECTOR_INLINE void unroll(F f) {
  unroll(std::make_integer_sequence<int, n>{}, f);
}

// Half of the lanes of a vector, from `first` on.
template <class E, int bytes, int first, int... lane>
VECTOR_INLINE auto half(typename Native<E, bytes>::Type v, std::integer_sequence<int, lane...>) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(v, v, (first + lane)...);
#else  // through memory, which takes as long as the sum of a short row
  typename Native<E, bytes / 2>::Type result;
  std::memcpy(&result, reinterpret_cast<const char*>(&v) + first * sizeof(E), sizeof result);
  return result;
#endif
}

// Combines the lanes of a vector, halves with each other until four or two numbers are left.
template <class E, int bytes = kVectorBytes, class G>
VECTOR_INLINE E reduce(typename Native<E, bytes>::Type v, G combine) {
  if constexpr (bytes > 16) {
    constexpr int count = bytes / 2 / sizeof(E);
    constexpr auto lanes = std::make_integer_sequence<int, count>{};
    return reduce<E, bytes / 2>(combine(half<E, bytes, 0>(v, lanes), half<E, bytes, count>(v, lanes)), combine);
  } else if constexpr (sizeof(E) == 8) {
    return combine(v[0], v[1]);
  } else {
    return combine(combine(v[0], v[2]), combine(v[1], v[3]));
  }
}

template <class E>
VECTOR_INLINE E sum(Vector<E> x) {
  return reduce<E>(x.v, [](auto a, auto b) LAMBDA_INLINE { return a + b; });
}

// The largest lane; if one is NaN, it or another.
template <class E>
VECTOR_INLINE E largest(Vector<E> x) {
  return reduce<E>(x.v, [](auto a, auto b) LAMBDA_INLINE { return a > b ? a : b; });
}

// Two vectors, with the lanes of one in which a bit of the number is set exchanged for those of the other in which it is not.
template <int bit, class V, int... lane>
VECTOR_INLINE void exchange(V& a, V& b, std::integer_sequence<int, lane...>) {
#if __has_builtin(__builtin_shufflevector)
  constexpr int lanes = sizeof...(lane);
  const V low = __builtin_shufflevector(a, b, ((lane & bit ? lanes : 0) + (lane & ~bit))...);
  b = __builtin_shufflevector(a, b, ((lane & bit ? lanes : 0) + (lane | bit))...);
  a = low;
#else
  const V both[] = {a, b};
  ((a[lane] = both[(lane & bit) != 0][lane & ~bit]), ...);
  ((b[lane] = both[(lane & bit) != 0][lane | bit]), ...);
#endif
}

// Copies a square of numbers, as many as a vector has lanes on a side, with rows as columns. Rows to be read lie `from_bytes`
// apart.
template <class E>
void turn_square(const void* from, int64_t from_bytes, E* to, int64_t to_stride) {
  using V = typename Vector<E>::Type;
  constexpr int side = Vector<E>::lanes;
  V rows[side];
  for (int row = 0; row < side; row++) std::memcpy(&rows[row], static_cast<const char*>(from) + row * from_bytes, sizeof(V));
  const auto exchange_by = [&](auto bit) LAMBDA_INLINE {
    unroll<side>([&](auto row) LAMBDA_INLINE {
      if constexpr ((row & bit) == 0) exchange<bit>(rows[row], rows[row + bit], std::make_integer_sequence<int, side>{});
    });
  };
  unroll<4>([&](auto i) LAMBDA_INLINE {
    if constexpr (1 << i < side) exchange_by(std::integral_constant<int, 1 << i>{});
  });
  for (int row = 0; row < side; row++) std::memcpy(to + row * to_stride, &rows[row], sizeof(V));
}

// The lanes of a vector that lie within a row: all, or the first `size`.
struct Whole {};

struct Part {
  int64_t size;
};

template <class T>
using VectorOf = Vector<Accumulator<T>>;

template <class T>
VECTOR_INLINE VectorOf<T> load(const T* x, Whole) {
  if constexpr (std::is_same_v<T, Accumulator<T>>) {
    VectorOf<T> result;
    std::memcpy(&result.v, x, sizeof result.v);
    return result;
  } else {
    Narrow bits;
    std::memcpy(&bits, x, sizeof bits);
    if constexpr (std::is_same_v<T, Half>) return widen_half(bits);
    else return float_of_bfloat16(widen(bits));
  }
}

template <class T>
VECTOR_INLINE void store(T* out, VectorOf<T> x, Whole) {
  if constexpr (std::is_same_v<T, Accumulator<T>>) {
    std::memcpy(out, &x.v, sizeof x.v);
  } else {
    Narrow bits;
    if constexpr (std::is_same_v<T, Half>) bits = narrow_half(x);
    else bits = narrow_bfloat16(x);
    std::memcpy(out, &bits, sizeof bits);
  }
}

// The lanes beyond `part` are 0.
template <class T>
VECTOR_INLINE VectorOf<T> load(const T* x, Part part) {
  T lanes[VectorOf<T>::lanes] = {};
  std::memcpy(lanes, x, part.size * sizeof(T));
  return load(lanes, Whole{});
}

template <class T>
VECTOR_INLINE void store(T* out, VectorOf<T> x, Part part) {
  T lanes[VectorOf<T>::lanes];
  store(lanes, x, Whole{});
  std::memcpy(out, lanes, part.size * sizeof(T));
}

// x with `other` in the lanes that do not lie within the row.
template <class E>
VECTOR_INLINE Vector<E> keep(Vector<E> x, Whole, Vector<E> = E(0)) {
  return x;
}

template <class E>
VECTOR_INLINE Vector<E> keep(Vector<E> x, Part part, Vector<E> other = E(0)) {
  using Index = std::conditional_t<sizeof(E) == 8, int64_t, int32_t>;
  decltype(x.v < x.v) within{};
  for (int lane = 0; lane < Vector<E>::lanes; lane++) within[lane] = -Index{lane < part.size};
  return select(within, x, other);
}

// Calls f(index, lanes, i) for every vector of a row; i, from 0 to 3, tells neighbors apart, so that each may add to a
// sum of its own: one addition after the other would be the longer wait.
template <int lanes, class F>
VECTOR_INLINE void for_vectors(int64_t size, F f) {
  int64_t c = 0;
  for (; c + 4 * lanes <= size; c += 4 * lanes) {
    f(c, Whole{}, 0);
    f(c + lanes, Whole{}, 1);
    f(c + 2 * lanes, Whole{}, 2);
    f(c + 3 * lanes, Whole{}, 3);
  }
  for (; c + lanes <= size; c += lanes) f(c, Whole{}, 0);
  if (c < size) f(c, Part{size - c}, 0);
}

// Stores value(index, lanes) for every vector of a row.
template <class T, class F>
VECTOR_INLINE void fill(T* to, int64_t size, F value) {
  for_vectors<VectorOf<T>::lanes>(size, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
    store(to + c, value(c, lanes), lanes);
  });
}

}  // namespace
}  // namespace cvt_kernels

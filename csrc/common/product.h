// Matrix products in registers: the micro-kernel, and the packed panels that it reads. They have internal linkage, as the
// functions of vector.h, on which they build.
//
// The left factor lies by rows; the right one is packed, two vectors wide, so that it is read from end to end. Where the
// CPU multiplies pairs of bfloat16 and adds both products, a factor is a pair of numbers along the axis of the sum.
#pragma once

#include "common/vector.h"

namespace cvt_kernels {
namespace {

#if defined __AVX512BF16__ || defined KERNELS_PAIRS  // the latter for tests on machines without such an instruction
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

// Two neighboring bfloat16, the first in the low half.
using Pair = uint32_t;

template <class T>
constexpr bool kPaired = kPairs && std::is_same_v<T, BFloat16>;

// The operands of the products: numbers in the accumulator's type, or pairs where there is an instruction for them.
template <class T>
using Factor = std::conditional_t<kPaired<T>, Pair, Accumulator<T>>;

// Numbers per factor along the axis that a product sums over.
template <class T>
constexpr int kDepth = kPaired<T> ? 2 : 1;

// The most rows of a product, which is kept in 24 of 32 registers, or 12 of 16.
constexpr int kRows = kVectorBytes == 64 ? 12 : 6;

// Columns of a panel.
template <class A>
constexpr int kPanel = 2 * Vector<A>::lanes;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

VECTOR_INLINE Vector<double> multiply_add(Vector<double> a, Vector<double> b, Vector<double> sum) { return a * b + sum; }
VECTOR_INLINE Vector<float> multiply_add(Vector<float> a, Vector<float> b, Vector<float> sum) { return a * b + sum; }
VECTOR_INLINE Vector<float> multiply_add(Vector<Pair> a, Vector<Pair> b, Vector<float> sum) {
#ifdef __AVX512BF16__
  return (Vector<float>::Type)_mm512_dpbf16_ps((__m512)sum.v, (__m512bh)a.v, (__m512bh)b.v);
#else
  const Vector<Pair> high = 0xffff0000u;
  return float_of(a << 16) * float_of(b << 16) + (float_of(a & high) * float_of(b & high) + sum);
#endif
}

// c = a b, or c += a b: a (rows, depth) and c (rows, vectors) by rows, b (depth, vectors) adjacent.
template <int rows, int vectors, class P, class A>
void multiply_rows(const P* a, int64_t a_stride, const P* b, int64_t depth, A* c, int64_t c_stride, bool adds) {
  using F = Vector<A>;
  F sums[rows][vectors];
  for (int row = 0; row < rows; row++) {
    for (int i = 0; i < vectors; i++) sums[row][i] = A(0);
  }
  const P* thirds[ceil_div(rows, 3)];  // an address holds a pointer plus one or two strides: more pointers do not fit
  for (int i = 0; i < ceil_div(rows, 3); i++) thirds[i] = a + 3 * i * a_stride;
  for (int64_t d = 0; d < depth; d++) {
    Vector<P> right[vectors];
    for (int i = 0; i < vectors; i++) std::memcpy(&right[i].v, b + (d * vectors + i) * F::lanes, sizeof right[i].v);
    for (int row = 0; row < rows; row++) {
      const Vector<P> left = thirds[row / 3][row % 3 * a_stride + d];
      for (int i = 0; i < vectors; i++) sums[row][i] = multiply_add(left, right[i], sums[row][i]);
    }
  }
  for (int row = 0; row < rows; row++) {
    for (int i = 0; i < vectors; i++) {
      A* to = c + row * c_stride + i * F::lanes;
      store(to, adds ? load(to, Whole{}) + sums[row][i] : sums[row][i], Whole{});
    }
  }
}

template <int vectors, class P, class A>
using Multiply = void (*)(const P*, int64_t, const P*, int64_t, A*, int64_t, bool);

template <int vectors, class P, class A, int... row>
Multiply<vectors, P, A> multiply_of(int64_t rows, std::integer_sequence<int, row...>) {
  static constexpr Multiply<vectors, P, A> table[] = {multiply_rows<row + 1, vectors, P, A>...};
  return table[rows - 1];
}

// The same for any number of rows, in groups of about the same size.
template <int vectors, class P, class A>
void multiply(const P* a, int64_t a_stride, int64_t rows, const P* b, int64_t depth, A* c, int64_t c_stride, bool adds) {
  const int64_t groups = ceil_div(rows, kRows);
  for (int64_t group = 0; group < groups; group++) {
    const int64_t first = group * rows / groups, size = (group + 1) * rows / groups - first;
    multiply_of<vectors, P, A>(size, std::make_integer_sequence<int, kRows>{})(
        a + first * a_stride, a_stride, b, depth, c + first * c_stride, c_stride, adds);
  }
}

// Calls f(start, vectors) for panels of two vectors, the last of one where that is enough.
template <class A, class F>
VECTOR_INLINE void for_panels(int64_t size, F f) {
  int64_t start = 0;
  for (; start + Vector<A>::lanes < size; start += kPanel<A>) f(start, std::integral_constant<int, 2>{});
  if (start < size) f(start, std::integral_constant<int, 1>{});
}

// Packs a row of numbers as factors that lie side by side.
template <class T>
void pack_row(const T* row, int64_t size, Factor<T>* out) {
  if constexpr (kPaired<T>) {
    out[(size - 1) / 2] = 0;
    std::memcpy(out, row, size * sizeof(T));
  } else {
    for_vectors<VectorOf<T>::lanes>(size, [&](int64_t i, auto lanes, int) LAMBDA_INLINE {
      store(out + i, load(row + i, lanes), lanes);
    });
  }
}

}  // namespace
}  // namespace cvt_kernels

// The moments of a row, and the activation of a vector and its derivative, for the loops of this folder and of others.
#pragma once

#include "common/vector.h"
#include "layer_norm_gelu/activation.h"

namespace cvt_kernels::layer_norm_gelu {
namespace {

template <class T>
constexpr Precision kPrecision = sizeof(T) == 2 ? Precision::half : Precision::full;

// Functions of a table that call a template for the type and the activation of a call: any, or one of GELU.
#define BY_ACTIVATION(function) BY_TYPES(true, function)
#define BY_GELU(function) BY_TYPES(false, function)
#define BY_TYPES(or_identity, function)                                                                       \
  [](DType dtype, Activation activation, auto... given) {                                                     \
    with_type(dtype, [&](auto type) {                                                                         \
      layer_norm_gelu::with_activation<or_identity>(activation, [&](auto constant) {                          \
        function<decltype(type), constant>(given...);                                                         \
      });                                                                                                     \
    });                                                                                                       \
  }

// f of a vector, or of one lane after the other where f takes numbers only, of double.
template <class T, class F>
VECTOR_INLINE VectorOf<T> by_lanes(VectorOf<T> x, F f) {
  if constexpr (std::is_same_v<T, double>) {
    for (int i = 0; i < x.lanes; i++) x.v[i] = f(x.v[i]);
    return x;
  } else {
    return f(x);
  }
}

template <class T, Activation activation>
VECTOR_INLINE VectorOf<T> activated(VectorOf<T> x) {
  return by_lanes<T>(x, [](auto y) LAMBDA_INLINE { return activate<activation, kPrecision<T>>(y); });
}

template <class T, Activation activation>
VECTOR_INLINE VectorOf<T> derivative(VectorOf<T> x) {
  return by_lanes<T>(x, [](auto y) LAMBDA_INLINE { return activation_derivative<activation, kPrecision<T>>(y); });
}

// The variance and the mean of a row: mean = origin + shift, where the origin lies near by. Where the mean is large and
// the variance tiny, rounding their sum would cost more than all the rest.
template <class A>
struct Statistics {
  A origin, shift, variance;
};

template <class A>
VECTOR_INLINE Statistics<A> moments(const A* x, int64_t channels, A origin) {
  using F = Vector<A>;
  F sums[4] = {0, 0, 0, 0}, squares[4] = {0, 0, 0, 0};
  for_vectors<F::lanes>(channels, [&](int64_t c, auto lanes, int i) LAMBDA_INLINE {
    const F deviation = keep(load(x + c, lanes) - origin, lanes);
    sums[i] = sums[i] + deviation;
    squares[i] = squares[i] + deviation * deviation;
  });
  const A n = static_cast<A>(channels);
  const A shift = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / n;
  return {origin, shift, sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / n - shift * shift};
}

// Takes the moments in one pass around the mean of the first few values. In the rare row where they lie so far from the
// others that the variance loses digits, it takes them again around its mean.
template <class A>
VECTOR_INLINE Statistics<A> statistics(const A* x, int64_t channels) {
  constexpr int lanes = Vector<A>::lanes;
  const A first = channels < lanes ? sum(load(x, Part{channels})) / static_cast<A>(channels)
                                   : sum(load(x, Whole{})) / lanes;
  Statistics<A> result = moments(x, channels, first);
  if (result.shift * result.shift > result.variance) result = moments(x, channels, result.origin + result.shift);
  if (result.variance < 0) result.variance = 0;
  return result;
}

}  // namespace
}  // namespace cvt_kernels::layer_norm_gelu

// A depthwise convolution with its BatchNorm on rows of pixels, for the loops of this folder and of others.
//
// A row of pixels is laid down as vectors of channels one after the other, each with all its columns, so that neighboring
// pixels lie at constant distances.
#pragma once

#include <utility>

#include "common/vector.h"
#include "conv_projection/cpu_loops.h"

namespace cvt_kernels::conv_projection {
namespace {

// Calls f with the constants 0 to n − 1.
template <int... i, class F>
VECTOR_INLINE void unroll(std::integer_sequence<int, i...>, F f) {
  (f(std::integral_constant<int, i>{}), ...);
}

template <int n, class F>
VECTOR_INLINE void unroll(F f) {
  unroll(std::make_integer_sequence<int, n>{}, f);
}

template <class T>
constexpr int kLanes = VectorOf<T>::lanes;

// Packs the parameters of a branch for each vector of channels: `kernel`² taps, then the mean, the scale
// γ / sqrt(variance + eps) and the shift β. The mean is subtracted on its own: a shift that held it would cancel where the
// mean is many deviations.
template <class T, class A = Accumulator<T>>
void pack(const Branch& branch, int64_t first, int64_t size, A* out) {
  const int64_t taps = branch.kernel * branch.kernel;
  const T* weight = static_cast<const T*>(branch.weight) + first * taps;
  with_type(branch.norm, [&](auto type) {
    using P = decltype(type);
    const auto value = [&](const void* values, int64_t c, A absent) {
      return values == nullptr ? absent : static_cast<A>(load(static_cast<const P*>(values) + first + c));
    };
    for (int64_t c = 0; c < size; c += kLanes<T>, out += (taps + 3) * kLanes<T>) {
      for (int lane = 0; lane < kLanes<T>; lane++) {
        const bool within = c + lane < size;
        const int64_t channel = within ? c + lane : c;
        for (int64_t tap = 0; tap < taps; tap++) out[tap * kLanes<T> + lane] = load(weight + channel * taps + tap);
        A* norm = out + taps * kLanes<T> + lane;
        norm[0] = value(branch.mean, channel, 0);
        norm[kLanes<T>] = value(branch.scale, channel, 1) /
                          std::sqrt(value(branch.variance, channel, 1) + static_cast<A>(branch.eps));
        norm[2 * kLanes<T>] = value(branch.shift, channel, 0);
      }
    }
  });
}

template <int n, class T, class Lanes, class A = Accumulator<T>>
VECTOR_INLINE void normalize(const Vector<A>* sums, const A* norm, T* out, int64_t pitch, Lanes lanes) {
  constexpr int L = kLanes<T>;
  const auto mean = load(norm, Whole{}), scale = load(norm + L, Whole{}), shift = load(norm + 2 * L, Whole{});
  unroll<n>([&](auto j) LAMBDA_INLINE { store(out + j * pitch, (sums[j] - mean) * scale + shift, lanes); });
}

// The sizes of a branch that are known to the compiler, or 0 where only the branch knows.
template <int kernel, int stride>
struct Shape {};

// Computes n neighboring outputs of a vector of channels.
template <int n, class T, int kernel, int stride, class Lanes, class A = Accumulator<T>>
VECTOR_INLINE void outputs(Shape<kernel, stride>, const Branch&, const A* const* rows, int64_t offset, int64_t column,
                           const A* packed, T* out, int64_t pitch, Lanes lanes) {
  using F = Vector<A>;
  constexpr int L = F::lanes;
  F sums[n];
  unroll<n>([&](auto j) LAMBDA_INLINE { sums[j] = 0; });
  unroll<kernel>([&](auto y) LAMBDA_INLINE {
    F taps[kernel];
    unroll<kernel>([&](auto x) LAMBDA_INLINE { taps[x] = load(packed + (y * kernel + x) * L, Whole{}); });
    const A* row = rows[y] + offset + column * stride * L;
    unroll<(n - 1) * stride + kernel>([&](auto i) LAMBDA_INLINE {
      const F pixel = load(row + i * L, Whole{});
      unroll<n>([&](auto j) LAMBDA_INLINE {
        constexpr int tap = i - j * stride;
        if constexpr (tap >= 0 && tap < kernel) sums[j] = sums[j] + taps[tap] * pixel;
      });
    });
  });
  normalize<n>(sums, packed + kernel * kernel * L, out, pitch, lanes);
}

template <int n, class T, class Lanes, class A = Accumulator<T>>
VECTOR_INLINE void outputs(Shape<0, 0>, const Branch& branch, const A* const* rows, int64_t offset, int64_t column,
                           const A* packed, T* out, int64_t pitch, Lanes lanes) {
  using F = Vector<A>;
  constexpr int L = F::lanes;
  const int64_t step = branch.stride * L;
  F sums[n];
  unroll<n>([&](auto j) LAMBDA_INLINE { sums[j] = 0; });
  for (int64_t y = 0; y < branch.kernel; y++) {
    const A* pixels = rows[y] + offset + column * step;
    for (int64_t x = 0; x < branch.kernel; x++, packed += L, pixels += branch.dilation * L) {
      const F tap = load(packed, Whole{});
      unroll<n>([&](auto j) LAMBDA_INLINE { sums[j] = sums[j] + tap * load(pixels + j * step, Whole{}); });
    }
  }
  normalize<n>(sums, packed, out, pitch, lanes);
}

// Computes a row of output from `kernel` rows, whose vectors of channels lie `plane` apart.
template <class T, class S, class A = Accumulator<T>>
void convolve(S shape, const Branch& branch, const A* const* rows, int64_t plane, const A* packed, int64_t size, T* out,
              int64_t pitch) {
  const int64_t step = (branch.kernel * branch.kernel + 3) * kLanes<T>;
  int64_t column = 0;
  const auto advance = [&](auto n) LAMBDA_INLINE {
    for (; column + n <= branch.width; column += n) {
      const A* weights = packed;
      T* to = out + column * pitch;
      int64_t c = 0, offset = 0;
      for (; c + kLanes<T> <= size; c += kLanes<T>, weights += step, offset += plane) {
        outputs<n>(shape, branch, rows, offset, column, weights, to + c, pitch, Whole{});
      }
      if (c < size) outputs<n>(shape, branch, rows, offset, column, weights, to + c, pitch, Part{size - c});
    }
  };
#ifndef __SANITIZE_ADDRESS__  // its checks in these two would take a minute to compile
  advance(std::integral_constant<int, 8>{});
  advance(std::integral_constant<int, 4>{});
#endif
  advance(std::integral_constant<int, 2>{});
  advance(std::integral_constant<int, 1>{});
}

}  // namespace
}  // namespace cvt_kernels::conv_projection

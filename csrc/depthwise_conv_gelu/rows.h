// A depthwise 3×3 convolution of tokens with its bias, row by row, for the loops of this folder and of others.
//
// Tokens are read where they lie: each row of them is read for three rows of outputs, between which the cache holds it.
#pragma once

#include "conv_projection/convolve.h"
#include "layer_norm_gelu/moments.h"

namespace cvt_kernels::depthwise_conv_gelu {
namespace {

using conv_projection::kLanes;
using layer_norm_gelu::Activation;

// The rows of tokens above, at and below a row of outputs. They may have a part of the channels only.
template <class T>
struct Rows {
  const T* tokens[3];  // the first of each row; null beyond the image
  int64_t pitch;       // elements from a token to its neighbor
  int64_t width;       // tokens of a row
};

// The rows of an image under one row of outputs; the image begins at `tokens`.
template <class T>
KERNEL_INLINE Rows<T> rows_of(const T* tokens, int64_t pitch, int64_t height, int64_t width, int64_t row) {
  const auto place = [&](int64_t y) { return y < 0 || y >= height ? nullptr : tokens + y * width * pitch; };
  return {{place(row - 1), place(row), place(row + 1)}, pitch, width};
}

// The accumulators that pack() writes for each vector of channels: nine taps and the bias, a vector each.
template <class T>
constexpr int64_t kPacked = 10 * kLanes<T>;

// The accumulators that the parameters of some channels take when packed.
template <class T>
KERNEL_INLINE int64_t packed_size(int64_t channels) {
  return (channels + kLanes<T> - 1) / kLanes<T> * kPacked<T>;
}

// Packs some channels, from `first` on, of weight (channels, 1, 3, 3) and bias (channels), or null for 0.
template <class T, class A = Accumulator<T>>
void pack(const void* weight, const void* bias, int64_t first, int64_t size, A* out) {
  for (int64_t c = 0; c < size; c += kLanes<T>, out += kPacked<T>) {
    for (int lane = 0; lane < kLanes<T>; lane++) {
      const int64_t channel = first + (c + lane < size ? c + lane : c);
      const T* taps = static_cast<const T*>(weight) + channel * 9;
      for (int tap = 0; tap < 9; tap++) out[tap * kLanes<T> + lane] = load(taps + tap);
      out[9 * kLanes<T> + lane] = bias == nullptr ? A(0) : load(static_cast<const T*>(bias) + channel);
    }
  }
}

// Calls f(i, token) for those tokens of a row that lie under n neighboring outputs and within the image.
template <int n, class T, class Lanes, class F>
VECTOR_INLINE void for_tokens(const Rows<T>& rows, int y, int64_t column, int64_t c, Lanes lanes, F f) {
  const T* row = rows.tokens[y] + column * rows.pitch + c;
  const bool first = column == 0, last = column + n == rows.width;
  unroll<n + 2>([&](auto i) LAMBDA_INLINE {
    if ((i == 0 && first) || (i == n + 1 && last)) return;
    f(i, load(row + (i - 1) * rows.pitch, lanes));
  });
}

// Computes n neighboring sums of a vector of channels that begins at c.
template <int n, class T, class Lanes, class A = Accumulator<T>>
VECTOR_INLINE void convolve(const Rows<T>& rows, int64_t column, int64_t c, const A* packed, Vector<A>* sums, Lanes lanes) {
  using F = Vector<A>;
  unroll<n>([&](auto j) LAMBDA_INLINE { sums[j] = load(packed + 9 * F::lanes, Whole{}); });
  unroll<3>([&](auto y) LAMBDA_INLINE {
    if (rows.tokens[y] == nullptr) return;
    F taps[3];
    unroll<3>([&](auto x) LAMBDA_INLINE { taps[x] = load(packed + (y * 3 + x) * F::lanes, Whole{}); });
    for_tokens<n>(rows, y, column, c, lanes, [&](auto i, F token) LAMBDA_INLINE {
      unroll<n>([&](auto j) LAMBDA_INLINE {
        if constexpr (i >= j && i - j < 3) sums[j] = sums[j] + taps[i - j] * token;
      });
    });
  });
}

// Calls f(column, c, sums, lanes, n) for the sums of n neighboring outputs and a vector of channels each, until a row of
// `channels` of them is through; n is a constant.
template <class T, class F, class A = Accumulator<T>>
VECTOR_INLINE void for_sums(const Rows<T>& rows, int64_t channels, const A* packed, F f) {
  const auto tile = [&](int64_t column, int64_t c, const A* own, auto lanes, auto n) LAMBDA_INLINE {
    Vector<A> sums[n()];
    convolve<n>(rows, column, c, own, sums, lanes);
    f(column, c, sums, lanes, n);
  };
  constexpr std::integral_constant<int, 1> kOne;
  int64_t column = 0;
  const auto advance = [&](auto n) LAMBDA_INLINE {
    for (; column + n <= rows.width; column += n) {
      const A* own = packed;
      int64_t c = 0;
      for (; c + kLanes<T> <= channels; c += kLanes<T>, own += kPacked<T>) tile(column, c, own, Whole{}, n);
      if (c == channels) continue;
      // The rest of the channels is few, and code of its own for several outputs would take long to compile.
      for (int64_t i = column; i < column + n; i++) tile(i, c, own, Part{channels - c}, kOne);
    }
  };
#ifndef __SANITIZE_ADDRESS__  // its checks in this one would take long to compile
  advance(std::integral_constant<int, 4>{});
#endif
  advance(kOne);
}

// Computes activation(convolution + bias) of a row, rounded once to the type of `out`, whose tokens lie `pitch` elements
// apart. The channels are the same as in rows and packed.
template <Activation activation, class T, class Out, class A = Accumulator<T>>
void convolve_row(const Rows<T>& rows, int64_t channels, const A* packed, Out* out, int64_t pitch) {
  for_sums(rows, channels, packed, [&](int64_t column, int64_t c, const Vector<A>* sums, auto lanes, auto n) LAMBDA_INLINE {
    Out* to = out + column * pitch + c;
    unroll<n>([&](auto j) LAMBDA_INLINE {
      store(to + j * pitch, layer_norm_gelu::activated<Out, activation>(sums[j]), lanes);
    });
  });
}

}  // namespace
}  // namespace cvt_kernels::depthwise_conv_gelu

// A depthwise convolution with its BatchNorm on rows of pixels, for the loops of this folder and of others.
//
// A row of pixels is laid down as vectors of channels one after the other, each with all its columns, so that neighboring
// pixels lie at constant distances.
#pragma once

#include "common/vector.h"
#include "conv_projection/cpu_loops.h"

namespace cvt_kernels::conv_projection {
namespace {

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

// Normalizes n sums in place.
template <int n, class A>
VECTOR_INLINE void normalize(Vector<A>* sums, const A* norm) {
  constexpr int L = Vector<A>::lanes;
  const auto mean = load(norm, Whole{}), scale = load(norm + L, Whole{}), shift = load(norm + 2 * L, Whole{});
  unroll<n>([&](auto j) LAMBDA_INLINE { sums[j] = (sums[j] - mean) * scale + shift; });
}

// The sizes of a branch that are known to the compiler, or 0 where only the branch knows.
template <int kernel, int stride, int dilation = 1>
struct Shape {};

// Computes n neighboring outputs of the convolution, of a vector of channels. Returns what follows the taps.
template <int n, int kernel, int stride, int dilation, class A>
VECTOR_INLINE const A* accumulate(Shape<kernel, stride, dilation>, const Branch&, const A* const* rows, int64_t offset,
                                  int64_t column, const A* packed, Vector<A>* sums) {
  using F = Vector<A>;
  constexpr int L = F::lanes;
  unroll<n>([&](auto j) LAMBDA_INLINE { sums[j] = 0; });
  unroll<kernel>([&](auto y) LAMBDA_INLINE {
    F taps[kernel];
    unroll<kernel>([&](auto x) LAMBDA_INLINE { taps[x] = load(packed + (y * kernel + x) * L, Whole{}); });
    const A* row = rows[y] + offset + column * stride * L;
    unroll<(n - 1) * stride + (kernel - 1) * dilation + 1>([&](auto i) LAMBDA_INLINE {
      const F pixel = load(row + i * L, Whole{});
      unroll<n>([&](auto j) LAMBDA_INLINE {
        constexpr int ahead = i - j * stride, tap = ahead / dilation;
        if constexpr (ahead >= 0 && ahead % dilation == 0 && tap < kernel) sums[j] = sums[j] + taps[tap] * pixel;
      });
    });
  });
  return packed + kernel * kernel * L;
}

template <int n, class A>
VECTOR_INLINE const A* accumulate(Shape<0, 0>, const Branch& branch, const A* const* rows, int64_t offset, int64_t column,
                                  const A* packed, Vector<A>* sums) {
  using F = Vector<A>;
  constexpr int L = F::lanes;
  const int64_t step = branch.stride * L;
  unroll<n>([&](auto j) LAMBDA_INLINE { sums[j] = 0; });
  for (int64_t y = 0; y < branch.kernel; y++) {
    const A* pixels = rows[y] + offset + column * step;
    for (int64_t x = 0; x < branch.kernel; x++, packed += L, pixels += branch.dilation * L) {
      const F tap = load(packed, Whole{});
      unroll<n>([&](auto j) LAMBDA_INLINE { sums[j] = sums[j] + tap * load(pixels + j * step, Whole{}); });
    }
  }
  return packed;
}

// Computes n neighboring outputs of a vector of channels; `adds` says that they are added to what is there.
template <int n, bool adds, class T, class S, class Lanes, class A = Accumulator<T>>
VECTOR_INLINE void outputs(S shape, const Branch& branch, const A* const* rows, int64_t offset, int64_t column,
                           const A* packed, T* out, int64_t pitch, Lanes lanes) {
  Vector<A> sums[n];
  normalize<n>(sums, accumulate<n>(shape, branch, rows, offset, column, packed, sums));
  unroll<n>([&](auto j) LAMBDA_INLINE {
    T* to = out + j * pitch;
    if constexpr (adds) sums[j] = load(to, lanes) + sums[j];
    store(to, sums[j], lanes);
  });
}

// Calls advance(n) to go on by n outputs as often as it can, from many to one.
template <class F>
VECTOR_INLINE void in_steps(F advance) {
#ifndef __SANITIZE_ADDRESS__  // its checks in these two would take a minute to compile
  advance(std::integral_constant<int, 8>{});
  advance(std::integral_constant<int, 4>{});
#endif
  advance(std::integral_constant<int, 2>{});
  advance(std::integral_constant<int, 1>{});
}

// Computes a row of output from `kernel` rows, whose vectors of channels lie `plane` apart.
template <class T, bool adds = false, class S, class A = Accumulator<T>>
void convolve(S shape, const Branch& branch, const A* const* rows, int64_t plane, const A* packed, int64_t size, T* out,
              int64_t pitch) {
  const int64_t step = (branch.kernel * branch.kernel + 3) * kLanes<T>;
  int64_t column = 0;
  in_steps([&](auto n) LAMBDA_INLINE {
    for (; column + n <= branch.width; column += n) {
      const A* weights = packed;
      T* to = out + column * pitch;
      int64_t c = 0, offset = 0;
      for (; c + kLanes<T> <= size; c += kLanes<T>, weights += step, offset += plane) {
        outputs<n, adds>(shape, branch, rows, offset, column, weights, to + c, pitch, Whole{});
      }
      if (c == size) continue;
      // The rest of the channels is few, and code of its own for several outputs would take long to compile.
      for (int64_t i = 0; i < n; i++) {
        outputs<1, adds>(shape, branch, rows, offset, column + i, weights, to + i * pitch + c, pitch, Part{size - c});
      }
    }
  });
}

// Calls f with the shape of a branch. In double, which serves checks rather than models, all have the general one.
template <class A, class F>
VECTOR_INLINE void with_shape(const Branch& branch, F f) {
  if constexpr (std::is_same_v<A, double>) return f(Shape<0, 0>{});
  const bool adjacent = branch.kernel == 3 && branch.dilation == 1;
  const bool dilated = branch.kernel == 5 && branch.dilation == 2;  // of hybrid mixing
  if (adjacent && branch.stride == 1) f(Shape<3, 1>{});
#ifndef __SANITIZE_ADDRESS__  // its checks in these two, which are as the others, would take long to compile
  else if (adjacent && branch.stride == 2) f(Shape<3, 2>{});
  else if (dilated && branch.stride == 1) f(Shape<5, 1, 2>{});
#endif
  else if (dilated && branch.stride == 2) f(Shape<5, 2, 2>{});
  else f(Shape<0, 0>{});
}

// The number of channels of the block that begins at `first`.
template <class Call>
int64_t block_size(const Call& call, int64_t first) {
  return call.channels - first < call.block ? call.channels - first : call.block;
}

// Calls f(c, lanes) for every vector of channels of a block.
template <class T, class F>
VECTOR_INLINE void for_channels(int64_t size, F f) {
  int64_t c = 0;
  for (; c + kLanes<T> <= size; c += kLanes<T>) f(c, Whole{});
  if (c < size) f(c, Part{size - c});
}

// An image's first token in x, from the channel `first` on.
template <class T>
const T* pixels_of(const Projection& call, int64_t first, int64_t image) {
  return static_cast<const T*>(call.x) + image * call.batch_stride + first;
}

// Lays down a row of x in its place in the ring.
template <class T, class A = Accumulator<T>>
void read_row(const Projection& call, int64_t first, int64_t image, int64_t row, A* ring) {
  const int64_t size = block_size(call, first), plane = (call.width + 2 * call.margin) * kLanes<T>;
  const T* pixel = pixels_of<T>(call, first, image) + (call.class_tokens + row * call.width) * call.token_stride;
  A* to = ring + row % call.held * row_size(call) + call.margin * kLanes<T>;
  for (int64_t column = 0; column < call.width; column++, pixel += call.token_stride, to += kLanes<T>) {
    A* lane = to;
    for_channels<T>(size, [&](int64_t c, auto lanes) LAMBDA_INLINE {
      store(lane, load(pixel + c, lanes), Whole{});
      lane += plane;
    });
  }
}

// Copies sums (vectors, quantities, lanes) to where they lie as (quantities, channels).
template <int most, class Q>
void write_sums(const Q* sums, int64_t size, int64_t quantities, Q* out, int64_t channels) {
  for (int64_t c = 0; c < size; c += most) {
    const int64_t lanes = at_most<int64_t>(size - c, most);
    for (int64_t i = 0; i < quantities; i++, sums += most) std::memcpy(out + i * channels + c, sums, lanes * sizeof(Q));
  }
}

// Packs the branches of the block that begins at `first`; returns what lies behind them.
template <class T, class A = Accumulator<T>>
A* pack_branches(const Projection& call, int64_t first, A* packed) {
  for (const Branch* b = call.branches; b < call.branches + call.count; b++) {
    pack<T>(*b, first, block_size(call, first), packed);
    packed += packed_size(call, *b);
  }
  return packed;
}

// The row of output whose last row of x is `row`, or -1; for the first row of output, this is the last row of `reach`.
[[maybe_unused]] inline int64_t output_row(const Branch& branch, Reach reach, int64_t row) {
  const int64_t place = row - reach.end + 1;
  if (place < 0 || place % branch.stride != 0) return -1;
  return place / branch.stride < branch.height ? place / branch.stride : -1;
}

// Finds the rows of a ring that a row of output reads, from its first column on; `outside` stands for those beyond.
template <class T, class P>
void rows_under(const Projection& call, const Branch& branch, int64_t to, P ring, P outside, P* rows) {
  const int64_t shift = (call.margin - branch.padding) * kLanes<T>;
  for (int64_t y = 0; y < branch.kernel; y++) {
    const int64_t from = to * branch.stride - branch.padding + y * branch.dilation;
    const bool inside = from >= 0 && from < call.height;
    rows[y] = inside ? ring + from % call.held * row_size(call) + shift : outside == nullptr ? nullptr : outside + shift;
  }
}

}  // namespace
}  // namespace cvt_kernels::conv_projection

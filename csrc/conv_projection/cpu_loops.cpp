// The loops of the projection on the CPU.
//
// Every row of x is read once, converted, and laid down in a ring of rows that stays in L1: vectors of channels one
// after the other, each with all its columns, so that neighboring pixels lie at constant distances. Zeros around the
// rows are the padding. As soon as a row is there, each branch, or sum of branches, computes the output row that it
// completes.

#include "conv_projection/convolve.h"

namespace cvt_kernels::conv_projection {
namespace {

// Serves one unit: reads the rows of x from the first to the last that its outputs need, and computes the outputs on the
// way.
template <class T, class A = Accumulator<T>>
void project_band(const Projection& call, int64_t first, int64_t image, int64_t band, A* zeros, const A* packed, A* line) {
  const int64_t size = block_size(call, first), plane = (call.width + 2 * call.margin) * kLanes<T>;
  const int64_t padded = (size + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
  A* ring = zeros + row_size(call);
  const T* x = pixels_of<T>(call, first, image);
  const auto rows_of = [&](const Branch& branch, int64_t part) { return branch.height * part / call.bands; };
  const auto out_of = [&](const Branch& branch, int64_t token) {
    const int64_t tokens = call.class_tokens + branch.height * branch.width;
    return static_cast<T*>(branch.out) + (image * tokens + token) * call.channels + first;
  };

  Reach read{call.height, 0};
  for (const Branch* b = call.branches; b < call.branches + call.count; b++) {
    if (b->summands == 0) continue;
    if (band == 0 && call.class_tokens) std::memcpy(out_of(*b, 0), x, size * sizeof(T));
    widen(read, b, b->summands, rows_of(*b, band), rows_of(*b, band + 1));
  }

  for (int64_t row = read.first; row < read.end; row++) {
    if (row >= 0 && row < call.height) read_row<T>(call, first, image, row, ring);
    const A* weights = packed;
    for (const Branch* b = call.branches; b < call.branches + call.count; b++) {
      const A* own = weights;
      weights += packed_size(call, *b);
      if (b->summands == 0) continue;
      const int64_t to = output_row(*b, reach_of(b, b->summands), row);
      if (to < rows_of(*b, band) || to >= rows_of(*b, band + 1)) continue;
      T* out = out_of(*b, call.class_tokens + to * b->width);
      const bool is_sum = b->summands > 1;  // added up in `line`, and rounded once
      for (int64_t i = 0; i < b->summands; own += packed_size(call, b[i]), i++) {
        const A* rows[kMaxKernel];
        rows_under<T, const A*>(call, b[i], to, ring, zeros, rows);
        with_shape<A>(b[i], [&](auto shape) {
          if (!is_sum) convolve(shape, b[i], rows, plane, own, size, out, call.channels);
          else if (i == 0) convolve(shape, b[i], rows, plane, own, padded, line, padded);
          else convolve<A, true>(shape, b[i], rows, plane, own, padded, line, padded);
        });
      }
      for (int64_t column = 0; is_sum && column < b->width; column++) {
        for_channels<T>(size, [&](int64_t c, auto lanes) LAMBDA_INLINE {
          store(out + column * call.channels + c, load(line + column * padded + c, Whole{}), lanes);
        });
      }
    }
  }
}

// Serves units with the blocks of channels outermost: a block's weights serve all images.
template <class T, class A = Accumulator<T>>
void project_units(const Projection& call, int64_t begin, int64_t end, void* memory) {
  A* scratch = static_cast<A*>(memory);
  const int64_t held = (call.held + 1) * row_size(call), images = call.batch * call.bands;
  std::memset(scratch, 0, held * sizeof(A));
  A *packed = scratch + held, *line = packed;
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t first = unit / images * call.block;
    if (unit == begin || unit % images == 0) line = pack_branches<T>(call, first, packed);
    project_band<T>(call, first, unit % images / call.bands, unit % call.bands, scratch, packed, line);
  }
}

// Training: the statistics of the convolutions, and the backward of the projection ------------------------------
//
// As in evaluation, rows of x go through a ring in L1 and serve all branches; the convolution is computed again in every
// pass rather than stored. Each unit sums over one image, in one order, and leaves its sums to the operator to add up.

// Where a unit works: a block of channels of one image, its part of the scratch memory, and its sums. Q is their type.
template <class T, class Q>
struct Unit {
  using A = Accumulator<T>;

  const Training& call;
  int64_t first, image;
  Q* sums;  // (quantities, block) of a unit; with vectors of channels outermost, (vectors, quantities, lanes)
  A* zeros;
  A* ring;
  A* dring;   // as the ring, for dx
  A* packed;  // branch after branch
  A* row;     // of output, (width, padded)

  const Projection& forward() const { return call.forward; }
  int64_t size() const { return block_size(call.forward, first); }
  // The channels in whole vectors.
  int64_t padded() const { return (size() + kLanes<T> - 1) / kLanes<T> * kLanes<T>; }
  int64_t plane() const { return (call.forward.width + 2 * call.forward.margin) * kLanes<T>; }

  // The gradient of a row of output.
  const T* dout(int64_t branch, int64_t to) const {
    const Branch& own = call.forward.branches[branch];
    const int64_t tokens = call.forward.class_tokens + own.height * own.width;
    const int64_t token = image * tokens + call.forward.class_tokens + to * own.width;
    return static_cast<const T*>(call.gradients[branch].dout) + token * call.forward.channels + first;
  }
};

// Asks for a row of tokens, which the convolution of its row of output leaves the memory time for.
template <class T>
void prefetch_row(const T* row, int64_t width, int64_t pitch, int64_t size) {
  for (int64_t column = 0; column < width; column++, row += pitch) {
    for (int64_t c = 0; c < size; c += 64 / sizeof(T)) __builtin_prefetch(row + c);
  }
}

// Goes down an image. Calls enter(row) for each row of x that has come into the ring, output(branch, packed, quantity, to)
// for each row of output whose rows are all there, quantity being the first of the branch, and leave(row) for each row of
// x that no later output reads.
template <class T, class Q, class Enter, class Output, class Leave>
void walk(const Unit<T, Q>& unit, int64_t (*quantities)(const Branch&), Enter enter, Output output, Leave leave) {
  const Projection& call = unit.forward();
  int64_t begin = 0, end = call.height, reach = 1;
  for (const Branch* b = call.branches; b < call.branches + call.count; b++) {
    const int64_t own = b->dilation * (b->kernel - 1) + 1;
    const int64_t last = (b->height - 1) * b->stride - b->padding + own;
    begin = -b->padding < begin ? -b->padding : begin;
    end = last > end ? last : end;
    reach = own > reach ? own : reach;
  }
  end = call.height + reach - 1 > end ? call.height + reach - 1 : end;
  for (int64_t row = begin; row < end; row++) {
    if (row >= 0 && row < call.height) {
      read_row<T>(call, unit.first, unit.image, row, unit.ring);
      enter(row);
    }
    const Accumulator<T>* packed = unit.packed;
    int64_t quantity = 0;
    for (int64_t b = 0; b < call.count; b++) {
      const Branch& branch = call.branches[b];
      const int64_t to = output_row(branch, reach_of(&branch, 1), row);
      if (to >= 0) output(b, packed, quantity, to);
      packed += packed_size(call, branch);
      quantity += quantities(branch);
    }
    const int64_t done = row - reach + 1;
    if (done >= 0 && done < call.height) leave(done);
  }
}

// Computes a row of output, (convolution − mean) · scale as packed, in whole vectors.
template <class T, class Q, class A = Accumulator<T>>
void convolve_row(const Unit<T, Q>& unit, int64_t b, const A* packed, int64_t to, const A** rows) {
  const Branch& branch = unit.forward().branches[b];
  rows_under<T, const A*>(unit.forward(), branch, to, unit.ring, unit.zeros, rows);
  with_shape<A>(branch, [&](auto shape) {
    convolve<A>(shape, branch, rows, unit.plane(), packed, unit.padded(), unit.row, unit.padded());
  });
}

void none(int64_t) {}
int64_t two(const Branch&) { return 2; }
int64_t taps_of(const Branch& branch) { return branch.kernel * branch.kernel; }

// Adds f(column) over the columns of a row, in four sums: one addition after the other would be the longer wait.
template <class F, class G>
VECTOR_INLINE F over_columns(int64_t width, G f) {
  F sums[4] = {0, 0, 0, 0};
  int64_t column = 0;
  for (; column + 4 <= width; column += 4) {
    unroll<4>([&](auto i) LAMBDA_INLINE { sums[i] = sums[i] + f(column + i); });
  }
  for (; column < width; column++) sums[0] = sums[0] + f(column);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Statistics -----------------------------------------------------------------------------------------------

// Merges the moments of a row into the moments of the rows above it (Chan et al.), which loses no digits where the mean
// is many deviations.
template <class T>
void statistics_of(const Unit<T, double>& unit) {
  using A = Accumulator<T>;
  using F = Vector<A>;
  constexpr int L = F::lanes;
  walk<T>(unit, two, none, [&](int64_t b, const A* packed, int64_t quantity, int64_t to) {
    const A* rows[kMaxKernel];
    convolve_row<T>(unit, b, packed, to, rows);
    const int64_t width = unit.forward().branches[b].width, padded = unit.padded();
    const double n = static_cast<double>(width), above = n * static_cast<double>(to);
    const double share = n / (above + n), weight = above * share;
    for (int64_t c = 0; c < padded; c += L) {
      const auto value = [&](int64_t column) LAMBDA_INLINE { return load(unit.row + column * padded + c, Whole{}); };
      const F mean = over_columns<F>(width, value) / F(static_cast<A>(width));
      const F rest = over_columns<F>(width, [&](int64_t i) LAMBDA_INLINE { return value(i) - mean; });
      const F square = over_columns<F>(width, [&](int64_t i) LAMBDA_INLINE {
        const F deviation = value(i) - mean;
        return deviation * deviation;
      });
      A origin[L], rests[L], squares[L];
      store(origin, mean, Whole{});
      store(rests, rest, Whole{});
      store(squares, square, Whole{});
      double* means = unit.sums + c * unit.call.quantities + quantity * L;
      double* deviations = means + L;
      for (int lane = 0; lane < L; lane++) {
        const double remainder = rests[lane] / n;
        const double delta = origin[lane] + remainder - means[lane];
        means[lane] += delta * share;
        deviations[lane] += squares[lane] - rests[lane] * remainder + delta * delta * weight;
      }
    }
  }, none);
}

// The sums of dout and of dout · n ---------------------------------------------------------------------------

template <class T, class A = Accumulator<T>>
void sums_of(const Unit<T, A>& unit) {
  using F = Vector<A>;
  constexpr int L = F::lanes;
  walk<T>(unit, two, none, [&](int64_t b, const A* packed, int64_t quantity, int64_t to) {
    const int64_t width = unit.forward().branches[b].width, padded = unit.padded(), pitch = unit.forward().channels;
    const T* dout = unit.dout(b, to);
    prefetch_row(dout, width, pitch, unit.size());
    const A* rows[kMaxKernel];
    convolve_row<T>(unit, b, packed, to, rows);
    for_channels<T>(unit.size(), [&](int64_t c, auto lanes) LAMBDA_INLINE {
      A* sums = unit.sums + c * unit.call.quantities + quantity * L;
      F products[2] = {0, 0};
      const F plain = over_columns<F>(width, [&](int64_t column) LAMBDA_INLINE {
        const F d = load(dout + column * pitch + c, lanes);
        products[column % 2] = products[column % 2] + d * load(unit.row + column * padded + c, Whole{});
        return d;
      });
      store(sums, load(sums, Whole{}) + plain, Whole{});
      store(sums + L, load(sums + L, Whole{}) + (products[0] + products[1]), Whole{});
    });
  }, none);
}

// The gradients of x and of the taps ---------------------------------------------------------------------------

// Spreads the gradients of n neighboring outputs over the rows of dx, and adds their products with x to the taps'.
template <int n, class A, int kernel, int stride, int dilation>
VECTOR_INLINE void spread(Shape<kernel, stride, dilation>, const Branch&, const A* const* rows, A* const* drows,
                          int64_t offset, const A* weights, const A* gradient, int64_t pitch, A* dtaps) {
  using F = Vector<A>;
  constexpr int L = F::lanes;
  F g[n];
  unroll<n>([&](auto j) LAMBDA_INLINE { g[j] = load(gradient + j * pitch, Whole{}); });
  unroll<kernel>([&](auto y) LAMBDA_INLINE {
    if (drows[y] == nullptr) return;
    F taps[kernel], sums[kernel];
    unroll<kernel>([&](auto x) LAMBDA_INLINE {
      taps[x] = load(weights + (y * kernel + x) * L, Whole{});
      sums[x] = 0;
    });
    const A* row = rows[y] + offset;
    A* drow = drows[y] + offset;
    unroll<(n - 1) * stride + (kernel - 1) * dilation + 1>([&](auto i) LAMBDA_INLINE {
      const F pixel = load(row + i * L, Whole{});
      F d = load(drow + i * L, Whole{});
      unroll<n>([&](auto j) LAMBDA_INLINE {
        constexpr int ahead = i - j * stride, tap = ahead / dilation;
        if constexpr (ahead >= 0 && ahead % dilation == 0 && tap < kernel) {
          d = d + taps[tap] * g[j];
          sums[tap] = sums[tap] + pixel * g[j];
        }
      });
      store(drow + i * L, d, Whole{});
    });
    unroll<kernel>([&](auto x) LAMBDA_INLINE {
      A* to = dtaps + (y * kernel + x) * L;
      store(to, load(to, Whole{}) + sums[x], Whole{});
    });
  });
}

template <int n, class A>
VECTOR_INLINE void spread(Shape<0, 0>, const Branch& branch, const A* const* rows, A* const* drows, int64_t offset,
                          const A* weights, const A* gradient, int64_t pitch, A* dtaps) {
  using F = Vector<A>;
  constexpr int L = F::lanes;
  for (int64_t y = 0; y < branch.kernel; y++) {
    if (drows[y] == nullptr) continue;
    for (int64_t x = 0; x < branch.kernel; x++) {
      const int64_t tap = (y * branch.kernel + x) * L, at = offset + x * branch.dilation * L;
      const F weight = load(weights + tap, Whole{});
      F sum = 0;
      unroll<n>([&](auto j) LAMBDA_INLINE {
        const F g = load(gradient + j * pitch, Whole{});
        A* d = drows[y] + at + j * branch.stride * L;
        store(d, load(d, Whole{}) + weight * g, Whole{});
        sum = sum + load(rows[y] + at + j * branch.stride * L, Whole{}) * g;
      });
      store(dtaps + tap, load(dtaps + tap, Whole{}) + sum, Whole{});
    }
  }
}

// Spreads a row of the convolution's gradient, `row`, in vectors of channels whose rows lie `plane` apart. `dtaps` are
// the sums of the first vector's taps; the next vector's lie `pitch` behind.
template <class S, class A>
void spread_row(S shape, const Branch& branch, const A* const* rows, A* const* drows, const A* packed, const A* row,
                int64_t padded, int64_t plane, A* dtaps, int64_t pitch) {
  constexpr int L = Vector<A>::lanes;
  const int64_t step = branch.stride * L;
  for (int64_t c = 0, offset = 0; c < padded; c += L, offset += plane, packed += (taps_of(branch) + 3) * L, dtaps += pitch) {
    int64_t column = 0;
    in_steps([&](auto n) LAMBDA_INLINE {
      for (; column + n <= branch.width; column += n) {
        spread<n>(shape, branch, rows, drows, offset + column * step, packed, row + column * padded + c, padded, dtaps);
      }
    });
  }
}

// Writes the gradient of the class token, which went to every output.
template <class T, class A = Accumulator<T>>
void add_class_tokens(const Unit<T, A>& unit, T* dx) {
  for_channels<T>(unit.size(), [&](int64_t c, auto lanes) LAMBDA_INLINE {
    Vector<A> sum = 0;
    for (int64_t b = 0; b < unit.forward().count; b++) {
      if (unit.forward().branches[b].summands == 0) continue;
      sum = sum + load(unit.dout(b, 0) - unit.forward().channels + c, lanes);
    }
    store(dx + c, sum, lanes);
  });
}

template <class T, class A = Accumulator<T>>
void gradients_of(const Unit<T, A>& unit) {
  const Projection& call = unit.forward();
  const int64_t size = unit.size(), padded = unit.padded(), pitch = call.channels;
  const int64_t tokens = call.class_tokens + call.height * call.width;
  T* dx = static_cast<T*>(unit.call.dx) + unit.image * tokens * pitch + unit.first;
  if (call.class_tokens) add_class_tokens<T>(unit, dx);
  dx += call.class_tokens * pitch;

  const auto place = [&](int64_t row) { return unit.dring + row % call.held * row_size(call); };
  const auto enter = [&](int64_t row) { std::memset(place(row), 0, row_size(call) * sizeof(A)); };
  const auto leave = [&](int64_t row) {
    const A* from = place(row) + call.margin * kLanes<T>;
    T* to = dx + row * call.width * pitch;
    for (int64_t column = 0; column < call.width; column++, from += kLanes<T>, to += pitch) {
      const A* lane = from;
      for_channels<T>(size, [&](int64_t c, auto lanes) LAMBDA_INLINE {
        store(to + c, load(lane, Whole{}), lanes);
        lane += unit.plane();
      });
    }
  };
  walk<T>(unit, taps_of, enter, [&](int64_t b, const A* packed, int64_t quantity, int64_t to) {
    const Branch& branch = call.branches[b];
    const BranchGradient& gradient = unit.call.gradients[b];
    const T* dout = unit.dout(b, to);
    prefetch_row(dout, branch.width, pitch, size);
    const A* rows[kMaxKernel];
    A* drows[kMaxKernel];
    convolve_row<T>(unit, b, packed, to, rows);
    rows_under<T, A*>(call, branch, to, unit.dring, nullptr, drows);
    const auto vector = [&](const void* values) { return static_cast<const A*>(values) + unit.first; };
    const bool is_constant = gradient.mean_dout == nullptr;
    const A* mean = is_constant ? nullptr : vector(gradient.mean_dout);
    const A* product = is_constant ? nullptr : vector(gradient.mean_product);
    const A* factor = vector(gradient.factor);
    for (int64_t column = 0; column < branch.width; column++, dout += pitch) {
      A* row = unit.row + column * padded;
      for_channels<T>(size, [&](int64_t c, auto lanes) LAMBDA_INLINE {
        auto d = load(dout + c, lanes);
        if (!is_constant) d = d - load(mean + c, lanes) - load(row + c, Whole{}) * load(product + c, lanes);
        store(row + c, d * load(factor + c, lanes), Whole{});
      });
    }
    A* dtaps = unit.sums + quantity * kLanes<T>;
    with_shape<A>(branch, [&](auto shape) {
      spread_row(shape, branch, rows, drows, packed, unit.row, padded, unit.plane(), dtaps,
                 unit.call.quantities * kLanes<T>);
    });
  }, leave);
}

// Units ------------------------------------------------------------------------------------------------------

// Serves units by f, with the blocks of channels outermost: a block's weights serve all images.
template <class T, class Q>
void serve_units(void (*f)(const Unit<T, Q>&), const Training& call, int64_t begin, int64_t end, void* scratch) {
  using A = Accumulator<T>;
  const Projection& forward = call.forward;
  Q* sums = static_cast<Q*>(scratch);
  A* zeros = reinterpret_cast<A*>(sums + call.quantities * forward.block);
  A* ring = zeros + row_size(forward);
  A* dring = ring + forward.held * row_size(forward);
  A* packed = dring + forward.held * row_size(forward);
  A* row = packed;
  std::memset(zeros, 0, (1 + forward.held) * row_size(forward) * sizeof(A));
  for (int64_t index = begin; index < end; index++) {
    const int64_t first = index / forward.batch * forward.block, image = index % forward.batch;
    if (index == begin || image == 0) row = pack_branches<T>(forward, first, packed);
    const Unit<T, Q> unit{call, first, image, sums, zeros, ring, dring, packed, row};
    std::memset(sums, 0, call.quantities * forward.block * sizeof(Q));
    f(unit);
    Q* out = static_cast<Q*>(call.sums) + image * call.quantities * forward.channels + first;
    write_sums<kLanes<T>>(sums, unit.size(), call.quantities, out, forward.channels);
  }
}

// Functions of the table that serve units by a template for the type of a call.
#define BY_UNIT(function) \
  [](DType dtype, auto... given) { with_type(dtype, [&](auto type) { serve_units(function<decltype(type)>, given...); }); }

}  // namespace

const Kernels KERNELS{BY_TYPE(project_units), BY_UNIT(statistics_of), BY_UNIT(sums_of), BY_UNIT(gradients_of)};

}  // namespace cvt_kernels::conv_projection

// The loops of the depth head on the CPU.
//
// A product over the channels and an interpolation between pixels commute. So the nine taps of the first convolution multiply
// the map at its own size, a sixteenth of the result's, and what is interpolated and summed is their products. Four rows and
// four columns of the result, its phases, lie within a pixel of the map; in each phase the sum over taps and neighbors has
// the same weights everywhere but at the edge. First the rows are summed, then the columns, with neighboring columns of the
// map in the lanes of a vector. Behind ReLU, the channel is added to the sums of the last convolution.

#include "depth_head/cpu_loops.h"

#include "linear/layer_loops.h"

namespace cvt_kernels::depth_head {
namespace {

constexpr int64_t kChannels = 4;  // that are multiplied together: their products stay in the cache

F sigmoid(F x) {
  const F y = at_most(at_least(x * F(-1.44269504088896341f), F(-127.0f)), F(128.0f));  // -x / ln(2)
  return F(1.0f) / (power_of_two<Precision::full>(y) + F(1.0f));
}

// The weights of the pixel before, of this one and of the next in the phases of an upsampled side.
constexpr float kWeights[kScale][3] = {
    {0.375f, 0.625f, 0.0f}, {0.1875f, 0.75f, 0.0625f}, {0.0625f, 0.75f, 0.1875f}, {0.0f, 0.625f, 0.375f}};

// The weight of a pixel, `side` from −1 to 1, for the neighbor of a phase that a tap, from −1 to 1, reads.
constexpr float weight_of(int phase, int tap, int side) {
  const int place = phase + tap;
  const int at = side + 1 + (place < 0 ? 1 : place < kScale ? 0 : -1);
  return at < 0 || at > 2 ? 0.0f : kWeights[(place + kScale) % kScale][at];
}

// Rows of a thread's memory, in numbers.
struct Strides {
  int64_t columns;   // of the map with one more at each end
  int64_t product;   // their rows, which are read a vector further
  int64_t hidden;    // of a phase, with a vector before and behind
  int64_t sums;      // of a phase

  explicit Strides(int64_t width)
      : columns(width + 2), product(padded(columns) + kLanes), hidden(padded(width) + 2 * kLanes), sums(padded(width)) {}
};

struct Scratch {
  float *pixels, *products, *blended, *hidden, *sums;

  Scratch(const Head& head, Parts& parts) {
    const Strides strides(head.width);
    const int64_t rows = head.rows + 4;
    pixels = parts.take<float>(rows * head.inputs * padded(strides.columns));
    products = parts.take<float>(rows * kChannels * kTaps * strides.product);
    blended = parts.take<float>(kScale * 3 * strides.product);
    hidden = parts.take<float>(kScale * kScale * strides.hidden);
    sums = parts.take<float>(head.rows * kScale * kScale * strides.sums);
  }
};

// Packs a row of the map as the panels of a product, with the pixel at each end twice.
template <class T>
void pack_pixels(const T* row, int64_t channel_step, int64_t width, int64_t inputs, float* out) {
  for_panels<float>(width + 2, [&](int64_t start, auto vectors) LAMBDA_INLINE {
    for (int64_t d = 0; d < inputs; d++) {
      const T* channel = row + d * channel_step;
      float* to = out + start * inputs + d * vectors * kLanes;
      for (int64_t i = 0; i < vectors * kLanes; i += kLanes) {
        const int64_t column = start + i - 1;
        if (column >= 0 && column + kLanes <= width) {
          store(to + i, load(channel + column, Whole{}), Whole{});
        } else {
          for (int64_t lane = 0; lane < kLanes; lane++) {
            const int64_t at = column + lane;
            to[i + lane] = at > width ? 0.0f : float(load(channel + at_least(at_most(at, width - 1), int64_t{0})));
          }
        }
      }
    }
  });
}

// The products of a channel in three rows of the map, by tap.
struct Products {
  const float* rows[3];
  int64_t stride;

  const float* at(int side, int tap_y, int tap_x) const { return rows[side + 1] + ((tap_y + 1) * 3 + tap_x + 1) * stride; }
};

// Sums the taps and the neighbors of the phases `first` to `last` along a side, beyond whose ends there may be none.
template <int first, int last, bool is_start, bool is_end, class G>
VECTOR_INLINE void blend(F (&sums)[kScale], float bias, G pixel) {
  unroll<kScale>([&](auto phase) LAMBDA_INLINE { sums[phase] = F(bias); });
  unroll<9>([&](auto i) LAMBDA_INLINE {
    constexpr int tap = i / 3 - 1, side = i % 3 - 1;
    const F x = pixel(tap, side);
    unroll<kScale>([&](auto phase) LAMBDA_INLINE {
      constexpr bool is_outside = (is_start && phase + tap < 0) || (is_end && phase + tap >= kScale);
      constexpr float weight = weight_of(phase, tap, side);
      if constexpr (phase >= first && phase <= last && !is_outside && weight != 0) sums[phase] = x * F(weight) + sums[phase];
    });
  });
}

// The same over rows, for each tap over columns.
template <int first, int last, bool is_top, bool is_bottom>
void blend_rows(const Products& products, const Strides& strides, float* blended) {
  for (int64_t j = 0; j < padded(strides.columns); j += kLanes) {
    unroll<3>([&](auto tap_x) LAMBDA_INLINE {
      F sums[kScale];
      blend<first, last, is_top, is_bottom>(sums, 0.0f, [&](int tap_y, int side) LAMBDA_INLINE {
        return load(products.at(side, tap_y, tap_x - 1) + j, Whole{});
      });
      unroll<kScale>([&](auto phase) LAMBDA_INLINE {
        if constexpr (phase >= first && phase <= last) store(blended + (phase * 3 + tap_x) * strides.product + j, sums[phase], Whole{});
      });
    });
  }
}

// Sums over columns too: a pixel at the end of its row, of the first or the last phase, has no tap beyond it.
inline float at_end(const float* blended, int64_t stride, int64_t column, int phase, float bias) {
  const int outside = phase == 0 ? -1 : 1;
  float total = bias;
  for (int tap_x = -1; tap_x <= 1; tap_x++) {
    for (int side = -1; side <= 1; side++) {
      const float weight = weight_of(phase, tap_x, side);
      if (tap_x != outside && weight != 0) total += weight * blended[(tap_x + 1) * stride + column + 1 + side];
    }
  }
  return total < 0 ? 0 : total;
}

// The channel behind ReLU in a row of each phase, with zeros where the last convolution reads beyond its ends.
template <int first, int last>
void blend_columns(const float* blended, const Strides& strides, int64_t width, float bias, float* hidden) {
  for (int y = first; y <= last; y++) {
    const float* rows = blended + y * 3 * strides.product;
    float* to = hidden + y * kScale * strides.hidden + kLanes;
    for (int64_t j = 0; j < strides.sums; j += kLanes) {
      F sums[kScale];
      blend<0, kScale - 1, false, false>(sums, bias, [&](int tap_x, int side) LAMBDA_INLINE {
        return load(rows + (tap_x + 1) * strides.product + j + 1 + side, Whole{});
      });
      unroll<kScale>([&](auto phase) LAMBDA_INLINE {
        store(to + phase * strides.hidden + j, at_least(sums[phase], F(0.0f)), Whole{});
      });
    }
    float* of_last = to + (kScale - 1) * strides.hidden;
    to[0] = at_end(rows, strides.product, 0, 0, bias);
    of_last[width - 1] = at_end(rows, strides.product, width - 1, kScale - 1, bias);
    to[width] = of_last[-1] = 0;
  }
}

// Adds a channel to the sums of the last convolution, of the result's row `y` from the first phase of this row of the map on.
template <int first, int last, int y>
void add_channel(const float* hidden, const Strides& strides, const float (&last_taps)[kTaps], float* sums) {
  for (int64_t j = 0; j < strides.sums; j += kLanes) {
    unroll<kScale>([&](auto x) LAMBDA_INLINE {
      float* to = sums + x * strides.sums + j;
      F total = 0.0f;  // of this channel: sums of few numbers round less
      unroll<kTaps>([&](auto i) LAMBDA_INLINE {
        constexpr int row = y + i / 3 - 1, place = x + i % 3 - 1, column = (place + kScale) % kScale;
        if constexpr (row >= first && row <= last) {
          const float* from = hidden + (row * kScale + column) * strides.hidden + kLanes + j;
          total = load(from + (place - column) / kScale, Whole{}) * F(last_taps[i]) + total;
        }
      });
      store(to, load(to, Whole{}) + total, Whole{});
    });
  }
}

// A channel of a row of the map, for its phases `first` to `last`; `row` counts from the first of the run.
template <int first, int last, bool is_top = false, bool is_bottom = false>
void run_channel(const Head& head, int64_t c, int64_t row, int64_t rows, const Products& products, const Strides& strides,
                 const Scratch& scratch) {
  float last_taps[kTaps];
  std::memcpy(last_taps, head.last + c * kTaps, sizeof last_taps);
  blend_rows<first, last, is_top, is_bottom>(products, strides, scratch.blended);
  blend_columns<first, last>(scratch.blended, strides, head.width, head.bias[c], scratch.hidden);
  unroll<last - first + 3>([&](auto i) LAMBDA_INLINE {
    constexpr int y = first - 1 + i;
    const int64_t line = row * kScale + y;
    if (line >= 0 && line < rows * kScale) {
      add_channel<first, last, y>(scratch.hidden, strides, last_taps, scratch.sums + line * kScale * strides.sums);
    }
  });
}

template <class T>
void estimate_run(const Head& head, const Run& run, void* memory) {
  const InMemory<Scratch> scratch(head, memory);
  const Strides strides(head.width);
  const int64_t rows = run.end - run.begin, width = head.width, height = head.height, inputs = head.inputs;
  const int64_t before = at_least(run.begin - 2, int64_t{0}), behind = at_most(run.end + 2, height);
  const int64_t pixels_step = inputs * padded(strides.columns), products_step = kChannels * kTaps * strides.product;
  const T* image = static_cast<const T*>(head.data) + run.image * inputs * height * width;
  for (int64_t i = before; i < behind; i++) {
    pack_pixels(image + i * width, height * width, width, inputs, scratch.pixels + (i - before) * pixels_step);
  }
  std::memset(scratch.sums, 0, rows * kScale * kScale * strides.sums * sizeof(float));
  std::memset(scratch.products, 0, (behind - before) * products_step * sizeof(float));  // what lies behind a row is read
  std::memset(scratch.blended, 0, kScale * 3 * strides.product * sizeof(float));
  for (int64_t c = 0; c < head.channels; c += kChannels) {
    const int64_t channels = at_most(head.channels - c, kChannels);
    for (int64_t i = 0; i < behind - before; i++) {
      for_panels<float>(strides.columns, [&](int64_t start, auto vectors) LAMBDA_INLINE {
        multiply<vectors, float, float>(head.taps + c * kTaps * inputs, inputs, channels * kTaps,
                                        scratch.pixels + i * pixels_step + start * inputs, inputs,
                                        scratch.products + i * products_step + start, strides.product, false);
      });
    }
    for (int64_t i = at_least(run.begin - 1, int64_t{0}); i < at_most(run.end + 1, height); i++) {
      for (int64_t k = 0; k < channels; k++) {
        Products products{{}, strides.product};
        for (int64_t side = -1; side <= 1; side++) {
          const int64_t at = at_least(at_most(i + side, height - 1), int64_t{0}) - before;
          products.rows[side + 1] = scratch.products + at * products_step + k * kTaps * strides.product;
        }
        const auto run_phases = [&](auto run_row) LAMBDA_INLINE {
          run_row(head, c + k, i - run.begin, rows, products, strides, scratch);
        };
        if (i < run.begin) run_phases(run_channel<kScale - 1, kScale - 1>);
        else if (i == run.end) run_phases(run_channel<0, 0>);
        else if (height == 1) run_phases(run_channel<0, kScale - 1, true, true>);
        else if (i == 0) run_phases(run_channel<0, kScale - 1, true, false>);
        else if (i == height - 1) run_phases(run_channel<0, kScale - 1, false, true>);
        else run_phases(run_channel<0, kScale - 1>);
      }
    }
  }
  T* out = static_cast<T*>(head.out) + (run.image * height + run.begin) * kScale * kScale * width;
  for (int64_t line = 0; line < rows * kScale; line++) {
    for (int x = 0; x < kScale; x++) {
      float* sums = scratch.sums + (line * kScale + x) * strides.sums;
      for (int64_t j = 0; j < strides.sums; j += kLanes) {
        store(sums + j, F(head.max_depth) * sigmoid(load(sums + j, Whole{}) + F(head.last_bias)), Whole{});
      }
      for (int64_t j = 0; j < width; j++) store(out + (line * width + j) * kScale + x, sums[j]);
    }
  }
}

}  // namespace

const Kernels KERNELS{{bytes_of<Scratch>, BY_FLOAT(estimate_run)}};

}  // namespace cvt_kernels::depth_head

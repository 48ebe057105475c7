// The loops of the depthwise convolution with GELU on the CPU.
//
// The backward goes down a band of rows. It recomputes the convolution of a row, and from it the gradient before the
// activation, which is added to the taps' gradients at once and stays in a ring of three rows. As soon as the ring has the
// rows around one, their convolution with the taps in reverse order is the gradient of x.

#include "depthwise_conv_gelu/cpu_loops.h"

#include "depthwise_conv_gelu/rows.h"

namespace cvt_kernels::depthwise_conv_gelu {
namespace {

using conv_projection::block_size;

// The rows of x under a row of outputs, from the channel `first` on.
template <class T>
Rows<T> rows_under(const Convolution& conv, int64_t first, int64_t image, int64_t row) {
  const T* x = static_cast<const T*>(conv.x) + image * conv.batch_stride + first;
  return rows_of(x, conv.token_stride, conv.height, conv.width, row);
}

// The element of a contiguous tensor at a row's first token and the channel `first`.
int64_t offset_of(const Convolution& conv, int64_t first, int64_t image, int64_t row) {
  return (image * conv.height + row) * conv.width * conv.channels + first;
}

template <class T, Activation activation, class A = Accumulator<T>>
void forward_units(const Forward& call, int64_t begin, int64_t end, void* memory) {
  A* packed = static_cast<A*>(memory);
  const Convolution& conv = call.conv;
  const int64_t rows = conv.batch * conv.height;
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t first = unit / rows * conv.block, image = unit % rows / conv.height, row = unit % conv.height;
    if (unit == begin || unit % rows == 0) pack<T>(conv.weight, conv.bias, first, block_size(conv, first), packed);
    convolve_row<activation>(rows_under<T>(conv, first, image, row), block_size(conv, first), packed,
                             static_cast<T*>(call.out) + offset_of(conv, first, image, row), conv.channels);
  }
}

// Adds the products of n neighboring gradients and the tokens under them to the gradients of the taps and of the bias.
template <int n, class T, class Lanes, class A = Accumulator<T>>
VECTOR_INLINE void add_products(const Rows<T>& rows, int64_t column, int64_t c, const Vector<A>* gradients, A* sums,
                                Lanes lanes) {
  using F = Vector<A>;
  const auto add = [&](int parameter, F sum) LAMBDA_INLINE {
    A* to = sums + parameter * F::lanes;
    store(to, load(to, Whole{}) + sum, Whole{});
  };
  unroll<3>([&](auto y) LAMBDA_INLINE {
    if (rows.tokens[y] == nullptr) return;
    F products[3] = {0, 0, 0};
    for_tokens<n>(rows, y, column, c, lanes, [&](auto i, F token) LAMBDA_INLINE {
      unroll<n>([&](auto j) LAMBDA_INLINE {
        if constexpr (i >= j && i - j < 3) products[i - j] = products[i - j] + gradients[j] * token;
      });
    });
    unroll<3>([&](auto x) LAMBDA_INLINE { add(y * 3 + x, products[x]); });
  });
  F total = 0;
  unroll<n>([&](auto j) LAMBDA_INLINE { total = total + gradients[j]; });
  add(9, total);
}

// What a unit of the backward works with.
template <class T>
struct Unit {
  using A = Accumulator<T>;

  const Backward& call;
  int64_t first, image, top, bottom;  // its rows, without those around them
  A* packed;
  A* reversed;  // as packed: the taps in reverse order, and no bias
  A* sums;      // as packed
  A* ring;      // three rows of the gradient before the activation, in whole vectors of channels

  int64_t size() const { return block_size(call.conv, first); }
  int64_t padded() const { return (size() + kLanes<T> - 1) / kLanes<T> * kLanes<T>; }
  A* ring_row(int64_t row) const { return ring + row % 3 * call.conv.width * call.conv.block; }

  // The rows of the gradient around one; null where there is none.
  Rows<A> ring_rows(int64_t row) const {
    const auto place = [&](int64_t y) { return y < 0 || y >= call.conv.height ? nullptr : ring_row(y); };
    return {{place(row - 1), place(row), place(row + 1)}, padded(), call.conv.width};
  }
};

// Computes a row of the gradient before the activation, and adds its products unless the row is another unit's.
template <class T, Activation activation, class A = Accumulator<T>>
void fill_ring(const Unit<T>& unit, int64_t row) {
  using F = Vector<A>;
  const Convolution& conv = unit.call.conv;
  const int64_t pitch = conv.channels, padded = unit.padded();
  const T* dout = static_cast<const T*>(unit.call.dout) + offset_of(conv, unit.first, unit.image, row);
  A* out = unit.ring_row(row);
  const bool own = row >= unit.top && row < unit.bottom;
  const Rows<T> rows = rows_under<T>(conv, unit.first, unit.image, row);
  for_sums(rows, unit.size(), unit.packed, [&](int64_t column, int64_t c, F* sums, auto lanes, auto n) LAMBDA_INLINE {
    unroll<n>([&](auto j) LAMBDA_INLINE {
      const F d = load(dout + (column + j) * pitch + c, lanes);
      sums[j] = d * layer_norm_gelu::derivative<T, activation>(sums[j]);
      store(out + (column + j) * padded + c, sums[j], Whole{});
    });
    if (own) add_products<n>(rows, column, c, sums, unit.sums + c * kParameters, lanes);
  });
}

template <class T, Activation activation, class A = Accumulator<T>>
void serve(const Unit<T>& unit) {
  const Convolution& conv = unit.call.conv;
  const auto leave = [&](int64_t row) {
    T* dx = static_cast<T*>(unit.call.dx) + offset_of(conv, unit.first, unit.image, row);
    convolve_row<Activation::identity>(unit.ring_rows(row), unit.size(), unit.reversed, dx, conv.channels);
  };
  const int64_t begin = at_least<int64_t>(unit.top - 1, 0), end = at_most(unit.bottom + 1, conv.height);
  for (int64_t row = begin; row < end; row++) {
    fill_ring<T, activation>(unit, row);
    if (row > unit.top) leave(row - 1);
  }
  if (unit.bottom == conv.height) leave(unit.bottom - 1);
}

// Packs the parameters of a unit's block.
template <class T, class A = Accumulator<T>>
void pack_both(const Unit<T>& unit) {
  pack<T>(unit.call.conv.weight, unit.call.conv.bias, unit.first, unit.size(), unit.packed);
  for (int64_t c = 0; c < unit.size(); c += kLanes<T>) {
    const A* from = unit.packed + c * kParameters;
    A* to = unit.reversed + c * kParameters;
    for (int tap = 0; tap < 9; tap++) std::memcpy(to + tap * kLanes<T>, from + (8 - tap) * kLanes<T>, kLanes<T> * sizeof(A));
    std::memset(to + 9 * kLanes<T>, 0, kLanes<T> * sizeof(A));
  }
}

template <class T, Activation activation, class A = Accumulator<T>>
void backward_units(const Backward& call, int64_t begin, int64_t end, void* memory) {
  A* packed = static_cast<A*>(memory);
  const Convolution& conv = call.conv;
  const int64_t parameters = parameters_size(conv), bands = conv.batch * call.bands;
  for (int64_t index = begin; index < end; index++) {
    const int64_t place = index % bands, band = place % call.bands;
    const Unit<T> unit{call,
                       index / bands * conv.block,
                       place / call.bands,
                       conv.height * band / call.bands,
                       conv.height * (band + 1) / call.bands,
                       packed,
                       packed + parameters,
                       packed + 2 * parameters,
                       packed + 3 * parameters};
    if (index == begin || place == 0) pack_both(unit);
    std::memset(unit.sums, 0, parameters * sizeof(A));
    serve<T, activation>(unit);
    A* out = static_cast<A*>(call.sums) + place * kParameters * conv.channels + unit.first;
    conv_projection::write_sums<kLanes<T>>(unit.sums, unit.size(), kParameters, out, conv.channels);
  }
}

}  // namespace

const Kernels KERNELS{BY_GELU(forward_units), BY_GELU(backward_units)};

}  // namespace cvt_kernels::depthwise_conv_gelu

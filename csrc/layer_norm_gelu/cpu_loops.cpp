// The loops of LayerNorm and GELU on the CPU.

#include "layer_norm_gelu/cpu_loops.h"

#include "layer_norm_gelu/moments.h"

namespace cvt_kernels::layer_norm_gelu {
namespace {

// LayerNorm -------------------------------------------------------------------------------------------------

// The row x, h = x + residual, or x + shift, as accumulators: they lie in `scratch` unless x or h is of that type already.
template <class T, class A = Accumulator<T>>
const A* read(const LayerNormForward& call, int64_t offset, [[maybe_unused]] A* scratch) {
  const int64_t channels = call.channels;
  const T* x = static_cast<const T*>(call.x) + offset;
  if (call.residual != nullptr) {
    const T* residual = static_cast<const T*>(call.residual) + offset;
    T* h = static_cast<T*>(call.h) + offset;
    fill(h, channels, [&](int64_t c, auto lanes) LAMBDA_INLINE { return load(x + c, lanes) + load(residual + c, lanes); });
    x = h;
  }
  if (call.shift != nullptr) {
    const A* shift = static_cast<const A*>(call.shift);
    fill(scratch, channels, [&](int64_t c, auto lanes) LAMBDA_INLINE { return load(x + c, lanes) + load(shift + c, lanes); });
  } else if constexpr (std::is_same_v<T, A>) {
    return x;
  } else {
    fill(scratch, channels, [&](int64_t c, auto lanes) LAMBDA_INLINE { return load(x + c, lanes); });
  }
  return scratch;
}

template <class T, Activation activation, class A = Accumulator<T>>
void layer_norm_rows(const LayerNormForward& call, int64_t begin, int64_t end, void* memory) {
  using F = Vector<A>;
  A* scratch = static_cast<A*>(memory);
  const A* weight = static_cast<const A*>(call.weight);
  const A* bias = static_cast<const A*>(call.bias);
  for (int64_t row = begin; row < end; row++) {
    const int64_t offset = row * call.channels;
    const A* x = read<T>(call, offset, scratch);
    const Statistics<A> of_row = statistics(x, call.channels);
    const A rstd = 1 / std::sqrt(of_row.variance + static_cast<A>(call.eps));
    const F origin = of_row.origin, scale = rstd, shift = -of_row.shift * rstd;
    T* out = static_cast<T*>(call.out) + offset;
    for_vectors<F::lanes>(call.channels, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
      const F normal = (load(x + c, lanes) - origin) * scale + shift;
      store(out + c, activated<T, activation>(normal * load(weight + c, lanes) + load(bias + c, lanes)), lanes);
    });
    if (call.mean != nullptr) {
      static_cast<A*>(call.mean)[row] = of_row.origin + of_row.shift;
      static_cast<A*>(call.rstd)[row] = rstd;
    }
  }
}

// With n = normalized h and g = dout · activation'(n · weight + bias) · weight:
// dx = rstd · (g − mean(g) − n · mean(g · n)) + dh.
template <class T, Activation activation, class A = Accumulator<T>>
void layer_norm_backward_rows(const LayerNormBackward& call, int64_t begin, int64_t end, void* total, void* memory) {
  using F = Vector<A>;
  constexpr bool activates = activation != Activation::identity;
  const int64_t channels = call.channels;
  const A* weight = static_cast<const A*>(call.weight);
  const A* bias = static_cast<const A*>(call.bias);
  A *scratch = static_cast<A*>(memory), *dweight = static_cast<A*>(total), *dbias = dweight + channels;
  for (int64_t row = begin; row < end; row++) {
    const int64_t offset = row * channels;
    const T* h = static_cast<const T*>(call.h) + offset;
    const T* dout = static_cast<const T*>(call.dout) + offset;
    const F mean = static_cast<const A*>(call.mean)[row], rstd = static_cast<const A*>(call.rstd)[row];
    F sums[2] = {0, 0}, products[2] = {0, 0};
    for_vectors<F::lanes>(channels, [&](int64_t c, auto lanes, int i) LAMBDA_INLINE {
      const F scale = load(weight + c, lanes);
      const F normal = (load(h + c, lanes) - mean) * rstd;
      F g = load(dout + c, lanes);
      if constexpr (activates) g = g * derivative<T, activation>(normal * scale + load(bias + c, lanes));
      store(dweight + c, load(dweight + c, lanes) + g * normal, lanes);
      store(dbias + c, load(dbias + c, lanes) + g, lanes);
      g = g * scale;
      store(scratch + c, g, lanes);
      sums[i % 2] = sums[i % 2] + g;
      products[i % 2] = products[i % 2] + keep(g * normal, lanes);
    });
    const F mean_g = sum(sums[0] + sums[1]) / static_cast<A>(channels);
    const F mean_gn = sum(products[0] + products[1]) / static_cast<A>(channels);
    T* dx = static_cast<T*>(call.dx) + offset;
    const auto gradient = [&](int64_t c, auto lanes) LAMBDA_INLINE {
      return (load(scratch + c, lanes) - mean_g - (load(h + c, lanes) - mean) * rstd * mean_gn) * rstd;
    };
    if (call.dh == nullptr) {
      fill(dx, channels, gradient);
    } else {
      const T* dh = static_cast<const T*>(call.dh) + offset;
      fill(dx, channels, [&](int64_t c, auto lanes) LAMBDA_INLINE { return gradient(c, lanes) + load(dh + c, lanes); });
    }
  }
}

// GELU ------------------------------------------------------------------------------------------------------

// Calls f(i, channel, sum, lanes) for the vectors of x + bias, i being the number of their first element; without a bias,
// all rows are one.
template <class T, class Call, class G>
VECTOR_INLINE void for_sums(const Call& call, int64_t begin, int64_t end, G f) {
  using F = VectorOf<T>;
  const T* x = static_cast<const T*>(call.x);
  const auto* bias = static_cast<const Accumulator<T>*>(call.bias);
  const int64_t size = bias == nullptr ? (end - begin) * call.channels : call.channels, last = end * call.channels;
  for (int64_t first = begin * call.channels; first < last; first += size) {
    for_vectors<F::lanes>(size, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
      F sum = load(x + first + c, lanes);
      if (bias != nullptr) sum = sum + load(bias + c, lanes);
      f(first + c, c, sum, lanes);
    });
  }
}

template <class T, Activation activation>
void gelu_rows(const GeluForward& call, int64_t begin, int64_t end) {
  T* out = static_cast<T*>(call.out);
  for_sums<T>(call, begin, end, [&](int64_t i, int64_t, VectorOf<T> sum, auto lanes) LAMBDA_INLINE {
    store(out + i, activated<T, activation>(sum), lanes);
  });
}

template <class T, Activation activation, class A = Accumulator<T>>
void gelu_backward_rows(const GeluBackward& call, int64_t begin, int64_t end, void* sums) {
  const T* dout = static_cast<const T*>(call.dout);
  T* dx = static_cast<T*>(call.dx);
  A* dbias = static_cast<A*>(sums);
  for_sums<T>(call, begin, end, [&](int64_t i, int64_t c, Vector<A> sum, auto lanes) LAMBDA_INLINE {
    const Vector<A> g = load(dout + i, lanes) * derivative<T, activation>(sum);
    if (call.bias != nullptr) store(dbias + c, load(dbias + c, lanes) + g, lanes);
    store(dx + i, g, lanes);
  });
}

}  // namespace

const Kernels KERNELS{BY_ACTIVATION(layer_norm_rows), BY_ACTIVATION(layer_norm_backward_rows), BY_ACTIVATION(gelu_rows),
                      BY_ACTIVATION(gelu_backward_rows)};

}  // namespace cvt_kernels::layer_norm_gelu

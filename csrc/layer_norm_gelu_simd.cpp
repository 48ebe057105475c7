// The loops of LayerNorm and GELU on the CPU. setup.py compiles this file once per instruction set, with KERNELS naming
// the table it fills; it includes nothing whose code the linker could merge between them.

#include "layer_norm_gelu.h"

#include "half.h"

namespace cvt_kernels {
namespace {

template <class A>
struct Statistics {
  A mean;
  A correction;  // what rounding kept out of the mean
  A rstd;
};

template <class A>
struct Row {
  const A* values;
  A sum;
};

// A row as accumulators, which are converted once: the values lie in `scratch` unless they are of that type already.
// The two halves are summed side by side: one addition after the other would be the longer wait.
template <class T, class A = Accumulator<T>>
Row<A> read(const T* x, int64_t channels, [[maybe_unused]] A* scratch) {
  const int64_t half = channels / 2;
  A first = 0, second = 0;
  const A* values;
  if constexpr (std::is_same_v<T, A>) {
    values = x;
  } else {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) scratch[c] = load(x + c);
    values = scratch;
  }
#pragma omp simd reduction(+ : first, second)
  for (int64_t c = 0; c < half; c++) {
    first += values[c];
    second += values[half + c];
  }
  return {values, first + second + (channels % 2 == 0 ? A(0) : values[channels - 1])};
}

template <class T>
void add(const T* x, const T* residual, T* h, int64_t channels) {
#pragma omp simd
  for (int64_t c = 0; c < channels; c++) store(h + c, load(x + c) + load(residual + c));
}

// In two passes. The second also sums the deviations, which exact arithmetic would make 0: where the mean is large and
// the variance tiny, rounding the mean costs more than all the rest.
template <class A>
Statistics<A> statistics(const Row<A>& row, int64_t channels, A eps) {
  const A n = static_cast<A>(channels);
  const A mean = row.sum / n;
  A deviations = 0, squares = 0;
#pragma omp simd reduction(+ : deviations, squares)
  for (int64_t c = 0; c < channels; c++) {
    const A deviation = row.values[c] - mean;
    deviations += deviation;
    squares += deviation * deviation;
  }
  const A correction = deviations / n;
  const A variance = squares / n - correction * correction;
  return {mean, correction, A(1) / std::sqrt((variance < 0 ? A(0) : variance) + eps)};
}

template <class T, Activation activation, class A = Accumulator<T>>
void layer_norm_rows(const LayerNormForward& call, int64_t begin, int64_t end, A* scratch) {
  const int64_t channels = call.channels;
  const A* weight = static_cast<const A*>(call.weight);
  const A* bias = static_cast<const A*>(call.bias);
  for (int64_t row = begin; row < end; row++) {
    const int64_t offset = row * channels;
    const T* h = static_cast<const T*>(call.x) + offset;
    if (call.residual != nullptr) {
      T* sum = static_cast<T*>(call.h) + offset;
      add(h, static_cast<const T*>(call.residual) + offset, sum, channels);
      h = sum;
    }
    const Row<A> values = read(h, channels, scratch);
    const auto [mean, correction, rstd] = statistics(values, channels, static_cast<A>(call.eps));
    const A shift = -correction * rstd;
    T* out = static_cast<T*>(call.out) + offset;
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) {
      const A normal = (values.values[c] - mean) * rstd + shift;
      store(out + c, activate<activation>(normal * weight[c] + bias[c]));
    }
    static_cast<A*>(call.mean)[row] = mean + correction;
    static_cast<A*>(call.rstd)[row] = rstd;
  }
}

// With n = normalised h and g = dout · activation'(n · weight + bias) · weight:
// dx = rstd · (g − mean(g) − n · mean(g · n)) + dh.
template <class T, Activation activation, class A = Accumulator<T>>
void layer_norm_backward_rows(const LayerNormBackward& call, int64_t begin, int64_t end, A* sums, A* scratch) {
  const int64_t channels = call.channels;
  const A* weight = static_cast<const A*>(call.weight);
  const A* bias = static_cast<const A*>(call.bias);
  A* dweight = sums;
  A* dbias = sums + channels;
  for (int64_t row = begin; row < end; row++) {
    const int64_t offset = row * channels;
    const T* h = static_cast<const T*>(call.h) + offset;
    const T* dout = static_cast<const T*>(call.dout) + offset;
    const A mean = static_cast<const A*>(call.mean)[row];
    const A rstd = static_cast<const A*>(call.rstd)[row];
    A sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
    for (int64_t c = 0; c < channels; c++) {
      const A normal = (load(h + c) - mean) * rstd;
      A g = load(dout + c);
      if constexpr (activation != Activation::identity) {
        g *= activation_derivative<activation>(normal * weight[c] + bias[c]);
      }
      dweight[c] += g * normal;
      dbias[c] += g;
      g *= weight[c];
      scratch[c] = g;
      sum += g;
      product += g * normal;
    }
    sum /= static_cast<A>(channels);
    product /= static_cast<A>(channels);
    const auto gradient = [&](int64_t c) {
      return (scratch[c] - sum - (load(h + c) - mean) * rstd * product) * rstd;
    };
    T* dx = static_cast<T*>(call.dx) + offset;
    if (call.dh == nullptr) {
#pragma omp simd
      for (int64_t c = 0; c < channels; c++) store(dx + c, gradient(c));
    } else {
      const T* dh = static_cast<const T*>(call.dh) + offset;
#pragma omp simd
      for (int64_t c = 0; c < channels; c++) store(dx + c, gradient(c) + load(dh + c));
    }
  }
}

// A row is a function of its own: within the loop over rows, GCC 12 does not vectorise that of Half.
template <class T, Activation activation>
[[gnu::noinline]] void bias_gelu_row(const T* x, const Accumulator<T>* bias, T* out, int64_t channels) {
#pragma omp simd
  for (int64_t c = 0; c < channels; c++) store(out + c, activate<activation>(load(x + c) + bias[c]));
}

template <class T, Activation activation>
[[gnu::noinline]] void gelu_row(const T* x, T* out, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; i++) store(out + i, activate<activation>(load(x + i)));
}

template <class T, Activation activation>
void gelu_rows(const GeluForward& call, int64_t begin, int64_t end) {
  const int64_t channels = call.channels;
  const T* x = static_cast<const T*>(call.x);
  const auto* bias = static_cast<const Accumulator<T>*>(call.bias);
  T* out = static_cast<T*>(call.out);
  if (bias == nullptr) {
    gelu_row<T, activation>(x + begin * channels, out + begin * channels, (end - begin) * channels);
    return;
  }
  for (int64_t row = begin; row < end; row++) {
    bias_gelu_row<T, activation>(x + row * channels, bias, out + row * channels, channels);
  }
}

template <class T, Activation activation, class A = Accumulator<T>>
[[gnu::noinline]] void bias_gelu_backward_row(const T* dout, const T* x, const A* bias, T* dx, A* dbias,
                                              int64_t channels) {
#pragma omp simd
  for (int64_t c = 0; c < channels; c++) {
    const A g = load(dout + c) * activation_derivative<activation>(load(x + c) + bias[c]);
    dbias[c] += g;
    store(dx + c, g);
  }
}

template <class T, Activation activation, class A = Accumulator<T>>
void gelu_backward_rows(const GeluBackward& call, int64_t begin, int64_t end, A* dbias) {
  const int64_t channels = call.channels;
  const T* dout = static_cast<const T*>(call.dout);
  const T* x = static_cast<const T*>(call.x);
  const A* bias = static_cast<const A*>(call.bias);
  T* dx = static_cast<T*>(call.dx);
  if (bias == nullptr) {
#pragma omp simd
    for (int64_t i = begin * channels; i < end * channels; i++) {
      store(dx + i, load(dout + i) * activation_derivative<activation>(load(x + i)));
    }
    return;
  }
  for (int64_t row = begin; row < end; row++) {
    const int64_t offset = row * channels;
    bias_gelu_backward_row<T, activation>(dout + offset, x + offset, bias, dx + offset, dbias, channels);
  }
}

// From the types of a call to those of a template ----------------------------------------------------------

template <Activation activation>
using Constant = std::integral_constant<Activation, activation>;

template <class T, class F>
void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::identity: return f(T{}, Constant<Activation::identity>{});
    case Activation::none: return f(T{}, Constant<Activation::none>{});
    case Activation::tanh: return f(T{}, Constant<Activation::tanh>{});
    case Activation::quick: return f(T{}, Constant<Activation::quick>{});
  }
}

template <class F>
void with_types(DType dtype, Activation activation, F f) {
  switch (dtype) {
    case DType::float64: return with_activation<double>(activation, f);
    case DType::float32: return with_activation<float>(activation, f);
    case DType::bfloat16: return with_activation<BFloat16>(activation, f);
    case DType::float16: return with_activation<Half>(activation, f);
  }
}

void layer_norm(DType dtype, Activation activation, const LayerNormForward& call, int64_t begin, int64_t end,
                void* scratch) {
  with_types(dtype, activation, [&](auto type, auto constant) {
    using T = decltype(type);
    layer_norm_rows<T, constant.value>(call, begin, end, static_cast<Accumulator<T>*>(scratch));
  });
}

void layer_norm_backward(DType dtype, Activation activation, const LayerNormBackward& call, int64_t begin, int64_t end,
                         void* sums, void* scratch) {
  with_types(dtype, activation, [&](auto type, auto constant) {
    using T = decltype(type);
    using A = Accumulator<T>;
    layer_norm_backward_rows<T, constant.value>(call, begin, end, static_cast<A*>(sums), static_cast<A*>(scratch));
  });
}

void gelu(DType dtype, Activation activation, const GeluForward& call, int64_t begin, int64_t end) {
  with_types(dtype, activation, [&](auto type, auto constant) {
    gelu_rows<decltype(type), constant.value>(call, begin, end);
  });
}

void gelu_backward(DType dtype, Activation activation, const GeluBackward& call, int64_t begin, int64_t end,
                   void* sums) {
  with_types(dtype, activation, [&](auto type, auto constant) {
    using T = decltype(type);
    gelu_backward_rows<T, constant.value>(call, begin, end, static_cast<Accumulator<T>*>(sums));
  });
}

}  // namespace

const Kernels KERNELS{layer_norm, layer_norm_backward, gelu, gelu_backward};

}  // namespace cvt_kernels

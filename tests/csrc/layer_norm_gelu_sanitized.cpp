// Runs the loops of csrc/layer_norm_gelu/cpu_loops.cpp, without torch, over odd sizes in buffers that end where the data
// does. test_sanitized.py compiles both with AddressSanitizer and UBSan, with KERNELS naming the table. Every output starts
// as NaN and must not be NaN at the end.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common/half.h"
#include "layer_norm_gelu/cpu_loops.h"

using namespace cvt_kernels;
using namespace cvt_kernels::layer_norm_gelu;

template <class T>
std::vector<T> buffer(int64_t size, float value) {
  std::vector<T> made(size);  // size 0 has no address that may be read
  for (int64_t i = 0; i < size; i++) {
    const float x = value + 0.37f * static_cast<float>(i % 11);
    store(&made[i], static_cast<Accumulator<T>>(x));
  }
  return made;
}

template <class T>
void check(const std::vector<T>& written, const char* name) {
  for (const T& x : written) {
    if (std::isnan(load(&x))) {
      std::printf("%s: a value was not written\n", name);
      std::exit(1);
    }
  }
}

template <class T>
void run(DType dtype, Activation activation, int64_t rows, int64_t channels) {
  using A = Accumulator<T>;
  const int64_t size = rows * channels;
  const auto x = buffer<T>(size, -2), residual = buffer<T>(size, 1), dout = buffer<T>(size, -1);
  const auto weight = buffer<A>(channels, 0.5f), bias = buffer<A>(channels, -0.5f);
  enum class Addend { none, residual, shift };
  for (const auto addend : {Addend::none, Addend::residual, Addend::shift}) {
    const bool adds = addend == Addend::residual;
    const A* shift = addend == Addend::shift ? bias.data() : nullptr;
    auto h = buffer<T>(size, NAN), out = buffer<T>(size, NAN), dx = buffer<T>(size, NAN);
    auto mean = buffer<A>(rows, NAN), rstd = buffer<A>(rows, NAN);
    std::vector<A> scratch(channels), sums(2 * channels);
    const LayerNormForward forward{.x = x.data(),
                                   .residual = adds ? residual.data() : nullptr,
                                   .shift = shift,
                                   .weight = weight.data(),
                                   .bias = bias.data(),
                                   .h = h.data(),
                                   .out = out.data(),
                                   .mean = mean.data(),
                                   .rstd = rstd.data(),
                                   .rows = rows,
                                   .eps = 1e-5,
                                   .channels = channels};
    KERNELS.layer_norm(dtype, activation, forward, 0, rows, scratch.data());
    const LayerNormBackward backward{dout.data(), adds ? residual.data() : nullptr, x.data(), weight.data(), bias.data(),
                                     mean.data(), rstd.data(), dx.data(), nullptr, rows, channels};
    KERNELS.layer_norm_backward(dtype, activation, backward, 0, rows, sums.data(), scratch.data());
    if (adds) check(h, "h");
    check(out, "out of layer_norm");
    check(mean, "mean");
    check(rstd, "rstd");
    check(dx, "dx of layer_norm");
    check(sums, "dweight or dbias");
  }
  for (const A* shift : {static_cast<const A*>(nullptr), bias.data()}) {
    auto out = buffer<T>(size, NAN), dx = buffer<T>(size, NAN);
    std::vector<A> sums(channels);
    KERNELS.gelu(dtype, activation, GeluForward{x.data(), shift, out.data(), size, channels}, 0, rows);
    const GeluBackward backward{dout.data(), x.data(), shift, dx.data(), size, channels};
    KERNELS.gelu_backward(dtype, activation, backward, 0, rows, sums.data());
    check(out, "out of gelu");
    check(dx, "dx of gelu");
    check(sums, "dbias");
  }
}

int main() {
  for (const auto activation : {Activation::identity, Activation::none, Activation::tanh, Activation::quick}) {
    for (const int64_t rows : {0, 1, 5}) {
      for (const int64_t channels : {1, 3, 17, 64, 65, 385}) {
        run<double>(DType::float64, activation, rows, channels);
        run<float>(DType::float32, activation, rows, channels);
        run<BFloat16>(DType::bfloat16, activation, rows, channels);
        run<Half>(DType::float16, activation, rows, channels);
      }
    }
  }
  std::puts("done");
}

// Runs the loops of csrc/depthwise_conv_gelu/cpu_loops.cpp, without torch, over odd sizes in buffers that end where the
// data does, and compares them with the formula in double. test_sanitized.py compiles both with AddressSanitizer and UBSan,
// with KERNELS naming the table. Every output starts as NaN.
#include <cmath>
#include <cstdio>
#include <vector>

#include "../../tests/csrc/sanitized.h"
#include "depthwise_conv_gelu/cpu_loops.h"

using namespace cvt_kernels;
using namespace cvt_kernels::depthwise_conv_gelu;
using sanitized::expect_close;
using sanitized::random_buffer;

template <class T>
std::vector<T> unwritten(int64_t size) {
  std::vector<T> made(size);
  for (T& x : made) store(&x, std::nanf(""));
  return made;
}

// The image's grid; f(tap, token) is called for the tokens under the kernel at a place of it.
struct Grid {
  int64_t height, width;

  template <class F>
  void under(int64_t token, F f) const {
    for (int64_t tap = 0; tap < 9; tap++) {
      const int64_t y = token / width + tap / 3 - 1, x = token % width + tap % 3 - 1;
      if (y >= 0 && y < height && x >= 0 && x < width) f(tap, y * width + x);
    }
  }
};

template <class T>
void run(DType dtype, Grid grid, int64_t channels, int64_t block, int64_t bands, bool has_bias, double unit) {
  using A = Accumulator<T>;
  constexpr int64_t batch = 2;
  const int64_t tokens = grid.height * grid.width, size = batch * tokens * channels, blocks = (channels + block - 1) / block;
  const int64_t pitch = channels + 3;
  const auto x = random_buffer<T>(batch * tokens * pitch - 3), weight = random_buffer<T>(9 * channels, 0.5);
  const auto bias = random_buffer<T>(channels), dout = random_buffer<T>(size);
  auto out = unwritten<T>(size), dx = unwritten<T>(size);
  auto sums = unwritten<A>(batch * bands * kParameters * channels);
  const Convolution conv{x.data(),   tokens * pitch, pitch, batch, grid.height, grid.width, channels, weight.data(),
                         has_bias ? bias.data() : nullptr, block};
  const auto serve = [&](auto loops, const auto& call, int64_t units, int64_t accumulators) {
    for (int64_t unit = 0; unit < units; unit += 3) {
      const auto scratch = sanitized::memory(accumulators * sizeof(A));
      loops(dtype, Activation::none, call, unit, unit + 3 < units ? unit + 3 : units, scratch.get());
    }
  };
  serve(KERNELS.forward, Forward{conv, out.data()}, blocks * batch * grid.height, parameters_size(conv));
  serve(KERNELS.backward, Backward{conv, dout.data(), dx.data(), bands, sums.data()}, blocks * batch * bands,
        backward_size(conv));

  std::vector<double> expected_dx(size), expected(kParameters * channels), actual(kParameters * channels);
  const auto x_at = [&](int64_t image, int64_t token, int64_t c) { return load(&x[(image * tokens + token) * pitch + c]); };
  for (int64_t i = 0; i < size; i++) {
    const int64_t c = i % channels, token = i / channels % tokens, image = i / channels / tokens;
    double sum = has_bias ? load(&bias[c]) : 0;
    grid.under(token, [&](int64_t tap, int64_t from) { sum += load(&weight[c * 9 + tap]) * x_at(image, from, c); });
    const double cdf = 0.5 * std::erfc(-sum * std::sqrt(0.5));
    expect_close("out", load(&out[i]), sum * cdf, unit * (1 + std::abs(sum)));
    const double d = load(&dout[i]) * (cdf + sum * std::exp(-0.5 * sum * sum) / std::sqrt(2 * std::acos(-1.0)));
    grid.under(token, [&](int64_t tap, int64_t from) {
      expected_dx[(image * tokens + from) * channels + c] += load(&weight[c * 9 + tap]) * d;
      expected[tap * channels + c] += x_at(image, from, c) * d;
    });
    expected[9 * channels + c] += d;
  }
  for (int64_t i = 0; i < size; i++) expect_close("dx", load(&dx[i]), expected_dx[i], 8 * unit);
  for (size_t i = 0; i < sums.size(); i++) actual[i % actual.size()] += sums[i];
  const double tolerance = sizeof(T) == 8 ? 1e-11 : 1e-3;
  for (size_t i = 0; i < actual.size(); i++) expect_close("sums", actual[i], expected[i], tolerance);
}

int main() {
  for (const Grid grid : {Grid{1, 1}, Grid{1, 9}, Grid{7, 1}, Grid{5, 6}}) {
    for (const int64_t channels : {1, 17, 37}) {
      const int64_t block = channels == 37 ? 32 : 48, bands = grid.height > 4 ? 2 : 1;
      run<double>(DType::float64, grid, channels, block, bands, true, 1e-12);
      run<float>(DType::float32, grid, channels, block, bands, true, 2e-6);
      run<BFloat16>(DType::bfloat16, grid, channels, block, bands, false, 1.0 / 128);
      run<Half>(DType::float16, grid, channels, block, bands, true, 1.0 / 1024);
    }
  }
  std::printf("done\n");
}

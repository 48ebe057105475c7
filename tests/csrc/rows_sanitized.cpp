// Runs the loops of csrc/rows/cpu_loops.cpp, without torch, over odd sizes in buffers that end where the data does, and
// compares them with the formula in double. test_sanitized.py compiles both with AddressSanitizer and UBSan, with KERNELS
// naming the table.
#include <cmath>
#include <cstdio>
#include <vector>

#include "../../tests/csrc/sanitized.h"
#include "rows/cpu_loops.h"

using namespace cvt_kernels;
using namespace cvt_kernels::rows;
using sanitized::expect;
using sanitized::expect_close;
using sanitized::random_buffer;

template <class T>
double number(const std::vector<T>& values, int64_t i) {
  return load(&values[i]);
}

template <class T>
void run(DType dtype, int64_t channels, double unit) {
  using A = Accumulator<T>;
  constexpr int64_t images = 2, tokens = 5, count = 3;
  const std::vector<int64_t> index{4, -1, 0, 2, 1, -7};
  const auto x = random_buffer<T>(images * tokens * channels), branch = random_buffer<T>(images * count * channels);
  const auto weight = random_buffer<A>(channels), bias = random_buffer<A>(channels);
  std::vector<T> h(branch.size()), out(branch.size()), sums(channels);
  std::vector<A> mean(images * count), rstd(images * count), scratch(channels);
  const Gather call{.x = x.data(),
                    .image_stride = tokens * channels,
                    .token_stride = channels,
                    .index = index.data(),
                    .count = count,
                    .channels = channels,
                    .branch = branch.data(),
                    .weight = weight.data(),
                    .bias = bias.data(),
                    .eps = 0.1,
                    .h = h.data(),
                    .out = out.data(),
                    .mean = mean.data(),
                    .rstd = rstd.data()};
  KERNELS.gather_add_layer_norm(dtype, call, 0, 2, scratch.data());
  KERNELS.gather_add_layer_norm(dtype, call, 2, images * count, scratch.data());
  for (int64_t row = 0; row < images * count; row++) {
    double total = 0, squares = 0;
    for (int64_t c = 0; c < channels; c++) {
      const int64_t i = row * channels + c, token = index[row];
      const double gathered = token < 0 ? 0 : number(x, (row / count * tokens + token) * channels + c);
      expect_close("h", number(h, i), gathered + number(branch, i), 8 * unit);
      total += number(h, i);
    }
    const double average = total / channels;
    for (int64_t c = 0; c < channels; c++) squares += std::pow(number(h, row * channels + c) - average, 2);
    const double scale = 1 / std::sqrt(squares / channels + 0.1);
    expect_close("mean", mean[row], average, 1e-5);
    expect_close("rstd", rstd[row], scale, 1e-4);
    for (int64_t c = 0; c < channels; c++) {
      const double normal = (number(h, row * channels + c) - average) * scale;
      expect_close("out", number(out, row * channels + c), normal * weight[c] + bias[c], 16 * unit + 1e-4);
    }
  }
  KERNELS.add(dtype, x.data(), branch.data(), channels, sums.data());
  for (int64_t c = 0; c < channels; c++) expect_close("sum", number(sums, c), number(x, c) + number(branch, c), 8 * unit);
}

int main() {
  for (const int64_t channels : {1, 7, 16, 17, 63, 64, 65, 150}) {
    run<double>(DType::float64, channels, 1e-12);
    run<float>(DType::float32, channels, 1e-6);
    run<BFloat16>(DType::bfloat16, channels, 1.0 / 256);
    run<Half>(DType::float16, channels, 1.0 / 2048);
  }
  std::printf("done\n");
}

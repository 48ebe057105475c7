// Runs the loops of csrc/depth_head/cpu_loops.cpp, without torch, over odd sizes in buffers that end where the data does, and
// compares them with the formula in double. test_sanitized.py compiles both with AddressSanitizer and UBSan, with KERNELS naming
// the table.
#include <cmath>
#include <cstdio>
#include <vector>

#include "../../tests/csrc/sanitized.h"
#include "depth_head/cpu_loops.h"

using namespace cvt_kernels;
using namespace cvt_kernels::depth_head;
using sanitized::expect_close;
using sanitized::random_buffer;

struct Size {
  int64_t inputs, channels, height, width;
};

using Map = std::vector<double>;

Map upsampled(const Map& x, int64_t height, int64_t width) {
  Map out(4 * height * width);
  const auto place = [](int64_t i, int64_t size) { return std::fmin(std::fmax((i + 0.5) / 2 - 0.5, 0), size - 1); };
  for (int64_t i = 0; i < 2 * height; i++) {
    for (int64_t j = 0; j < 2 * width; j++) {
      for (int64_t y = 0; y < height; y++) {
        for (int64_t c = 0; c < width; c++) {
          const double down = std::fmax(0, 1 - std::abs(place(i, height) - y));
          out[i * 2 * width + j] += down * std::fmax(0, 1 - std::abs(place(j, width) - c)) * x[y * width + c];
        }
      }
    }
  }
  return out;
}

void convolve(const Map& x, int64_t height, int64_t width, const float* taps, int64_t step, Map& out) {
  for (int64_t i = 0; i < height; i++) {
    for (int64_t j = 0; j < width; j++) {
      for (int64_t tap = 0; tap < kTaps; tap++) {
        const int64_t y = i + tap / 3 - 1, c = j + tap % 3 - 1;
        if (y >= 0 && y < height && c >= 0 && c < width) out[i * width + j] += taps[tap * step] * x[y * width + c];
      }
    }
  }
}

template <class T>
void run(DType dtype, double tolerance, const Size& size, int64_t parts) {
  constexpr int64_t images = 2;
  const int64_t pixels = size.height * size.width, large = 16 * pixels;
  const auto data = random_buffer<T>(images * size.inputs * pixels);
  const auto taps = random_buffer<float>(size.channels * kTaps * size.inputs, 0.3), bias = random_buffer<float>(size.channels);
  const auto last = random_buffer<float>(size.channels * kTaps, 0.3);
  std::vector<T> out(images * large);
  const auto runs = sanitized::cut(images, size.height, parts);
  Head head{.data = data.data(), .inputs = size.inputs, .height = size.height, .width = size.width, .taps = taps.data(),
            .bias = bias.data(), .channels = size.channels, .last = last.data(), .last_bias = 0.25f, .max_depth = 2, .rows = 0,
            .out = out.data()};
  for (const Run& each : runs) head.rows = std::max(head.rows, each.end - each.begin);
  const sanitized::Memory scratch = sanitized::memory(KERNELS.scratch_bytes(head));
  for (const Run& each : runs) {
    if (each.begin < each.end) KERNELS.estimate(dtype, head, each, scratch.get());
  }
  for (int64_t image = 0; image < images; image++) {
    std::vector<Map> maps;
    for (int64_t c = 0; c < size.inputs; c++) {
      Map x(pixels);
      for (int64_t i = 0; i < pixels; i++) x[i] = load(&data[(image * size.inputs + c) * pixels + i]);
      maps.push_back(upsampled(upsampled(x, size.height, size.width), 2 * size.height, 2 * size.width));
    }
    Map depth(large, 0.25);
    for (int64_t c = 0; c < size.channels; c++) {
      Map hidden(large, bias[c]);
      for (int64_t i = 0; i < size.inputs; i++) {
        convolve(maps[i], 4 * size.height, 4 * size.width, &taps[c * kTaps * size.inputs + i], size.inputs, hidden);
      }
      for (double& x : hidden) x = std::fmax(x, 0);
      convolve(hidden, 4 * size.height, 4 * size.width, &last[c * kTaps], 1, depth);
    }
    for (int64_t i = 0; i < large; i++) {
      expect_close("a depth", load(&out[image * large + i]), 2 / (1 + std::exp(-depth[i])), tolerance);
    }
  }
}

int main() {
  const Size kSizes[] = {{1, 1, 1, 1}, {3, 5, 4, 3}, {2, 4, 1, 17}, {5, 3, 9, 1}, {2, 9, 6, 33}, {7, 2, 3, 15}, {2, 2, 2, 31}};
  for (const Size& size : kSizes) {
    for (const int64_t parts : {1, 3}) {
      run<float>(DType::float32, 1e-5, size, parts);
      run<BFloat16>(DType::bfloat16, 1e-2, size, parts);
      run<Half>(DType::float16, 2e-3, size, parts);
    }
  }
  std::printf("done\n");
}

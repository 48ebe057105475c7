// Runs the loops of csrc/segmentation_head/cpu_loops.cpp, without torch, over odd sizes in buffers that end where the data
// does, and compares them with the formula. test_sanitized.py compiles them with AddressSanitizer and UBSan.
#include "linear/cpu_loops.h"
#include "sanitized.h"
#include "segmentation_head/cpu_loops.h"

using namespace cvt_kernels;
using namespace sanitized;
using segmentation_head::Head;
using segmentation_head::Source;

constexpr int64_t kImages = 2;

struct Size {
  int64_t inputs, height, width, tiles;
};

struct Sizes {
  int64_t channels, classes, segments;
  std::vector<Size> maps;
};

// A map with its weight, and the memory that they lie in. Pixels lie further apart than their channels.
template <class T>
struct Made {
  Source source;
  std::vector<T> pixels, weight;
  std::vector<float> product;
  Memory packed;

  Made(DType dtype, const Size& size, int64_t channels, const float* bias) {
    source.column_step = size.inputs + 3, source.row_step = size.width * source.column_step + 1;
    source.image_step = size.height * source.row_step + 5;
    source.height = size.height, source.width = size.width;
    const int64_t last = (size.height - 1) * source.row_step + (size.width - 1) * source.column_step + size.inputs;
    pixels = random_buffer<T>((kImages - 1) * source.image_step + last);
    weight = random_buffer<T>(channels * size.inputs, 0.5);
    product.resize(kImages * size.height * size.width * channels);
    packed = memory(linear::KERNELS.packed_bytes(dtype, channels, size.inputs));
    linear::KERNELS.pack(dtype, weight.data(), size.inputs, channels, size.inputs, packed.get());
    source.data = pixels.data();
    source.product = product.data();
    source.linear = {packed.get(), bias, size.inputs, channels};
  }

  double product_at(int64_t image, int64_t y, int64_t x, int64_t channel) const {
    double sum = source.linear.bias[channel];
    for (int64_t i = 0; i < source.linear.inputs; i++) {
      const int64_t step = image * source.image_step + y * source.row_step + x * source.column_step;
      sum += static_cast<double>(load(&pixels[step + i])) * load(&weight[channel * source.linear.inputs + i]);
    }
    return sum;
  }

  // Between the pixels around the center of one of a map of another size.
  double resized_at(const Source& to, int64_t image, int64_t y, int64_t x, int64_t channel) const {
    const auto place = [](int64_t i, int64_t size, int64_t from) {
      return std::fmin(std::fmax((i + 0.5) * from / size - 0.5, 0.0), from - 1.0);
    };
    const double row = place(y, to.height, source.height), column = place(x, to.width, source.width);
    double sum = 0;
    for (int64_t j = 0; j < source.height; j++) {
      for (int64_t i = 0; i < source.width; i++) {
        const double share = std::fmax(0, 1 - std::abs(row - j)) * std::fmax(0, 1 - std::abs(column - i));
        if (share > 0) sum += share * product_at(image, j, i, channel);
      }
    }
    return sum;
  }
};

template <class T>
void run(DType dtype, double tolerance, const Sizes& sizes) {
  const auto bias = random_buffer<float>(sizes.channels), classifier_bias = random_buffer<float>(sizes.classes);
  const std::vector<float> zeros(sizes.channels);
  std::vector<Made<T>> made;
  std::vector<Source> maps;
  for (const Size& size : sizes.maps) {
    made.emplace_back(dtype, size, sizes.channels, made.empty() ? bias.data() : zeros.data());
    maps.push_back(made.back().source);
  }
  const auto weight = random_buffer<T>(sizes.classes * sizes.channels, 0.2);
  const Memory packed = memory(linear::KERNELS.packed_bytes(dtype, sizes.classes, sizes.channels));
  linear::KERNELS.pack(dtype, weight.data(), sizes.channels, sizes.classes, sizes.channels, packed.get());
  const Source& first = maps[0];
  std::vector<T> out(kImages * first.height * first.width * sizes.classes);
  const Head head{maps.data(), static_cast<int64_t>(maps.size()) - 1, sizes.segments,
                  {packed.get(), classifier_bias.data(), sizes.channels, sizes.classes}, out.data()};
  for (size_t i = 1; i < maps.size(); i++) {
    const std::vector<Run> runs = cut(kImages, maps[i].height * maps[i].width, sizes.maps[i].tiles);
    maps[i].tile_rows = longest(runs);
    for (const Run& run : runs) {
      const Memory scratch = memory(segmentation_head::KERNELS.projection_bytes(dtype, maps[i]));
      segmentation_head::KERNELS.project(dtype, maps[i], run, scratch.get());
    }
  }
  for (int64_t unit = 0; unit < kImages * first.height * sizes.segments; unit++) {
    const Memory scratch = memory(segmentation_head::KERNELS.scratch_bytes(dtype, head));
    segmentation_head::KERNELS.classify(dtype, head, unit, scratch.get());
  }
  const T* actual = out.data();
  for (int64_t image = 0; image < kImages; image++) {
    for (int64_t y = 0; y < first.height; y++) {
      for (int64_t x = 0; x < first.width; x++) {
        std::vector<double> expected(classifier_bias.begin(), classifier_bias.end());
        for (int64_t channel = 0; channel < sizes.channels; channel++) {
          double sum = made[0].product_at(image, y, x, channel);
          for (size_t i = 1; i < made.size(); i++) sum += made[i].resized_at(first, image, y, x, channel);
          for (int64_t o = 0; o < sizes.classes; o++) {
            expected[o] += std::fmax(sum, 0.0) * load(&weight[o * sizes.channels + channel]);
          }
        }
        for (const double logit : expected) expect_close("a logit", load(actual++), logit, tolerance);
      }
    }
  }
}

int main() {
  const Sizes kSizes[] = {
      {1, 1, 1, {{1, 1, 1, 1}}},
      {37, 19, 1, {{5, 4, 7, 1}, {3, 2, 4, 1}}},
      {33, 5, 3, {{17, 5, 11, 1}, {4, 3, 6, 2}, {9, 2, 3, 1}, {6, 1, 1, 1}}},
      {20, 16, 2, {{3, 3, 5, 1}, {5, 3, 5, 3}, {2, 9, 40, 4}}},  // of the same size, and larger
      {64, 32, 5, {{8, 2, 5, 1}, {7, 4, 5, 20}}},                // segments and tiles of one pixel
  };
  for (const Sizes& sizes : kSizes) {
    run<float>(DType::float32, 1e-4, sizes);
    run<BFloat16>(DType::bfloat16, 0.2, sizes);
    run<Half>(DType::float16, 3e-2, sizes);
  }
  std::printf("done\n");
}

// Runs the loops of csrc/resized_argmax/cpu_loops.cpp, without torch, over odd sizes in buffers that end where the data does,
// and compares them with the formula in double. test_sanitized.py compiles both with AddressSanitizer and UBSan, with KERNELS
// naming the table.
#include <cmath>
#include <cstdio>
#include <vector>

#include "../../tests/csrc/sanitized.h"
#include "resized_argmax/cpu_loops.h"

using namespace cvt_kernels;
using namespace cvt_kernels::resized_argmax;
using sanitized::expect_close;
using sanitized::random_buffer;

struct Size {
  int64_t classes, height, width, out_height, out_width;
};

double place(int64_t i, int64_t to, int64_t from) {
  return std::fmin(std::fmax((i + 0.5) * from / to - 0.5, 0), from - 1);
}

template <class T>
void run(DType dtype, double tolerance, const Size& size) {
  constexpr int64_t images = 2;
  const auto logits = random_buffer<T>(images * size.height * size.width * size.classes);
  std::vector<int32_t> largest(images * size.height * size.width);
  std::vector<int64_t> out(images * size.out_height * size.out_width);
  const Logits call{.data = logits.data(),
                    .image_step = size.height * size.width * size.classes,
                    .row_step = size.width * size.classes,
                    .column_step = size.classes,
                    .height = size.height,
                    .width = size.width,
                    .classes = size.classes,
                    .largest = largest.data(),
                    .out_height = size.out_height,
                    .out_width = size.out_width,
                    .out = out.data()};
  for (int64_t row = 0; row < images * size.height; row++) KERNELS.classify(dtype, call, row);
  std::vector<char> scratch(KERNELS.scratch_bytes(call));
  for (int64_t row = 0; row < images * size.out_height; row++) KERNELS.resize(dtype, call, row, scratch.data());
  const int64_t* actual = out.data();
  for (int64_t image = 0; image < images; image++) {
    for (int64_t y = 0; y < size.out_height; y++) {
      for (int64_t x = 0; x < size.out_width; x++) {
        std::vector<double> resized(size.classes);
        double most = -INFINITY;
        for (int64_t c = 0; c < size.classes; c++) {
          for (int64_t j = 0; j < size.height; j++) {
            for (int64_t i = 0; i < size.width; i++) {
              const double down = std::fmax(0, 1 - std::abs(place(y, size.out_height, size.height) - j));
              const double across = std::fmax(0, 1 - std::abs(place(x, size.out_width, size.width) - i));
              const int64_t at = ((image * size.height + j) * size.width + i) * size.classes + c;
              if (down * across > 0) resized[c] += down * across * load(&logits[at]);
            }
          }
          most = std::fmax(most, resized[c]);
        }
        expect_close("the logit of a class", resized.at(*actual++), most, tolerance);
      }
    }
  }
}

int main() {
  const Size kSizes[] = {
      {1, 1, 1, 1, 1}, {1, 3, 2, 5, 7}, {5, 4, 3, 9, 11}, {16, 2, 2, 8, 8}, {33, 3, 5, 12, 20}, {70, 7, 9, 3, 4}, {19, 4, 5, 4, 5},
  };
  for (const Size& size : kSizes) {
    run<float>(DType::float32, 1e-5, size);
    run<BFloat16>(DType::bfloat16, 1e-5, size);
    run<Half>(DType::float16, 1e-5, size);
  }
  std::printf("done\n");
}

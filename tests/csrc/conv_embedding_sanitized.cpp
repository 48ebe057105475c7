// Runs the loops of csrc/conv_embedding/cpu_loops.cpp, without torch, over odd sizes in buffers that end where the data
// does, and compares them with the formula. test_sanitized.py compiles them with AddressSanitizer and UBSan.
#include "conv_embedding/cpu_loops.h"
#include "linear/cpu_loops.h"
#include "sanitized.h"

using namespace cvt_kernels;
using namespace sanitized;
using conv_embedding::Embedding;

enum class Layout { channels_first, channels_last, tokens };  // tokens: channels last, with more between the pixels

struct Sizes {
  int64_t in_channels, height, width, kernel, stride, padding, channels, tiles;
  Layout layout;
  bool class_token;
};

// The position of a pixel's channel in the weight's inputs.
int64_t input_at(const Embedding& call, int64_t c, int64_t y, int64_t x) {
  return (y * call.kernel + x) * call.in_channels + c;
}

template <class T>
std::vector<double> convolution(const Embedding& call, const std::vector<T>& weight, int64_t image, int64_t token) {
  const int64_t top = token / call.out_width * call.stride - call.padding;
  const int64_t left = token % call.out_width * call.stride - call.padding;
  const T* pixels = static_cast<const T*>(call.image) + image * call.image_step;
  std::vector<double> out(call.linear.bias, call.linear.bias + call.linear.outputs);
  for (int64_t c = 0; c < call.in_channels; c++) {
    for (int64_t y = 0; y < call.kernel; y++) {
      for (int64_t x = 0; x < call.kernel; x++) {
        if (top + y < 0 || top + y >= call.height || left + x < 0 || left + x >= call.width) continue;
        const double pixel =
            load(pixels + c * call.channel_step + (top + y) * call.row_step + (left + x) * call.column_step);
        for (int64_t o = 0; o < call.linear.outputs; o++) {
          out[o] += pixel * load(&weight[o * call.linear.inputs + input_at(call, c, y, x)]);
        }
      }
    }
  }
  return out;
}

void layer_norm(std::vector<double>& row, const Norm& norm) {
  double mean = 0, variance = 0;
  for (const double x : row) mean += x / row.size();
  for (const double x : row) variance += (x - mean) * (x - mean) / row.size();
  for (size_t i = 0; i < row.size(); i++) {
    row[i] = (row[i] - mean) / std::sqrt(variance + norm.eps) * norm.weight[i] + norm.bias[i];
  }
}

template <class T>
void compare(const Embedding& call, const std::vector<T>& weight, const std::vector<T>& out, double tolerance) {
  const int64_t channels = call.linear.outputs, pixels = call.out_height * call.out_width;
  const T* actual = out.data();
  for (int64_t image = 0; image < call.images; image++) {
    for (int64_t o = 0; call.class_token != nullptr && o < channels; o++) {
      expect_close("a class token", load(actual++), call.class_token[o], tolerance);
    }
    for (int64_t token = 0; token < pixels; token++) {
      std::vector<double> expected = convolution(call, weight, image, token);
      layer_norm(expected, call.norm);
      for (const double x : expected) expect_close("a token", load(actual++), x, tolerance);
    }
  }
}

template <class T>
void run(DType dtype, double tolerance, const Sizes& sizes) {
  const int64_t channels = sizes.channels, inputs = sizes.in_channels * sizes.kernel * sizes.kernel;
  Embedding call{};
  call.images = 2;
  call.in_channels = sizes.in_channels, call.height = sizes.height, call.width = sizes.width;
  call.kernel = sizes.kernel, call.stride = sizes.stride, call.padding = sizes.padding;
  call.out_height = (sizes.height + 2 * sizes.padding - sizes.kernel) / sizes.stride + 1;
  call.out_width = (sizes.width + 2 * sizes.padding - sizes.kernel) / sizes.stride + 1;
  const bool channels_last = sizes.layout != Layout::channels_first;
  call.channel_step = channels_last ? 1 : sizes.height * sizes.width;
  call.column_step = channels_last ? sizes.in_channels + (sizes.layout == Layout::tokens ? 3 : 0) : 1;
  call.row_step = sizes.width * call.column_step;
  call.image_step = sizes.in_channels * sizes.height * sizes.width + 5;
  if (channels_last) call.image_step = sizes.height * call.row_step + 5;
  const int64_t last = (sizes.in_channels - 1) * call.channel_step + (sizes.height - 1) * call.row_step +
                       (sizes.width - 1) * call.column_step;
  const auto image = random_buffer<T>(call.image_step + last + 1), weight = random_buffer<T>(channels * inputs);
  const auto bias = random_buffer<float>(channels), norm_weight = random_buffer<float>(channels),
             norm_bias = random_buffer<float>(channels), class_token = random_buffer<float>(channels);
  const Memory packed = memory(linear::KERNELS.packed_bytes(dtype, channels, inputs));
  linear::KERNELS.pack(dtype, weight.data(), inputs, channels, inputs, packed.get());
  call.image = image.data();
  call.linear = {packed.get(), bias.data(), inputs, channels};
  call.norm = {norm_weight.data(), norm_bias.data(), 0.1f};
  call.class_token = sizes.class_token ? class_token.data() : nullptr;
  std::vector<T> out(call.images * (call.out_height * call.out_width + sizes.class_token) * channels);
  call.out = out.data();
  const Memory pixels = memory(call.images * conv_embedding::KERNELS.pixel_bytes(dtype, call));
  call.pixels = pixels.get();
  for (int64_t row = 0; row < call.images * call.height && conv_embedding::KERNELS.pixel_bytes(dtype, call) > 0; row++) {
    conv_embedding::KERNELS.arrange(dtype, call, row);
  }
  const std::vector<Run> runs = cut(call.images, call.out_height * call.out_width, sizes.tiles);
  call.tile_rows = longest(runs);
  for (const Run& run : runs) {
    const Memory scratch = memory(conv_embedding::KERNELS.scratch_bytes(dtype, call));
    conv_embedding::KERNELS.embed(dtype, call, run, scratch.get());
  }
  compare(call, weight, out, tolerance);
}

int main() {
  constexpr Sizes kSizes[] = {
      {1, 1, 1, 1, 1, 0, 1, 1, Layout::channels_first, true},
      {3, 9, 8, 7, 4, 2, 37, 1, Layout::channels_first, false},
      {3, 5, 7, 7, 1, 3, 16, 2, Layout::channels_last, true},  // the kernel reaches beyond both sides
      {5, 6, 11, 3, 2, 1, 33, 3, Layout::channels_last, false},
      {130, 4, 3, 3, 2, 1, 18, 2, Layout::channels_first, false},  // more inputs than are summed at a time
      {17, 4, 5, 3, 2, 1, 19, 6, Layout::tokens, true},
      {2, 3, 3, 2, 3, 2, 50, 2, Layout::tokens, false},  // a token that sees nothing of the image
  };
  for (const Sizes& sizes : kSizes) {
    run<float>(DType::float32, 1e-4, sizes);
    run<BFloat16>(DType::bfloat16, 4e-2, sizes);
    run<Half>(DType::float16, 6e-3, sizes);
  }
  std::printf("done\n");
}

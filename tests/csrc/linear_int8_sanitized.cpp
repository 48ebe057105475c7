// Runs the loops of csrc/linear_int8 over odd sizes, without torch, in buffers that end where the data does, and compares
// them with the formula. test_sanitized.py compiles them with AddressSanitizer and UBSan. With -DKERNELS_TILES the products
// pass through emulated tiles of AMX, whose arithmetic is tested too.
#include "linear_int8/cpu_loops.h"
#include "common/tiles.h"
#include "sanitized.h"

using namespace cvt_kernels;
using namespace sanitized;
using linear_int8::KERNELS;
using linear_int8::kPanel;

template <class N>
N random_integer() {
  return static_cast<N>(std::lround(random_number() * 63.5));
}

// A weight of random numbers, packed.
struct Weight {
  int64_t outputs, inputs;
  std::vector<int8_t> numbers;
  Memory packed;

  Weight(int64_t outputs, int64_t inputs)
      : outputs(outputs), inputs(inputs), numbers(outputs * inputs),
        packed(memory(KERNELS.packed_bytes(outputs, inputs))) {
    for (int8_t& number : numbers) number = random_integer<int8_t>();
    KERNELS.pack(numbers.data(), outputs, inputs, packed.get());
  }

  // Compares the products of rows, which lie as the instruction set wants, with those of the numbers that they stand for.
  void check(const char* what, const void* rows, const std::vector<int8_t>& of_rows) const {
    const int64_t count = of_rows.size() / inputs;
    std::vector<int32_t> sums(count * kPanel);
    for (int64_t begin = 0; begin < outputs; begin += kPanel) {
      KERNELS.multiply(rows, count, packed.get(), inputs, begin, sums.data(), kPanel);
      for (int64_t i = 0; i < count * kPanel; i++) {
        const int64_t output = begin + i % kPanel, row = i / kPanel;
        int64_t sum = 0;
        for (int64_t j = 0; j < inputs && output < outputs; j++) {
          sum += of_rows[row * inputs + j] * numbers[output * inputs + j];
        }
        expect(what, sums[i] == sum);
      }
    }
  }
};

std::vector<int8_t> quantized(const std::vector<float>& x, int64_t stride, int64_t rows, int64_t inputs,
                              std::vector<float>& scales) {
  std::vector<int8_t> numbers;
  for (int64_t row = 0; row < rows; row++) {
    const float* from = x.data() + row * stride;
    float largest = 0;
    for (int64_t i = 0; i < inputs; i++) largest = std::fmax(largest, std::abs(from[i]));
    const float factor = 127 / largest;
    scales.push_back(largest / 127);
    for (int64_t i = 0; i < inputs; i++) {
      const float number = std::nearbyint(from[i] * factor);
      numbers.push_back(static_cast<int8_t>(std::fmin(std::fmax(number, -127.0f), 127.0f)));
    }
  }
  return numbers;
}

void run(int64_t rows, int64_t outputs, int64_t inputs) {
  const Weight weight(outputs, inputs);
  const Memory laid_out = memory(rows * KERNELS.row_bytes(inputs));
  const int64_t stride = inputs + 3;
  const std::vector<float> x = random_buffer<float>((rows - 1) * stride + inputs);
  std::vector<float> scales(rows), expected;
  KERNELS.quantize(DType::float32, x.data(), stride, rows, inputs, laid_out.get(), scales.data());
  std::vector<int8_t> numbers = quantized(x, stride, rows, inputs, expected);
  expect("scales", scales == expected);
  weight.check("products of what was quantized", laid_out.get(), numbers);
  for (int8_t& number : numbers) number = random_integer<int8_t>();
  KERNELS.lay_out(numbers.data(), inputs, rows, inputs, laid_out.get());
  weight.check("products of what was laid out", laid_out.get(), numbers);
}

double activated(linear_int8::Activation activation, double x) {
  return activation == linear_int8::Activation::quick ? x / (1 + std::exp(-1.702 * x)) : x;
}

// What follows the products, in the dtype of a result, with a residual or without one.
template <class T>
void run_finish(DType dtype, linear_int8::Activation activation, int64_t rows, int64_t outputs, bool adds) {
  const int64_t first = 2, begin = outputs > kPanel ? kPanel : 0;
  const auto weight_scale = random_buffer<float>(outputs), bias = random_buffer<float>(outputs);
  const auto scales = random_buffer<float>(rows);
  const auto residual = random_buffer<T>((first + rows) * outputs);
  std::vector<T> out((first + rows) * outputs);
  std::vector<int32_t> sums(rows * kPanel);
  for (int32_t& sum : sums) sum = random_integer<int32_t>();
  KERNELS.finish(dtype, {weight_scale.data(), bias.data(), activation, adds ? residual.data() : nullptr, out.data(), outputs},
                 sums.data(), scales.data(), first, rows, begin);
  for (int64_t i = first * outputs; i < (first + rows) * outputs; i++) {
    const int64_t row = i / outputs - first, output = i % outputs;
    if (output < begin || output >= begin + kPanel) continue;
    const double product = static_cast<double>(sums[row * kPanel + output - begin]) * scales[row] * weight_scale[output];
    const double expected = activated(activation, product + bias[output]) + (adds ? load(&residual[i]) : 0);
    expect_close("a finished sum", load(&out[i]), expected, 1e-4 + (sizeof(T) == 2 ? 1e-2 : 1e-6) * std::abs(expected));
  }
}

// Rounded rows after a LayerNorm or GELU, within a unit of those that are rounded here.
template <class T>
void run_rows(DType dtype, int64_t rows, int64_t channels) {
  const int64_t stride = channels + 1;
  const auto x = random_buffer<T>((rows - 1) * stride + channels);
  const auto weight = random_buffer<float>(channels), bias = random_buffer<float>(channels);
  std::vector<float> row(channels), scales(rows);
  std::vector<int8_t> values(rows * channels);
  for (const bool normalizes : {true, false}) {
    const auto activation = normalizes ? linear_int8::Activation::identity : linear_int8::Activation::quick;
    const Norm norm{weight.data(), bias.data(), 1e-5f};
    const linear_int8::Rows call{x.data(), stride, channels, normalizes, norm, normalizes ? bias.data() : nullptr, activation};
    KERNELS.quantize_rows(dtype, call, 0, rows, row.data(), values.data(), scales.data());
    for (int64_t i = 0; i < rows; i++) {
      double mean = 0, variance = 0;
      for (int64_t c = 0; c < channels; c++) mean += (load(&x[i * stride + c]) + bias[c]) / channels;
      for (int64_t c = 0; c < channels; c++) {
        variance += std::pow(load(&x[i * stride + c]) + bias[c] - mean, 2) / channels;
      }
      for (int64_t c = 0; c < channels; c++) {
        const double sum = load(&x[i * stride + c]) + bias[c];
        const double normal = (sum - mean) / std::sqrt(variance + 1e-5) * weight[c] + bias[c];
        const double expected = normalizes ? normal : activated(activation, sum);
        expect_close("a rounded number", values[i * channels + c] * scales[i], expected, 0.51 * scales[i] + 1e-3);
      }
    }
  }
}

#ifdef KERNELS_TILES

// One sum of four products, as TDPBSSD makes it.
int32_t emulated_sum(int32_t before, std::vector<int8_t> a, std::vector<int8_t> b) {
  TileUse::configure({1, 1});
  int32_t sums[kTileSide] = {before}, right[kTileSide] = {};  // the other columns are 0
  std::memcpy(right, b.data(), 4);
  load_tile<0>(sums, sizeof sums);
  load_tile<5>(a.data(), 0);
  load_tile<7>(right, sizeof right);
  multiply_tile<int32_t, 0, 5, 7>();
  store_tile<0>(sums, sizeof sums);
  for (int i = 1; i < kTileSide; i++) expect("a column that should be 0", sums[i] == 0);
  return sums[0];
}

void check_emulation() {
  const TileUse tiles;
  expect("signs", emulated_sum(0, {-128, 127, -1, 1}, {-128, -128, 127, 2}) == 16384 - 16256 - 127 + 2);
  expect("the sum so far", emulated_sum(-5, {1, 0, 0, 1}, {3, 1, 1, 4}) == 2);
  expect("a sum that wraps", emulated_sum(0x7fffffff, {1, 0, 0, 0}, {1, 0, 0, 0}) == -0x7fffffff - 1);
}

void check_that_tiles_are_released() { expect("tiles are left in use", emulated.config.palette == 0); }

#else
void check_emulation() {}
void check_that_tiles_are_released() {}
#endif

int main() {
  check_emulation();
  for (const int64_t rows : {1, 5, 16, 17, 33, 40}) {
    for (const int64_t outputs : {1, 32, 37}) {
      for (const int64_t inputs : {1, 31, 64, 70, 132}) run(rows, outputs, inputs);
      check_that_tiles_are_released();
    }
  }
  for (const int64_t outputs : {5, 32, 43}) {
    using linear_int8::Activation;
    run_finish<float>(DType::float32, Activation::identity, 3, outputs, true);
    run_finish<BFloat16>(DType::bfloat16, Activation::quick, 3, outputs, false);
    run_finish<Half>(DType::float16, Activation::quick, 3, outputs, true);
    run_rows<float>(DType::float32, 3, outputs);
    run_rows<BFloat16>(DType::bfloat16, 3, outputs);
    run_rows<Half>(DType::float16, 3, outputs);
  }
  expect("products in tiles", KERNELS.products_are_right());
  std::printf("done\n");
}

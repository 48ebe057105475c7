// The loops for linear layers of 8-bit integers on the CPU. setup.py compiles this file once per instruction set, with
// KERNELS naming the table it fills; it includes nothing whose code the linker could merge between them.

#include "linear_int8/cpu_loops.h"

#include <cmath>
#include <cstring>

namespace cvt_kernels::linear_int8 {
namespace {

constexpr int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

int64_t row_bytes(int64_t inputs) { return round_up(inputs, 64); }

void quantize(const float* x, int64_t stride, int64_t rows, int64_t inputs, float scale, void* out, float* scales) {
  for (int64_t row = 0; row < rows; row++, x += stride) {
    int8_t* to = static_cast<int8_t*>(out) + row * row_bytes(inputs);
    std::memset(to, 0, row_bytes(inputs));
    float largest = 0;
    bool finite = true;
    for (int64_t i = 0; i < inputs; i++) {
      finite = finite && std::isfinite(x[i]);
      if (std::abs(x[i]) > largest) largest = std::abs(x[i]);
    }
    if (!finite) {
      scales[row] = NAN;
    } else if (scale == 0 && largest < kLeast) {
      scales[row] = 0;
    } else {
      const float inverse = scale == 0 ? kLimit / largest : 1 / scale;
      scales[row] = scale == 0 ? largest / kLimit : scale;
      for (int64_t i = 0; i < inputs; i++) {
        const float number = std::nearbyint(x[i] * inverse);
        to[i] = static_cast<int8_t>(number > kLimit ? kLimit : number < -kLimit ? -kLimit : number);
      }
    }
  }
}

void lay_out(const int8_t* values, int64_t stride, int64_t rows, int64_t inputs, void* out) {
  for (int64_t row = 0; row < rows; row++) {
    int8_t* to = static_cast<int8_t*>(out) + row * row_bytes(inputs);
    std::memset(to, 0, row_bytes(inputs));
    std::memcpy(to, values + row * stride, inputs);
  }
}

int64_t packed_bytes(int64_t outputs, int64_t inputs) { return round_up(outputs, kPanel) * inputs; }

void pack(const int8_t* weight, int64_t outputs, int64_t inputs, void* out) {
  std::memset(out, 0, packed_bytes(outputs, inputs));
  std::memcpy(out, weight, outputs * inputs);
}

void multiply(const void* values, int64_t rows, const void* packed, int64_t inputs, int64_t begin, int32_t* sums) {
  for (int64_t row = 0; row < rows; row++) {
    const int8_t* a = static_cast<const int8_t*>(values) + row * row_bytes(inputs);
    for (int64_t column = 0; column < kPanel; column++) {
      const int8_t* b = static_cast<const int8_t*>(packed) + (begin + column) * inputs;
      int32_t sum = 0;
      for (int64_t i = 0; i < inputs; i++) sum += a[i] * b[i];
      sums[row * kPanel + column] = sum;
    }
  }
}

}  // namespace

const Kernels KERNELS{row_bytes, quantize, lay_out, packed_bytes, pack, multiply};

}  // namespace cvt_kernels::linear_int8

// Linear layers of 8-bit integers on the CPU, and what makes such integers.

#include "common/units.h"
#include "layer_norm_gelu/operators.h"
#include "linear/packed.h"

namespace cvt_kernels::linear_int8 {
namespace {

// The most rows that are multiplied together: of more, the results lie on more pages than the CPU keeps track of.
constexpr int64_t kMostRows = 32;

// The bytes of parts of a thread's memory, each on lines of the cache of its own.
constexpr int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The rows of a tensor, which lie `stride` numbers apart.
struct Matrix {
  Tensor tensor;
  int64_t rows, columns, stride;
};

Matrix rows_of(const Tensor& x) {
  numbers_of("x", x);
  const int64_t columns = channels_of("x", x), last = x.dim() - 1, rows = x.numel() / columns;
  bool regular = columns == 1 || x.stride(last) == 1;
  int64_t stride = columns, expected = -1;  // of the next dimension; a repeated row has the stride 0
  for (int64_t i = last - 1; i >= 0; i--) {
    if (x.size(i) == 1) continue;
    if (expected < 0) stride = x.stride(i);
    else regular = regular && x.stride(i) == expected;
    expected = x.stride(i) * x.size(i);
  }
  return regular ? Matrix{x, rows, columns, stride} : Matrix{made_contiguous("x", x), rows, columns, columns};
}

// A vector of the channels in float32; filled with `absent` if there is none, and there are rows for it.
Tensor vector_or(const char* name, const Optional& tensor, int64_t size, float absent, const Tensor& x) {
  if (!tensor.has_value()) {
    return tensor_of({x.numel() > 0 ? size : 0}, ScalarType::Float, x, [=](int64_t) { return absent; });
  }
  linear::vector_of(name, *tensor, size);
  return *tensor;
}

const float* floats_of(const Optional& tensor) { return static_cast<const float*>(const_data_of(tensor)); }

// The sizes of x with another last one.
std::vector<int64_t> sizes_with(const Tensor& x, int64_t last) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = last;
  return sizes;
}

std::tuple<Tensor, Tensor> quantized(const Tensor& x, Rows rows) {
  const DType dtype = linear::served_dtype("x", x);
  const Matrix matrix = rows_of(x);
  rows.x = matrix.tensor.const_data_ptr();
  rows.stride = matrix.stride;
  rows.channels = matrix.columns;
  const Tensor values = empty(x.sizes(), ScalarType::Char, x);
  const Tensor scales = empty(sizes_with(x, 1), ScalarType::Float, x);
  int8_t* numbers = static_cast<int8_t*>(values.mutable_data_ptr());
  float* of_rows = static_cast<float*>(scales.mutable_data_ptr());
  const int64_t bytes = matrix.columns * sizeof(float);
  parallel_for_with_scratch(matrix.rows, grain_of(matrix.columns), bytes, [&](int64_t begin, int64_t end, char* scratch) {
    kernels().quantize_rows(dtype, rows, begin, end, reinterpret_cast<float*>(scratch), numbers, of_rows);
  });
  return {values, scales};
}

std::tuple<Tensor, Tensor> quantize_rows(const Tensor& x) { return quantized(x, {}); }

std::tuple<Tensor, Tensor> layer_norm_quantize(const Tensor& x, const Optional& weight, const Optional& bias, double eps,
                                               const Optional& shift) {
  const int64_t channels = channels_of("x", x);
  numbers_of("x", x);
  const Tensor norm_weight = vector_or("weight", weight, channels, 1, x), norm_bias = vector_or("bias", bias, channels, 0, x);
  expect_eps("eps", eps);
  if (shift.has_value()) linear::vector_of("shift", *shift, channels);
  return quantized(x, {.normalizes = true,
                       .norm = {floats_of(norm_weight), floats_of(norm_bias), static_cast<float>(eps)},
                       .shift = floats_of(shift)});
}

std::tuple<Tensor, Tensor> gelu_quantize(const Tensor& x, const Optional& bias, const std::string& activation) {
  const int64_t channels = channels_of("x", x);
  numbers_of("x", x);
  const Tensor added = vector_or("bias", bias, channels, 0, x);
  return quantized(x, {.norm = {nullptr, floats_of(added), 0}, .activation = layer_norm_gelu::gelu_of(activation)});
}

Tensor pack_linear_int8(const Tensor& weight) {
  expect(weight.dim() == 2 && weight.scalar_type() == ScalarType::Char && weight.size(0) > 0 && weight.size(1) > 0 &&
             weight.size(1) <= kMostInputs,
         "weight", weight, "int8 (outputs, inputs) of up to ", kMostInputs, " inputs");
  const Tensor rows = made_contiguous("weight", weight);
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const Tensor out = empty({kernels().packed_bytes(outputs, inputs)}, ScalarType::Byte, weight);
  kernels().pack(static_cast<const int8_t*>(rows.const_data_ptr()), outputs, inputs, out.mutable_data_ptr());
  return out;
}

// The left factor of a call: rows of float, or of numbers with their scales.
struct Left {
  Matrix x;
  DType dtype;          // of float
  const float* scales;  // of the rows that are quantized already, or null

  // Lays out the rows from `first` on as products take them, with their scales.
  void lay_out(int64_t first, int64_t rows, void* out, float* of_rows) const {
    const char* data = static_cast<const char*>(x.tensor.const_data_ptr());
    if (scales == nullptr) {
      data += first * x.stride * (dtype == DType::float32 ? sizeof(float) : sizeof(uint16_t));
      return kernels().quantize(dtype, data, x.stride, rows, x.columns, out, of_rows);
    }
    const int8_t* numbers = reinterpret_cast<const int8_t*>(data) + first * x.stride;
    kernels().lay_out(numbers, x.stride, rows, x.columns, out);
    std::copy_n(scales + first, rows, of_rows);
  }
};

// As many parts as needed, or a few more, so that all threads have the same number.
int64_t balanced(int64_t parts, int64_t most) {
  constexpr int64_t kRounds = 8;  // from so many parts per thread on, they need not be shared evenly
  for (int64_t count = parts; count <= std::min(most, parts + threads()); count++) {
    if (count >= kRounds * threads()) break;
    if (count % threads() == 0) return count;
  }
  return parts;
}

// Computes tiles of rows, each for a group of the panels of outputs: a unit of work.
void multiply_and_finish(const Left& left, const void* packed, const Finish& finish, DType dtype) {
  const int64_t rows = left.x.rows, inputs = left.x.columns, panels = (finish.outputs + kPanel - 1) / kPanel;
  if (rows == 0) return;
  const int64_t tiles = balanced((rows + kMostRows - 1) / kMostRows, rows);
  const int64_t groups = std::min(panels, (threads() + tiles - 1) / tiles), tile_rows = (rows + tiles - 1) / tiles;
  const int64_t scale_bytes = lines(tile_rows * sizeof(float));
  const int64_t value_bytes = tile_rows * kernels().row_bytes(inputs);
  const int64_t sum_bytes = tile_rows * kPanel * sizeof(int32_t);
  const auto multiply = [&](int64_t unit, int64_t previous, char* at) {
    const int64_t tile = unit / groups, group = unit % groups;
    const int64_t first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
    float* scales = reinterpret_cast<float*>(at);
    void* values = at += scale_bytes;
    int32_t* sums = reinterpret_cast<int32_t*>(at += value_bytes);
    if (previous < 0 || previous / groups != tile) left.lay_out(first, count, values, scales);
    for (int64_t panel = panels * group / groups; panel < panels * (group + 1) / groups; panel++) {
      kernels().multiply(values, count, packed, inputs, panel * kPanel, sums, kPanel);
      kernels().finish(dtype, finish, sums, scales, first, count, panel * kPanel);
    }
  };
  for_steps({{tiles * groups, scale_bytes + value_bytes + sum_bytes, multiply}}, false);
}

Tensor linear_int8(const Tensor& x, const Optional& x_scales, const Tensor& packed, const Tensor& weight_scale,
                   const Optional& bias, const Optional& residual, const std::string& activation, ScalarType dtype) {
  const bool is_quantized = x.scalar_type() == ScalarType::Char;
  expect(is_quantized == x_scales.has_value(), "x_scales", x_scales, "them for x of int8, and none for others; x is ",
         Shown{x});
  const DType x_dtype = is_quantized ? DType::float32 : linear::served_dtype("x", x);
  expect(weight_scale.dim() == 1 && weight_scale.size(0) > 0, "weight_scale", weight_scale, "(outputs,)");
  const int64_t outputs = weight_scale.size(0), inputs = channels_of("x", x);
  const float* scale_of_weight = linear::vector_of("weight_scale", weight_scale, outputs);
  linear::expect_integers(packed, outputs, inputs);
  dtype_of("dtype", dtype);
  const Tensor out = empty(sizes_with(x, outputs), dtype, x);
  const DType out_dtype = linear::served_dtype("dtype", out);
  const Tensor added = vector_or("bias", bias, outputs, 0, x);
  const Optional summand = contiguous_like("residual", residual, out);
  Optional scales;
  if (is_quantized) {
    expect(x_scales->scalar_type() == ScalarType::Float && x_scales->numel() == x.numel() / inputs, "x_scales", *x_scales,
           "a float32 number for each row");
    scales = made_contiguous("x_scales", *x_scales);
  }
  const Left left{rows_of(x), x_dtype, floats_of(scales)};
  const Finish finish{
      .weight_scale = scale_of_weight,
      .bias = floats_of(added),
      .activation = layer_norm_gelu::activation_of(activation),
      .residual = const_data_of(summand),
      .out = out.mutable_data_ptr(),
      .outputs = outputs,
  };
  multiply_and_finish(left, packed.const_data_ptr(), finish, out_dtype);
  return out;
}

IMPLEMENT("quantize_rows", quantize_rows)
IMPLEMENT("layer_norm_quantize", layer_norm_quantize)
IMPLEMENT("gelu_quantize", gelu_quantize)
IMPLEMENT("pack_linear_int8", pack_linear_int8)
IMPLEMENT("linear_int8_packed", linear_int8)

}  // namespace
}  // namespace cvt_kernels::linear_int8

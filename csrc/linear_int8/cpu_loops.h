// The interface of the loops for linear layers of 8-bit integers on the CPU (cpu_loops.cpp). The operators of this
// folder (cpu_operators.cpp) and of transformer_block/ call them. Floats are of any dtype but float64.
//
// Numbers lie between -127 and 127. A row of activations is quantized with one scale: x ≈ scale · number. How rows and
// weights lie is the concern of an instruction set alone; the sums of their products are exact.
#pragma once

#include "layer_norm_gelu/activation.h"
#include "linear/cpu_loops.h"

namespace cvt_kernels::linear_int8 {

constexpr int64_t kPanel = 32;            // the outputs that are computed together
constexpr int64_t kMostInputs = 1 << 16;  // so that sums of products fit into 32 bits
constexpr float kLimit = 127;
// A row whose largest number is smaller counts as zeros: the reciprocal of its scale would overflow.
constexpr float kLeast = 0x1p-117f;

using layer_norm_gelu::Activation;

// Rows that are rounded to 8-bit numbers, alone or after a LayerNorm or a bias and an activation.
struct Rows {
  const void* x = nullptr;
  int64_t stride = 0, channels = 0;
  bool normalizes = false;       // whether there is a LayerNorm
  Norm norm{};                   // without it only the bias is used, and only with an activation
  const float* shift = nullptr;  // added to x before the LayerNorm
  Activation activation = Activation::identity;
};

// The part of a linear layer that follows the products: out = activation(sums · scales · weight_scale + bias) + residual.
struct Finish {
  const float* weight_scale;
  const float* bias;
  Activation activation;
  const void* residual;  // (rows, outputs) of the dtype of the result, or null
  void* out;
  int64_t outputs;
};

// The loops, compiled for one instruction set. They are for one thread, and hold no memory.
struct Kernels {
  // The bytes of a quantized row, and the distance of rows; rows begin at multiples of 64 bytes.
  int64_t (*row_bytes)(int64_t inputs);
  // Quantizes rows of a dtype that lie `stride` numbers apart. A row has the scale max |x| / 127, and its numbers are
  // x · (127 / max |x|), rounded half to even; zeros have the scale 0. A row that holds NaN or an infinity has zeros and
  // the scale NaN.
  void (*quantize)(DType, const void* x, int64_t stride, int64_t rows, int64_t inputs, void* out, float* scales);
  // Lays out rows that are quantized already and lie `stride` numbers apart, as `quantize` does.
  void (*lay_out)(const int8_t* values, int64_t stride, int64_t rows, int64_t inputs, void* out);
  // Packs a contiguous weight (outputs, inputs) into packed_bytes(outputs, inputs), with zeros up to whole panels. The
  // packed weight begins at a multiple of 64 bytes.
  int64_t (*packed_bytes)(int64_t outputs, int64_t inputs);
  void (*pack)(const int8_t* weight, int64_t outputs, int64_t inputs, void* out);
  // sums (rows, kPanel) = values · weightᵀ for the outputs from `begin` on, which is a multiple of kPanel; rows of sums lie
  // `stride` numbers apart. The thread has no tiles of AMX configured (TileUse of common/tiles.h), and has none afterwards.
  void (*multiply)(const void* values, int64_t rows, const void* packed, int64_t inputs, int64_t begin, int32_t* sums,
                   int64_t stride);
  // Quantizes activation(layer) for the next layer, as `quantize`, from the sums of all outputs, whose rows lie
  // `stride` numbers apart. `scales` are those of the layer's input, then those of the result; `row` has room for a row of
  // float.
  void (*requantize)(const Linear& layer, Activation, const int32_t* sums, int64_t stride, int64_t rows, float* row,
                     void* out, float* scales);
  // Finishes what `multiply` has made for the outputs from `begin` on, for some rows from `first` on.
  void (*finish)(DType, const Finish&, const int32_t* sums, const float* scales, int64_t first, int64_t rows, int64_t begin);
  // Quantizes the rows from `begin` to `end` into values (rows, channels) and scales (rows); `row` has room for a row of float.
  void (*quantize_rows)(DType, const Rows&, int64_t begin, int64_t end, float* row, int8_t* values, float* scales);
  // Says whether products in tiles of AMX are right in all shapes of tiles; true where there are none.
  bool (*products_are_right)();
};

DECLARE_TABLES;

}  // namespace cvt_kernels::linear_int8

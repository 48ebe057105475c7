// The common loops of both kinds of blocks. Everything has internal linkage, as in vector.h.
#pragma once

#include <initializer_list>

#include "attention/heads.h"
#include "linear/layer_loops.h"
#include "transformer_block/block.h"

namespace cvt_kernels::transformer_block {
namespace {

// If fc2 is quantized, all hidden channels of some rows are held at once.
constexpr int64_t kHiddenBytes = 256 << 10;             // of them, which stay in L2,
constexpr int64_t kFewestRows = kTiles ? kAtOnce : 24;  // but at least of so many rows

// Normalizes adjacent tokens of T into rows of factors.
template <class T, class E>
void normalize_rows(const Norm& norm, const T* tokens, int64_t rows, int64_t channels, float* copy, E* a, int64_t stride) {
  for (int64_t row = 0; row < rows; row++) {
    E* to = a + row * stride;
    normalize(norm, tokens + row * channels, channels, copy,
              [&](int64_t c, F normal, auto lanes) LAMBDA_INLINE { store(to + c, normal, lanes); });
  }
  pad_rows(a, rows, stride, channels);
}

// Takes memory for rows of the inputs of some layers, where they are quantized.
inline Rounded take_rounded(Parts& parts, int64_t rows, std::initializer_list<const Linear*> layers) {
  int64_t bytes = 0;
  for (const Linear* linear : layers) bytes = at_least(rounded_bytes(*linear), bytes);
  return {parts.take<char>(rows * bytes), parts.take<float>(bytes == 0 ? 0 : rows)};
}

// Rounds activation(fc1) for fc2, where both layers are quantized and the rows are rounded for fc1; `copy` has room for a row of
// the result.
inline void round_hidden(const AnyBlock& block, int64_t rows, int32_t* sums, int64_t stride, float* copy,
                         const Rounded& rounded) {
  const Linear& fc1 = block.fc1;
  TileUse::release();
  for (int64_t begin = 0; begin < fc1.outputs; begin += kSums) {
    fc1.integers->multiply(rounded.values, rows, fc1.weight, fc1.inputs, begin, sums + begin, stride);
  }
  fc1.integers->requantize(fc1, block.activation, sums, stride, rows, copy, rounded.values, rounded.scales);
}

inline int64_t sums_stride_of(const AnyBlock& block) { return round_up(block.channels, kColumns) + kLanes; }

// out = y + (sums + the bias of fc2), for adjacent tokens.
template <class T>
void add_fc2(const AnyBlock& block, const T* y, const float* sums, int64_t rows, T* out) {
  for (int64_t row = 0; row < rows; row++, y += block.channels, out += block.channels, sums += sums_stride_of(block)) {
    for_vectors<kLanes>(block.channels, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
      store(out + c, load(y + c, lanes) + (load(sums + c, lanes) + load(block.fc2.bias + c, lanes)), lanes);
    });
  }
}

// From the dtype of a call to the type of a template ------------------------------------------------------

inline int64_t element_bytes(DType dtype) {
  int64_t bytes = 0;
  with_element(dtype, [&](auto type) { bytes = sizeof(Element<decltype(type)>); });
  return bytes;
}

template <template <class> class Scratch, class Block>
int64_t bytes_of(DType dtype, const Block& block) {
  Parts parts(nullptr);
  with_element(dtype, [&](auto type) { Scratch<Element<decltype(type)>>(block, parts); });
  return parts.size();
}

}  // namespace
}  // namespace cvt_kernels::transformer_block

// The common loops of both kinds of blocks. Everything has internal linkage, as in vector.h.
#pragma once

#include <initializer_list>

#include "attention/attend.h"
#include "transformer_block/cpu_loops.h"

namespace cvt_kernels::transformer_block {
namespace {

// If fc2 is quantized, all hidden channels of some rows are held at once.
constexpr int64_t kHiddenBytes = 256 << 10;             // of them, which stay in L2,
constexpr int64_t kFewestRows = kTiles ? kAtOnce : 24;  // but at least of so many rows

// Rows of the inputs of some layers, with what these need besides, in a thread's memory.
template <class E>
struct Inputs {
  int64_t stride;
  E* a;
  float *tile, *copy;  // sums, and room for a row
  Rounded rounded;     // where layers are quantized

  // `most` are the most channels of a row, and those that are copied.
  Inputs(Parts& parts, int64_t rows, int64_t most, int64_t most_copied, std::initializer_list<const Linear*> layers)
      : stride(stride_of<E>(most)) {
    int64_t bytes = 0;
    for (const Linear* linear : layers) bytes = at_least(rounded_bytes(*linear), bytes);
    a = parts.take<E>(rows * stride);
    tile = parts.take<float>(rows * kTileColumns);
    copy = parts.take<float>(padded(most_copied));
    rounded = {parts.take<char>(rows * bytes), parts.take<float>(bytes == 0 ? 0 : rows)};
  }

  // The place of a row among those that are rounded for a layer.
  Rounded from_row(const Linear& linear, int64_t row) const {
    return {rounded.values + row * rounded_bytes(linear), rounded.scales + row};
  }

  // Normalizes adjacent tokens.
  template <class T>
  void normalize(const Norm& norm, const T* tokens, int64_t rows, int64_t channels) const {
    for (int64_t row = 0; row < rows; row++) {
      cvt_kernels::normalize(norm, tokens + row * channels, channels, copy, a + row * stride);
    }
    pad_rows(a, rows, stride, channels);
  }

  // The same for a layer alone, rounded where it is quantized.
  template <class T>
  void normalize(const Norm& norm, const T* tokens, int64_t rows, const Linear& linear) const {
    if (linear.integers == nullptr) return normalize(norm, tokens, rows, linear.inputs);
    for (int64_t row = 0; row < rows; row++) {
      cvt_kernels::normalize(norm, tokens + row * linear.inputs, linear.inputs, copy, copy);
      round_rows(linear, copy, 0, 1, from_row(linear, row));
    }
  }

  void round(const Linear& linear, int64_t rows) const { round_rows(linear, a, stride, rows, rounded); }

  // Computes a layer on rows that are rounded if it is quantized, for its outputs from `begin` to `end`.
  template <class G>
  VECTOR_INLINE void apply(const Linear& linear, int64_t begin, int64_t end, int64_t rows, G f) const {
    if (linear.integers != nullptr) return apply_rounded(linear, begin, end, rows, f);
    cvt_kernels::apply(linear, begin, end, a, stride, rows, tile, f);
  }

  template <class G>
  VECTOR_INLINE void apply(const Linear& linear, int64_t rows, G f) const {
    apply(linear, 0, linear.outputs, rows, f);
  }

  // The same for a quantized layer, whose input has been rounded from elsewhere.
  template <class G>
  VECTOR_INLINE void apply_rounded(const Linear& linear, int64_t begin, int64_t end, int64_t rows, G f) const {
    cvt_kernels::apply(linear, begin, end, rounded, rows, reinterpret_cast<int32_t*>(tile), f);
  }
};

// Whether fc2 takes what fc1 gives as rounded numbers.
inline bool rounds_hidden(const AnyBlock& block) { return block.fc1.integers != nullptr && block.fc2.integers != nullptr; }

inline int64_t head_dim_of(const AnyBlock& block) { return block.proj.inputs / block.heads; }
inline int64_t sums_stride_of(const AnyBlock& block) { return round_up(block.channels, kColumns) + kLanes; }

// The rows whose hidden channels are held at once, all of them if fc2 is quantized, or else in parts.
template <class E>
int64_t rows_of_hidden(const AnyBlock& block, bool rounds) {
  const int64_t bytes = rounds ? stride_of<int32_t>(block.fc1.outputs) * sizeof(int32_t)
                               : stride_of<E>(block.fc1.outputs) * sizeof(E);
  return at_least(kHiddenBytes / bytes, kFewestRows);
}

// Hidden channels of some rows behind the activation, in a thread's memory.
template <class E>
struct Hidden {
  int64_t part, stride;  // the channels that are held at once
  E* values;
  int32_t* integers;  // sums of fc1 in their place, where fc2 takes rounded numbers
  float* sums;        // of fc2

  Hidden(const AnyBlock& block, Parts& parts, int64_t rows, bool rounds) {
    const bool whole = block.fc2.integers != nullptr;
    const int64_t count = whole ? 1 : ceil_div(block.fc1.outputs, kHidden);
    part = round_up(ceil_div(block.fc1.outputs, count), kTileColumns);
    stride = rounds ? stride_of<int32_t>(part) : stride_of<E>(part);
    values = parts.take<E>(rounds ? 0 : rows * stride);
    integers = parts.take<int32_t>(rounds ? rows * stride : 0);
    sums = parts.take<float>(whole ? 0 : rows * sums_stride_of(block));
  }
};

// out = y + fc2(hidden channels), for adjacent tokens; fill(begin, end) computes some of the channels.
template <class T, class E, class G>
void add_fc2(const AnyBlock& block, const T* y, int64_t rows, const Inputs<E>& inputs, const Hidden<E>& hidden, T* out, G fill) {
  const int64_t channels = block.channels, sums_stride = sums_stride_of(block);
  for (int64_t begin = 0; begin < block.fc1.outputs; begin += hidden.part) {
    const int64_t end = at_most(block.fc1.outputs, begin + hidden.part);
    fill(begin, end);
    if (block.fc2.integers != nullptr) {
      round_rows(block.fc2, hidden.values, hidden.stride, rows, inputs.rounded);
      return inputs.apply_rounded(block.fc2, 0, channels, rows, stored_sum(y, out, channels));
    }
    pad_rows(hidden.values, rows, hidden.stride, end - begin);
    add_product(block.fc2, begin, end, hidden.values, hidden.stride, rows, hidden.sums, sums_stride, begin > 0);
  }
  for (int64_t row = 0; row < rows; row++, y += channels, out += channels) {
    const float* sums = hidden.sums + row * sums_stride;
    for_vectors<kLanes>(channels, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
      store(out + c, load(y + c, lanes) + (load(sums + c, lanes) + load(block.fc2.bias + c, lanes)), lanes);
    });
  }
}

// out = y + fc2(activation(fc1(norm2(y)))), for adjacent tokens.
template <Activation activation, class T, class E>
void add_mlp(const AnyBlock& block, const T* y, int64_t rows, const Inputs<E>& inputs, const Hidden<E>& hidden, T* out) {
  const Linear& fc1 = block.fc1;
  inputs.normalize(block.norm2, y, rows, fc1);
  if (rounds_hidden(block)) {
    TileUse::release();
    for (int64_t begin = 0; begin < fc1.outputs; begin += kSums) {
      fc1.integers->multiply(inputs.rounded.values, rows, fc1.weight, fc1.inputs, begin, hidden.integers + begin,
                             hidden.stride);
    }
    fc1.integers->requantize(fc1, activation, hidden.integers, hidden.stride, rows, inputs.copy, inputs.rounded.values,
                             inputs.rounded.scales);
    return inputs.apply_rounded(block.fc2, 0, block.channels, rows, stored_sum(y, out, block.channels));
  }
  add_fc2(block, y, rows, inputs, hidden, out, [&](int64_t begin, int64_t end) {
    inputs.apply(fc1, begin, end, rows, [&](int64_t row, int64_t c, F sums, auto lanes) LAMBDA_INLINE {
      store(hidden.values + row * hidden.stride + c - begin, layer_norm_gelu::activated<T, activation>(sums), lanes);
    });
  });
}

}  // namespace
}  // namespace cvt_kernels::transformer_block

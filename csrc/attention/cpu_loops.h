// The interface of the loops of attention on the CPU.
//
// The bias of attention by position: a number for each head and each offset from key to query, read from a table.
//
// A table (heads, H + s (Hk - 1), W + s (Wk - 1)) is packed before, so that the biases of one query (i, j) with all keys
// are neighbors: for each phase i mod s and each column j there is a plane (offsets down, columns of keys), turned around
// so that keys rise, and i / s says where in it the first row of keys is. That is a small part of the (Nq, Nkv) numbers
// that a head's matrix would have: 1/14 in the first stage of CvT-13 at 224x224. They are divided by the scale of scores
// (Scale), so that they can be added to these before they are multiplied by it, and zeros leave them as they are.
#pragma once

#include "common/instruction_sets.h"

namespace cvt_kernels::attention {

constexpr int64_t kPackedPadding = 64;  // numbers after the last one that vectors may read

// The grids of a table. A class token, key and token 0 if there is one, has no place and gets no bias.
struct PositionGrids {
  int64_t height, width, key_height, key_width, stride, class_tokens;

  int64_t table_height() const { return height + stride * (key_height - 1); }
  int64_t table_width() const { return width + stride * (key_width - 1); }
  int64_t plane_height() const { return (table_height() + stride - 1) / stride; }
  int64_t plane_size() const { return plane_height() * key_width; }
  int64_t packed_size() const { return stride * width * plane_size(); }

  // Where in the packed table of a head the biases of the query (i, j) begin.
  int64_t start_of(int64_t i, int64_t j) const {
    return (i % stride * width + j) * plane_size() + (plane_height() - key_height - i / stride) * key_width;
  }
};

// The packed table of all heads, in accumulators, and the tokens (batch, queries) that the queries are; null where there
// is a query for each token. A token outside the grid gets no bias.
struct Position {
  PositionGrids grids;
  const void* packed;
  const int64_t* rows;
};

// q (batch, queries, heads, head_dim), k or v, with the steps between neighbors in elements; channels are adjacent.
struct Strided {
  const void* data;
  int64_t batch, token, head;
};

// out = softmax(scale · q kᵀ + bias by position) v, contiguous (batch, queries, heads, head_dim).
struct Forward {
  Strided q, k, v;
  int64_t batch, queries, keys, heads, head_dim;
  double scale;
  void* out;
  const Position* position = nullptr;
};

constexpr int64_t kTile = 32;       // the most queries that share what is read of k and v: two tiles of AMX
constexpr int64_t kKeyBlock = 224;  // keys whose scores are taken together
constexpr int64_t kMaxHeadDim = 256;

static inline int64_t tiles_of(int64_t queries) { return (queries + kTile - 1) / kTile; }

// A scale in two factors: a power of two with its sign, which multiplies the queries and rounds nothing, and a positive
// one, which is left to the exponents of the softmax. So scores overflow only where their multiples by the scale do. The
// power is not so small that queries would become subnormal.
struct Scale {
  double of_queries, of_scores;
};

static inline Scale split(double scale) {
  int exponent;
  const double size = std::frexp(scale < 0 ? -scale : scale, &exponent);  // from 0.5 to 1, or 0
  if (size == 0) return {0, 1};
  const int power = exponent > -63 ? exponent - 1 : -64;
  return {std::ldexp(scale < 0 ? -1.0 : 1.0, power), std::ldexp(size, exponent - power)};
}

// The loops, compiled for one instruction set.
struct Kernels {
  // Computes tiles, from the first number to before the second; there are tiles_of(queries) per head and image.
  Loop<Forward, int64_t, int64_t> forward;
};

DECLARE_TABLES;

}  // namespace cvt_kernels::attention

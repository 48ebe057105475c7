// The interface between the operator on the CPU (cpu_operators.cpp) and its loops (cpu_loops.cpp).
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/position.h"
#include "common/half.h"
#include "common/instruction_sets.h"

namespace cvt_kernels::attention {

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
constexpr int64_t kAlignment = 64;  // of the parts of scratch, in bytes

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
  // Computes the tiles from `begin` to `end`; there are tiles_of(queries) per head and image.
  void (*forward)(DType, const Forward&, int64_t begin, int64_t end, void* scratch);
  int64_t (*scratch_bytes)(DType, const Forward&);
};

DECLARE_PRODUCT_TABLES;

}  // namespace cvt_kernels::attention

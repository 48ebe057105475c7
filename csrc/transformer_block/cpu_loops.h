// The interface between the operator on the CPU (cpu_operators.cpp) and its loops (cpu_loops.cpp), for blocks with three
// convolutions.
//
// A block is y = x + proj(attention(linear(conv(norm1(x))))), then y + fc2(activation(fc1(norm2(y)))), on tokens: a class
// token or none, then the pixels of an image row by row. It takes two steps, each cut into units that threads share: first
// the finished queries, keys and values, then all else, which goes on row by row. Where only some of an image's tokens are
// computed, it is these that have queries; keys and values are of all tokens.
#pragma once

#include <cstdint>

#include "conv_projection/cpu_loops.h"
#include "transformer_block/block.h"

namespace cvt_kernels::transformer_block {

using conv_projection::Branch;

constexpr int64_t kHeldBytes = 256 << 10;  // of the normalized rows of a band, which stay in L2

enum class Scored { none, class_token, mean };

struct Block : AnyBlock {
  void* x;  // (images, class_tokens + height · width, channels), where the result goes too
  int64_t class_tokens;
  Branch branches[3];      // their sizes only
  const float* packed[3];  // their weights and BatchNorms
  const int64_t* rows;  // (images, kept), the tokens that are computed, ascending, then -1; none if all are
  int64_t kept;
  Scored scored;       // the query whose attention to each key, summed over the heads, goes to scores (images, keys)
  float* scores;
  void* projected[3];  // (images, projected_tokens, channels of the linear layer), of element_bytes each
  int64_t band_rows;   // the most rows that a run of the first step holds
  int64_t margin;      // zeros beside the rows of a band
};

static inline int64_t tokens_of(const Block& block) { return block.class_tokens + block.height * block.width; }
static inline int64_t tokens_of(const Block& block, int branch) {
  return block.class_tokens + block.branches[branch].height * block.branches[branch].width;
}

static inline int64_t queries_of(const Block& block) { return block.rows == nullptr ? tokens_of(block) : block.kept; }
static inline int64_t projected_tokens(const Block& block, int branch) {
  return branch == 0 ? queries_of(block) : tokens_of(block, branch);
}

struct Rows {
  int64_t begin, end;
};

// The rows of a branch's output that belong to some rows of x.
static inline Rows rows_of_branch(const Block& block, const Branch& b, const Run& run) {
  return {b.height * run.begin / block.height, b.height * run.end / block.height};
}

// The rows of x from which these are computed.
static inline Rows held_rows(const Block& block, const Run& run) {
  Rows rows{block.height, 0};
  for (const Branch& b : block.branches) {
    const auto [top, bottom] = rows_of_branch(block, b, run);
    if (top == bottom) continue;
    const int64_t low = top * b.stride - b.padding;
    const int64_t high = (bottom - 1) * b.stride - b.padding + b.dilation * (b.kernel - 1) + 1;
    rows.begin = low < rows.begin ? low : rows.begin;
    rows.end = high > rows.end ? high : rows.end;
  }
  rows.begin = rows.begin < 0 ? 0 : rows.begin;
  rows.end = rows.end > block.height ? block.height : rows.end;
  return rows;
}

// The loops, compiled for one instruction set. They serve all dtypes but float64.
struct Kernels {
  // Packs a convolution and its BatchNorm into as many numbers as packed_convolution_size.
  void (*pack_convolution)(DType, const Branch&, int64_t channels, float* out);
  int64_t (*packed_convolution_size)(int64_t kernel, int64_t channels);
  int64_t (*element_bytes)(DType);  // of queries, keys and values between the steps
  int64_t (*project_bytes)(DType, const Block&);
  void (*project)(DType, const Block&, const Run&, void* scratch);
  int64_t (*attend_bytes)(DType, const Block&);
  // `previous` is the image that the thread served before with the same scratch, or -1.
  void (*attend)(DType, const Block&, const Run&, int64_t previous, void* scratch);
  // The scores of an image, after the first step.
  int64_t (*score_bytes)(DType, const Block&);
  void (*score)(DType, const Block&, int64_t image, void* scratch);
};

DECLARE_PRODUCT_TABLES;

}  // namespace cvt_kernels::transformer_block

// The interface of the loops of transformer blocks with three convolutions on the CPU.
//
// A block is y = x + proj(attention(linear(conv(norm1(x))))), then y + fc2(activation(fc1(norm2(y)))), on tokens: a class
// token or none, then the pixels of an image row by row. It takes two steps, each cut into units that threads share: first
// the finished queries, keys and values, then all else, which goes on row by row. Where only some of an image's tokens are
// computed, it is these that have queries; keys and values are of all tokens.
#pragma once

#include "attention/cpu_loops.h"
#include "conv_projection/cpu_loops.h"
#include "layer_norm_gelu/activation.h"
#include "linear/cpu_loops.h"

namespace cvt_kernels::transformer_block {

using attention::kMaxHeadDim;
using conv_projection::Branch;
using conv_projection::Reach;
using layer_norm_gelu::Activation;

constexpr int64_t kHidden = 384;  // the most hidden channels that are held at once behind the activation

// What blocks of both kinds have: those with three convolutions, and those of pyramid_cpu_loops.h.
struct AnyBlock {
  int64_t images, height, width, channels;
  Norm norm1, norm2;
  Linear linears[3], proj, fc1, fc2;
  int64_t heads;
  double scale;
  Activation activation;
  int64_t tile_rows;  // the most queries of a run, in the step with attention
};

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

// The rows of a branch's output that belong to some rows of x.
static inline Reach rows_of_branch(const Block& block, const Branch& b, const Run& run) {
  return {b.height * run.begin / block.height, b.height * run.end / block.height};
}

// The rows of x from which these are computed.
static inline Reach held_rows(const Block& block, const Run& run) {
  Reach rows{block.height, 0};
  for (const Branch& b : block.branches) {
    const auto [top, bottom] = rows_of_branch(block, b, run);
    widen(rows, &b, 1, top, bottom);
  }
  return {rows.first < 0 ? 0 : rows.first, rows.end > block.height ? block.height : rows.end};
}

// The loops, compiled for one instruction set. They serve all dtypes but float64.
struct Kernels {
  // Packs `size` channels of a convolution and its BatchNorm into as many numbers as packed_convolution_size.
  void (*pack_convolution)(DType, const Branch&, int64_t first, int64_t size, float* out);
  int64_t (*packed_convolution_size)(int64_t kernel, int64_t channels);
  int64_t (*element_bytes)(DType);  // of queries, keys and values between the steps
  Loop<Block, const Run&> project;
  Loop<Block, const Run&, int64_t> attend;  // the number is the image that the thread served before, or -1
  Loop<Block, int64_t> score;               // the scores of an image, after the first step
};

DECLARE_TABLES;

}  // namespace cvt_kernels::transformer_block

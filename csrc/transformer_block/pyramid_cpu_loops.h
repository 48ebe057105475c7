// The interface of the loops of blocks of SegFormer and PVT on the CPU (pyramid_cpu_loops.cpp).
//
// A block is y = x + proj(attention(q, k, v)), then y + fc2(activation(conv(fc1(norm2(y))))), on the tokens of an image row
// by row. Queries are of norm1(x), keys and values of what a reduction makes of it. It takes three steps, each cut into
// units that threads share: keys and values; queries and attention, up to y; and the feed-forward layers.
#pragma once

#include "transformer_block/cpu_loops.h"

namespace cvt_kernels::transformer_block::pyramids {

struct Block : AnyBlock {
  const void* x;       // (images, height · width, channels)
  const void* asking;  // the tokens that are computed, (images, queries, channels): x, or some of it without a convolution
  void* out;           // the same
  int64_t queries;
  int64_t ratio;            // of the reduction; 0 if there is none
  const Linear* reduction;  // a linear layer for each of its rows of weights, with one bias
  Norm norm_kept;
  const float* conv;  // packed; none if there is no convolution
  void *keys, *values;  // (images, kept_tokens, channels of the linear layer), of element_bytes each
  void* stream;         // y, as asking
  void* hidden;         // fc1(norm2(y)), if the second step makes it, each token's hidden_bytes; else the third does
  int64_t group_rows;   // the most keys of a run of the first step
  int64_t band_rows;    // the most rows, of mixed_width, of a run of the third step
};

// Rows of mixed_width for the third step. Where two threads share them, `taken` says how many both together have taken; one
// begins at the top, the other goes upward from the bottom.
struct Band : Run {
  int64_t* taken;  // or none
  bool upward;
};

// A side of the grid of keys and values, of the side of x.
static inline int64_t kept_side(const Block& block, int64_t side) { return block.ratio == 0 ? side : side / block.ratio; }

static inline int64_t kept_tokens(const Block& block) {
  return kept_side(block, block.height) * kept_side(block, block.width);
}
static inline int64_t tokens_of(const Block& block) { return block.height * block.width; }

// The tokens of a row of the third step: with no convolution it is one.
static inline int64_t mixed_width(const Block& block) { return block.conv == nullptr ? 1 : block.width; }

// As many rows of some tokens each as pass through a linear layer together, at least one.
static inline int64_t rows_together(int64_t width) { return width < kTileRows ? kTileRows / width : 1; }

// The loops, compiled for one instruction set. They serve all dtypes but float64.
struct Kernels {
  // Packs `size` channels of a convolution (channels, 1, 3, 3) and its bias, or null, into packed_convolution_size numbers.
  void (*pack_convolution)(DType, const void* weight, const void* bias, int64_t first, int64_t size, float* out);
  int64_t (*packed_convolution_size)(int64_t channels);
  int64_t (*hidden_bytes)(DType, const Block&);  // of a token between the second step and the third
  Loop<Block, const Run&> project;
  Loop<Block, const Run&, int64_t> attend;  // the number is the image that the thread served before, or -1
  Loop<Block, const Band&> mix;
};

DECLARE_TABLES;

}  // namespace cvt_kernels::transformer_block::pyramids

// The interface of the loops of the convolutional embedding on the CPU.
//
// The tokens of an image are the LayerNorm of its convolution, after a class token or none.
#pragma once

#include "linear/cpu_loops.h"

namespace cvt_kernels::conv_embedding {

struct Embedding {
  const void* image = nullptr;  // with the steps between neighbors in elements
  void* pixels = nullptr;       // room for pixel_bytes of each image
  int64_t image_step, channel_step, row_step, column_step;
  int64_t images = 0, in_channels, height, width;
  int64_t kernel, stride, padding;
  int64_t out_height, out_width;
  Linear linear;  // of the inputs (kernel, kernel, in_channels)
  Norm norm;
  const float* class_token;  // or null
  int64_t tile_rows = 0;     // the most tokens of a run
  void* out = nullptr;       // (images, tokens, channels)
};

// The loops, compiled for one instruction set. They serve all dtypes but float64.
struct Kernels {
  // Of the copy of an image with adjacent channels; 0 if the image itself serves.
  int64_t (*pixel_bytes)(DType, const Embedding&);
  // Copies a row of pixels; the rows of all images are counted on.
  void (*arrange)(DType, const Embedding&, int64_t row);
  Loop<Embedding, const Run&> embed;
};

DECLARE_TABLES;

}  // namespace cvt_kernels::conv_embedding

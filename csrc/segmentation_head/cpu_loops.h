// The interface of the loops of the segmentation head and of resized_argmax on the CPU.
//
// The maps of an image are multiplied to the same channels, resized to the first one and summed; a linear layer behind ReLU
// gives the logits of each pixel.
#pragma once

#include "linear/cpu_loops.h"

namespace cvt_kernels::segmentation_head {

constexpr int64_t kMostSide = 1 << 20;  // pixels in height and width, whose centers float tells apart well enough

// Maps of some images, the channels of a pixel adjacent; steps between neighbors are in elements.
struct Pixels {
  const void* data;
  int64_t image_step, row_step, column_step;
  int64_t height, width, channels;
};

struct Source : Pixels {
  Linear linear;             // that of the first map has the bias of the sum, others have zeros
  float* product = nullptr;  // room for (images, height, width, linear.outputs); not of the first map
  int64_t tile_rows = 0;     // the most pixels of a run
};

struct Head {
  const Source* maps;  // the first map, then `others` that are resized to it
  int64_t others;
  int64_t segments;  // of a row of the first map: with the rows, the units that threads share
  Linear classifier;
  void* out = nullptr;  // (images, height, width, classifier.outputs)
};

// The channels are classes.
struct Logits : Pixels {
  int32_t* largest;  // (images, height, width): the first largest class of each pixel, or -1 where a logit is not finite
  int64_t out_height, out_width;
  int64_t* out;  // (images, out_height, out_width)
};

// The loops, compiled for one instruction set. They serve all dtypes but float64.
struct Kernels {
  Loop<Source, const Run&> project;  // the product of some pixels of a map that is resized
  Loop<Head, int64_t> classify;      // the logits of a segment; the segments of all rows and images are counted on
  // Finds the largest class of each pixel of a row, then the classes of a row of the resized logits; the rows of all images
  // are counted on.
  void (*classify_row)(DType, const Logits&, int64_t row);
  Loop<Logits, int64_t> resize;
};

DECLARE_TABLES;

}  // namespace cvt_kernels::segmentation_head

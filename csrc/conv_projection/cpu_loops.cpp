// The loops of the projection on the CPU. setup.py compiles this file once per instruction set, with KERNELS naming the
// table it fills; it includes nothing whose code the linker could merge between them.
//
// Every row of x is read once, converted, and laid down in a ring of rows that stays in L1: vectors of channels one
// after the other, each with all its columns, so that neighboring pixels lie at constant distances. Zeros around the
// rows are the padding. As soon as a row is there, each branch, or sum of branches, computes the output row that it
// completes.

#include "conv_projection/convolve.h"
#include "conv_projection/training.h"

namespace cvt_kernels::conv_projection {
namespace {

// Serves one unit: reads the rows of x from the first to the last that its outputs need, and computes the outputs on the
// way.
template <class T, class A = Accumulator<T>>
void project_band(const Projection& call, int64_t first, int64_t image, int64_t band, A* zeros, const A* packed, A* line) {
  const int64_t size = block_size(call, first), plane = (call.width + 2 * call.margin) * kLanes<T>;
  const int64_t padded = (size + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
  A* ring = zeros + row_size(call);
  const T* x = pixels_of<T>(call, first, image);
  const auto rows_of = [&](const Branch& branch, int64_t part) { return branch.height * part / call.bands; };
  const auto out_of = [&](const Branch& branch, int64_t token) {
    const int64_t tokens = call.class_tokens + branch.height * branch.width;
    return static_cast<T*>(branch.out) + (image * tokens + token) * call.channels + first;
  };

  int64_t begin = call.height, end = 0;
  for (const Branch* b = call.branches; b < call.branches + call.count; b++) {
    if (b->summands == 0) continue;
    if (band == 0 && call.class_tokens) std::memcpy(out_of(*b, 0), x, size * sizeof(T));
    const int64_t top = rows_of(*b, band), bottom = rows_of(*b, band + 1);
    if (top == bottom) continue;
    const Reach reach = reach_of(b, b->summands);
    const int64_t low = top * b->stride + reach.first, high = (bottom - 1) * b->stride + reach.end;
    begin = low < begin ? low : begin;
    end = high > end ? high : end;
  }

  for (int64_t row = begin; row < end; row++) {
    if (row >= 0 && row < call.height) read_row<T>(call, first, image, row, ring);
    const A* weights = packed;
    for (const Branch* b = call.branches; b < call.branches + call.count; b++) {
      const A* own = weights;
      weights += packed_size(call, *b);
      if (b->summands == 0) continue;
      const int64_t to = output_row(*b, reach_of(b, b->summands), row);
      if (to < rows_of(*b, band) || to >= rows_of(*b, band + 1)) continue;
      T* out = out_of(*b, call.class_tokens + to * b->width);
      const bool is_sum = b->summands > 1;  // added up in `line`, and rounded once
      for (int64_t i = 0; i < b->summands; own += packed_size(call, b[i]), i++) {
        const A* rows[kMaxKernel];
        rows_under<T, const A*>(call, b[i], to, ring, zeros, rows);
        with_shape<A>(b[i], [&](auto shape) {
          if (!is_sum) convolve(shape, b[i], rows, plane, own, size, out, call.channels);
          else if (i == 0) convolve(shape, b[i], rows, plane, own, padded, line, padded);
          else convolve<A, true>(shape, b[i], rows, plane, own, padded, line, padded);
        });
      }
      for (int64_t column = 0; is_sum && column < b->width; column++) {
        for_channels<T>(size, [&](int64_t c, auto lanes) LAMBDA_INLINE {
          store(out + column * call.channels + c, load(line + column * padded + c, Whole{}), lanes);
        });
      }
    }
  }
}

// Serves units with the blocks of channels outermost: a block's weights serve all images.
template <class T, class A = Accumulator<T>>
void project_units(const Projection& call, int64_t begin, int64_t end, A* scratch) {
  const int64_t held = (call.held + 1) * row_size(call), images = call.batch * call.bands;
  std::memset(scratch, 0, held * sizeof(A));
  A *packed = scratch + held, *line = packed;
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t first = unit / images * call.block;
    if (unit == begin || unit % images == 0) line = pack_branches<T>(call, first, packed);
    project_band<T>(call, first, unit % images / call.bands, unit % call.bands, scratch, packed, line);
  }
}

void project(DType dtype, const Projection& call, int64_t begin, int64_t end, void* scratch) {
  with_type(dtype, [&]<class T>(T) { project_units<T>(call, begin, end, static_cast<Accumulator<T>*>(scratch)); });
}

}  // namespace

const Kernels KERNELS{project, statistics, sums, gradients};

}  // namespace cvt_kernels::conv_projection

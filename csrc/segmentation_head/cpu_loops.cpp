// The loops of the segmentation head on the CPU. setup.py compiles this file once per instruction set, with KERNELS naming
// the table it fills; it includes nothing whose code the linker could merge between them.
//
// The products of the smaller maps go through memory, in float32, at their own sizes. A segment of a row of pixels is then
// finished in the cache: the two rows of each product that it lies between become one; to the sums of the first map's product
// two columns of each are added as they leave the registers; behind ReLU they are the rows that the classifier multiplies.

#include "segmentation_head/cpu_loops.h"

#include "common/resize.h"
#include "linear/layer_loops.h"

namespace cvt_kernels::segmentation_head {
namespace {

// What is added to a pixel.
struct Neighbors {
  const float *left, *right;
  float weight, next_weight;
};

// Copies some pixels of an image, row by row, as factors.
template <class T, class E = Element<T>>
void copy_pixels(const Source& map, int64_t image, int64_t first, int64_t count, E* to, int64_t stride) {
  for (int64_t i = first; i < first + count; i++, to += stride) {
    const int64_t step = image * map.image_step + i / map.width * map.row_step + i % map.width * map.column_step;
    pack_row(static_cast<const T*>(map.data) + step, map.linear.inputs, reinterpret_cast<Factor<T>*>(to));
  }
}

// Products of the smaller maps --------------------------------------------------------------------------------

template <class E>
struct ProjectionScratch {
  int64_t stride;
  E* pixels;
  float* tile;

  ProjectionScratch(const Source& map, Parts& parts) {
    const int64_t rows = map.tile_rows;
    stride = stride_of<E>(map.linear.inputs);
    pixels = parts.take<E>(rows * stride);
    tile = parts.take<float>(rows * kColumns);
  }
};

template <class T, class E = Element<T>>
void project_run(const Source& map, const Run& run, void* memory) {
  const TileUse tile_use;
  Parts parts(memory);
  const ProjectionScratch<E> scratch(map, parts);
  const int64_t rows = run.end - run.begin, channels = map.linear.outputs;
  float* out = map.product + (run.image * map.height * map.width + run.begin) * channels;
  copy_pixels<T>(map, run.image, run.begin, rows, scratch.pixels, scratch.stride);
  apply(map.linear, 0, channels, scratch.pixels, scratch.stride, rows, scratch.tile,
        [&](int64_t row, int64_t c, F sums, auto lanes) LAMBDA_INLINE { store(out + row * channels + c, sums, lanes); });
}

// A segment ---------------------------------------------------------------------------------------------------

template <class T, class E = Element<T>>
struct Scratch {
  int64_t pixels_stride, hidden_stride, blended_stride;
  E *pixels, *hidden;
  float *tile, *blended;
  Neighbors* neighbors;
  T* logits;

  Scratch(const Head& head, Parts& parts) {
    const int64_t width = head.maps[0].width, rows = ceil_div(width, head.segments);
    int64_t columns = 0;  // the most of all maps from the first to the last neighbor of a segment
    for (int64_t i = 1; i <= head.others; i++) {
      columns += at_most(head.maps[i].width, rows * head.maps[i].width / width + 4);
    }
    pixels_stride = stride_of<E>(head.maps[0].linear.inputs);
    hidden_stride = stride_of<E>(head.classifier.inputs);
    blended_stride = stride_of<float>(head.classifier.inputs);
    pixels = parts.take<E>(rows * pixels_stride);
    hidden = parts.take<E>(rows * hidden_stride);
    tile = parts.take<float>(rows * kColumns);
    blended = parts.take<float>(columns * blended_stride);
    neighbors = parts.take<Neighbors>(rows * head.others);
    logits = parts.take<T>(rows * head.classifier.outputs);
  }
};

// Makes one of the two rows of each product around a row of the first map, where columns of the segment need it.
template <class T>
void blend_rows(const Head& head, int64_t image, int64_t y, int64_t first, int64_t rows, const Scratch<T>& scratch) {
  const int64_t channels = head.classifier.inputs;
  float* to = scratch.blended;
  for (int64_t i = 0; i < head.others; i++) {
    const Source& map = head.maps[i + 1];
    const Place place = place_of(y, head.maps[0].height, map.height);
    const float* product = map.product + image * map.height * map.width * channels;
    const float *above = product + place.at * map.width * channels, *below = product + place.next * map.width * channels;
    const int64_t begin = place_of(first, head.maps[0].width, map.width).at;
    int64_t end = begin;
    for (int64_t row = 0; row < rows; row++) {
      const Place column = place_of(first + row, head.maps[0].width, map.width);
      const float* left = to + (column.at - begin) * scratch.blended_stride;
      const float* right = to + (column.next - begin) * scratch.blended_stride;
      scratch.neighbors[row * head.others + i] = {left, right, column.weight, column.next_weight};
      end = column.next + 1;
    }
    for (int64_t column = begin; column < end; column++, to += scratch.blended_stride) {
      const int64_t offset = column * channels;
      for_vectors<kLanes>(channels, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
        const F top = load(above + offset + c, lanes), bottom = load(below + offset + c, lanes);
        store(to + c, top * F(place.weight) + bottom * F(place.next_weight), lanes);
      });
    }
  }
}

template <class T, class E = Element<T>>
void classify_segment(const Head& head, int64_t unit, void* memory) {
  const TileUse tile_use;
  Parts parts(memory);
  const Scratch<T> scratch(head, parts);
  const Source& map = head.maps[0];
  const int64_t line = unit / head.segments, segment = unit % head.segments;  // lines are the rows of all images
  const int64_t image = line / map.height, y = line % map.height;
  const int64_t first = map.width * segment / head.segments, rows = map.width * (segment + 1) / head.segments - first;
  const int64_t classes = head.classifier.outputs;
  copy_pixels<T>(map, image, y * map.width + first, rows, scratch.pixels, scratch.pixels_stride);
  blend_rows(head, image, y, first, rows, scratch);
  apply(map.linear, 0, map.linear.outputs, scratch.pixels, scratch.pixels_stride, rows, scratch.tile,
        [&](int64_t row, int64_t c, F sums, auto lanes) LAMBDA_INLINE {
          const Neighbors* neighbors = scratch.neighbors + row * head.others;
          for (int64_t i = 0; i < head.others; i++) {
            const auto& [left, right, weight, next_weight] = neighbors[i];
            sums = sums + load(left + c, Whole{}) * F(weight) + load(right + c, Whole{}) * F(next_weight);
          }
          store(scratch.hidden + row * scratch.hidden_stride + c, at_least(sums, F(0.0f)), lanes);
        });
  pad_rows(scratch.hidden, rows, scratch.hidden_stride, head.classifier.inputs);
  apply(head.classifier, 0, classes, scratch.hidden, scratch.hidden_stride, rows, scratch.tile,
        [&](int64_t row, int64_t c, F sums, auto lanes) LAMBDA_INLINE {
          store(scratch.logits + row * classes + c, sums, lanes);
        });
  // Written from end to end: a panel of classes at a time, each store would wait for memory.
  T* out = static_cast<T*>(head.out) + (line * map.width + first) * classes;
  std::memcpy(out, scratch.logits, rows * classes * sizeof(T));
}

int64_t projection_bytes(DType dtype, const Source& map) {
  Parts parts(nullptr);
  with_float(dtype, [&](auto type) { ProjectionScratch<Element<decltype(type)>>(map, parts); });
  return parts.size();
}

void project(DType dtype, const Source& map, const Run& run, void* scratch) {
  with_float(dtype, [&](auto type) { project_run<decltype(type)>(map, run, scratch); });
}

int64_t scratch_bytes(DType dtype, const Head& head) {
  Parts parts(nullptr);
  with_float(dtype, [&](auto type) { Scratch<decltype(type)>(head, parts); });
  return parts.size();
}

void classify(DType dtype, const Head& head, int64_t unit, void* scratch) {
  with_float(dtype, [&](auto type) { classify_segment<decltype(type)>(head, unit, scratch); });
}

}  // namespace

const Kernels KERNELS{projection_bytes, project, scratch_bytes, classify};

}  // namespace cvt_kernels::segmentation_head

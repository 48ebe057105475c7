// The loops of the segmentation head and of resized_argmax on the CPU.
//
// The products of the smaller maps go through memory, in float32, at their own sizes. A segment of a row of pixels is then
// finished in the cache: the two rows of each product that it lies between become one; to the sums of the first map's product
// two columns of each are added as they leave the registers; behind ReLU they are the rows that the classifier multiplies.

#include "segmentation_head/cpu_loops.h"

#include "linear/layer_loops.h"

namespace cvt_kernels::segmentation_head {
namespace {

// Bilinear interpolation along one side of an image, as F.interpolate has it without align_corners: the neighbors of number i of `to` among the `from` numbers that are resized to them, and their weights. They are computed
// in float as in F.interpolate, so that the same neighbors have no weight: of these NaN comes all the same.
struct Place {
  int64_t at, next;
  float weight, next_weight;
};

inline Place place_of(int64_t i, int64_t to, int64_t from) {
  if (from == to) return {i, i, 1, 0};
  const float scale = static_cast<float>(from) / static_cast<float>(to);
  const float center = at_least(scale * (static_cast<float>(i) + 0.5f) - 0.5f, 0.0f);
  const int64_t at = at_most(static_cast<int64_t>(center), from - 1);
  const float next_weight = center - static_cast<float>(at);
  return {at, at_most(at + 1, from - 1), 1 - next_weight, next_weight};
}

// What is added to a pixel.
struct Neighbors {
  const float *left, *right;
  float weight, next_weight;
};

template <class T>
const T* row_of(const Pixels& call, int64_t image, int64_t y) {
  return static_cast<const T*>(call.data) + image * call.image_step + y * call.row_step;
}

// Copies some pixels of an image, row by row, as factors.
template <class T, class E = Element<T>>
void copy_pixels(const Source& map, int64_t image, int64_t first, int64_t count, E* to, int64_t stride) {
  for (int64_t i = first; i < first + count; i++, to += stride) {
    const T* pixel = row_of<T>(map, image, i / map.width) + i % map.width * map.column_step;
    pack_row(pixel, map.linear.inputs, reinterpret_cast<Factor<T>*>(to));
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
  const InMemory<ProjectionScratch<E>> scratch(map, memory);
  const int64_t rows = run.end - run.begin, channels = map.linear.outputs;
  float* out = map.product + (run.image * map.height * map.width + run.begin) * channels;
  copy_pixels<T>(map, run.image, run.begin, rows, scratch.pixels, scratch.stride);
  apply(map.linear, 0, channels, scratch.pixels, scratch.stride, rows, scratch.tile, stored(out, channels));
}

// A segment ---------------------------------------------------------------------------------------------------

template <class E>
struct Scratch {
  int64_t pixels_stride, hidden_stride, blended_stride;
  E *pixels, *hidden;
  float *tile, *blended, *logits;
  Neighbors* neighbors;

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
    logits = parts.take<float>(rows * head.classifier.outputs);  // of any type of up to 4 bytes
  }
};

// Makes one of the two rows of each product around a row of the first map, where columns of the segment need it.
template <class E>
void blend_rows(const Head& head, int64_t image, int64_t y, int64_t first, int64_t rows, const Scratch<E>& scratch) {
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
  const InMemory<Scratch<E>> scratch(head, memory);
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
  T* logits = reinterpret_cast<T*>(scratch.logits);
  apply(head.classifier, 0, classes, scratch.hidden, scratch.hidden_stride, rows, scratch.tile, stored(logits, classes));
  // Written from end to end: a panel of classes at a time, each store would wait for memory.
  std::memcpy(static_cast<T*>(head.out) + (line * map.width + first) * classes, logits, rows * classes * sizeof(T));
}

// The largest class of a pixel between others -----------------------------------------------------------------------
//
// A class that is the largest in all four neighbors of a pixel is the largest in between, since the weights are not negative:
// such pixels, most of a photograph's, need no interpolation. Where a logit is not finite, all are interpolated, so that the
// same pixels have NaN as by F.interpolate.

using I = Vector<uint32_t>;

constexpr uint32_t kNone = 0xffffffffu;

// The first largest class of a pixel, and whether all of its numbers are finite; if not, the class is not right.
struct Largest {
  uint32_t index;
  bool is_finite;
};

// `value(c, lanes)` are the numbers from class c on.
template <class G>
VECTOR_INLINE Largest largest_of(int64_t classes, G value) {
  I lane;
  for (int i = 0; i < I::lanes; i++) lane.v[i] = i;
  F best = -INFINITY, zeros = 0.0f;
  I at = 0u;
  const auto compare = [&](int64_t c, auto lanes) LAMBDA_INLINE {
    const F given = value(c, lanes);
    zeros = zeros + given * F(0.0f);  // NaN from NaN and from infinities
    const F x = keep(given, lanes, F(-INFINITY));
    const auto is_larger = best < x;
    best = select(is_larger, x, best);
    at = select(is_larger, lane + I(static_cast<uint32_t>(c)), at);
  };
  int64_t c = 0;
  for (; c + F::lanes <= classes; c += F::lanes) compare(c, Whole{});
  if (c < classes) compare(c, Part{classes - c});
  const F most = largest(best);
  const I first = select(best == most, at, I(kNone));
  return {reduce<uint32_t>(first.v, [](auto a, auto b) LAMBDA_INLINE { return a < b ? a : b; }), sum(zeros) == 0.0f};
}

// The same for numbers of which some are not finite: NaN is the largest, as for torch.argmax.
int64_t largest_with_nan(int64_t classes, const float* value) {
  int64_t best = 0;
  for (int64_t c = 0; c < classes && value[best] == value[best]; c++) {
    if (!(value[c] <= value[best])) best = c;
  }
  return best;
}

template <class T>
void classify_row(const Logits& call, int64_t row) {
  const T* pixel = row_of<T>(call, row / call.height, row % call.height);
  int32_t* out = call.largest + row * call.width;
  for (int64_t x = 0; x < call.width; x++, pixel += call.column_step) {
    const Largest found = largest_of(call.channels, [&](int64_t c, auto lanes) LAMBDA_INLINE { return load(pixel + c, lanes); });
    out[x] = found.is_finite ? static_cast<int32_t>(found.index) : -1;
  }
}

template <class T>
void resize_row(const Logits& call, int64_t row, void* given) {
  float* memory = static_cast<float*>(given);
  const int64_t image = row / call.out_height, classes = call.channels;
  const Place down = place_of(row % call.out_height, call.out_height, call.height);
  const int32_t* of_image = call.largest + image * call.height * call.width;
  const int32_t *above = of_image + down.at * call.width, *below = of_image + down.next * call.width;
  const T *top = row_of<T>(call, image, down.at), *bottom = row_of<T>(call, image, down.next);
  int64_t blended[2] = {-1, -1};
  const auto column = [&](int64_t x) {  // between both rows; the last two that were asked for stay
    float* to = memory + x % 2 * padded(call.channels);
    if (blended[x % 2] == x) return to;
    blended[x % 2] = x;
    const int64_t at = x * call.column_step;
    for_vectors<F::lanes>(classes, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
      store(to + c, load(top + at + c, lanes) * F(down.weight) + load(bottom + at + c, lanes) * F(down.next_weight), lanes);
    });
    return to;
  };
  float* mixed = memory + 2 * padded(call.channels);
  int64_t* out = call.out + row * call.out_width;
  for (int64_t x = 0; x < call.out_width; x++) {
    const Place across = place_of(x, call.out_width, call.width);
    const int32_t first = above[across.at];
    if (first >= 0 && first == above[across.next] && first == below[across.at] && first == below[across.next]) {
      out[x] = first;
      continue;
    }
    const float *left = column(across.at), *right = column(across.next);
    const auto value = [&](int64_t c, auto lanes) LAMBDA_INLINE {
      return load(left + c, lanes) * F(across.weight) + load(right + c, lanes) * F(across.next_weight);
    };
    const Largest found = largest_of(classes, value);
    out[x] = found.index;
    if (found.is_finite) continue;
    for_vectors<F::lanes>(classes, [&](int64_t c, auto lanes, int) LAMBDA_INLINE { store(mixed + c, value(c, lanes), lanes); });
    out[x] = largest_with_nan(classes, mixed);
  }
}

int64_t resize_bytes(DType, const Logits& call) { return 3 * padded(call.channels) * static_cast<int64_t>(sizeof(float)); }

}  // namespace

const Kernels KERNELS{{bytes_of<ProjectionScratch>, BY_FLOAT(project_run)}, {bytes_of<Scratch>, BY_FLOAT(classify_segment)},
                      BY_FLOAT(classify_row), {resize_bytes, BY_FLOAT(resize_row)}};

}  // namespace cvt_kernels::segmentation_head

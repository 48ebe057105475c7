// The loops of resized_argmax on the CPU. setup.py compiles this file once per instruction set, with KERNELS naming the table
// it fills; it includes nothing whose code the linker could merge between them.
//
// A class that is the largest in all four neighbors of a pixel is the largest in between, since the weights are not negative:
// such pixels, most of a photograph's, need no interpolation. Where a logit is not finite, all are interpolated, so that the
// same pixels have NaN as by F.interpolate.

#include "resized_argmax/cpu_loops.h"

#include "common/resize.h"
#include "common/vector.h"

namespace cvt_kernels::resized_argmax {
namespace {

using F = Vector<float>;
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
const T* pixels_of(const Logits& call, int64_t image, int64_t y) {
  return static_cast<const T*>(call.data) + image * call.image_step + y * call.row_step;
}

template <class T>
void classify_row(const Logits& call, int64_t row) {
  const T* pixel = pixels_of<T>(call, row / call.height, row % call.height);
  int32_t* out = call.largest + row * call.width;
  for (int64_t x = 0; x < call.width; x++, pixel += call.column_step) {
    const Largest found = largest_of(call.classes, [&](int64_t c, auto lanes) LAMBDA_INLINE { return load(pixel + c, lanes); });
    out[x] = found.is_finite ? static_cast<int32_t>(found.index) : -1;
  }
}

int64_t stride_of(const Logits& call) { return (call.classes + F::lanes - 1) / F::lanes * F::lanes; }

template <class T>
void resize_row(const Logits& call, int64_t row, float* memory) {
  const int64_t image = row / call.out_height, classes = call.classes;
  const Place down = place_of(row % call.out_height, call.out_height, call.height);
  const int32_t* of_image = call.largest + image * call.height * call.width;
  const int32_t *above = of_image + down.at * call.width, *below = of_image + down.next * call.width;
  const T *top = pixels_of<T>(call, image, down.at), *bottom = pixels_of<T>(call, image, down.next);
  int64_t blended[2] = {-1, -1};
  const auto column = [&](int64_t x) {  // between both rows; the last two that were asked for stay
    float* to = memory + x % 2 * stride_of(call);
    if (blended[x % 2] == x) return to;
    blended[x % 2] = x;
    const int64_t at = x * call.column_step;
    for_vectors<F::lanes>(classes, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
      store(to + c, load(top + at + c, lanes) * F(down.weight) + load(bottom + at + c, lanes) * F(down.next_weight), lanes);
    });
    return to;
  };
  float* mixed = memory + 2 * stride_of(call);
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

void classify(DType dtype, const Logits& call, int64_t row) {
  with_float(dtype, [&](auto type) { classify_row<decltype(type)>(call, row); });
}

int64_t scratch_bytes(const Logits& call) { return 3 * stride_of(call) * static_cast<int64_t>(sizeof(float)); }

void resize(DType dtype, const Logits& call, int64_t row, void* scratch) {
  with_float(dtype, [&](auto type) { resize_row<decltype(type)>(call, row, static_cast<float*>(scratch)); });
}

}  // namespace

const Kernels KERNELS{classify, scratch_bytes, resize};

}  // namespace cvt_kernels::resized_argmax

// The loops of the convolutional embedding on the CPU. setup.py compiles this file once per instruction set, with KERNELS
// naming the table it fills; it includes nothing whose code the linker could merge between them.
//
// The pixels under the kernel are copied into rows, for a tile of tokens at a time, and multiplied with the packed weight;
// both stay in the cache. A row of sums is then normalized and written once.

#include "conv_embedding/cpu_loops.h"

#include "linear/layer_loops.h"

namespace cvt_kernels::conv_embedding {
namespace {

template <class E>
struct Scratch {
  int64_t pixels_stride, sums_stride;
  E* pixels;
  float* sums;

  Scratch(const Embedding& call, Parts& parts) {
    const int64_t rows = ceil_div(call.out_height * call.out_width, call.tiles);
    pixels_stride = stride_of<E>(call.linear.inputs);
    sums_stride = round_up(call.linear.outputs, kColumns) + kLanes;
    pixels = parts.take<E>(rows * pixels_stride);
    sums = parts.take<float>(rows * sums_stride);
  }
};

template <class T, class E>
VECTOR_INLINE void copy(const T* from, int64_t count, int64_t step, E* to) {
  if constexpr (std::is_same_v<T, E>) {
    if (step == 1) {
      for (int64_t i = 0; i < count; i++) to[i] = from[i];
      return;
    }
    for (int64_t i = 0; i < count; i++) to[i] = from[i * step];
  } else if (step == 1) {
    for_vectors<kLanes>(count, [&](int64_t i, auto lanes, int) LAMBDA_INLINE {
      store(to + i, load(from + i, lanes), lanes);
    });
  } else {
    for (int64_t i = 0; i < count; i++) to[i] = load(from + i * step);
  }
}

// The pixels of one row of the kernel that lie within the image: those from `first` to `last` of its columns.
struct Columns {
  int64_t first, last;
};

Columns columns_within(const Embedding& call, int64_t left) {
  const int64_t first = at_most(call.kernel, at_least<int64_t>(-left, 0));
  return {first, at_least(first, at_most(call.kernel, call.width - left))};
}

// Copies the pixels under the kernel at one token, zeros where it reaches beyond the image.
template <class T, class E>
void gather(const Embedding& call, const T* image, int64_t token, E* to) {
  const int64_t top = token / call.out_width * call.stride - call.padding;
  const int64_t left = token % call.out_width * call.stride - call.padding;
  const Columns within = columns_within(call, left);
  const bool adjacent = call.channels_last && call.column_step == call.in_channels;
  std::memset(to, 0, call.linear.inputs * sizeof(E));
  for (int64_t y = 0; y < call.kernel; y++) {
    if (top + y < 0 || top + y >= call.height) continue;
    const T* row = image + (top + y) * call.row_step + (left + within.first) * call.column_step;
    const int64_t count = within.last - within.first;
    if (adjacent) {
      copy(row, count * call.in_channels, 1, to + (y * call.kernel + within.first) * call.in_channels);
    } else if (call.channels_last) {
      for (int64_t x = 0; x < count; x++) {
        E* pixel = to + (y * call.kernel + within.first + x) * call.in_channels;
        copy(row + x * call.column_step, call.in_channels, call.channel_step, pixel);
      }
    } else {
      for (int64_t c = 0; c < call.in_channels; c++) {
        E* pixels = to + (c * call.kernel + y) * call.kernel + within.first;
        copy(row + c * call.channel_step, count, call.column_step, pixels);
      }
    }
  }
}

template <class T, class E = Element<T>>
void embed_tile(const Embedding& call, int64_t unit, void* memory) {
  Parts parts(memory);
  const Scratch<E> scratch(call, parts);
  const int64_t image = unit / call.tiles, tile = unit % call.tiles, tokens = call.out_height * call.out_width;
  const int64_t first = tokens * tile / call.tiles, rows = tokens * (tile + 1) / call.tiles - first;
  const int64_t channels = call.linear.outputs, class_tokens = call.class_token != nullptr;
  T* out = static_cast<T*>(call.out) + image * (class_tokens + tokens) * channels;
  if (tile == 0 && class_tokens) {
    for_vectors<kLanes>(channels, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
      store(out + c, load(call.class_token + c, lanes), lanes);
    });
  }
  out += (class_tokens + first) * channels;
  const T* pixels = static_cast<const T*>(call.image) + image * call.image_step;
  for (int64_t row = 0; row < rows; row++) {
    gather(call, pixels, first + row, scratch.pixels + row * scratch.pixels_stride);
  }
  pad_rows(scratch.pixels, rows, scratch.pixels_stride, call.linear.inputs);
  const int64_t depth = ceil_div(call.linear.inputs, kDepth<E>);
  const Factor<E>* weight = static_cast<const Factor<E>*>(call.linear.weight);
  for_panels<float>(channels, [&](int64_t start, auto vectors) LAMBDA_INLINE {
    multiply<vectors>(factors(scratch.pixels), scratch.pixels_stride / kDepth<E>, rows, weight + start * depth, depth,
                      scratch.sums + start, scratch.sums_stride, false);
  });
  for (int64_t row = 0; row < rows; row++, out += channels) {
    float* sums = scratch.sums + row * scratch.sums_stride;
    for_vectors<kLanes>(channels, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
      store(sums + c, load(sums + c, lanes) + load(call.linear.bias + c, lanes), lanes);
    });
    normalize(call.norm, static_cast<const float*>(sums), channels, nullptr,
              [&](int64_t c, F normal, auto lanes) LAMBDA_INLINE { store(out + c, normal, lanes); });
  }
}

int64_t scratch_bytes(DType dtype, const Embedding& call) {
  Parts parts(nullptr);
  with_element(dtype, [&](auto type) { Scratch<Element<decltype(type)>>(call, parts); });
  return parts.size();
}

void embed(DType dtype, const Embedding& call, int64_t unit, void* scratch) {
  with_element(dtype, [&](auto type) { embed_tile<decltype(type)>(call, unit, scratch); });
}

}  // namespace

const Kernels KERNELS{scratch_bytes, embed};

}  // namespace cvt_kernels::conv_embedding

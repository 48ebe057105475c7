// The loops of the convolutional embedding on the CPU.
//
// The pixels under the kernel are copied into rows, for a tile of tokens at a time, and multiplied with the packed weight;
// both stay in the cache. A row of sums is then normalized and written once. Where the channels of a pixel are not adjacent,
// the image is copied first so that they are. The products of a few hundred inputs are summed at a time: one sum over
// thousands would have a larger error.

#include "conv_embedding/cpu_loops.h"

#include "linear/layer_loops.h"

namespace cvt_kernels::conv_embedding {
namespace {

constexpr int64_t kInputs = 512;  // the most whose products are summed at a time

template <class E>
struct Scratch {
  int64_t pixels_stride, sums_stride;
  E* pixels;
  float* sums;

  Scratch(const Embedding& call, Parts& parts) {
    const int64_t rows = call.tile_rows;
    pixels_stride = stride_of<E>(call.linear.inputs);
    sums_stride = round_up(call.linear.outputs, kColumns) + kLanes;
    pixels = parts.take<E>(rows * pixels_stride);
    sums = parts.take<float>(rows * sums_stride);
  }
};

// Whether the pixels lie as factors one beside the other.
template <class T>
bool are_adjacent(const Embedding& call) {
  const bool last = (call.channel_step == 1 || call.in_channels == 1) && call.column_step == call.in_channels;
  return last && std::is_same_v<T, Element<T>>;
}

template <class T, class E = Element<T>>
void arrange_row(const Embedding& call, int64_t row) {
  const T* from = static_cast<const T*>(call.image) + row / call.height * call.image_step + row % call.height * call.row_step;
  E* to = static_cast<E*>(call.pixels) + row * call.width * call.in_channels;
  const auto copy = [&](int64_t x, int64_t c) LAMBDA_INLINE {
    const T& value = from[x * call.column_step + c * call.channel_step];
    if constexpr (std::is_same_v<T, E>) to[x * call.in_channels + c] = value;
    else to[x * call.in_channels + c] = load(&value);
  };
  if (call.channel_step == 1) {
    for (int64_t x = 0; x < call.width; x++) {
      for (int64_t c = 0; c < call.in_channels; c++) copy(x, c);
    }
  } else {
    for (int64_t c = 0; c < call.in_channels; c++) {
      for (int64_t x = 0; x < call.width; x++) copy(x, c);
    }
  }
}

// Copies the pixels under the kernel at one token, zeros where it reaches beyond the image, whose rows lie `step` apart.
template <class E>
void gather(const Embedding& call, const E* pixels, int64_t step, int64_t token, E* to) {
  const int64_t top = token / call.out_width * call.stride - call.padding;
  const int64_t left = token % call.out_width * call.stride - call.padding;
  const int64_t first = at_most(call.kernel, at_least<int64_t>(-left, 0));
  const int64_t count = at_least<int64_t>(at_most(call.kernel, call.width - left) - first, 0);
  if (top < 0 || top + call.kernel > call.height || count < call.kernel) std::memset(to, 0, call.linear.inputs * sizeof(E));
  for (int64_t y = at_least<int64_t>(-top, 0); y < at_most(call.kernel, call.height - top) && count > 0; y++) {
    std::memcpy(to + (y * call.kernel + first) * call.in_channels,
                pixels + (top + y) * step + (left + first) * call.in_channels,
                count * call.in_channels * sizeof(E));
  }
}

template <class T, class E = Element<T>>
void embed_run(const Embedding& call, const Run& run, void* memory) {
  const InMemory<Scratch<E>> scratch(call, memory);
  const int64_t tokens = call.out_height * call.out_width, first = run.begin, rows = run.end - first;
  const int64_t channels = call.linear.outputs, class_tokens = call.class_token != nullptr;
  T* out = static_cast<T*>(call.out) + run.image * (class_tokens + tokens) * channels;
  if (first == 0 && class_tokens) {
    fill(out, channels, [&](int64_t c, auto lanes) LAMBDA_INLINE { return load(call.class_token + c, lanes); });
  }
  out += (class_tokens + first) * channels;
  const bool is_copied = !are_adjacent<T>(call);
  const int64_t step = is_copied ? call.width * call.in_channels : call.row_step;
  const E* pixels = static_cast<const E*>(is_copied ? call.pixels : call.image) +
                    run.image * (is_copied ? call.height * step : call.image_step);
  for (int64_t row = 0; row < rows; row++) {
    gather(call, pixels, step, first + row, scratch.pixels + row * scratch.pixels_stride);
  }
  pad_rows(scratch.pixels, rows, scratch.pixels_stride, call.linear.inputs);
  for (int64_t begin = 0; begin < call.linear.inputs; begin += kInputs) {
    add_product(call.linear, begin, at_most(begin + kInputs, call.linear.inputs), scratch.pixels + begin,
                scratch.pixels_stride, rows, scratch.sums, scratch.sums_stride, begin > 0);
  }
  for (int64_t row = 0; row < rows; row++, out += channels) {
    normalize_sums(call.norm, call.linear.bias, channels, scratch.sums + row * scratch.sums_stride, out);
  }
}

template <class T>
int64_t pixel_bytes(const Embedding& call) {
  return are_adjacent<T>(call) ? 0 : call.height * call.width * call.in_channels * sizeof(Element<T>);
}

}  // namespace

const Kernels KERNELS{BY_FLOAT(pixel_bytes), BY_FLOAT(arrange_row), {bytes_of<Scratch>, BY_FLOAT(embed_run)}};

}  // namespace cvt_kernels::conv_embedding

// The loops of blocks of SegFormer and PVT on the CPU. setup.py compiles this file once per instruction set, with KERNELS naming the
// table it fills; it includes nothing whose code the linker could merge between them.
//
// Between x and the result, nothing but keys, values and y goes through memory. A reduction is as many products as its
// weight has rows, each of rows of normalized tokens as they lie side by side. A band of y's rows passes through the
// feed-forward layers a few rows at a time: fc1 makes the hidden channels of new rows in the place of those that no output
// needs any more, and the convolution takes three rows of them for each row of fc2's input, which is held in parts. Where
// bands of few rows would make many hidden channels twice, they go through memory too.
//
// In front of a quantized layer the rows are rounded where they lie. The scale of a row of fc2's input depends on all of its
// channels, so that these are held together, of fewer rows.

#include "transformer_block/pyramid_cpu_loops.h"

#include "depthwise_conv_gelu/rows.h"
#include "transformer_block/block_loops.h"

namespace cvt_kernels::transformer_block::pyramids {
namespace {

// Computes fc1(norm2(y)) of some tokens, by way of rows of factors.
template <class T, class E>
void hide(const Block& block, const T* y, int64_t rows, float* copy, float* tile, E* a, int64_t a_stride,
          const Rounded& rounded, E* hidden) {
  const int64_t stride = stride_of<E>(block.fc1.outputs);
  normalize_rows(block.norm2, y, rows, block.channels, copy, a, a_stride);
  round_rows(block.fc1, a, a_stride, rows, rounded);
  apply(block.fc1, 0, block.fc1.outputs, a, a_stride, rows, rounded, tile,
        [&](int64_t r, int64_t c, F sums, auto lanes) LAMBDA_INLINE { store(hidden + r * stride + c, sums, lanes); });
}

// The first step: keys and values -------------------------------------------------------------------------

template <class E>
struct Projecting {
  E *squares, *a;
  float *sums, *tile, *copy;
  Rounded rounded;
  int64_t squares_stride, a_stride, sums_stride;

  Projecting(const Block& block, Parts& parts)
      : squares_stride(stride_of<E>(block.ratio * block.channels)), a_stride(stride_of<E>(block.channels)),
        sums_stride(sums_stride_of(block)) {
    const int64_t most = block.group_rows, reduced = block.ratio == 0 ? 0 : most;
    squares = parts.take<E>(reduced * squares_stride);
    sums = parts.take<float>(reduced * sums_stride);
    a = parts.take<E>(most * a_stride);
    tile = parts.take<float>(most * kTileColumns);
    copy = parts.take<float>(padded(block.channels));
    rounded = take_rounded(parts, most, {&block.linears[1], &block.linears[2]});
  }
};

// Computes the reduction of the kept tokens from `begin` to `end`, as rows of factors.
template <class T, class E = Element<T>>
void reduce(const Block& block, const T* x, int64_t begin, int64_t end, const Projecting<E>& scratch) {
  const int64_t ratio = block.ratio, channels = block.channels, width = kept_grid(block).width, rows = end - begin;
  for (int64_t y = 0; y < ratio; y++) {
    for (int64_t square = 0; square < rows; square++) {
      const int64_t row = (begin + square) / width * ratio + y, column = (begin + square) % width * ratio;
      E* to = scratch.squares + square * scratch.squares_stride;
      for (int64_t i = 0; i < ratio; i++, to += channels) {
        normalize(block.norm1, x + (row * block.width + column + i) * channels, channels, scratch.copy,
                  [&](int64_t c, F normal, auto lanes) LAMBDA_INLINE { store(to + c, normal, lanes); });
      }
    }
    pad_rows(scratch.squares, rows, scratch.squares_stride, ratio * channels);
    add_product(block.reduction[y], 0, ratio * channels, scratch.squares, scratch.squares_stride, rows, scratch.sums,
                scratch.sums_stride, y > 0);
  }
  for (int64_t row = 0; row < rows; row++) {
    float* sums = scratch.sums + row * scratch.sums_stride;
    for_vectors<kLanes>(channels, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
      store(sums + c, load(sums + c, lanes) + load(block.reduction->bias + c, lanes), lanes);
    });
    E* to = scratch.a + row * scratch.a_stride;
    normalize(block.norm_kept, sums, channels, scratch.copy,
              [&](int64_t c, F normal, auto lanes) LAMBDA_INLINE { store(to + c, normal, lanes); });
  }
  pad_rows(scratch.a, rows, scratch.a_stride, channels);
}

template <class T, class E = Element<T>>
void project_run(const Block& block, const Run& run, void* memory) {
  const TileUse tile_use;
  Parts parts(memory);
  const Projecting<E> scratch(block, parts);
  const auto [image, begin, end] = run;
  const int64_t rows = end - begin, first = image * kept_tokens(block) + begin;
  const T* x = static_cast<const T*>(block.x) + image * tokens_of(block) * block.channels;
  if (block.ratio > 0) {
    reduce(block, x, begin, end, scratch);
  } else {
    normalize_rows(block.norm1, x + begin * block.channels, rows, block.channels, scratch.copy, scratch.a,
                   scratch.a_stride);
  }
  for (int i = 1; i < 3; i++) {
    const Linear& linear = block.linears[i];
    E* out = static_cast<E*>(i == 1 ? block.keys : block.values) + first * linear.outputs;
    round_rows(linear, scratch.a, scratch.a_stride, rows, scratch.rounded);
    apply(linear, 0, linear.outputs, scratch.a, scratch.a_stride, rows, scratch.rounded, scratch.tile,
          [&](int64_t r, int64_t c, F sums, auto lanes) LAMBDA_INLINE {
            store(out + r * linear.outputs + c, sums, lanes);
          });
  }
}

// The second step: queries and attention ------------------------------------------------------------------

template <class E>
struct Attending {
  attention::Heads<E> heads;
  E *a, *q;
  float *tile, *copy;
  Rounded rounded;
  int64_t a_stride;

  Attending(const Block& block, Parts& parts)
      : heads(kept_tokens(block), block.heads, block.proj.inputs / block.heads, block.scale, parts),
        a_stride(stride_of<E>(at_least(block.channels, block.proj.inputs))) {
    const int64_t rows = block.tile_rows;
    a = parts.take<E>(rows * a_stride);
    q = parts.take<E>(rows * block.proj.inputs);
    tile = parts.take<float>(rows * kTileColumns);
    copy = parts.take<float>(padded(block.channels));
    rounded = take_rounded(parts, rows, {&block.linears[0], &block.proj, &block.fc1});
  }
};

template <class T, class E = Element<T>>
void attend_run(const Block& block, const Run& run, int64_t previous, void* memory) {
  const TileUse tile_use;
  Parts parts(memory);
  Attending<E> scratch(block, parts);
  const int64_t image = run.image, begin = run.begin, rows = run.end - begin, width = block.proj.inputs;
  if (previous != image) {
    const int64_t first = image * kept_tokens(block) * width;
    scratch.heads.pack(static_cast<const E*>(block.keys) + first, static_cast<const E*>(block.values) + first);
  }
  const int64_t token = image * block.queries + begin, offset = token * block.channels;
  const T* x = static_cast<const T*>(block.asking) + offset;
  T* y = static_cast<T*>(block.stream) + offset;
  normalize_rows(block.norm1, x, rows, block.channels, scratch.copy, scratch.a, scratch.a_stride);
  round_rows(block.linears[0], scratch.a, scratch.a_stride, rows, scratch.rounded);
  apply(block.linears[0], 0, width, scratch.a, scratch.a_stride, rows, scratch.rounded, scratch.tile,
        [&](int64_t r, int64_t c, F sums, auto lanes) LAMBDA_INLINE { store(scratch.q + r * width + c, sums, lanes); });
  scratch.heads.attend(scratch.q, rows, scratch.a, scratch.a_stride);
  pad_rows(scratch.a, rows, scratch.a_stride, width);
  round_rows(block.proj, scratch.a, scratch.a_stride, rows, scratch.rounded);
  apply(block.proj, 0, block.channels, scratch.a, scratch.a_stride, rows, scratch.rounded, scratch.tile,
        [&](int64_t r, int64_t c, F sums, auto lanes) LAMBDA_INLINE {
          store(y + r * block.channels + c, load(x + r * block.channels + c, lanes) + sums, lanes);
        });
  if (block.hidden != nullptr) {
    E* hidden = static_cast<E*>(block.hidden) + token * stride_of<E>(block.fc1.outputs);
    hide(block, y, rows, scratch.copy, scratch.tile, scratch.a, scratch.a_stride, scratch.rounded, hidden);
  }
}

// The third step: the feed-forward layers -----------------------------------------------------------------

// Whether fc2 takes what fc1 gives as rounded numbers.
bool rounds_hidden(const Block& block) {
  return block.conv == nullptr && block.fc1.integers != nullptr && block.fc2.integers != nullptr;
}

// The most rows of a band that are made together.
template <class E>
int64_t rows_of_step(const Block& block) {
  const int64_t width = mixed_grid(block).width;
  if (block.fc2.integers == nullptr) return at_most(rows_together(width), block.band_rows);
  const int64_t bytes = rounds_hidden(block) ? sizeof(int32_t) : sizeof(E);
  const int64_t most = kHiddenBytes / (stride_of<E>(block.fc1.outputs) * bytes);
  return at_most(at_least<int64_t>(at_most(at_least(most, kFewestRows), kTileRows) / width, 1), block.band_rows);
}

template <class E>
struct Mixing {
  E *a, *hidden, *activated;
  int32_t* hidden_sums;  // in the place of what is activated, if fc2 takes rounded numbers
  float *tile, *sums, *copy;
  Rounded rounded;
  int64_t first, held;  // the row in the first place of hidden, and the places; rows beyond these take the first ones again
  int64_t a_stride, hidden_stride, part, part_stride, sums_stride;

  Mixing(const Block& block, Parts& parts)
      : a_stride(stride_of<E>(block.channels)), hidden_stride(stride_of<E>(block.fc1.outputs)),
        sums_stride(sums_stride_of(block)) {
    const Grid grid = mixed_grid(block);
    const int64_t rows = rows_of_step<E>(block);
    const bool whole = block.fc2.integers != nullptr;
    const int64_t tokens = rows * grid.width, count = whole ? 1 : ceil_div(block.fc1.outputs, kHidden);
    held = rows + 2;  // with those above and below
    part = round_up(ceil_div(block.fc1.outputs, count), kTileColumns);
    part_stride = stride_of<E>(part);
    a = parts.take<E>(kTileRows * a_stride);
    hidden = parts.take<E>(block.conv == nullptr || block.hidden != nullptr ? 0 : held * grid.width * hidden_stride);
    const bool rounds = rounds_hidden(block);
    activated = parts.take<E>(rounds ? 0 : tokens * part_stride);
    hidden_sums = parts.take<int32_t>(rounds ? tokens * part_stride : 0);
    tile = parts.take<float>(at_least(tokens, kTileRows) * kTileColumns);
    sums = parts.take<float>(whole ? 0 : tokens * sums_stride);
    copy = parts.take<float>(padded(rounds ? at_least(block.channels, block.fc1.outputs) : block.channels));
    rounded = take_rounded(parts, at_least(tokens, kTileRows), {&block.fc1, &block.fc2});
  }

  // The hidden channels of a row of tokens.
  E* row(int64_t number, int64_t width) const { return hidden + (number - first) % held * width * hidden_stride; }
};

// y and the result of an image.
template <class T>
struct Image {
  const T* y;
  T* out;
};

// Hands out the rows of a band in steps; those of a shared band have at least `fewest` rows, if so many are left.
class Steps {
 public:
  Steps(const Band& band, int64_t fewest, int64_t most) : band_(band), fewest_(fewest), most_(most) {}

  // The next rows; none if all are taken.
  Run next() {
    const int64_t rows = band_.end - band_.begin;
    int64_t size = 0;
    if (band_.taken == nullptr) {
      const int64_t left = rows - own_;
      size = left == 0 ? 0 : left / ceil_div(left, most_);
    } else {
      // Both threads take less towards the end, so that they end at about the same time.
      int64_t taken = __atomic_load_n(band_.taken, __ATOMIC_RELAXED);
      do size = at_most(at_most(at_least(ceil_div(rows - taken, int64_t{4}), fewest_), most_), rows - taken);
      while (!__atomic_compare_exchange_n(band_.taken, &taken, taken + size, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    }
    own_ += size;
    const int64_t begin = band_.upward ? band_.end - own_ : band_.begin + own_ - size;
    return {band_.image, begin, begin + size};
  }

 private:
  const Band& band_;
  const int64_t fewest_, most_;
  int64_t own_ = 0;
};

// Computes fc1(norm2(y)) of the rows from `begin` to `end`, each in the place of an earlier one.
template <class T, class E = Element<T>>
void hide_rows(const Block& block, const T* y, int64_t begin, int64_t end, const Mixing<E>& scratch) {
  const int64_t width = block.width;
  for (int64_t row = begin; row < end;) {
    const int64_t place = (row - scratch.first) % scratch.held, adjacent = at_most(end - row, scratch.held - place);
    const int64_t tokens = adjacent * width, chunks = ceil_div(tokens, kTileRows);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const int64_t first = tokens * chunk / chunks, count = tokens * (chunk + 1) / chunks - first;
      hide(block, y + (row * width + first) * block.channels, count, scratch.copy, scratch.tile, scratch.a,
           scratch.a_stride, scratch.rounded, scratch.row(row, width) + first * scratch.hidden_stride);
    }
    row += adjacent;
  }
}

// Computes activation(conv) of the rows from `begin` to `end` for the hidden channels of a part.
template <Activation activation, class E>
void convolve_rows(const Block& block, int64_t begin, int64_t end, int64_t first, int64_t channels,
                   const Mixing<E>& scratch) {
  const float* packed = block.conv + first / kLanes * depthwise_conv_gelu::kPacked<E>;
  for (int64_t row = begin; row < end; row++) {
    depthwise_conv_gelu::Rows<E> rows{{}, scratch.hidden_stride, block.width};
    for (int64_t i = 0; i < 3; i++) {
      const int64_t from = row - 1 + i;
      rows.tokens[i] = from >= 0 && from < block.height ? scratch.row(from, block.width) + first : nullptr;
    }
    depthwise_conv_gelu::convolve_row<activation>(rows, channels, packed,
                                                  scratch.activated + (row - begin) * block.width * scratch.part_stride,
                                                  scratch.part_stride);
  }
}

// Computes activation(fc1) of tokens that are normalized, where there is no convolution.
template <Activation activation, class T, class E = Element<T>>
void activate_rows(const Block& block, int64_t rows, int64_t begin, int64_t end, const Mixing<E>& scratch) {
  apply(block.fc1, begin, end, scratch.a, scratch.a_stride, rows, scratch.rounded, scratch.tile,
        [&](int64_t r, int64_t c, F sums, auto lanes) LAMBDA_INLINE {
          store(scratch.activated + r * scratch.part_stride + c - begin, layer_norm_gelu::activated<T, activation>(sums),
                lanes);
        });
}

// out = y + fc2(hidden channels that are rounded) for some tokens.
template <class T, class E>
void add_quantized_fc2(const Block& block, const T* y, int64_t rows, const Mixing<E>& scratch, T* out) {
  apply(block.fc2, 0, block.channels, scratch.rounded, rows, reinterpret_cast<int32_t*>(scratch.tile),
        [&](int64_t r, int64_t c, F sums, auto lanes) LAMBDA_INLINE {
          const int64_t place = r * block.channels + c;
          store(out + place, load(y + place, lanes) + sums, lanes);
        });
}

template <Activation activation, class T, class E = Element<T>>
void mix_rows(const Block& block, const Image<T>& image, int64_t begin, int64_t end, const Mixing<E>& scratch) {
  const int64_t width = mixed_grid(block).width, rows = (end - begin) * width, offset = begin * width * block.channels;
  if (block.conv == nullptr) {
    normalize_rows(block.norm2, image.y + offset, rows, block.channels, scratch.copy, scratch.a, scratch.a_stride);
    round_rows(block.fc1, scratch.a, scratch.a_stride, rows, scratch.rounded);
  }
  if (rounds_hidden(block)) {
    round_hidden(block, rows, scratch.hidden_sums, scratch.part_stride, scratch.copy, scratch.rounded);
    return add_quantized_fc2(block, image.y + offset, rows, scratch, image.out + offset);
  }
  for (int64_t first = 0; first < block.fc1.outputs; first += scratch.part) {
    const int64_t last = at_most(block.fc1.outputs, first + scratch.part);
    if (block.conv != nullptr) convolve_rows<activation>(block, begin, end, first, last - first, scratch);
    else activate_rows<activation, T>(block, rows, first, last, scratch);
    if (block.fc2.integers != nullptr) {
      round_rows(block.fc2, scratch.activated, scratch.part_stride, rows, scratch.rounded);
      return add_quantized_fc2(block, image.y + offset, rows, scratch, image.out + offset);
    }
    pad_rows(scratch.activated, rows, scratch.part_stride, last - first);
    add_product(block.fc2, first, last, scratch.activated, scratch.part_stride, rows, scratch.sums, scratch.sums_stride,
                first > 0);
  }
  add_fc2(block, image.y + offset, scratch.sums, rows, image.out + offset);
}

template <class T, class E = Element<T>>
void mix_band(const Block& block, const Band& band, void* memory) {
  const TileUse tile_use;
  Parts parts(memory);
  Mixing<E> scratch(block, parts);
  const int64_t offset = band.image * block.queries * block.channels;
  const Image<T> image{static_cast<const T*>(block.stream) + offset, static_cast<T*>(block.out) + offset};
  scratch.first = band.begin - 1;
  if (block.hidden != nullptr) {
    scratch.hidden = static_cast<E*>(block.hidden) + band.image * tokens_of(block) * scratch.hidden_stride;
    scratch.first = 0, scratch.held = block.height;
  }
  const bool hides = block.conv != nullptr && block.hidden == nullptr;
  Steps steps(band, ceil_div(kAtOnce, mixed_grid(block).width), rows_of_step<E>(block));
  Run known{};  // the rows whose hidden channels are held: none at first
  layer_norm_gelu::with_activation<false>(block.activation, [&](auto activation) {
    for (Run step = steps.next(); step.begin < step.end; step = steps.next()) {
      if (hides) {
        const Run wanted{band.image, at_least<int64_t>(step.begin - 1, 0), at_most(step.end + 1, block.height)};
        const bool none = known.begin == known.end;
        const int64_t begin = none || band.upward ? wanted.begin : known.end;
        const int64_t end = none || !band.upward ? wanted.end : known.begin;
        hide_rows(block, image.y, begin, end, scratch);
        known = wanted;
      }
      mix_rows<activation.value>(block, image, step.begin, step.end, scratch);
    }
  });
}

// From the dtype of a call to the type of a template ------------------------------------------------------

void pack_convolution(DType dtype, const void* weight, const void* bias, int64_t channels, float* out) {
  with_element(dtype, [&](auto type) {
    using T = decltype(type);
    depthwise_conv_gelu::pack(static_cast<const T*>(weight), static_cast<const T*>(bias), channels, out);
  });
}

int64_t packed_convolution_size(int64_t channels) { return depthwise_conv_gelu::packed_size<float>(channels); }

int64_t hidden_bytes(DType dtype, const Block& block) {
  int64_t bytes = 0;
  with_element(dtype, [&](auto type) {
    using E = Element<decltype(type)>;
    bytes = stride_of<E>(block.fc1.outputs) * sizeof(E);
  });
  return bytes;
}

void project(DType dtype, const Block& block, const Run& run, void* scratch) {
  with_element(dtype, [&](auto type) { project_run<decltype(type)>(block, run, scratch); });
}

void attend(DType dtype, const Block& block, const Run& run, int64_t previous, void* scratch) {
  with_element(dtype, [&](auto type) { attend_run<decltype(type)>(block, run, previous, scratch); });
}

void mix(DType dtype, const Block& block, const Band& band, void* scratch) {
  with_element(dtype, [&](auto type) { mix_band<decltype(type)>(block, band, scratch); });
}

}  // namespace

const Kernels KERNELS{pack_convolution, packed_convolution_size, element_bytes, hidden_bytes,     bytes_of<Projecting>,
                      project,          bytes_of<Attending>,     attend,        bytes_of<Mixing>, mix};

}  // namespace cvt_kernels::transformer_block::pyramids

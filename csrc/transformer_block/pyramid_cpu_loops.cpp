// The loops of blocks of SegFormer and PVT on the CPU.
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
void hide(const Block& block, const T* y, int64_t rows, const Inputs<E>& inputs, E* hidden) {
  inputs.normalize(block.norm2, y, rows, block.fc1);
  inputs.apply(block.fc1, rows, stored(hidden, stride_of<E>(block.fc1.outputs)));
}

// The first step: keys and values -------------------------------------------------------------------------

template <class E>
struct Projecting {
  Inputs<E> inputs;
  int64_t squares_stride;
  E* squares;
  float* sums;

  Projecting(const Block& block, Parts& parts)
      : inputs(parts, block.group_rows, block.channels, block.channels, {&block.linears[1], &block.linears[2]}),
        squares_stride(stride_of<E>(block.ratio * block.channels)) {
    const int64_t reduced = block.ratio == 0 ? 0 : block.group_rows;
    squares = parts.take<E>(reduced * squares_stride);
    sums = parts.take<float>(reduced * sums_stride_of(block));
  }
};

// Computes the reduction of the kept tokens from `begin` to `end`, as rows of factors.
template <class T, class E = Element<T>>
void reduce(const Block& block, const T* x, int64_t begin, int64_t end, const Projecting<E>& scratch) {
  const int64_t ratio = block.ratio, channels = block.channels, width = kept_side(block, block.width), rows = end - begin;
  const int64_t sums_stride = sums_stride_of(block);
  const Inputs<E>& inputs = scratch.inputs;
  for (int64_t y = 0; y < ratio; y++) {
    for (int64_t square = 0; square < rows; square++) {
      const int64_t row = (begin + square) / width * ratio + y, column = (begin + square) % width * ratio;
      E* to = scratch.squares + square * scratch.squares_stride;
      for (int64_t i = 0; i < ratio; i++, to += channels) {
        normalize(block.norm1, x + (row * block.width + column + i) * channels, channels, inputs.copy, to);
      }
    }
    pad_rows(scratch.squares, rows, scratch.squares_stride, ratio * channels);
    add_product(block.reduction[y], 0, ratio * channels, scratch.squares, scratch.squares_stride, rows, scratch.sums,
                sums_stride, y > 0);
  }
  for (int64_t row = 0; row < rows; row++) {
    normalize_sums(block.norm_kept, block.reduction->bias, channels, scratch.sums + row * sums_stride,
                   inputs.a + row * inputs.stride);
  }
  pad_rows(inputs.a, rows, inputs.stride, channels);
}

template <class T, class E = Element<T>>
void project_run(const Block& block, const Run& run, void* memory) {
  const InMemory<Projecting<E>> scratch(block, memory);
  const auto [image, begin, end] = run;
  const int64_t rows = end - begin, first = image * kept_tokens(block) + begin;
  const T* x = static_cast<const T*>(block.x) + image * tokens_of(block) * block.channels;
  if (block.ratio > 0) reduce(block, x, begin, end, scratch);
  else scratch.inputs.normalize(block.norm1, x + begin * block.channels, rows, block.channels);
  for (int i = 1; i < 3; i++) {
    const Linear& linear = block.linears[i];
    E* out = static_cast<E*>(i == 1 ? block.keys : block.values) + first * linear.outputs;
    scratch.inputs.round(linear, rows);
    scratch.inputs.apply(linear, rows, stored(out, linear.outputs));
  }
}

// The second step: queries and attention ------------------------------------------------------------------

template <class E>
struct Attending {
  attention::Heads<E> heads;
  Inputs<E> inputs;
  E* q;

  Attending(const Block& block, Parts& parts)
      : heads(kept_tokens(block), block.heads, head_dim_of(block), block.scale, parts),
        inputs(parts, block.tile_rows, at_least(block.channels, block.proj.inputs), block.channels,
               {&block.linears[0], &block.proj, &block.fc1}),
        q(parts.take<E>(block.tile_rows * block.proj.inputs)) {}
};

template <class T, class E = Element<T>>
void attend_run(const Block& block, const Run& run, int64_t previous, void* memory) {
  InMemory<Attending<E>> scratch(block, memory);
  const Inputs<E>& inputs = scratch.inputs;
  const int64_t image = run.image, begin = run.begin, rows = run.end - begin, width = block.proj.inputs;
  if (previous != image) {
    const int64_t first = image * kept_tokens(block) * width;
    scratch.heads.pack(static_cast<const E*>(block.keys) + first, static_cast<const E*>(block.values) + first);
  }
  const int64_t token = image * block.queries + begin, offset = token * block.channels;
  const T* x = static_cast<const T*>(block.asking) + offset;
  T* y = static_cast<T*>(block.stream) + offset;
  inputs.normalize(block.norm1, x, rows, block.linears[0]);
  inputs.apply(block.linears[0], rows, stored(scratch.q, width));
  scratch.heads.attend(scratch.q, rows, inputs.a, inputs.stride);
  pad_rows(inputs.a, rows, inputs.stride, width);
  inputs.round(block.proj, rows);
  inputs.apply(block.proj, rows, stored_sum(x, y, block.channels));
  if (block.hidden != nullptr) {
    hide(block, y, rows, inputs, static_cast<E*>(block.hidden) + token * stride_of<E>(block.fc1.outputs));
  }
}

// The third step: the feed-forward layers -----------------------------------------------------------------

// Whether fc2 takes what fc1 gives, which no convolution has changed, as rounded numbers.
bool rounds_activated(const Block& block) { return block.conv == nullptr && rounds_hidden(block); }

// The most rows of a band that are made together.
template <class E>
int64_t rows_of_step(const Block& block) {
  const int64_t width = mixed_width(block);
  if (block.fc2.integers == nullptr) return at_most(rows_together(width), block.band_rows);
  const int64_t most = at_most(rows_of_hidden<E>(block, rounds_activated(block)), kTileRows);
  return at_most(at_least<int64_t>(most / width, 1), block.band_rows);
}

template <class E>
struct Mixing {
  int64_t tokens, held_stride;
  int64_t first, places;  // the row in the first place of held, and the places; rows beyond these take the first ones again
  Inputs<E> inputs;
  Hidden<E> hidden;  // behind the activation
  E* held;           // in front of the convolution

  Mixing(const Block& block, Parts& parts)
      : tokens(rows_of_step<E>(block) * mixed_width(block)), held_stride(stride_of<E>(block.fc1.outputs)),
        places(rows_of_step<E>(block) + 2),  // with those above and below
        inputs(parts, at_least(tokens, kTileRows), block.channels,
               at_least(block.channels, rounds_activated(block) ? block.fc1.outputs : 0), {&block.fc1, &block.fc2}),
        hidden(block, parts, tokens, rounds_activated(block)),
        held(parts.take<E>(block.conv == nullptr || block.hidden != nullptr ? 0 : places * block.width * held_stride)) {}

  // The hidden channels of a row of tokens.
  E* row(int64_t number, int64_t width) const { return held + (number - first) % places * width * held_stride; }
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
    const int64_t place = (row - scratch.first) % scratch.places, adjacent = at_most(end - row, scratch.places - place);
    const int64_t tokens = adjacent * width, chunks = ceil_div(tokens, kTileRows);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const int64_t first = tokens * chunk / chunks, count = tokens * (chunk + 1) / chunks - first;
      hide(block, y + (row * width + first) * block.channels, count, scratch.inputs,
           scratch.row(row, width) + first * scratch.held_stride);
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
    depthwise_conv_gelu::Rows<E> rows{{}, scratch.held_stride, block.width};
    for (int64_t i = 0; i < 3; i++) {
      const int64_t from = row - 1 + i;
      rows.tokens[i] = from >= 0 && from < block.height ? scratch.row(from, block.width) + first : nullptr;
    }
    depthwise_conv_gelu::convolve_row<activation>(rows, channels, packed,
                                                  scratch.hidden.values + (row - begin) * block.width * scratch.hidden.stride,
                                                  scratch.hidden.stride);
  }
}

template <Activation activation, class T, class E = Element<T>>
void mix_rows(const Block& block, const T* y, T* out, int64_t begin, int64_t end, const Mixing<E>& scratch) {
  const int64_t width = mixed_width(block), rows = (end - begin) * width, offset = begin * width * block.channels;
  y += offset, out += offset;
  if (block.conv == nullptr) return add_mlp<activation>(block, y, rows, scratch.inputs, scratch.hidden, out);
  add_fc2(block, y, rows, scratch.inputs, scratch.hidden, out, [&](int64_t first, int64_t last) {
    convolve_rows<activation>(block, begin, end, first, last - first, scratch);
  });
}

template <class T, class E = Element<T>>
void mix_band(const Block& block, const Band& band, void* memory) {
  InMemory<Mixing<E>> scratch(block, memory);
  const int64_t offset = band.image * block.queries * block.channels;
  const T* y = static_cast<const T*>(block.stream) + offset;
  T* out = static_cast<T*>(block.out) + offset;
  scratch.first = band.begin - 1;
  if (block.hidden != nullptr) {
    scratch.held = static_cast<E*>(block.hidden) + band.image * tokens_of(block) * scratch.held_stride;
    scratch.first = 0, scratch.places = block.height;
  }
  const bool hides = block.conv != nullptr && block.hidden == nullptr;
  Steps steps(band, ceil_div(kAtOnce, mixed_width(block)), rows_of_step<E>(block));
  Run known{};  // the rows whose hidden channels are held: none at first
  layer_norm_gelu::with_activation<false>(block.activation, [&](auto activation) {
    for (Run step = steps.next(); step.begin < step.end; step = steps.next()) {
      if (hides) {
        const Run wanted{band.image, at_least<int64_t>(step.begin - 1, 0), at_most(step.end + 1, block.height)};
        const bool none = known.begin == known.end;
        const int64_t begin = none || band.upward ? wanted.begin : known.end;
        const int64_t end = none || !band.upward ? wanted.end : known.begin;
        hide_rows(block, y, begin, end, scratch);
        known = wanted;
      }
      mix_rows<activation.value>(block, y, out, step.begin, step.end, scratch);
    }
  });
}

template <class T, class E = Element<T>>
int64_t hidden_bytes(const Block& block) {
  return stride_of<E>(block.fc1.outputs) * sizeof(E);
}

}  // namespace

const Kernels KERNELS{BY_FLOAT(depthwise_conv_gelu::pack),
                      depthwise_conv_gelu::packed_size<float>,
                      BY_FLOAT(hidden_bytes),
                      {bytes_of<Projecting>, BY_FLOAT(project_run)},
                      {bytes_of<Attending>, BY_FLOAT(attend_run)},
                      {bytes_of<Mixing>, BY_FLOAT(mix_band)}};

}  // namespace cvt_kernels::transformer_block::pyramids

// The loops of the transformer block on the CPU.
//
// Between x and the result, nothing but queries, keys and values goes through memory. A band of an image's rows is
// normalized once and held; its convolutions are made a few rows at a time, which the linear layers then take from the
// cache. A tile of queries passes through attention, the linear layer behind it, LayerNorm and the MLP in one go; the
// hidden channels of the MLP are held in parts.
//
// If only some tokens are computed, a row of pixels is convolved whole where one of them lies in it, and these are then
// gathered before the linear layer. A tile gathers its tokens and puts them back at its end. A row is computed in the same
// way whichever others are.
//
// In front of a quantized layer a row is rounded in the cache, right after it is normalized or convolved. The scale of a row
// of hidden channels depends on all of them, so that these are held together, of fewer rows.

#include "conv_projection/convolve.h"
#include "transformer_block/block_loops.h"

namespace cvt_kernels::transformer_block {
namespace {

using conv_projection::kMaxKernel;

// The tokens of an image that are computed, in order; no rows if all are.
struct Kept {
  const int64_t* rows;
  int64_t count;

  Kept(const Block& block, int64_t image)
      : rows(block.rows == nullptr ? nullptr : block.rows + image * block.kept), count(queries_of(block)) {
    while (rows != nullptr && count > 0 && rows[count - 1] < 0) count--;
  }

  // How many lie before a token.
  int64_t before(int64_t token) const {
    if (rows == nullptr) return token;
    int64_t place = 0;
    while (place < count && rows[place] < token) place++;
    return place;
  }
};

// The first step: queries, keys and values ----------------------------------------------------------------

int64_t plane_of(const Block& block) { return (block.width + 2 * block.margin) * kLanes; }
int64_t row_size(const Block& block) { return (block.width + 2 * block.margin) * padded(block.channels); }

// The rows of a branch's output that are made together, at least one.
int64_t rows_together(const Branch& branch) { return at_least<int64_t>((kTileRows - 1) / branch.width, 1); }

int64_t most_tokens(const Block& block) {
  int64_t most = 0;
  for (const Branch& b : block.branches) most = at_least(rows_together(b) * b.width, most);
  return most + block.class_tokens;
}

template <class E>
struct Projecting {
  float *zeros, *held, *class_token;
  float* convolved;  // a row of pixels, before it is rounded
  Inputs<E> inputs;

  Projecting(const Block& block, Parts& parts)
      : inputs(parts, most_tokens(block), block.channels, block.channels,
               {&block.linears[0], &block.linears[1], &block.linears[2]}) {
    zeros = parts.take<float>(row_size(block));
    held = parts.take<float>(block.band_rows * row_size(block));
    class_token = parts.take<float>(padded(block.channels));
    int64_t widest = 0;
    for (int i = 0; i < 3; i++) {
      if (block.linears[i].integers != nullptr) widest = at_least(block.branches[i].width, widest);
    }
    convolved = parts.take<float>(widest * stride_of<float>(block.channels));
  }
};

// Lays down the normalized rows of a band, with zeros on both sides.
template <class T, class E>
void hold(const Block& block, const T* x, Reach rows, const Projecting<E>& scratch) {
  const int64_t plane = plane_of(block), margin = block.margin * kLanes;
  for (int64_t row = rows.first; row < rows.end; row++) {
    float* to = scratch.held + (row - rows.first) * row_size(block);
    for (int64_t c = 0; c < block.channels; c += kLanes) {
      float* vectors = to + c / kLanes * plane;
      std::memset(vectors, 0, margin * sizeof(float));
      std::memset(vectors + plane - margin, 0, margin * sizeof(float));
    }
    for (int64_t column = 0; column < block.width; column++) {
      const T* pixel = x + (block.class_tokens + row * block.width + column) * block.channels;
      float* place = to + margin + column * kLanes;
      normalize(block.norm1, pixel, block.channels, scratch.inputs.copy, [&](int64_t c, F normal, auto lanes) LAMBDA_INLINE {
        store(place + c / kLanes * plane, keep(normal, lanes), Whole{});
      });
    }
  }
}

// Computes one row of a branch's output from the rows that are held.
template <class E, class N>
void convolve_row(const Block& block, int branch, int64_t row, Reach held, const Projecting<E>& scratch, N* out) {
  const Branch& b = block.branches[branch];
  const float* rows[kMaxKernel];
  for (int64_t y = 0; y < b.kernel; y++) {
    const int64_t from = row * b.stride - b.padding + y * b.dilation;
    const bool inside = from >= 0 && from < block.height;
    rows[y] = (inside ? scratch.held + (from - held.first) * row_size(block) : scratch.zeros) +
              (block.margin - b.padding) * kLanes;
  }
  const auto run = [&](auto shape) {
    conv_projection::convolve<N>(shape, b, rows, plane_of(block), block.packed[branch], block.channels, out,
                                 stride_of<N>(block.channels));
  };
  const bool adjacent = b.kernel == 3 && b.dilation == 1;
  if (adjacent && b.stride == 1) run(conv_projection::Shape<3, 1>{});
  else if (adjacent && b.stride == 2) run(conv_projection::Shape<3, 2>{});
  else run(conv_projection::Shape<0, 0>{});
}

// Moves the tokens of a row that are kept, the places from `begin` to `end`, to its front.
template <class E>
void gather(const int64_t* rows, int64_t begin, int64_t end, int64_t first, const Block& block, E* a) {
  const int64_t stride = stride_of<E>(block.channels);
  for (int64_t place = begin; place < end; place++) {
    const int64_t from = rows[place] - first, to = place - begin;
    if (from != to) std::memcpy(a + to * stride, a + from * stride, block.channels * sizeof(E));
  }
}

template <class T, class E = Element<T>>
void project_run(const Block& block, const Run& run, void* memory) {
  const InMemory<Projecting<E>> scratch(block, memory);
  const Inputs<E>& inputs = scratch.inputs;
  const int64_t image = run.image;
  const T* x = static_cast<const T*>(block.x) + image * tokens_of(block) * block.channels;
  const Reach held = held_rows(block, run);
  std::memset(scratch.zeros, 0, row_size(block) * sizeof(float));
  hold(block, x, held, scratch);
  const bool with_class_token = run.begin == 0 && block.class_tokens;
  if (with_class_token) normalize(block.norm1, x, block.channels, inputs.copy, scratch.class_token);
  for (int branch = 0; branch < 3; branch++) {
    const Branch& b = block.branches[branch];
    const Linear& linear = block.linears[branch];
    const bool gathers = branch == 0 && block.rows != nullptr;
    const Kept kept(block, image);
    const auto [top, bottom] = rows_of_branch(block, b, run);
    const int64_t most = rows_together(b) * b.width + block.class_tokens;
    int64_t row = top, token = block.class_tokens + row * b.width, rows = 0;
    if (gathers) token = kept.before(token);
    if (with_class_token && (!gathers || token > 0)) {
      round_rows(linear, scratch.class_token, 0, 1, inputs.rounded);
      for_vectors<kLanes>(block.channels, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
        store(inputs.a + c, load(scratch.class_token + c, lanes), lanes);
      });
      token = 0, rows = 1;
    }
    const auto convolve = [&](auto* to, int64_t begin, int64_t end) {
      convolve_row(block, branch, row, held, scratch, to);
      if (gathers) gather(kept.rows, begin, end, block.class_tokens + row * b.width, block, to);
    };
    while (row < bottom || rows > 0) {
      for (; row < bottom && rows + b.width <= most; row++) {
        const int64_t first = block.class_tokens + row * b.width, begin = token + rows;
        const int64_t end = gathers ? kept.before(first + b.width) : begin + b.width;
        if (begin == end) continue;
        if (linear.integers == nullptr) {
          convolve(inputs.a + rows * inputs.stride, begin, end);
        } else {
          convolve(scratch.convolved, begin, end);
          round_rows(linear, scratch.convolved, stride_of<float>(block.channels), end - begin,
                     inputs.from_row(linear, rows));
        }
        rows += end - begin;
      }
      if (rows == 0) break;
      pad_rows(inputs.a, rows, inputs.stride, block.channels);
      E* out = static_cast<E*>(block.projected[branch]) +
               (image * projected_tokens(block, branch) + token) * linear.outputs;
      inputs.apply(linear, rows, stored(out, linear.outputs));
      token += rows, rows = 0;
    }
  }
}

// The second step: attention and the MLP ------------------------------------------------------------------

template <class E>
struct Attending {
  attention::Heads<E> heads;
  Inputs<E> inputs;
  int64_t hidden_rows;
  Hidden<E> hidden;
  float* gathered;

  Attending(const Block& block, Parts& parts)
      : heads(tokens_of(block, 1), block.heads, head_dim_of(block), block.scale, parts),
        inputs(parts, block.tile_rows, at_least(block.channels, block.proj.inputs),
               at_least(block.channels, rounds_hidden(block) ? block.fc1.outputs : 0),
               {&block.proj, &block.fc1, &block.fc2}),
        hidden_rows(block.fc2.integers == nullptr
                        ? block.tile_rows
                        : at_most(block.tile_rows, rows_of_hidden<E>(block, rounds_hidden(block)))),
        hidden(block, parts, hidden_rows, rounds_hidden(block)),
        gathered(parts.take<float>(block.rows == nullptr ? 0 : block.tile_rows * block.channels)) {}  // of up to 4 bytes
};

template <class T, class E = Element<T>>
void attend_run(const Block& block, const Run& run, int64_t previous, void* memory) {
  InMemory<Attending<E>> scratch(block, memory);
  const int64_t image = run.image;
  const Kept kept(block, image);
  if (kept.count == 0) return;
  if (previous != image) {
    const int64_t before = image * tokens_of(block, 1) * block.linears[1].outputs;
    scratch.heads.pack(static_cast<const E*>(block.projected[1]) + before, static_cast<const E*>(block.projected[2]) + before);
  }
  const int64_t first = run.begin, rows = at_most(run.end, kept.count) - first;
  if (rows <= 0) return;
  const E* q = static_cast<const E*>(block.projected[0]) + (image * queries_of(block) + first) * block.linears[0].outputs;
  T* const tokens = static_cast<T*>(block.x) + image * tokens_of(block) * block.channels;
  const int64_t bytes = block.channels * sizeof(T);
  T* x = tokens + first * block.channels;
  if (kept.rows != nullptr) {
    x = reinterpret_cast<T*>(scratch.gathered);
    for (int64_t r = 0; r < rows; r++) {
      std::memcpy(x + r * block.channels, tokens + kept.rows[first + r] * block.channels, bytes);
    }
  }
  const Inputs<E>& inputs = scratch.inputs;
  scratch.heads.attend(q, rows, inputs.a, inputs.stride);
  pad_rows(inputs.a, rows, inputs.stride, block.proj.inputs);
  inputs.round(block.proj, rows);
  inputs.apply(block.proj, rows, stored_sum(x, x, block.channels));
  layer_norm_gelu::with_activation<false>(block.activation, [&](auto activation) {
    const int64_t groups = ceil_div(rows, scratch.hidden_rows);
    for (int64_t group = 0; group < groups; group++) {
      const int64_t begin = rows * group / groups, count = rows * (group + 1) / groups - begin;
      T* to = x + begin * block.channels;
      add_mlp<activation>(block, static_cast<const T*>(to), count, inputs, scratch.hidden, to);
    }
  });
  for (int64_t r = 0; kept.rows != nullptr && r < rows; r++) {
    std::memcpy(tokens + kept.rows[first + r] * block.channels, x + r * block.channels, bytes);
  }
}

// Scores --------------------------------------------------------------------------------------------------

struct Scoring {
  float *query, *products;

  Scoring(const Block& block, Parts& parts) {
    query = parts.take<float>(padded(block.linears[0].outputs));
    products = parts.take<float>(padded(tokens_of(block, 1)));
  }
};

template <class E>
void add_query(const E* q, int64_t width, float* sums) {
  fill(sums, width, [&](int64_t c, auto lanes) LAMBDA_INLINE { return load(sums + c, lanes) + load(q + c, lanes); });
}

template <class T, class E = Element<T>>
void score_keys(const Block& block, int64_t image, void* memory) {
  const InMemory<Scoring> scratch(block, memory);
  const Kept kept(block, image);
  const int64_t width = block.linears[0].outputs, keys = tokens_of(block, 1), head_dim = head_dim_of(block);
  const E* q = static_cast<const E*>(block.projected[0]) + image * queries_of(block) * width;
  const E* k = static_cast<const E*>(block.projected[1]) + image * keys * width;
  // The class token is the first one, or with rows the first of these.
  const int64_t spatial = kept.before(block.class_tokens);
  const bool is_mean = block.scored == Scored::mean;
  const int64_t begin = is_mean ? spatial : 0, end = is_mean ? kept.count : 1;
  std::memset(scratch.query, 0, width * sizeof(float));
  for (int64_t place = begin; place < end; place++) add_query(q + place * width, width, scratch.query);
  const attention::Scale factors = attention::split(block.scale / at_least<int64_t>(end - begin, 1));
  const F power = static_cast<float>(factors.of_queries);
  fill(scratch.query, width, [&](int64_t c, auto lanes) LAMBDA_INLINE { return load(scratch.query + c, lanes) * power; });
  const float scale = static_cast<float>(factors.of_scores * 1.4426950408889634);  // 1 / ln(2)
  float* out = block.scores + image * keys;
  for (int64_t head = 0; head < block.heads; head++) {
    const int64_t first = head * head_dim;
    for (int64_t key = 0; key < keys; key++) {
      const E* of_key = k + key * width + first;
      F sums = 0;
      for_vectors<kLanes>(head_dim, [&](int64_t d, auto lanes, int) LAMBDA_INLINE {
        sums = sums + keep(load(scratch.query + first + d, lanes) * load(of_key + d, lanes), lanes);
      });
      scratch.products[key] = sum(sums);
    }
    attention::Running<float> running;
    attention::soften<float>(scratch.products, scratch.products, keys, scale, true, running);
    const F inverse = 1 / running.sum;
    for_vectors<kLanes>(keys, [&](int64_t key, auto lanes, int) LAMBDA_INLINE {
      const F shares = load(scratch.products + key, lanes) * inverse;
      store(out + key, head == 0 ? shares : load(out + key, lanes) + shares, lanes);
    });
  }
}

int64_t packed_convolution_size(int64_t kernel, int64_t channels) { return (kernel * kernel + 3) * padded(channels); }

}  // namespace

const Kernels KERNELS{BY_FLOAT(conv_projection::pack),
                      packed_convolution_size,
                      [](DType dtype) { return with_float(dtype, []<class T>(T) { return int64_t{sizeof(Element<T>)}; }); },
                      {bytes_of<Projecting>, BY_FLOAT(project_run)},
                      {bytes_of<Attending>, BY_FLOAT(attend_run)},
                      {bytes_of<Scoring>, BY_FLOAT(score_keys)}};

}  // namespace cvt_kernels::transformer_block

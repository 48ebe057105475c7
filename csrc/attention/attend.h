// Attention of a tile of queries over the keys of a head, for the loops of this folder and of others.
//
// K and V of a head are packed once, into the panels that the products read from end to end. A tile of queries then goes
// through the keys block by block: scores, softmax with a running maximum (Milakov and Gimelshein 2018), product with V.
// A tile's scores and a panel fit L1, K and V of CvT's heads L2.
#pragma once

#include "attention/cpu_loops.h"
#include "linear/layer_loops.h"

namespace cvt_kernels::attention {
namespace {

constexpr int64_t kScoreStride = kKeyBlock + 16;  // not a power of two, which would crowd a few sets of the cache
constexpr int64_t kQueryStride = kMaxHeadDim + 16;

// Packs a row of queries, multiplied by a power of two.
template <class T, class A = Accumulator<T>>
void pack_query(const T* q, int64_t head_dim, A power, Factor<T>* out) {
  if constexpr (kPaired<T>) out[(head_dim - 1) / 2] = 0;
  using To = std::conditional_t<kPaired<T>, T, A>;
  fill(reinterpret_cast<To*>(out), head_dim, [&](int64_t i, auto lanes) LAMBDA_INLINE { return load(q + i, lanes) * power; });
}

// Packs values (keys, head_dim) as panels (depth, channels of the panel).
template <class T>
void pack_values(const T* v, int64_t stride, int64_t keys, int64_t head_dim, Factor<T>* out) {
  const int64_t depth = ceil_div(keys, kDepth<T>);
  for_panels<Accumulator<T>>(head_dim, [&](int64_t start, auto vectors) LAMBDA_INLINE {
    constexpr int width = vectors * VectorOf<T>::lanes;
    const int64_t size = at_most<int64_t>(width, head_dim - start);
    Factor<T>* panel = out + start * depth;
    for (int64_t key = 0; key < keys; key++) {
      const T* row = v + key * stride + start;
      Factor<T>* packed = panel + key / kDepth<T> * width;
      if constexpr (kPaired<T>) {
        for (int64_t i = 0; i < width; i++) {
          const Pair bits = i < size ? row[i].bits : 0;
          packed[i] = key % 2 == 0 ? bits : packed[i] | bits << 16;
        }
      } else {
        for_vectors<VectorOf<T>::lanes>(width, [&](int64_t i, auto, int) LAMBDA_INLINE {
          const int64_t left = size - i;
          if (left >= VectorOf<T>::lanes) store(packed + i, load(row + i, Whole{}), Whole{});
          else store(packed + i, load(row + i, Part{at_least<int64_t>(left, 0)}), Whole{});
        });
      }
    }
  });
}

template <class T>
VECTOR_INLINE VectorOf<T> power(VectorOf<T> y) {
  if constexpr (std::is_same_v<T, double>) return layer_norm_gelu::by_lanes<T>(y, [](double x) { return power_of_two(x); });
  else return power_of_two<layer_norm_gelu::kPrecision<T>>(at_least(y, VectorOf<T>(-127.0f)));
}

// The parts of a thread's memory: keys and values of some heads, and what a tile of queries needs.
template <class T, class A = Accumulator<T>, class P = Factor<T>>
struct Scratch {
  int64_t k_size, v_size;  // of a head
  P *k, *v, *q, *probabilities;
  A *scores, *out;

  Scratch(const Forward& call, Parts& parts, int64_t heads = 1)
      : k_size(round_up(call.keys, kPanel<A>) * ceil_div(call.head_dim, kDepth<T>)),
        v_size(ceil_div(call.keys, kDepth<T>) * round_up(call.head_dim, kPanel<A>)) {
    k = parts.take<P>(heads * k_size);
    v = parts.take<P>(heads * v_size);
    q = parts.take<P>(kTile * kQueryStride);
    scores = parts.take<A>(kTile * kScoreStride);
    probabilities = kPaired<T> ? parts.take<P>(kTile * kScoreStride) : reinterpret_cast<P*>(scores);
    out = parts.take<A>(kTile * kQueryStride);
  }
};

// Softmax so far: the largest score, and the sum of 2^(scale · (score - top)).
template <class A>
struct Running {
  A top, sum;
};

// Turns scores into probabilities that are not yet divided by their sum. Returns the factor for the sums of earlier
// blocks. The difference comes before the scale, which is positive, so that the largest probabilities are rounded least.
template <class T, class A = Accumulator<T>>
VECTOR_INLINE A soften(const A* scores, Factor<T>* probabilities, int64_t keys, A scale, bool first,
                       Running<A>& running) {
  using F = Vector<A>;
  const F lowest = A(-INFINITY);
  F tops[4] = {lowest, lowest, lowest, lowest};
  for_vectors<F::lanes>(keys, [&](int64_t c, auto lanes, int i) LAMBDA_INLINE {
    tops[i] = at_least(keep(load(scores + c, Whole{}), lanes, lowest), tops[i]);
  });
  const A top = largest(at_least(at_least(tops[0], tops[1]), at_least(tops[2], tops[3])));
  const A before = first ? top : running.top;
  running.top = top > before ? top : before;
  const A origin = running.top == -INFINITY ? 0 : running.top;  // as long as all scores are -∞, lest -∞ - -∞ be NaN
  F sums[4] = {A(0), A(0), A(0), A(0)};
  for_vectors<F::lanes>(keys, [&](int64_t c, auto lanes, int i) LAMBDA_INLINE {
    const F p = keep(power<T>((load(scores + c, Whole{}) - origin) * scale), lanes);
    sums[i] = sums[i] + p;
    if constexpr (kPaired<T>) store(reinterpret_cast<T*>(probabilities) + c, p, Whole{});
    else store(probabilities + c, p, Whole{});
  });
  const A sum_here = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const A factor = first ? 0 : power<T>(F((before - origin) * scale)).v[0];
  running.sum = first ? sum_here : running.sum * factor + sum_here;
  return factor;
}

// The biases by position of a tile of queries; `packed` is null where there are none.
template <class A>
struct TileBias {
  const A* packed = nullptr;  // of the head
  const PositionGrids* grids = nullptr;
  const int64_t* rows = nullptr;  // the tokens of the queries; null where they are those from `first` on
  int64_t first = 0;

  // Adds one query's biases to its scores with the keys from `first_key` on; scores after the last key get garbage.
  VECTOR_INLINE void add(int64_t query, int64_t first_key, int64_t keys, A* scores) const {
    const int64_t token = (rows == nullptr ? first + query : rows[query]) - grids->class_tokens;
    if (token < 0 || token >= grids->height * grids->width) return;
    const int64_t skipped = first_key == 0 ? grids->class_tokens : 0;
    const A* biases = packed + grids->start_of(token / grids->width, token % grids->width) + first_key + skipped -
                      grids->class_tokens;
    for (int64_t c = 0; c < keys - skipped; c += Vector<A>::lanes) {
      A* to = scores + skipped + c;
      store(to, load(to, Whole{}) + load(biases + c, Whole{}), Whole{});
    }
  }
};

// Takes the queries of a tile, at most kTile, through all keys of their head; the rows of out lie out_stride apart.
template <class T, class A = Accumulator<T>>
void attend(const Forward& call, const T* q, int64_t rows, const Scratch<T>& scratch, T* out, int64_t out_stride,
            const TileBias<A>& bias = {}) {
  using F = Vector<A>;
  const int64_t depth = ceil_div(call.head_dim, kDepth<T>), value_depth = ceil_div(call.keys, kDepth<T>);
  const Scale factors = split(call.scale);
  for (int64_t row = 0; row < rows; row++) {
    pack_query(q + row * call.q.token, call.head_dim, static_cast<A>(factors.of_queries), scratch.q + row * kQueryStride);
  }
  const A scale = static_cast<A>(factors.of_scores * 1.4426950408889634);  // 1 / ln(2)
  Running<A> running[kTile];

  // Wide heads are summed in parts: rounding errors of equal products grow with the square of what is summed in turn.
  const int64_t step = kPaired<T> || depth <= 64 ? depth : 32;
  const int64_t block = round_up(ceil_div(call.keys, ceil_div(call.keys, kKeyBlock)), kPanel<A>);
  for (int64_t first = 0; first < call.keys; first += block) {
    const int64_t keys = at_most(block, call.keys - first);
    for_panels<A>(keys, [&](int64_t start, auto vectors) LAMBDA_INLINE {
      const Factor<T>* panel = scratch.k + (first + start) * depth;
      for (int64_t d = 0; d < depth; d += step) {
        multiply<vectors>(static_cast<const Factor<T>*>(scratch.q) + d, kQueryStride, rows, panel + d * vectors * F::lanes,
                          at_most(step, depth - d), scratch.scores + start, kScoreStride, d > 0);
      }
    });
    for (int64_t row = 0; row < rows; row++) {
      Factor<T>* probabilities = scratch.probabilities + row * kScoreStride;
      A* scores = scratch.scores + row * kScoreStride;
      if (bias.packed != nullptr) bias.add(row, first, keys, scores);
      const A factor = soften<T>(scores, probabilities, keys, scale, first == 0, running[row]);
      if (first == 0) continue;
      A* sums = scratch.out + row * kQueryStride;
      for (int64_t c = 0; c < call.head_dim; c += F::lanes) {
        store(sums + c, load(sums + c, Whole{}) * factor, Whole{});
      }
    }
    for_panels<A>(call.head_dim, [&](int64_t start, auto vectors) LAMBDA_INLINE {
      constexpr int width = vectors * F::lanes;
      const Factor<T>* panel = scratch.v + start * value_depth + first / kDepth<T> * width;
      multiply<vectors>(static_cast<const Factor<T>*>(scratch.probabilities), kScoreStride, rows, panel,
                        ceil_div(keys, kDepth<T>), scratch.out + start, kQueryStride, first > 0);
    });
  }
  for (int64_t row = 0; row < rows; row++) {
    const F inverse = 1 / running[row].sum;
    const A* sums = scratch.out + row * kQueryStride;
    T* to = out + row * out_stride;
    fill(to, call.head_dim, [&](int64_t c, auto) LAMBDA_INLINE { return load(sums + c, Whole{}) * inverse; });
  }
}

// The heads of an image, for the loops of other folders. Queries, keys and values are rows of all heads' channels.
template <class E>
class Heads {
 public:
  Heads(int64_t keys, int64_t heads, int64_t head_dim, double scale, Parts& parts)
      : call_{.q = {nullptr, 0, heads * head_dim, 0}, .k = {}, .v = {}, .batch = 1, .queries = 0, .keys = keys,
              .heads = heads, .head_dim = head_dim, .scale = scale, .out = nullptr},
        scratch_(call_, parts, heads) {}

  // Packs the keys and values of an image.
  void pack(const E* k, const E* v) {
    for (int64_t head = 0; head < call_.heads; head++) {
      const int64_t first = head * call_.head_dim, width = call_.q.token;
      pack_columns<E>(k + first, width, call_.keys, call_.head_dim, scratch_.k + head * scratch_.k_size);
      pack_values<E>(v + first, width, call_.keys, call_.head_dim, scratch_.v + head * scratch_.v_size);
    }
  }

  // Computes the attention of some queries; the rows of out lie out_stride apart.
  void attend(const E* q, int64_t rows, E* out, int64_t out_stride) const {
    Scratch<E> of_head = scratch_;
    const int64_t tiles = tiles_of(rows);
    for (int64_t head = 0; head < call_.heads; head++) {
      const int64_t first = head * call_.head_dim;
      of_head.k = scratch_.k + head * scratch_.k_size;
      of_head.v = scratch_.v + head * scratch_.v_size;
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = rows * tile / tiles;
        attention::attend<E>(call_, q + row * call_.q.token + first, rows * (tile + 1) / tiles - row, of_head,
                             out + row * out_stride + first, out_stride);
      }
    }
  }

 private:
  Forward call_;
  Scratch<E> scratch_;
};

}  // namespace
}  // namespace cvt_kernels::attention

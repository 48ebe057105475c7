// Attention of rows of queries in all heads side by side, for the loops of other folders.
#pragma once

#include "attention/attend.h"
#include "linear/layer_loops.h"

namespace cvt_kernels::attention {
namespace {

// The heads of an image, in a part of a thread's memory. Queries, keys and values are rows of all heads' channels.
template <class E>
class Heads {
 public:
  Heads(int64_t keys, int64_t heads, int64_t head_dim, double scale, Parts& parts)
      : call_{.q = {nullptr, 0, heads * head_dim, 0}, .k = {}, .v = {}, .batch = 1, .queries = 0, .keys = keys,
              .heads = heads, .head_dim = head_dim, .scale = scale, .out = nullptr},
        sizes_(sizes_of<E>(call_)) {
    keys_ = parts.take<Factor<E>>(heads * sizes_.k);
    values_ = parts.take<Factor<E>>(heads * sizes_.v);
    scratch_.q = parts.take<Factor<E>>(sizes_.q);
    scratch_.probabilities = parts.take<Factor<E>>(sizes_.probabilities);
    scratch_.scores = parts.take<float>(sizes_.scores);
    scratch_.out = parts.take<float>(sizes_.out);
    if (!kPaired<E>) scratch_.probabilities = reinterpret_cast<Factor<E>*>(scratch_.scores);
  }

  // Packs the keys and values of an image.
  void pack(const E* k, const E* v) {
    for (int64_t head = 0; head < call_.heads; head++) {
      const int64_t first = head * call_.head_dim, width = call_.q.token;
      pack_keys<E>(k + first, width, call_.keys, call_.head_dim, keys_ + head * sizes_.k);
      pack_values<E>(v + first, width, call_.keys, call_.head_dim, values_ + head * sizes_.v);
    }
  }

  // Computes the attention of some queries; the rows of out lie out_stride apart.
  void attend(const E* q, int64_t rows, E* out, int64_t out_stride) const {
    Scratch<E> of_head = scratch_;
    const int64_t tiles = tiles_of(rows);
    for (int64_t head = 0; head < call_.heads; head++) {
      const int64_t first = head * call_.head_dim;
      of_head.k = keys_ + head * sizes_.k;
      of_head.v = values_ + head * sizes_.v;
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = rows * tile / tiles;
        attention::attend<E>(call_, q + row * call_.q.token + first, rows * (tile + 1) / tiles - row, of_head,
                             out + row * out_stride + first, out_stride);
      }
    }
  }

 private:
  Forward call_;
  ScratchSizes sizes_;
  Scratch<E> scratch_{};
  Factor<E> *keys_, *values_;
};

}  // namespace
}  // namespace cvt_kernels::attention

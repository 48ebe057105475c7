// The bias of attention by position: a number for each head and each offset from key to query, read from a table.
//
// A table (heads, H + s (Hk - 1), W + s (Wk - 1)) is packed before, so that the biases of one query (i, j) with all keys
// are neighbors: for each phase i mod s and each column j there is a plane (offsets down, columns of keys), turned around
// so that keys rise, and i / s says where in it the first row of keys is. That is a small part of the (Nq, Nkv) numbers
// that a head's matrix would have: 1/14 in the first stage of CvT-13 at 224x224. They are divided by the scale of scores
// (Scale), so that they can be added to these before they are multiplied by it, and zeros leave them as they are.
#pragma once

#include <cstdint>

namespace cvt_kernels::attention {

constexpr int64_t kPackedPadding = 64;  // numbers after the last one that vectors may read

// The grids of a table. A class token, key and token 0 if there is one, has no place and gets no bias.
struct PositionGrids {
  int64_t height, width, key_height, key_width, stride, class_tokens;

  int64_t table_height() const { return height + stride * (key_height - 1); }
  int64_t table_width() const { return width + stride * (key_width - 1); }
  int64_t plane_height() const { return (table_height() + stride - 1) / stride; }
  int64_t plane_size() const { return plane_height() * key_width; }
  int64_t packed_size() const { return stride * width * plane_size(); }

  // Where in the packed table of a head the biases of the query (i, j) begin.
  int64_t start_of(int64_t i, int64_t j) const {
    return (i % stride * width + j) * plane_size() + (plane_height() - key_height - i / stride) * key_width;
  }
};

// The packed table of all heads, in accumulators, and the tokens (batch, queries) that the queries are; null where there
// is a query for each token. A token outside the grid gets no bias.
struct Position {
  PositionGrids grids;
  const void* packed;
  const int64_t* rows;
};

// Packs the table of one head; what belongs to no offset is zero.
template <class A>
void pack_table(const A* table, const PositionGrids& g, A scale, A* packed) {
  for (int64_t phase = 0; phase < g.stride; phase++) {
    for (int64_t j = 0; j < g.width; j++) {
      for (int64_t line = 0; line < g.plane_height(); line++) {
        const int64_t down = phase + g.stride * (g.plane_height() - 1 - line);
        const A* row = table + down * g.table_width() + j;
        for (int64_t b = 0; b < g.key_width; b++) {
          *packed++ = down < g.table_height() ? row[g.stride * (g.key_width - 1 - b)] / scale : A(0);
        }
      }
    }
  }
}

}  // namespace cvt_kernels::attention

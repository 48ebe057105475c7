// The loops of attention on the CPU.

#include "attention/attend.h"

namespace cvt_kernels::attention {
namespace {

template <class T>
const T* at(const Strided& tensor, int64_t image, int64_t head) {
  return static_cast<const T*>(tensor.data) + image * tensor.batch + head * tensor.head;
}

template <class T, class A = Accumulator<T>>
TileBias<A> tile_bias(const Forward& call, int64_t image, int64_t head, int64_t first) {
  if (call.position == nullptr) return {};
  const Position& position = *call.position;
  return {
      .packed = static_cast<const A*>(position.packed) + head * position.grids.packed_size(),
      .grids = &position.grids,
      .rows = position.rows == nullptr ? nullptr : position.rows + image * call.queries + first,
      .first = first,
  };
}

template <class T>
void forward_tiles(const Forward& call, int64_t begin, int64_t end, void* memory) {
  const InMemory<Scratch<T>> scratch(call, memory);
  const int64_t tiles = tiles_of(call.queries);
  int64_t packed = -1;
  for (; begin < end; begin++) {
    const int64_t item = begin / tiles, image = item / call.heads, head = item % call.heads;
    if (item != packed) {
      pack_columns<T>(at<T>(call.k, image, head), call.k.token, call.keys, call.head_dim, scratch.k);
      pack_values<T>(at<T>(call.v, image, head), call.v.token, call.keys, call.head_dim, scratch.v);
      packed = item;
    }
    const int64_t tile = begin % tiles, first = call.queries * tile / tiles;
    const int64_t rows = call.queries * (tile + 1) / tiles - first;
    T* out = static_cast<T*>(call.out) + ((image * call.queries + first) * call.heads + head) * call.head_dim;
    attend<T>(call, at<T>(call.q, image, head) + first * call.q.token, rows, scratch, out, call.heads * call.head_dim,
              tile_bias<T>(call, image, head, first));
  }
}

template <class T>
int64_t scratch_bytes(const Forward& call) {
  return bytes_of<Scratch<T>>(DType{}, call);
}

}  // namespace

const Kernels KERNELS{{BY_TYPE(scratch_bytes), BY_TYPE(forward_tiles)}};

}  // namespace cvt_kernels::attention

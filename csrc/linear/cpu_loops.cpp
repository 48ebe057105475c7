// The loops that pack weights on the CPU.

#include "linear/cpu_loops.h"

#include "linear/layer_loops.h"

namespace cvt_kernels::linear {
namespace {

// Packs a weight into panels (depth, outputs of the panel), with zeros beyond the last output.
template <class T, class E = Element<T>>
void pack_weight(const void* weight, int64_t stride, int64_t outputs, int64_t inputs, void* out) {
  const int64_t depth = ceil_div(inputs, kDepth<E>);
  for_panels<float>(outputs, [&](int64_t start, auto vectors) LAMBDA_INLINE {
    constexpr int width = vectors * kLanes;
    Factor<E>* panel = static_cast<Factor<E>*>(out) + start * depth;
    for (int lane = 0; lane < width; lane++) {
      const T* row = start + lane < outputs ? static_cast<const T*>(weight) + (start + lane) * stride : nullptr;
      for (int64_t d = 0; d < depth; d++) {
        Factor<E> factor = 0;
        if constexpr (kPaired<T>) {
          if (row != nullptr) factor = row[2 * d].bits;
          if (row != nullptr && 2 * d + 1 < inputs) factor |= uint32_t{row[2 * d + 1].bits} << 16;
        } else {
          if (row != nullptr) factor = load(row + d);
        }
        panel[d * width + lane] = factor;
      }
    }
  });
}

template <class T, class E = Element<T>>
int64_t packed_bytes(int64_t outputs, int64_t inputs) {
  return round_up(outputs, kLanes) * ceil_div(inputs, kDepth<E>) * sizeof(Factor<E>);
}

// Whether the products of a shape equal products of integers, which are exact. Memory is static: this runs after a
// fork.
template <int vectors>
bool tiles_are_right(int64_t rows, int64_t depth) {
  constexpr int64_t most_rows = 33, most_depth = 70, columns = vectors * kTileSide;
  static BFloat16 a[most_rows * most_depth * 2], b[most_depth * columns * 2];
  static float c[most_rows * columns];
  const auto left = [](int64_t row, int64_t k) { return static_cast<float>((3 * row + k) % 7 - 3); };
  const auto right = [](int64_t k, int64_t column) { return static_cast<float>((k + 5 * column) % 9 - 4); };
  for (int64_t k = 0; k < 2 * depth; k++) {
    for (int64_t row = 0; row < rows; row++) store(&a[row * 2 * depth + k], left(row, k));
    for (int64_t column = 0; column < columns; column++) {
      store(&b[(k / 2 * columns + column) * 2 + k % 2], right(k, column));
    }
  }
  bool right_so_far = true;
  for (int times = 1; times <= 2; times++) {  // set, then added to
    multiply<vectors>(reinterpret_cast<const Pair*>(a), depth, rows, reinterpret_cast<const Pair*>(b), depth, c, columns,
                      times == 2);
    for (int64_t row = 0; row < rows; row++) {
      for (int64_t column = 0; column < columns; column++) {
        float sum = 0;
        for (int64_t k = 0; k < 2 * depth; k++) sum += left(row, k) * right(k, column);
        right_so_far = right_so_far && c[row * columns + column] == static_cast<float>(times) * sum;
      }
    }
  }
  return right_so_far;
}

bool products_are_right() {
  bool all = true;
  if constexpr (kTiles) {
    const TileUse tile_use;
    for (const int64_t rows : {1, 15, 16, 17, 32, 33}) {
      for (const int64_t depth : {1, 15, 16, 17, 32, 33, 64, 65, 70}) {
        all = all && tiles_are_right<1>(rows, depth) && tiles_are_right<2>(rows, depth);
      }
    }
  }
  return all;
}

}  // namespace

const Kernels KERNELS{BY_FLOAT(pack_weight), BY_FLOAT(packed_bytes), products_are_right};

}  // namespace cvt_kernels::linear

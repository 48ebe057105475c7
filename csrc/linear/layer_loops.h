// Linear layers and LayerNorm on rows that stay in the cache, for the loops of several folders. Everything has internal
// linkage, as in vector.h. They serve all dtypes but float64.
#pragma once

#include "common/product.h"
#include "layer_norm_gelu/moments.h"
#include "linear_int8/cpu_loops.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace cvt_kernels {
namespace {

using F = Vector<float>;
constexpr int kLanes = F::lanes;
constexpr int kColumns = kPanel<float>;

constexpr int64_t kAlignment = 64;  // of the parts of a thread's memory, in bytes

// The type between the linear layers: pairs of bfloat16 where they are multiplied as such, else float.
template <class T>
using Element = std::conditional_t<kPaired<T>, BFloat16, float>;

// The distance of rows of factors. It is no power of two, which would crowd a few sets of the cache.
template <class E>
int64_t stride_of(int64_t channels) {
  return round_up(channels, kAlignment / sizeof(E)) + kAlignment / sizeof(E);
}

// Numbers of whole vectors.
inline int64_t padded(int64_t channels) { return round_up(channels, kLanes); }

// Puts a zero after the last channel of each row where it makes a pair with it.
template <class E>
void pad_rows(E* a, int64_t rows, int64_t stride, int64_t channels) {
  if (channels % kDepth<E> == 0) return;
  for (int64_t row = 0; row < rows; row++) a[row * stride + channels] = E{};
}

template <class E>
const Factor<E>* factors(const E* row) {
  return reinterpret_cast<const Factor<E>*>(row);
}

// Hands out the parts of a thread's memory; with none, it counts their bytes.
class Parts {
 public:
  explicit Parts(void* memory) : start_(static_cast<char*>(memory)) {}

  template <class E>
  E* take(int64_t count) {
    E* part = start_ == nullptr ? nullptr : reinterpret_cast<E*>(start_ + size_);
    const int64_t end = size_ + count * sizeof(E);
    size_ = round_up(end, kAlignment);
#ifdef __SANITIZE_ADDRESS__  // nobody may touch what lies between the parts
    size_ += kAlignment;
    if (start_ != nullptr) __asan_poison_memory_region(start_ + end, size_ - end);
#endif
    return part;
  }

#ifdef __SANITIZE_ADDRESS__
  ~Parts() {
    if (start_ != nullptr) __asan_unpoison_memory_region(start_, size_);
  }
#endif

  int64_t size() const { return size_; }

 private:
  char* start_;
  int64_t size_ = 0;
};

// A scratch in a thread's memory; the thread may use tiles meanwhile.
template <class Scratch>
struct InMemory : private Parts, public Scratch {
  template <class Call>
  InMemory(const Call& call, void* memory) : Parts(memory), Scratch(call, static_cast<Parts&>(*this)) {}

  const TileUse tile_use;
};

// The bytes of a scratch, which takes its parts when it is made for a call; it may be a template of the type between layers.
template <class Scratch, class Call>
int64_t bytes_of(DType, const Call& call) {
  Parts parts(nullptr);
  Scratch(call, parts);
  return parts.size();
}

template <template <class> class Scratch, class Call>
int64_t bytes_of(DType dtype, const Call& call) {
  return with_float(dtype, [&](auto type) { return bytes_of<Scratch<Element<decltype(type)>>>(dtype, call); });
}

// Linear layers -------------------------------------------------------------------------------------------

// Functions for `apply` that store results in rows of `out`, which lie `stride` apart, or what they give added to x.
template <class T>
auto stored(T* out, int64_t stride) {
  return [=](int64_t row, int64_t c, F sums, auto lanes) LAMBDA_INLINE { store(out + row * stride + c, sums, lanes); };
}

template <class T>
auto stored_sum(const T* x, T* out, int64_t stride) {
  return [=](int64_t row, int64_t c, F sums, auto lanes) LAMBDA_INLINE {
    store(out + row * stride + c, load(x + row * stride + c, lanes) + sums, lanes);
  };
}

// Calls f(column, lanes) for the vectors of a panel with `left` columns left.
template <int vectors, class G>
VECTOR_INLINE void for_columns(int64_t left, G f) {
  for (int i = 0; i < vectors; i++) {
    const int64_t column = i * kLanes;
    if (column + kLanes <= left) f(column, Whole{});
    else if (column < left) f(column, Part{left - column});
  }
}

// Calls f(first, count) for the rows that go through a layer together. With AMX these are two tiles high: they stay in L1
// while the weight passes, which lies in the order in which it is read.
template <class E, class G>
VECTOR_INLINE void for_rows(int64_t rows, G f) {
  if constexpr (kTiles && kPaired<E>) {
    constexpr int64_t most = 2 * kTileSide;
    for (int64_t first = 0; first < rows; first += most) f(first, first + most < rows ? most : rows - first);
  } else {
    f(0, rows);
  }
}

// Computes a linear layer on some rows of a, for its outputs from `begin` to `end`, which are the bounds of panels. Calls
// f(row, output, sums, lanes) for each vector of results.
template <class E, class G>
VECTOR_INLINE void apply(const Linear& linear, int64_t begin, int64_t end, const E* a, int64_t a_stride, int64_t rows,
                         float* tile, G f) {
  const int64_t depth = ceil_div(linear.inputs, kDepth<E>), step = a_stride / kDepth<E>;
  const Factor<E>* weight = static_cast<const Factor<E>*>(linear.weight);
  for_rows<E>(rows, [&](int64_t first, int64_t count) LAMBDA_INLINE {
    for_panels<float>(end - begin, [&](int64_t start, auto vectors) LAMBDA_INLINE {
      start += begin;
      const bool asks = first == 0 && start + kColumns < end;  // later rows find the panel in L2
      const Factor<E>* next = asks ? weight + (start + kColumns) * depth : nullptr;
      multiply<vectors>(factors(a) + first * step, step, count, weight + start * depth, depth, tile, kColumns, false, next);
      for_columns<vectors>(linear.outputs - start, [&](int64_t column, auto lanes) LAMBDA_INLINE {
        const auto bias = load(linear.bias + start + column, lanes);
        for (int64_t row = 0; row < count; row++) {
          f(first + row, start + column, load(tile + row * kColumns + column, Whole{}) + bias, lanes);
        }
      });
    });
  });
}

// sums = a weight, or sums += a weight, for the inputs of the weight from `begin` to `end`.
template <class E>
void add_product(const Linear& linear, int64_t begin, int64_t end, const E* a, int64_t a_stride, int64_t rows, float* sums,
                 int64_t sums_stride, bool adds) {
  const int64_t depth = ceil_div(linear.inputs, kDepth<E>);
  const Factor<E>* weight = static_cast<const Factor<E>*>(linear.weight);
  for_rows<E>(rows, [&](int64_t first, int64_t count) LAMBDA_INLINE {
    for_panels<float>(linear.outputs, [&](int64_t start, auto vectors) LAMBDA_INLINE {
      const Factor<E>* panel = weight + start * depth + begin / kDepth<E> * (vectors * kLanes);
      multiply<vectors>(factors(a + first * a_stride), a_stride / kDepth<E>, count, panel, ceil_div(end - begin, kDepth<E>),
                        sums + first * sums_stride + start, sums_stride, adds,
                        first == 0 && start + kColumns < linear.outputs ? panel + kColumns * depth : nullptr);
    });
  });
}

// Linear layers of 8-bit integers -------------------------------------------------------------------------

// Rows of a layer's input, rounded, each with its scale.
struct Rounded {
  char* values;
  float* scales;
};

// The bytes of such a row; 0 of a layer that is not quantized.
inline int64_t rounded_bytes(const Linear& linear) {
  return linear.integers == nullptr ? 0 : linear.integers->row_bytes(linear.inputs);
}

constexpr int64_t kSums = linear_int8::kPanel;  // the columns of a tile of sums
constexpr int64_t kTileColumns = kColumns > kSums ? kColumns : kSums;  // of one for layers of either kind

VECTOR_INLINE F float_of(const int32_t* integers) {
  return __builtin_convertvector(load(integers, Whole{}).v, F::Type);
}

// Computes a linear layer as `apply` above, on rows that are rounded.
template <class G>
VECTOR_INLINE void apply(const Linear& linear, int64_t begin, int64_t end, const Rounded& a, int64_t rows, int32_t* tile,
                         G f) {
  TileUse::release();
  for (int64_t start = begin; start < end; start += kSums) {
    linear.integers->multiply(a.values, rows, linear.weight, linear.inputs, start, tile, kSums);
    for_columns<kSums / kLanes>(linear.outputs - start, [&](int64_t column, auto lanes) LAMBDA_INLINE {
      const F scale = load(linear.weight_scales + start + column, lanes), bias = load(linear.bias + start + column, lanes);
      for (int64_t row = 0; row < rows; row++) {
        const F sums = float_of(tile + row * kSums + column) * F(a.scales[row]);
        f(row, start + column, sums * scale + bias, lanes);
      }
    });
  }
}

// Rounds the input of a quantized layer; does nothing for other layers.
template <class E>
void round_rows(const Linear& linear, const E* a, int64_t a_stride, int64_t rows, const Rounded& to) {
  if (linear.integers == nullptr) return;
  constexpr DType dtype = std::is_same_v<E, float> ? DType::float32 : DType::bfloat16;
  linear.integers->quantize(dtype, a, a_stride, rows, linear.inputs, to.values, to.scales);
}

// LayerNorm -----------------------------------------------------------------------------------------------

// Calls f(channel, normalized, lanes) for the vectors of a row of x; `copy` has room for it.
template <class T, class G>
VECTOR_INLINE void normalize(const Norm& norm, const T* x, int64_t channels, [[maybe_unused]] float* copy, G f) {
  const float* row;
  if constexpr (std::is_same_v<T, float>) {
    row = x;
  } else {
    fill(copy, channels, [&](int64_t c, auto lanes) LAMBDA_INLINE { return load(x + c, lanes); });
    row = copy;
  }
  const auto of_row = layer_norm_gelu::statistics(row, channels);
  const float rstd = 1 / std::sqrt(of_row.variance + norm.eps);
  const F origin = of_row.origin, scale = rstd, shift = -of_row.shift * rstd;
  for_vectors<kLanes>(channels, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
    const F normal = (load(row + c, lanes) - origin) * scale + shift;
    f(c, normal * load(norm.weight + c, lanes) + load(norm.bias + c, lanes), lanes);
  });
}

// The same, stored in a row.
template <class T, class E>
VECTOR_INLINE void normalize(const Norm& norm, const T* x, int64_t channels, float* copy, E* out) {
  normalize(norm, x, channels, copy, [=](int64_t c, F normal, auto lanes) LAMBDA_INLINE { store(out + c, normal, lanes); });
}

// Normalizes sums of a layer and its bias, in their place, into a row.
template <class E>
VECTOR_INLINE void normalize_sums(const Norm& norm, const float* bias, int64_t channels, float* sums, E* out) {
  fill(sums, channels, [&](int64_t c, auto lanes) LAMBDA_INLINE { return load(sums + c, lanes) + load(bias + c, lanes); });
  normalize(norm, sums, channels, nullptr, out);
}

}  // namespace
}  // namespace cvt_kernels

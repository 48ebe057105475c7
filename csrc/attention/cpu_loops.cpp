// The loops of attention on the CPU. setup.py compiles this file once per instruction set, with KERNELS naming the table
// it fills; it includes nothing whose code the linker could merge between them.
//
// K and V of a head are packed once, into the panels that the products read from end to end. A tile of queries then goes
// through the keys block by block: scores, softmax with a running maximum (Milakov and Gimelshein 2018), product with V.
// A tile's scores and a panel fit L1, K and V of CvT's heads L2.

#include "attention/cpu_loops.h"

#include "common/vector.h"

namespace cvt_kernels::attention {
namespace {

#if defined __AVX512BF16__ || defined KERNELS_PAIRS  // the latter for tests on machines without such an instruction
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

// Two neighboring bfloat16, the first in the low half.
using Pair = uint32_t;

template <class T>
constexpr bool kPaired = kPairs && std::is_same_v<T, BFloat16>;

// The operands of the products: numbers in the accumulator's type, or pairs where there is an instruction for them.
template <class T>
using Factor = std::conditional_t<kPaired<T>, Pair, Accumulator<T>>;

// Numbers per factor along the axis that a product sums over.
template <class T>
constexpr int kDepth = kPaired<T> ? 2 : 1;

// The rows of a product, which is kept in 24 of 32 registers, or 12 of 16.
constexpr int kRows = kVectorBytes == 64 ? 12 : 6;
static_assert(kTile % kRows == 0);

constexpr int64_t kScoreStride = kKeyBlock + 16;  // not a power of two, which would crowd a few sets of the cache
constexpr int64_t kQueryStride = kMaxHeadDim + 16;

template <class A>
constexpr int kPanel = 2 * Vector<A>::lanes;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

VECTOR_INLINE Vector<double> multiply_add(Vector<double> a, Vector<double> b, Vector<double> sum) { return a * b + sum; }
VECTOR_INLINE Vector<float> multiply_add(Vector<float> a, Vector<float> b, Vector<float> sum) { return a * b + sum; }
VECTOR_INLINE Vector<float> multiply_add(Vector<Pair> a, Vector<Pair> b, Vector<float> sum) {
#ifdef __AVX512BF16__
  return (Vector<float>::Type)_mm512_dpbf16_ps((__m512)sum.v, (__m512bh)a.v, (__m512bh)b.v);
#else
  const Vector<Pair> high = 0xffff0000u;
  return float_of(a << 16) * float_of(b << 16) + (float_of(a & high) * float_of(b & high) + sum);
#endif
}

// c = a b, or c += a b: a (kRows, depth) by rows, b (depth, width) adjacent, c (kRows, width) by rows, where the width is
// that of a few vectors.
template <int vectors, int64_t a_stride, int64_t c_stride, class P, class A>
VECTOR_INLINE void multiply(const P* a, const P* b, int64_t depth, A* c, bool adds) {
  using F = Vector<A>;
  F sums[kRows][vectors];
  for (int row = 0; row < kRows; row++) {
    for (int i = 0; i < vectors; i++) sums[row][i] = A(0);
  }
  for (int64_t d = 0; d < depth; d++) {
    Vector<P> right[vectors];
    for (int i = 0; i < vectors; i++) std::memcpy(&right[i].v, b + (d * vectors + i) * F::lanes, sizeof right[i].v);
    for (int row = 0; row < kRows; row++) {
      const Vector<P> left = a[row * a_stride + d];
      for (int i = 0; i < vectors; i++) sums[row][i] = multiply_add(left, right[i], sums[row][i]);
    }
  }
  for (int row = 0; row < kRows; row++) {
    for (int i = 0; i < vectors; i++) {
      A* to = c + row * c_stride + i * F::lanes;
      store(to, adds ? load(to, Whole{}) + sums[row][i] : sums[row][i], Whole{});
    }
  }
}

// Calls f(start, vectors) for panels of two vectors, the last of one where that is enough.
template <class A, class F>
VECTOR_INLINE void for_panels(int64_t size, F f) {
  int64_t start = 0;
  for (; start + Vector<A>::lanes < size; start += kPanel<A>) f(start, std::integral_constant<int, 2>{});
  if (start < size) f(start, std::integral_constant<int, 1>{});
}

// Packs a row of numbers as factors that lie side by side.
template <class T>
void pack_row(const T* row, int64_t size, Factor<T>* out) {
  if constexpr (kPaired<T>) {
    out[(size - 1) / 2] = 0;
    std::memcpy(out, row, size * sizeof(T));
  } else {
    for_vectors<VectorOf<T>::lanes>(size, [&](int64_t i, auto lanes, int) LAMBDA_INLINE {
      store(out + i, load(row + i, lanes), lanes);
    });
  }
}

// Packs keys (keys, head_dim) as panels (depth, keys of the panel), with zeros beyond the last key.
template <class T>
void pack_keys(const T* k, int64_t stride, int64_t keys, int64_t head_dim, Factor<T>* out) {
  const int64_t depth = ceil_div(head_dim, kDepth<T>);
  for_panels<Accumulator<T>>(keys, [&](int64_t start, auto vectors) LAMBDA_INLINE {
    constexpr int width = vectors * VectorOf<T>::lanes;
    Factor<T>* panel = out + start * depth;
    for (int lane = 0; lane < width; lane++) {
      Factor<T> copy[kMaxHeadDim];
      const Factor<T>* row = copy;
      if (start + lane >= keys) std::memset(copy, 0, depth * sizeof(Factor<T>));
      else if constexpr (std::is_same_v<T, Factor<T>>) row = k + (start + lane) * stride;
      else pack_row<T>(k + (start + lane) * stride, head_dim, copy);
      for (int64_t d = 0; d < depth; d++) panel[d * width + lane] = row[d];
    }
  });
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
  if constexpr (std::is_same_v<T, double>) {
    for (int i = 0; i < y.lanes; i++) y.v[i] = power_of_two(y.v[i]);
    return y;
  } else {
    return power_of_two<sizeof(T) == 2 ? Precision::half : Precision::full>(at_least(y, VectorOf<T>(-127.0f)));
  }
}

template <class A>
VECTOR_INLINE A largest(Vector<A> x) {
  A result = x.v[0];
  for (int i = 1; i < x.lanes; i++) result = x.v[i] > result ? x.v[i] : result;
  return result;
}

// The memory of one thread, divided into parts.
template <class T, class A = Accumulator<T>, class P = Factor<T>>
struct Scratch {
  P *k, *v, *q, *probabilities;
  A *scores, *out;
};

// Softmax so far: the score with the largest multiple by scale, and the sum of 2^(scale · (score - top)).
template <class A>
struct Running {
  A top, sum;
};

// Turns scores into probabilities that are not yet divided by their sum. Returns the factor for the sums of earlier
// blocks. The difference comes before the scale, so that the largest probabilities are rounded least.
template <class T, class A = Accumulator<T>>
VECTOR_INLINE A soften(const A* scores, Factor<T>* probabilities, int64_t keys, A scale, bool first,
                       Running<A>& running) {
  using F = Vector<A>;
  const A sign = scale < 0 ? -1 : 1;
  const F lowest = A(-INFINITY);
  F tops[4] = {lowest, lowest, lowest, lowest};
  for_vectors<F::lanes>(keys, [&](int64_t c, auto lanes, int i) LAMBDA_INLINE {
    tops[i] = at_least(keep(load(scores + c, Whole{}) * sign, lanes, lowest), tops[i]);
  });
  const A top = sign * largest(at_least(at_least(tops[0], tops[1]), at_least(tops[2], tops[3])));
  const A before = first ? top : running.top;
  running.top = (top - before) * sign > 0 ? top : before;
  F sums[4] = {A(0), A(0), A(0), A(0)};
  for_vectors<F::lanes>(keys, [&](int64_t c, auto lanes, int i) LAMBDA_INLINE {
    const F p = keep(power<T>((load(scores + c, Whole{}) - running.top) * scale), lanes);
    sums[i] = sums[i] + p;
    if constexpr (kPaired<T>) store(reinterpret_cast<T*>(probabilities) + c, p, Whole{});
    else store(probabilities + c, p, Whole{});
  });
  const A sum_here = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const A factor = first ? 0 : power<T>(F((before - running.top) * scale)).v[0];
  running.sum = first ? sum_here : running.sum * factor + sum_here;
  return factor;
}

// Takes the queries of a tile through all keys of their head.
template <class T, class A = Accumulator<T>>
void attend(const Forward& call, const T* q, int64_t rows, const Scratch<T>& scratch, T* out) {
  using F = Vector<A>;
  const int64_t depth = ceil_div(call.head_dim, kDepth<T>), value_depth = ceil_div(call.keys, kDepth<T>);
  const int64_t groups = ceil_div(rows, kRows);
  for (int64_t row = 0; row < groups * kRows; row++) {  // those beyond the last query are multiplied too
    Factor<T>* to = scratch.q + row * kQueryStride;
    if (row < rows) pack_row<T>(q + row * call.q.token, call.head_dim, to);
    else std::memset(to, 0, depth * sizeof(Factor<T>));
  }
  const A scale = static_cast<A>(call.scale * 1.4426950408889634);  // 1 / ln(2)
  Running<A> running[kTile];

  const int64_t block = round_up(ceil_div(call.keys, ceil_div(call.keys, kKeyBlock)), kPanel<A>);
  for (int64_t first = 0; first < call.keys; first += block) {
    const int64_t keys = at_most(block, call.keys - first);
    for_panels<A>(keys, [&](int64_t start, auto vectors) LAMBDA_INLINE {
      const Factor<T>* panel = scratch.k + (first + start) * depth;
      for (int64_t group = 0; group < groups; group++) {
        multiply<vectors, kQueryStride, kScoreStride>(scratch.q + group * kRows * kQueryStride, panel, depth,
                                                      scratch.scores + group * kRows * kScoreStride + start, false);
      }
    });
    for (int64_t row = 0; row < groups * kRows; row++) {
      Factor<T>* probabilities = scratch.probabilities + row * kScoreStride;
      const A* scores = scratch.scores + row * kScoreStride;
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
      for (int64_t group = 0; group < groups; group++) {
        multiply<vectors, kScoreStride, kQueryStride>(scratch.probabilities + group * kRows * kScoreStride, panel,
                                                      ceil_div(keys, kDepth<T>),
                                                      scratch.out + group * kRows * kQueryStride + start, first > 0);
      }
    });
  }
  for (int64_t row = 0; row < rows; row++) {
    const F inverse = 1 / running[row].sum;
    const A* sums = scratch.out + row * kQueryStride;
    T* to = out + row * call.heads * call.head_dim;
    for_vectors<F::lanes>(call.head_dim, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
      store(to + c, load(sums + c, Whole{}) * inverse, lanes);
    });
  }
}

// The number of elements of each part of Scratch.
struct ScratchSizes {
  int64_t k, v, q, probabilities, scores, out;
};

template <class T, class A = Accumulator<T>>
ScratchSizes sizes_of(const Forward& call) {
  return {
      .k = round_up(call.keys, kPanel<A>) * ceil_div(call.head_dim, kDepth<T>),
      .v = ceil_div(call.keys, kDepth<T>) * round_up(call.head_dim, kPanel<A>),
      .q = kTile * kQueryStride,
      .probabilities = kPaired<T> ? kTile * kScoreStride : 0,  // else they take the place of the scores
      .scores = kTile * kScoreStride,
      .out = kTile * kQueryStride,
  };
}

// The bytes of a part of scratch with this many elements.
template <class T>
int64_t part_bytes(int64_t size) {
  static_assert(sizeof(Factor<T>) == sizeof(Accumulator<T>));
  return round_up(size * sizeof(Accumulator<T>), kAlignment);
}

template <class T>
int64_t scratch_bytes(const Forward& call) {
  const ScratchSizes sizes = sizes_of<T>(call);
  int64_t total = 0;
  for (const int64_t size : {sizes.k, sizes.v, sizes.q, sizes.probabilities, sizes.scores, sizes.out}) {
    total += part_bytes<T>(size);
  }
  return total;
}

template <class T, class A = Accumulator<T>, class P = Factor<T>>
Scratch<T> divide(const Forward& call, void* memory) {
  const ScratchSizes sizes = sizes_of<T>(call);
  char* next = static_cast<char*>(memory);
  const auto take = [&](int64_t size) {
    char* part = next;
    next += part_bytes<T>(size);
    return part;
  };
  Scratch<T> scratch;
  scratch.k = reinterpret_cast<P*>(take(sizes.k));
  scratch.v = reinterpret_cast<P*>(take(sizes.v));
  scratch.q = reinterpret_cast<P*>(take(sizes.q));
  scratch.probabilities = reinterpret_cast<P*>(take(sizes.probabilities));
  scratch.scores = reinterpret_cast<A*>(take(sizes.scores));
  scratch.out = reinterpret_cast<A*>(take(sizes.out));
  return scratch;
}

template <class T>
const T* at(const Strided& tensor, int64_t image, int64_t head) {
  return static_cast<const T*>(tensor.data) + image * tensor.batch + head * tensor.head;
}

template <class T>
void forward_tiles(const Forward& call, int64_t begin, int64_t end, void* memory) {
  const Scratch<T> scratch = divide<T>(call, memory);
  const int64_t tiles = tiles_of(call.queries);
  int64_t packed = -1;
  for (; begin < end; begin++) {
    const int64_t item = begin / tiles, image = item / call.heads, head = item % call.heads;
    if (item != packed) {
      pack_keys<T>(at<T>(call.k, image, head), call.k.token, call.keys, call.head_dim, scratch.k);
      pack_values<T>(at<T>(call.v, image, head), call.v.token, call.keys, call.head_dim, scratch.v);
      packed = item;
    }
    const int64_t first = begin % tiles * kTile;
    T* out = static_cast<T*>(call.out) + ((image * call.queries + first) * call.heads + head) * call.head_dim;
    attend<T>(call, at<T>(call.q, image, head) + first * call.q.token, at_most(kTile, call.queries - first), scratch,
              out);
  }
}

void forward(DType dtype, const Forward& call, int64_t begin, int64_t end, void* scratch) {
  with_type(dtype, [&](auto type) { forward_tiles<decltype(type)>(call, begin, end, scratch); });
}

int64_t scratch_bytes_of(DType dtype, const Forward& call) {
  int64_t bytes = 0;
  with_type(dtype, [&](auto type) { bytes = scratch_bytes<decltype(type)>(call); });
  return bytes;
}

}  // namespace

const Kernels KERNELS{forward, scratch_bytes_of};

}  // namespace cvt_kernels::attention

// Matrix products in registers: the micro-kernel, and the packed panels that it reads. They have internal linkage, as the
// functions of vector.h, on which they build.
//
// The left factor lies by rows; the right one is packed, two vectors wide, so that it is read from end to end. Where the
// CPU multiplies pairs of bfloat16 and adds both products, a factor is a pair of numbers along the axis of the sum. Sixteen
// rows of a packed panel of pairs are what AMX wants as a tile.
#pragma once

#include "common/tiles.h"
#include "common/vector.h"

namespace cvt_kernels {
namespace {

#if defined __AVX512BF16__ || defined KERNELS_PAIRS || defined KERNELS_TILES  // the latter two for tests
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

// Two neighboring bfloat16, the first in the low half.
using Pair = uint32_t;
// Neighboring integers: four of 8 bits, or two of 16 bits where the CPU has no products of the former (linear_int8/).
using Integers = int32_t;

template <class T>
constexpr bool kPaired = kPairs && std::is_same_v<T, BFloat16>;

// The operands of the products: numbers in the accumulator's type, or pairs where there is an instruction for them.
template <class T>
using Factor = std::conditional_t<kPaired<T>, Pair, Accumulator<T>>;

// Numbers per factor along the axis that a product sums over.
template <class T>
constexpr int kDepth = kPaired<T> ? 2 : 1;

// The most rows of a product, which is kept in 24 of 32 registers, or 12 of 16.
constexpr int kRows = kVectorBytes == 64 ? 12 : 6;

// Columns of a panel.
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

// Memory that the next product reads: a product asks for `step` bytes of it at each step of its depth.
struct Ahead {
  const char* from;
  int64_t step;
};

// sums += a b: a (rows, depth) by rows, b (depth, vectors) adjacent. Loops over sums are unrolled: else the compiler keeps
// them in memory too.
template <int rows, int vectors, class P, class A>
VECTOR_INLINE void add_rows(const P* a, int64_t a_stride, const P* b, int64_t depth, Vector<A> (&sums)[rows][vectors],
                            Ahead ahead) {
  const P* thirds[ceil_div(rows, 3)];  // an address holds a pointer plus one or two strides: more pointers do not fit
  for (int i = 0; i < ceil_div(rows, 3); i++) thirds[i] = a + 3 * i * a_stride;
#pragma GCC unroll 2  // one less branch and address: 1 to 2 % of the time
  for (int64_t d = 0; d < depth; d++) {
    Vector<P> right[vectors];
    __builtin_prefetch(ahead.from + d * ahead.step, 0, 2);  // into L2
    for (int i = 0; i < vectors; i++) std::memcpy(&right[i].v, b + (d * vectors + i) * Vector<P>::lanes, sizeof right[i].v);
    unroll<rows>([&](auto row) LAMBDA_INLINE {
      const Vector<P> left = thirds[row / 3][row % 3 * a_stride + d];
      unroll<vectors>([&](auto i) LAMBDA_INLINE { sums[row][i] = multiply_add(left, right[i], sums[row][i]); });
    });
  }
}

// How many products are added in turn before their sum is added to c, of more than 3/2 as many: the rounding errors of equal
// products grow with the square of what is summed in turn. Pairs of bfloat16 have larger errors of their own.
template <class P>
constexpr int64_t kInTurn = std::is_same_v<P, float> || std::is_same_v<P, double> ? 128 : int64_t{1} << 40;

// c = a b, or c += a b, with c by rows.
template <int rows, int vectors, class P, class A>
void multiply_rows(const P* a, int64_t a_stride, const P* b, int64_t depth, A* c, int64_t c_stride, bool adds,
                   Ahead ahead) {
  using F = Vector<A>;
  do {
    const int64_t steps = depth > kInTurn<P> / 2 * 3 ? kInTurn<P> : depth;
    F sums[rows][vectors];
    unroll<rows * vectors>([&](auto i) LAMBDA_INLINE { sums[i / vectors][i % vectors] = A(0); });
    add_rows(a, a_stride, b, steps, sums, ahead);
    A* first = c;
    asm("" : "+r"(first));  // else all addresses are computed before the loop, and kept in memory
    unroll<rows * vectors>([&](auto i) LAMBDA_INLINE {
      A* to = first + i / vectors * c_stride + i % vectors * F::lanes;
      const F sum = sums[i / vectors][i % vectors];
      store(to, adds ? load(to, Whole{}) + sum : sum, Whole{});
    });
    a += steps, b += steps * vectors * F::lanes, ahead.from += steps * ahead.step, depth -= steps, adds = true;
  } while (depth > 0);
}

// The function for so many rows, up to kRows, of those that G gives by a constant.
template <class G, int... row>
auto of_rows(int64_t rows, G, std::integer_sequence<int, row...>) {
  static constexpr decltype(G{}(std::integral_constant<int, 1>{})) table[] = {G{}(std::integral_constant<int, row + 1>{})...};
  return table[rows - 1];
}

// Adds the products of up to 2 × 2 tiles, whose sums are tiles 0 to 3. The second left one lies `second` pairs behind the
// first, the second right one beside it. One tile serves for both left factors, and one for both right ones: a core seems to
// share its registers for tiles among its hyperthreads, and with eight in use beside a busy one, products took 1.5 times as
// long as with six (Intel Xeon, 2026-11-26). Alone they take the same time. Depths that are no multiple of 16 take two more
// at their end.
template <int rows, int vectors, int left, int right, class P>
[[gnu::always_inline]] inline void add_products(const P* a, int64_t a_stride, int64_t second, const P* b) {
  constexpr int64_t bytes = sizeof(P), b_stride = vectors * kTileSide * bytes;
  load_tile<right>(b, b_stride);
  load_tile<left>(a, a_stride * bytes);
  multiply_tile<P, 0, left, right>();
  if constexpr (rows == 2) {
    load_tile<left>(a + second, a_stride * bytes);
    multiply_tile<P, 2, left, right>();
  }
  if constexpr (vectors == 2) {
    load_tile<right>(b + kTileSide, b_stride);
    multiply_tile<P, rows == 2 ? 3 : 1, left, right>();
  }
  if constexpr (rows == 2 && vectors == 2) {
    load_tile<left>(a, a_stride * bytes);
    multiply_tile<P, 1, left, right>();
  }
}

// multiply_rows for one or two tiles of rows; the second one begins at the row `second` and may overlap the first. Asks for the
// panel `next`, if there is one: the CPU does not see across pages what comes. Without that, the layers of a ViT-B took 1.1 to 1.3
// times as long for one image in bfloat16, those of CLIP's, of 50 tokens, 1.6 times (Intel Xeon, 2026-11-30).
template <int rows, int vectors, class P, class A>
void multiply_tiles(const P* a, int64_t a_stride, int64_t second, const P* b, int64_t depth, A* c, int64_t c_stride,
                    bool adds, const P* next) {
  const int64_t bytes = c_stride * sizeof(A), a_second = second * a_stride;
  A* c_second = c + second * c_stride;
  if (adds) {
    load_tile<0>(c, bytes);
    if constexpr (vectors == 2) load_tile<1>(c + kTileSide, bytes);
    if constexpr (rows == 2) load_tile<2>(c_second, bytes);
    if constexpr (rows == 2 && vectors == 2) load_tile<3>(c_second + kTileSide, bytes);
  } else {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  }
  constexpr int64_t b_step = kTileSide * vectors * kTileSide;
  for (int64_t steps = depth / kTileSide; steps > 0; steps--, a += kTileSide, b += b_step) {
    if (next != nullptr) {
      for (int line = 0; line < kTileSide * vectors; line++, next += kTileSide) __builtin_prefetch(next, 0, 2);  // into L2
    }
    add_products<rows, vectors, 4, 6>(a, a_stride, a_second, b);
  }
  if (depth % kTileSide > 0) add_products<rows, vectors, 5, 7>(a, a_stride, a_second, b);
  store_tile<0>(c, bytes);
  if constexpr (vectors == 2) store_tile<1>(c + kTileSide, bytes);
  if constexpr (rows == 2) store_tile<2>(c_second, bytes);
  if constexpr (rows == 2 && vectors == 2) store_tile<3>(c_second + kTileSide, bytes);
}

// Configures tiles for a product, if those that are configured do not serve.
inline void shape_tiles(int64_t rows, int64_t depth) {
  const TileUse::Shape& now = TileUse::current;
  const int height = rows < kTileSide ? static_cast<int>(rows) : kTileSide, rest = static_cast<int>(depth % kTileSide);
  if (now.rows != height || (rest > 0 && now.rest != rest)) TileUse::configure({height, rest > 0 ? rest : kTileSide});
}

// Calls f(first, count, ahead) for groups of at most so many rows, of about the same size. Each asks for its share of the
// `bytes` that a product reads at each step of its depth from `next` on.
template <class G>
VECTOR_INLINE void for_groups(int64_t rows, int64_t most, int64_t depth, const void* next, int64_t bytes, G f) {
  const int64_t groups = ceil_div(rows, most);
  for (int64_t group = 0; group < groups; group++) {
    const int64_t first = group * rows / groups, step = ceil_div(bytes, groups);
    f(first, (group + 1) * rows / groups - first, Ahead{static_cast<const char*>(next) + group * depth * step, step});
  }
}

// Multiplies any number of rows, in groups. `next` is the panel of the next product, if it is to come from further than L2.
template <int vectors, class P, class A>
void multiply(const P* a, int64_t a_stride, int64_t rows, const P* b, int64_t depth, A* c, int64_t c_stride, bool adds,
              [[maybe_unused]] const P* next = nullptr) {
  if constexpr (kTiles && (std::is_same_v<P, Pair> || std::is_same_v<P, Integers>)) {
    // Two tiles, which overlap, serve 17 to 31 rows: every row goes through the same instructions, however many there are.
    if (rows > 0) shape_tiles(rows, depth);
    for_groups(rows, 2 * kTileSide, depth, next, 0, [&](int64_t first, int64_t count, Ahead) {
      const auto run = count > kTileSide ? multiply_tiles<2, vectors, P, A> : multiply_tiles<1, vectors, P, A>;
      run(a + first * a_stride, a_stride, count - kTileSide, b, depth, c + first * c_stride, c_stride, adds,
          first == 0 ? next : nullptr);
    });
  } else {
    const P* asked = next == nullptr ? b : next;
    for_groups(rows, kRows, depth, asked, next == nullptr ? 0 : vectors * kVectorBytes,
               [&](int64_t first, int64_t count, Ahead ahead) {
      constexpr auto of = [](auto size) { return &multiply_rows<size, vectors, P, A>; };
      const auto run = of_rows(count, of, std::make_integer_sequence<int, kRows>{});
      run(a + first * a_stride, a_stride, b, depth, c + first * c_stride, c_stride, adds, ahead);
    });
  }
}

// Whether the products of a shape of tiles equal products of integers, which are exact. Memory is static: this runs after a
// fork. A factor P has some numbers N.
template <int vectors, class N, class P, class A>
bool tiles_are_right(int64_t rows, int64_t depth) {
  constexpr int64_t most_rows = 33, most_depth = 70, columns = vectors * kTileSide, together = sizeof(P) / sizeof(N);
  alignas(P) static N a[most_rows * most_depth * together], b[most_depth * columns * together];
  static A c[most_rows * columns];
  const auto left = [](int64_t row, int64_t k) { return static_cast<int>((37 * row + 11 * k) % 255 - 127); };
  const auto right = [](int64_t k, int64_t column) { return static_cast<int>((29 * k + 5 * column) % 255 - 127); };
  const auto put = [](N& to, int number) {
    if constexpr (std::is_same_v<N, BFloat16>) store(&to, static_cast<float>(number));
    else to = static_cast<N>(number);
  };
  const int64_t numbers = depth * together;
  for (int64_t k = 0; k < numbers; k++) {
    for (int64_t row = 0; row < rows; row++) put(a[row * numbers + k], left(row, k));
    for (int64_t column = 0; column < columns; column++) {
      put(b[(k / together * columns + column) * together + k % together], right(k, column));
    }
  }
  for (int times = 1; times <= 2; times++) {  // set, then added to
    multiply<vectors>(reinterpret_cast<const P*>(a), depth, rows, reinterpret_cast<const P*>(b), depth, c, columns,
                      times == 2);
    for (int64_t row = 0; row < rows; row++) {
      for (int64_t column = 0; column < columns; column++) {
        int sum = 0;
        for (int64_t k = 0; k < numbers; k++) sum += left(row, k) * right(k, column);
        if (c[row * columns + column] != static_cast<A>(times * sum)) return false;
      }
    }
  }
  return true;
}

// The same of all shapes of tiles; true where there are none.
template <class N, class P, class A>
bool products_are_right() {
  if constexpr (kTiles) {
    const TileUse tile_use;
    for (const int64_t rows : {1, 15, 16, 17, 32, 33}) {
      for (const int64_t depth : {1, 15, 16, 17, 32, 33, 64, 65, 70}) {
        if (!tiles_are_right<1, N, P, A>(rows, depth) || !tiles_are_right<2, N, P, A>(rows, depth)) return false;
      }
    }
  }
  return true;
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
    fill(out, size, [&](int64_t i, auto lanes) LAMBDA_INLINE { return load(row + i, lanes); });
  }
}

// Packs rows of numbers as panels (depth, rows of the panel), with zeros beyond the last row.
template <class T>
void pack_columns(const T* from, int64_t stride, int64_t rows, int64_t size, Factor<T>* out) {
  constexpr int side = VectorOf<T>::lanes;
  constexpr int64_t most = 256;  // factors of a row that are packed at a time
  const int64_t depth = ceil_div(size, kDepth<T>);
  for_panels<Accumulator<T>>(rows, [&](int64_t start, auto vectors) LAMBDA_INLINE {
    constexpr int width = vectors * side;
    for (int64_t first = start; first < start + width; first += side) {
      Factor<T>* panel = out + start * depth + first - start;
      int64_t turned = 0;  // so many factors of all rows of a vector are packed as squares
      const int64_t squares = first + side <= rows ? size / kDepth<T> / side : 0;
      for (; turned < squares * side; turned += side) {
        const T* corner = from + first * stride + turned * kDepth<T>;
        if constexpr (std::is_same_v<T, Factor<T>> || kPaired<T>) {
          turn_square(corner, stride * sizeof(T), panel + turned * width, width);
        } else {
          Factor<T> square[side][side];
          for (int lane = 0; lane < side; lane++) pack_row(corner + lane * stride, side, square[lane]);
          turn_square(square, sizeof square[0], panel + turned * width, width);
        }
      }
      for (int lane = 0; lane < side; lane++) {
        for (int64_t done = turned; done < depth; done += most) {
          const bool is_last = done + most >= depth;
          const int64_t count = is_last ? depth - done : most, place = done * kDepth<T>;
          Factor<T> row[most];
          if (first + lane >= rows) std::memset(row, 0, count * sizeof(Factor<T>));
          else pack_row<T>(from + (first + lane) * stride + place, is_last ? size - place : most * kDepth<T>, row);
          for (int64_t d = 0; d < count; d++) panel[(done + d) * width + lane] = row[d];
        }
      }
    }
  });
}

}  // namespace
}  // namespace cvt_kernels

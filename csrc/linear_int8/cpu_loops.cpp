// The loops for linear layers of 8-bit integers on the CPU.
//
// A packed weight is one strip after another, each of as many outputs as two vectors have lanes: the initial sums of
// the products, then the numbers, a lane's beside each other (inputs / kTogether, outputs, kTogether).

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "linear/layer_loops.h"

namespace cvt_kernels {
namespace {

// Numbers and their products ------------------------------------------------------------------------------------

#if defined KERNELS_VECTOR_BYTES  // whose vectors differ from the machine's
#define INTRINSICS 0
#else
#define INTRINSICS 1
#endif

// Where the CPU multiplies four numbers of 8 bits at once, the left ones have no sign but with AMX: they are stored with
// an offset, whose part of the products is known beforehand. Elsewhere numbers are stored in 16 bits, two at once.
#if defined __AVX512VNNI__ || defined __AVXVNNI__
constexpr bool kQuads = true;
#else
constexpr bool kQuads = kTiles;
#endif
constexpr int kOffset = kQuads && !kTiles ? 128 : 0;
using LeftNumber = std::conditional_t<kQuads, std::conditional_t<kOffset == 0, int8_t, uint8_t>, int16_t>;
using RightNumber = std::conditional_t<kQuads, int8_t, int16_t>;
constexpr int kTogether = sizeof(Integers) / sizeof(LeftNumber);

using I = Vector<Integers>;

// sum + Σ a · b for the numbers in each lane. The instructions that add pairs of 8-bit products do so in 16 bits, which
// overflow.
VECTOR_INLINE I multiply_add(I a, I b, I sum) {
#if INTRINSICS && defined __AVX512VNNI__
  return (I::Type)_mm512_dpbusd_epi32((__m512i)sum.v, (__m512i)a.v, (__m512i)b.v);
#elif INTRINSICS && defined __AVXVNNI__
  return (I::Type)_mm256_dpbusd_avx_epi32((__m256i)sum.v, (__m256i)a.v, (__m256i)b.v);
#elif INTRINSICS && defined __AVX512BW__
  return sum + I((I::Type)_mm512_madd_epi16((__m512i)a.v, (__m512i)b.v));
#elif INTRINSICS && defined __AVX2__
  return sum + I((I::Type)_mm256_madd_epi16((__m256i)a.v, (__m256i)b.v));
#elif INTRINSICS && defined __SSE2__
  return sum + I((I::Type)_mm_madd_epi16((__m128i)a.v, (__m128i)b.v));
#else
  static_assert(!kQuads || kTiles);
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// x rounded to integers, half to even; |x| is small.
VECTOR_INLINE I rounded(Vector<float> x) {
#if INTRINSICS && defined __AVX512F__
  return (I::Type)_mm512_maskz_cvtps_epi32(0xffff, (__m512)x.v);
#elif INTRINSICS && defined __AVX2__
  return (I::Type)_mm256_cvtps_epi32((__m256)x.v);
#elif INTRINSICS && defined __SSE2__
  return (I::Type)_mm_cvtps_epi32((__m128)x.v);
#else
  I result;
  for (int lane = 0; lane < I::lanes; lane++) result.v[lane] = static_cast<Integers>(std::nearbyint(x.v[lane]));
  return result;
#endif
}

// Stores integers as numbers that are narrower, in which they fit.
template <class N>
VECTOR_INLINE void store_numbers(N* out, I x, Whole) {
  using Numbers = typename Native<N, I::lanes * sizeof(N)>::Type;
  Numbers numbers = __builtin_convertvector(x.v, Numbers);
#if INTRINSICS && defined __AVX2__ && !defined __AVX512F__  // the compiler does half of it number by number
  if constexpr (sizeof(N) == 1) {
    const __m128i low = _mm256_castsi256_si128((__m256i)x.v), high = _mm256_extracti128_si256((__m256i)x.v, 1);
    const __m128i words = _mm_packs_epi32(low, high);
    const __m128i bytes = std::is_signed_v<N> ? _mm_packs_epi16(words, words) : _mm_packus_epi16(words, words);
    std::memcpy(&numbers, &bytes, sizeof numbers);
  }
#endif
  std::memcpy(out, &numbers, sizeof numbers);
}

template <class N>
VECTOR_INLINE void store_numbers(N* out, I x, Part part) {
  N lanes[I::lanes];
  store_numbers(lanes, x, Whole{});
  std::memcpy(out, lanes, part.size * sizeof(N));
}

// The largest magnitude of numbers; infinity and NaN are larger than all others.
struct Magnitudes {
  I most[4] = {0, 0, 0, 0};  // as bits

  // Takes a vector of numbers; i is that of for_vectors.
  VECTOR_INLINE void take(Vector<float> x, int i) {
    const I magnitude = (I::Type)absolute(x).v;
    most[i] = select(most[i] < magnitude, magnitude, most[i]);
  }

  VECTOR_INLINE float largest() const {
    const auto larger = [](I a, I b) LAMBDA_INLINE { return select(a < b, b, a); };
    const I both = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    return cvt_kernels::float_of(static_cast<uint32_t>(cvt_kernels::largest(both)));
  }
};

// Quantizes a row, whose largest magnitude is known, as Kernels::quantize says, with `offset` added to its numbers, and
// returns its scale.
template <class T, class N>
VECTOR_INLINE float quantize_row(const T* x, int64_t inputs, float largest, N* out, int offset) {
  using F = Vector<float>;
  const bool finite = largest < INFINITY;
  if (!finite || largest < linear_int8::kLeast) {
    for (int64_t c = 0; c < inputs; c++) out[c] = static_cast<N>(offset);
    return finite ? 0 : NAN;
  }
  const F factor = linear_int8::kLimit / largest;
  const I shift = offset;
  for_vectors<F::lanes>(inputs, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
    store_numbers(out + c, rounded(load(x + c, lanes) * factor) + shift, lanes);
  });
  return largest / linear_int8::kLimit;
}

// The same of any row.
template <class T, class N>
VECTOR_INLINE float quantize_row(const T* x, int64_t inputs, N* out, int offset) {
  Magnitudes magnitudes;
  for_vectors<Vector<float>::lanes>(inputs, [&](int64_t c, auto lanes, int i) LAMBDA_INLINE {
    magnitudes.take(load(x + c, lanes), i);
  });
  return quantize_row(x, inputs, magnitudes.largest(), out, offset);
}

}  // namespace

namespace linear_int8 {
namespace {

// Rows and weights -----------------------------------------------------------------------------------------------

constexpr int64_t kStrip = 2 * I::lanes;
constexpr int64_t kLine = 64;  // the bytes of a line of the cache, and of a row of a tile
static_assert(kPanel % kStrip == 0 && (kStrip == kPanel || !kTiles));

// The lanes of a row. Tiles are always full, of zeros beyond the last input.
int64_t depth_of(int64_t inputs) {
  return ceil_div(kTiles ? round_up(inputs, kLine) : inputs, kTogether);
}

// An odd number of lines, since a power of two would crowd a few sets of the cache.
int64_t row_bytes(int64_t inputs) { return (ceil_div(inputs * sizeof(LeftNumber), kLine) | 1) * kLine; }

LeftNumber* row_of(void* rows, int64_t row, int64_t inputs) {
  return reinterpret_cast<LeftNumber*>(static_cast<char*>(rows) + row * row_bytes(inputs));
}

// Puts zeros behind the last input, as many as products read.
void pad_row(LeftNumber* row, int64_t inputs) {
  const int64_t end = depth_of(inputs) * kTogether;
  for (int64_t i = inputs; i < end; i++) row[i] = kOffset;
}

template <class T>
void quantize(const void* x, int64_t stride, int64_t rows, int64_t inputs, void* out, float* scales) {
  for (int64_t row = 0; row < rows; row++) {
    LeftNumber* to = row_of(out, row, inputs);
    scales[row] = quantize_row(static_cast<const T*>(x) + row * stride, inputs, to, kOffset);
    pad_row(to, inputs);
  }
}

// Half precision of the activation is far more than what 8 bits keep of it.
template <Activation activation>
void requantize_rows(const Linear& layer, const int32_t* sums, int64_t stride, int64_t rows, float* row, void* out,
                     float* scales) {
  for (int64_t i = 0; i < rows; i++, sums += stride) {
    const F of_row = scales[i];
    Magnitudes magnitudes;
    for_vectors<F::lanes>(layer.outputs, [&](int64_t c, auto lanes, int vector) LAMBDA_INLINE {
      const F product = float_of(sums + c) * of_row;
      const F sum = product * load(layer.weight_scales + c, lanes) + load(layer.bias + c, lanes);
      const F y = keep(layer_norm_gelu::activate<activation, Precision::half>(sum), lanes);
      magnitudes.take(y, vector);
      store(row + c, y, lanes);
    });
    LeftNumber* to = row_of(out, i, layer.outputs);
    scales[i] = quantize_row(row, layer.outputs, magnitudes.largest(), to, kOffset);
    pad_row(to, layer.outputs);
  }
}

void requantize(const Linear& layer, Activation activation, const int32_t* sums, int64_t stride, int64_t rows, float* row,
                void* out, float* scales) {
  layer_norm_gelu::with_activation(activation, [&](auto constant) {
    requantize_rows<constant>(layer, sums, stride, rows, row, out, scales);
  });
}

void lay_out(const int8_t* values, int64_t stride, int64_t rows, int64_t inputs, void* out) {
  for (int64_t row = 0; row < rows; row++) {
    const int8_t* from = values + row * stride;
    LeftNumber* to = row_of(out, row, inputs);
    for (int64_t i = 0; i < inputs; i++) to[i] = static_cast<LeftNumber>(from[i] + kOffset);
    pad_row(to, inputs);
  }
}

int64_t strip_size(int64_t inputs) { return (1 + depth_of(inputs)) * kStrip; }

int64_t packed_bytes(int64_t outputs, int64_t inputs) {
  return round_up(outputs, kPanel) / kStrip * strip_size(inputs) * sizeof(Integers);
}

void pack(const int8_t* weight, int64_t outputs, int64_t inputs, void* out) {
  std::memset(out, 0, packed_bytes(outputs, inputs));
  for (int64_t output = 0; output < outputs; output++) {
    const int8_t* from = weight + output * inputs;
    Integers* strip = static_cast<Integers*>(out) + output / kStrip * strip_size(inputs);
    const int64_t lane = output % kStrip;
    RightNumber* numbers = reinterpret_cast<RightNumber*>(strip + kStrip);
    Integers sum = 0;
    for (int64_t i = 0; i < inputs; i++) {
      numbers[(i / kTogether * kStrip + lane) * kTogether + i % kTogether] = from[i];
      sum += from[i];
    }
    strip[lane] = -kOffset * sum;
  }
}

template <int rows>
void multiply_strip(const Integers* a, int64_t a_stride, const Integers* strip, int64_t depth, Integers* sums,
                    int64_t stride, Ahead ahead) {
  I held[rows][2];
  unroll<2 * rows>([&](auto i) LAMBDA_INLINE { held[i / 2][i % 2] = load(strip + i % 2 * I::lanes, Whole{}); });
  add_rows(a, a_stride, strip + kStrip, depth, held, ahead);
  unroll<2 * rows>([&](auto i) LAMBDA_INLINE {
    store(sums + i / 2 * stride + i % 2 * I::lanes, held[i / 2][i % 2], Whole{});
  });
}

void multiply(const void* values, int64_t rows, const void* packed, int64_t inputs, int64_t begin, int32_t* sums,
              int64_t stride) {
  const int64_t a_stride = row_bytes(inputs) / sizeof(Integers), depth = depth_of(inputs), size = strip_size(inputs);
  const Integers* a = static_cast<const Integers*>(values);
  const Integers* strip = static_cast<const Integers*>(packed) + begin / kStrip * size;
  if constexpr (kTiles) {
    const TileUse tile_use;
    const Integers* next = strip + size + kStrip;  // or what lies behind the weight, which does no harm
    cvt_kernels::multiply<2>(a, a_stride, rows, strip + kStrip, depth, sums, stride, false, next);
  } else {
    for (int64_t start = 0; start < kPanel; start += kStrip, strip += size) {
      const Integers* next = strip + size;  // as above
      for_groups(rows, kRows, depth, next, 2 * kVectorBytes, [&](int64_t first, int64_t count, Ahead ahead) {
        constexpr auto of = [](auto size) { return &multiply_strip<size>; };
        const auto run = of_rows(count, of, std::make_integer_sequence<int, kRows>{});
        run(a + first * a_stride, a_stride, strip, depth, sums + first * stride + start, stride, ahead);
      });
    }
  }
}

// What is to be rounded of a row: x itself, or what becomes of it in `copy`.
template <class T, Activation activation>
const float* prepared(const Rows& rows, const T* x, float* copy) {
  const int64_t channels = rows.channels;
  if (rows.normalizes) {
    if (rows.shift == nullptr) {
      normalize(rows.norm, x, channels, copy, copy);
    } else {
      fill(copy, channels, [&](int64_t c, auto lanes) LAMBDA_INLINE { return load(x + c, lanes) + load(rows.shift + c, lanes); });
      normalize(rows.norm, copy, channels, copy, copy);
    }
  } else if constexpr (activation != Activation::identity) {
    fill(copy, channels, [&](int64_t c, auto lanes) LAMBDA_INLINE {
      return layer_norm_gelu::activate<activation>(load(x + c, lanes) + load(rows.norm.bias + c, lanes));
    });
  } else if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    fill(copy, channels, [&](int64_t c, auto lanes) LAMBDA_INLINE { return load(x + c, lanes); });
  }
  return copy;
}

template <class T>
void quantize_rows(const Rows& rows, int64_t begin, int64_t end, float* row, int8_t* values, float* scales) {
  layer_norm_gelu::with_activation(rows.activation, [&](auto activation) {
    const T* x = static_cast<const T*>(rows.x);
    for (int64_t i = begin; i < end; i++) {
      const float* ready = prepared<T, activation>(rows, x + i * rows.stride, row);
      scales[i] = quantize_row(ready, rows.channels, values + i * rows.channels, 0);
    }
  });
}

template <class T, Activation activation, bool adds>
void finish_panel(const Finish& finish, const int32_t* sums, const float* scales, int64_t first, int64_t rows,
                  int64_t begin) {
  const int64_t place = first * finish.outputs + begin;
  const T* residual = static_cast<const T*>(finish.residual) + (adds ? place : 0);
  T* out = static_cast<T*>(finish.out) + place;
  const int64_t columns = at_most<int64_t>(kPanel, finish.outputs - begin);
  for (int64_t row = 0; row < rows; row++, sums += kPanel, out += finish.outputs) {
    const F x_scale = scales[row];
    for_vectors<F::lanes>(columns, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
      const F product = float_of(sums + c);
      const F scaled = product * x_scale * load(finish.weight_scale + begin + c, lanes);
      F y = layer_norm_gelu::activated<T, activation>(scaled + load(finish.bias + begin + c, lanes));
      if constexpr (adds) y = y + load(residual + row * finish.outputs + c, lanes);
      store(out + c, y, lanes);
    });
  }
}

template <class T>
void finish(const Finish& finish, const int32_t* sums, const float* scales, int64_t first, int64_t rows, int64_t begin) {
  layer_norm_gelu::with_activation(finish.activation, [&](auto activation) {
    if (finish.residual == nullptr) finish_panel<T, activation, false>(finish, sums, scales, first, rows, begin);
    else finish_panel<T, activation, true>(finish, sums, scales, first, rows, begin);
  });
}

}  // namespace

const Kernels KERNELS{row_bytes, BY_FLOAT(quantize), lay_out, packed_bytes, pack, multiply, requantize, BY_FLOAT(finish),
                      BY_FLOAT(quantize_rows), products_are_right<int8_t, Integers, int32_t>};

}  // namespace linear_int8
}  // namespace cvt_kernels

// The tiles of AMX: registers of 16 rows of 64 bytes, and the instructions that multiply them. They have internal linkage,
// as the functions of vector.h.
//
// Where the file is compiled without AMX, plain functions take the place of the instructions, for tests (KERNELS_TILES).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace cvt_kernels {
namespace {

#if defined __AMX_TILE__ || defined KERNELS_TILES
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif

constexpr int kTileSide = 16;  // the most rows of a tile, and numbers of 32 bits in a row

// What LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

#ifdef __AMX_TILE__

// GCC 12 does not say of its intrinsics that they read memory.

inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }

inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int tile>
[[gnu::always_inline]] inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

template <int tile>
[[gnu::always_inline]] inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
[[gnu::always_inline]] inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}

// Adds the product of a by rows and b, whose rows are groups of rows, to the tile `sums`: of pairs of bfloat16 to float
// where P is uint32_t, of four 8-bit integers to integers where it is int32_t.
template <class P, int sums, int a, int b>
[[gnu::always_inline]] inline void multiply_tile() {
  if constexpr (std::is_same_v<P, uint32_t>) {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
  } else {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
  }
}

#else

// The tiles of a thread. An instruction that the CPU would refuse ends the program.
struct EmulatedTiles {
  TileConfig config;
  uint32_t data[8][kTileSide][kTileSide];

  int columns(int tile) const {
    expect(config.palette == 1 && config.rows[tile] > 0);
    return config.row_bytes[tile] / 4;
  }

  static void expect(bool condition) {
    if (!condition) std::abort();
  }
};

inline thread_local EmulatedTiles emulated{};

inline void configure_tiles(const TileConfig& config) {
  emulated = {};
  emulated.config = config;
  for (int tile = 0; tile < 8; tile++) {
    EmulatedTiles::expect(config.rows[tile] <= kTileSide && config.row_bytes[tile] <= 4 * kTileSide);
    EmulatedTiles::expect((config.rows[tile] == 0) == (config.row_bytes[tile] == 0));
  }
}

inline void release_tiles() { emulated = {}; }

template <int tile>
void zero_tile() {
  emulated.columns(tile);
  std::memset(emulated.data[tile], 0, sizeof emulated.data[tile]);
}

template <int tile>
void load_tile(const void* from, int64_t stride) {
  const int bytes = emulated.columns(tile) * 4;
  std::memset(emulated.data[tile], 0, sizeof emulated.data[tile]);
  for (int row = 0; row < emulated.config.rows[tile]; row++) {
    std::memcpy(emulated.data[tile][row], static_cast<const char*>(from) + row * stride, bytes);
  }
}

template <int tile>
void store_tile(void* to, int64_t stride) {
  const int bytes = emulated.columns(tile) * 4;
  for (int row = 0; row < emulated.config.rows[tile]; row++) {
    std::memcpy(static_cast<char*>(to) + row * stride, emulated.data[tile][row], bytes);
  }
}

inline float without_subnormals(float x) { return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline float emulated_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return without_subnormals(x);
}

// Of pairs, the first numbers and the second ones have a sum each, which are then added to each other.
inline uint32_t add_pairs(const uint32_t* left, const uint32_t* right, int depth, uint32_t before) {
  float first = 0, second = 0;
  for (int d = 0; d < depth; d++) {
    const uint32_t a = left[d], b = right[d];
    first = without_subnormals(std::fma(emulated_float(a << 16), emulated_float(b << 16), first));
    second = without_subnormals(std::fma(emulated_float(a & 0xffff0000u), emulated_float(b & 0xffff0000u), second));
  }
  const float sum = without_subnormals(emulated_float(before) + without_subnormals(first + second));
  uint32_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  return bits;
}

inline uint32_t add_integers(const uint32_t* left, const uint32_t* right, int depth, uint32_t sum) {
  for (int d = 0; d < depth; d++) {
    for (int shift = 0; shift < 32; shift += 8) {
      sum += static_cast<int8_t>(left[d] >> shift) * static_cast<int8_t>(right[d] >> shift);
    }
  }
  return sum;
}

template <class P, int sums, int a, int b>
void multiply_tile() {
  const int depth = emulated.columns(a), columns = emulated.columns(sums), rows = emulated.config.rows[sums];
  EmulatedTiles::expect(emulated.config.rows[a] == rows && emulated.config.rows[b] == depth &&
                        emulated.columns(b) == columns);
  uint32_t right[kTileSide];
  for (int row = 0; row < rows; row++) {
    for (int column = 0; column < columns; column++) {
      uint32_t& sum = emulated.data[sums][row][column];
      for (int d = 0; d < depth; d++) right[d] = emulated.data[b][d][column];
      const uint32_t* left = emulated.data[a][row];
      sum = std::is_same_v<P, uint32_t> ? add_pairs(left, right, depth, sum) : add_integers(left, right, depth, sum);
    }
  }
}

#endif

// Lets the functions of this thread use tiles while it lives. Other code on the thread may have left tiles configured, and
// finds none configured afterwards: tiles that are in use cost a switch of threads 8 KiB, and the CPU its deepest sleep.
class TileUse {
 public:
  TileUse() {
    if constexpr (kTiles) current = {};
  }
  ~TileUse() { release(); }
  TileUse(const TileUse&) = delete;
  TileUse& operator=(const TileUse&) = delete;

  // Tiles 0 to 3 are sums, 4 and 5 are left factors, 6 and 7 right ones. Sums and left factors have `rows` rows. Tiles 4 and
  // 6 are 16 pairs deep; tiles 5 and 7 are `rest` pairs deep, for what is left after these.
  struct Shape {
    int rows, rest;
  };

  // Leaves the thread without tiles, as it must be before it calls loops of another file that use them.
  static void release() {
    if constexpr (kTiles) {
      if (current.rows > 0) release_tiles();
      current = {};
    }
  }

  // Makes all tiles zero.
  static void configure(Shape shape) {
    TileConfig config{};
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
      config.row_bytes[tile] = tile == 5 ? shape.rest * 4 : kTileSide * 4;
      config.rows[tile] = tile < 6 ? shape.rows : tile == 7 ? shape.rest : kTileSide;
    }
    configure_tiles(config);
    current = shape;
  }

  inline static thread_local Shape current{};  // of no rows while no tiles are configured
};

}  // namespace
}  // namespace cvt_kernels

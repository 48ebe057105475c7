// The tiles of AMX: registers of 16 rows of 64 bytes, and the instructions that multiply them. They have internal linkage,
// as the functions of vector.h.
//
// For tests, KERNELS_TILES names a file of plain functions in the place of the instructions (tests/csrc/emulated_tiles.h).
#pragma once

#include "common/half.h"

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

#ifdef KERNELS_TILES
#include KERNELS_TILES
#else

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

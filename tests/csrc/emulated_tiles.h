// What takes the place of the instructions of AMX in tests; csrc/common/tiles.h includes it within its namespace.

// The tiles of a thread. An instruction that the CPU would refuse ends the program.
struct EmulatedTiles {
  TileConfig config;
  uint32_t data[8][kTileSide][kTileSide];

  int columns(int tile) const {
    expect(config.palette == 1 && config.rows[tile] > 0);
    return config.row_bytes[tile] / 4;
  }

  static void expect(bool condition) {
    if (!condition) __builtin_abort();
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

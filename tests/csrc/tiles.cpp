// Says of the arithmetic of csrc/common/tiles.h, by the instructions of AMX or by what takes their place in tests, what fails.
#include <cstdio>
#include <vector>

#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "common/tiles.h"

using namespace cvt_kernels;

void expect(const char* what, bool condition) {
  if (!condition) std::printf("%s\n", what);
}

uint32_t pair(float first, float second) {
  uint32_t bits[2];
  std::memcpy(&bits[0], &first, 4), std::memcpy(&bits[1], &second, 4);
  return bits[0] >> 16 | (bits[1] & 0xffff0000u);
}

uint32_t four(int a, int b, int c, int d) { return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | uint32_t(d & 255) << 24; }

// The sum of `before` and the products of a and b, in the first row and column of tiles that hold nothing else.
template <class P, class Sum>
Sum sum_of(Sum before, std::vector<uint32_t> a, std::vector<uint32_t> b) {
  const int depth = static_cast<int>(a.size());
  TileUse::configure({1, depth});
  std::vector<uint32_t> right(depth * kTileSide);
  for (int d = 0; d < depth; d++) right[d * kTileSide] = b[d];
  Sum sums[kTileSide] = {before};
  load_tile<0>(sums, sizeof sums);
  load_tile<5>(a.data(), 0);
  load_tile<7>(right.data(), kTileSide * sizeof(uint32_t));
  multiply_tile<P, 0, 5, 7>();
  store_tile<0>(sums, sizeof sums);
  for (int i = 1; i < kTileSide; i++) expect("a column that should be 0", sums[i] == 0);
  return sums[0];
}

int main() {
#ifdef __AMX_TILE__
  syscall(SYS_arch_prctl, 0x1023, 18);  // asks Linux for the registers
#endif
  const TileUse tiles;
  const auto floats = [](float before, std::vector<uint32_t> a, std::vector<uint32_t> b) {
    return sum_of<uint32_t>(before, a, b);
  };
  const auto integers = [](int32_t before, uint32_t a, uint32_t b) { return sum_of<int32_t>(before, {a}, {b}); };
  const float tiny = 0x1p-30f, big = 0x1p30f, small = 0x1p-63f;
  // First numbers and second ones are summed apart, and both before they meet the sum so far.
  expect("sums of their own", floats(0, {pair(big, 1), pair(-big, 1)}, {pair(1, 1), pair(1, 1)}) == 2);
  expect("the sum so far comes last", floats(big, {pair(1, -1)}, {pair(big, big)}) == big);
  expect("fused", floats(0, {pair(1 + 0x1p-7f, 0), pair(-1, 0)}, {pair(1 + 0x1p-7f, 0), pair(1, 0)}) == 0x1p-6f + 0x1p-14f);
  expect("ties to even", floats(0x1p24f, {pair(1, 0)}, {pair(1, 0)}) == 0x1p24f);
  // Numbers below 2^-126 count as 0, as factors, sums and results.
  expect("a factor", floats(0, {pair(0x1p-127f, 0)}, {pair(big, 0)}) == 0);
  expect("a sum", floats(0x1p-127f, {pair(0, 0)}, {pair(1, 0)}) == 0);
  expect("a product", floats(0, {pair(small * tiny, 0)}, {pair(small, 0)}) == 0);
  expect("the smallest that counts", floats(0, {pair(small, 0)}, {pair(small, 0)}) == 0x1p-126f);
  expect("signs", integers(0, four(-128, 127, -1, 1), four(-128, -128, 127, 2)) == 16384 - 16256 - 127 + 2);
  expect("the sum of integers so far", integers(-5, four(1, 0, 0, 1), four(3, 1, 1, 4)) == 2);
  expect("a sum that wraps", integers(0x7fffffff, four(1, 0, 0, 0), four(1, 0, 0, 0)) == -0x7fffffff - 1);
}

// What the tests of the loops have in common: random numbers, and comparison with the formula in double.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "common/half.h"
#include "linear/layers.h"

namespace sanitized {

using namespace cvt_kernels;

inline uint32_t state = 1;

inline double random_number() {  // in [-2, 2)
  state = state * 1664525u + 1013904223u;
  return state / 1073741824.0 - 2;
}

template <class T>
std::vector<T> random_buffer(int64_t size, double scale = 1) {
  std::vector<T> made(size);
  for (T& x : made) store(&x, static_cast<Accumulator<T>>(scale * random_number()));
  return made;
}

struct FreeAligned {
  void operator()(void* memory) const { ::operator delete(memory, std::align_val_t(64)); }
};

using Memory = std::unique_ptr<void, FreeAligned>;

// As a thread's memory is aligned; it ends where the bytes do.
inline Memory memory(int64_t bytes) { return Memory(::operator new(bytes, std::align_val_t(64))); }

inline void expect_close(const char* what, double actual, double expected, double tolerance) {
  if (std::abs(actual - expected) <= tolerance) return;
  std::printf("%s: got %.9g, expected %.9g within %g\n", what, actual, expected, tolerance);
  std::exit(1);
}

inline void expect(const char* what, bool condition) {
  if (condition) return;
  std::printf("%s\n", what);
  std::exit(1);
}

// Cuts the rows of images into runs, so many of each image.
inline std::vector<Run> cut(int64_t images, int64_t rows, int64_t parts) {
  std::vector<Run> runs;
  for (int64_t image = 0; image < images; image++) {
    for (int64_t part = 0; part < parts; part++) runs.push_back({image, rows * part / parts, rows * (part + 1) / parts});
  }
  return runs;
}

inline int64_t longest(const std::vector<Run>& runs) {
  int64_t rows = 0;
  for (const Run& run : runs) rows = rows < run.end - run.begin ? run.end - run.begin : rows;
  return rows;
}

}  // namespace sanitized

// Units of work that threads take as they come, each thread with memory of its own. For the operators only, as cpu.h.
#pragma once

#include <algorithm>
#include <atomic>

#include "common/cpu.h"

namespace cvt_kernels {

inline int64_t threads() { return static_cast<int64_t>(torch::stable::get_num_threads()); }

// As many parts of an image as needed, or a few more, so that all threads have the same number of units.
inline int64_t balanced(int64_t images, int64_t parts, int64_t most) {
  constexpr int64_t kRounds = 8;  // from so many units per thread on, they need not be shared evenly
  for (int64_t count = parts; count <= std::min(most, parts + threads()); count++) {
    if (images * count >= kRounds * threads()) break;
    if (images * count % threads() == 0) return count;
  }
  return parts;
}

// Calls f(unit, previous, scratch) for all units, which threads take as they come.
template <class F>
void for_units(int64_t units, int64_t bytes, const F& f) {
  const int64_t count = std::min(threads(), units);
  if (count == 0) return;
  bytes = (bytes + 4095) / 4096 * 4096;
  const Workspace scratch(count * bytes);
  std::atomic<int64_t> next{0};
  parallel_for(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; thread++) {
      int64_t previous = -1;
      for (int64_t unit = next++; unit < units; previous = unit, unit = next++) {
        f(unit, previous, scratch.data() + thread * bytes);
      }
    }
  });
}

}  // namespace cvt_kernels

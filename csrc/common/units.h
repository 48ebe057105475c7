// Units of work that threads take as they come, each thread with memory of its own. For the operators only, as cpu.h.
//
// Loops compute a unit in the same way whichever thread takes it, so results do not depend on their number.
#pragma once

#include <functional>

#include "common/cpu.h"
#include "common/pool.h"
#include "linear/cpu_loops.h"

namespace cvt_kernels {

inline int64_t threads() { return static_cast<int64_t>(torch::stable::get_num_threads()); }

// Cuts the rows of images into runs, which get smaller: those of a round, one for each thread, take about half of what is
// left, in multiples of `whole`; the last round takes all. So threads end at about the same time, even if one is slower. A run
// has `fewest` to `most` rows, less in the last round and at the end of an image, or up to whole / 2 more at its end.
inline std::vector<Run> cut(int64_t images, int64_t rows, int64_t fewest, int64_t most, int64_t whole = 1) {
  const auto divide = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  std::vector<Run> runs;
  int64_t image = 0, row = 0, size = most;
  bool is_last = threads() == 1;
  while (image < images) {
    if (!is_last && runs.size() % threads() == 0) {
      const int64_t left = (images - image) * rows - row, half = divide(left, 2 * threads());
      is_last = half < fewest;
      size = std::min(is_last ? divide(left, threads()) : (half + whole / 2) / whole * whole, most);
    }
    const int64_t rest = rows - row, extra = size < whole ? 0 : whole / 2;
    const int64_t end = rest < size + extra ? rows : row + size;
    runs.push_back({image, row, end});
    row = end;
    if (row == rows) image++, row = 0;
  }
  return runs;
}

// Cuts tokens that pass through linear layers.
inline std::vector<Run> cut_tokens(int64_t images, int64_t tokens) {
  return cut(images, tokens, kAtOnce, kTileRows / kAtOnce * kAtOnce, kAtOnce);
}

// Units of work that threads take as they come, each with `bytes` of memory for the thread. `previous` is the unit that the
// thread served before, or -1.
struct Step {
  int64_t units, bytes;
  std::function<void(int64_t unit, int64_t previous, char* scratch)> run;
};

// The step of a loop that takes each of some parts of a call, as runs are, and the image of the one that the thread served
// before, or -1, if it asks.
template <class Call, class Part, class... Previous>
Step over(std::vector<Part> parts, const Loop<Call, const Part&, Previous...>& loop, DType dtype, const Call& call) {
  const int64_t units = static_cast<int64_t>(parts.size()), bytes = loop.bytes(dtype, call);
  return {units, bytes, [=, parts = std::move(parts), &call](int64_t unit, int64_t previous, char* memory) {
            if constexpr (sizeof...(Previous) == 0) loop.run(dtype, call, parts[unit], memory);
            else loop.run(dtype, call, parts[unit], previous < 0 ? -1 : parts[previous].image, memory);
          }};
}

// The same; `longest` becomes the rows of the longest of the parts, before the loop is asked for its memory.
template <class Call, class Part, class... Previous>
Step over(std::vector<Part> parts, int64_t& longest, const Loop<Call, const Part&, Previous...>& loop, DType dtype,
          const Call& call) {
  longest = 0;
  for (const Part& part : parts) longest = std::max(longest, part.end - part.begin);
  return over(std::move(parts), loop, dtype, call);
}

// The step of a loop that takes the number of a unit.
template <class Call>
Step over(int64_t units, const Loop<Call, int64_t>& loop, DType dtype, const Call& call) {
  return {units, loop.bytes(dtype, call),
          [=, &call](int64_t unit, int64_t, char* memory) { loop.run(dtype, call, unit, memory); }};
}

// The units of a step that have been taken, and those that are done.
struct alignas(64) Progress {
  std::atomic<int64_t> taken{0}, done{0};

  // A unit that is being computed; it is done at its end, also if it throws.
  struct Unit {
    std::atomic<int64_t>& done;
    ~Unit() { done.fetch_add(1, std::memory_order_release); }
  };

  // Waits for the units that other threads have taken.
  void wait_for(int64_t units) const {
    wait_until([&] { return done.load(std::memory_order_acquire) >= units; });
  }
};

// Runs steps one after the other: those of `served` models in the threads of the pool; others, whose neighbors are operators of
// PyTorch, in PyTorch's. No step waits for a thread that has taken no unit, which may come late on a busy CPU; only the end of
// the last one does, and in the pool not even that. What a unit throws is thrown here again, when the threads are done.
inline void for_steps(const std::vector<Step>& steps, bool served = true) {
  int64_t units = 0, bytes = 0;
  for (const Step& step : steps) units = std::max(units, step.units), bytes = std::max(bytes, step.bytes);
  const int64_t count = std::min(threads(), units);
  if (count == 0) return;
#ifdef __SANITIZE_ADDRESS__  // which sees what is touched beyond them
  constexpr int64_t kWhole = 64;
#else
  constexpr int64_t kWhole = 4096;
#endif
  bytes = (bytes + kWhole - 1) / kWhole * kWhole;
  const Workspace scratch(count * bytes);
  std::vector<Progress> progress(steps.size());
  std::exception_ptr failure;
  std::mutex mutex;
  const auto run = [&](int64_t thread) {
    try {
      for (size_t i = 0; i < steps.size(); i++) {
        int64_t previous = -1;
        for (int64_t unit = progress[i].taken++; unit < steps[i].units; previous = unit, unit = progress[i].taken++) {
          const Progress::Unit is_done{progress[i].done};
          steps[i].run(unit, previous, scratch.data() + thread * bytes);
        }
        if (i + 1 < steps.size()) progress[i].wait_for(steps[i].units);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      failure = std::current_exception();
    }
  };
  if (served) {
    if (count > 1) Pool::instance().hush(threads());
    Pool::instance().run(count, run);
  } else {
    parallel_for(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; thread++) run(thread);
    });
  }
  if (failure) std::rethrow_exception(failure);
}

constexpr int64_t kBetweenBytes = 16 << 20;  // of what steps leave to the next ones, if images are small

// Calls serve(first, count, memory) for as many images at a time as have room in memory between their steps, at least so many.
template <class F>
void for_images(int64_t images, int64_t image_bytes, int64_t fewest, const F& serve) {
  const int64_t most = image_bytes == 0 ? images : std::max(kBetweenBytes / image_bytes, fewest);
  const Workspace between(std::min(images, most) * image_bytes);
  for (int64_t first = 0; first < images; first += most) serve(first, std::min(most, images - first), between.data());
}

}  // namespace cvt_kernels

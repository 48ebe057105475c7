// CUDA's model of execution on the host, for kernels that know threads, warp shuffles and barriers: the threads of a
// block are fibers that run one after the other until each waits for the rest. A shuffle or barrier that some threads
// do not reach ends the program, as it would hang or corrupt a GPU.
#pragma once

#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __shared__ static  // one block runs at a time
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct uint3 {
  unsigned x, y, z;
};

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

using std::max;
using std::min;

inline uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

constexpr size_t kStack = 32 * 1024;
constexpr unsigned kWarpSize = 32;

enum class State { running, at_barrier, at_shuffle, finished };

using Place = void* [5];  // of __builtin_setjmp

struct Fiber {
  Place place;
  bool started = false;
  std::vector<char> stack = std::vector<char>(kStack);
  State state;
  float value;  // what it gives to a shuffle, then what it gets
  int lane;     // whose value it gets
  int kind;     // the step of a shuffle by steps; -1 if each thread names a lane
};

struct Scheduler {
  Place place;
  const void* stack;
  size_t stack_size;
  std::vector<Fiber> fibers;
  Fiber* current;
  std::function<void()> body;
};

inline Scheduler scheduler;

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "simt: block %u: %s\n", blockIdx.x, why);
  std::exit(1);
}

// Goes on at a place of another stack. Unlike swapcontext it makes no system call, of which there would be two at every
// shuffle of a thread.
__attribute__((noinline, no_sanitize_address)) inline void jump(Place& from, Place& to) {
  if (__builtin_setjmp(from) == 0) __builtin_longjmp(to, 1);
}

// Leaves the fiber until the others have come as far.
inline void wait(State state) {
  scheduler.current->state = state;
  void* fake_stack;
  __sanitizer_start_switch_fiber(&fake_stack, scheduler.stack, scheduler.stack_size);
  jump(scheduler.current->place, scheduler.place);
  __sanitizer_finish_switch_fiber(fake_stack, &scheduler.stack, &scheduler.stack_size);
}

// What a fiber does: the work of its thread in one block after the other.
inline void enter() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler.stack, &scheduler.stack_size);
  while (true) {
    scheduler.body();
    wait(State::finished);
  }
}

__attribute__((noinline, no_sanitize_address)) inline void start(Fiber& fiber) {
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.data();
  context.uc_stack.ss_size = kStack;
  makecontext(&context, enter, 0);
  fiber.started = true;
  if (__builtin_setjmp(scheduler.place) == 0) setcontext(&context);
}

inline void resume(unsigned thread) {
  Fiber& fiber = scheduler.fibers[thread];
  threadIdx = {thread, 0, 0};
  fiber.state = State::running;
  scheduler.current = &fiber;
  void* fake_stack;
  __sanitizer_start_switch_fiber(&fake_stack, fiber.stack.data(), kStack);
  if (fiber.started) jump(scheduler.place, fiber.place);
  else start(fiber);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

inline bool all(unsigned begin, unsigned end, State state) {
  return std::all_of(scheduler.fibers.begin() + begin, scheduler.fibers.begin() + end,
                     [&](const Fiber& fiber) { return fiber.state == state; });
}

// Exchanges the values of a warp whose threads have all come to the same shuffle.
inline void shuffle(unsigned first) {
  Fiber* warp = &scheduler.fibers[first];
  float values[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; lane++) {
    if (warp[lane].kind != warp[0].kind) fail("threads of a warp are at different shuffles");
    values[lane] = warp[lane].value;
  }
  for (unsigned lane = 0; lane < kWarpSize; lane++) warp[lane].value = values[warp[lane].lane];
}

// Runs a warp until all its threads wait at a barrier or are finished.
inline void run_warp(unsigned first, bool backwards) {
  while (true) {
    for (unsigned i = 0; i < kWarpSize; i++) {
      const unsigned thread = first + (backwards ? kWarpSize - 1 - i : i);
      if (scheduler.fibers[thread].state == State::running) resume(thread);
    }
    if (!all(first, first + kWarpSize, State::at_shuffle)) return;
    shuffle(first);
    for (unsigned i = 0; i < kWarpSize; i++) scheduler.fibers[first + i].state = State::running;
  }
}

inline void run_block(unsigned threads, bool backwards) {
  for (unsigned i = 0; i < threads; i++) scheduler.fibers[i].state = State::running;
  while (true) {
    for (unsigned i = 0; i < threads; i += kWarpSize) run_warp(backwards ? threads - kWarpSize - i : i, backwards);
    if (all(0, threads, State::finished)) return;
    if (!all(0, threads, State::at_barrier)) fail("threads wait for others that do not come");
    for (unsigned i = 0; i < threads; i++) scheduler.fibers[i].state = State::running;
  }
}

// Runs kernel(arguments...) for all blocks. From barrier to barrier, one warp runs after the other, forwards or
// backwards: what one writes and another reads or writes without a barrier in between gives different results.
template <class... Parameters, class... Arguments>
void launch(bool backwards, void (*kernel)(Parameters...), int64_t blocks, int threads, const Arguments&... arguments) {
  if (threads % static_cast<int>(kWarpSize) != 0) fail("a warp is not full");
  const auto count = static_cast<unsigned>(threads);
  if (scheduler.fibers.size() < count) scheduler.fibers.resize(count);
  scheduler.body = [&] { kernel(arguments...); };
  gridDim = {static_cast<unsigned>(blocks), 1, 1};
  blockDim = {count, 1, 1};
  for (unsigned block = 0; block < gridDim.x; block++) {
    blockIdx = {block, 0, 0};
    run_block(count, backwards);
  }
}

inline float exchange(unsigned mask, float value, unsigned lane, int kind) {
  if (mask != 0xffffffffu) fail("a shuffle of a part of a warp");
  if (lane >= kWarpSize) fail("a shuffle from beyond the warp");
  Fiber& fiber = *scheduler.current;
  fiber.value = value;
  fiber.lane = static_cast<int>(lane);
  fiber.kind = kind;
  wait(State::at_shuffle);
  return fiber.value;
}

}  // namespace simt

#define __syncthreads() simt::wait(simt::State::at_barrier)

inline float __shfl_xor_sync(unsigned mask, float value, int step) {
  return simt::exchange(mask, value, threadIdx.x % simt::kWarpSize ^ static_cast<unsigned>(step), step);
}

inline float __shfl_sync(unsigned mask, float value, int lane) {
  return simt::exchange(mask, value, static_cast<unsigned>(lane), -1);
}

// The choice of the loops, which are compiled once per instruction set, and threads and memory for them. For the operators
// only: the loops themselves must not include it, since the linker would merge what they share.
#pragma once

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <exception>

#include <torch/csrc/stable/ops.h>

#include "common/checks.h"
#include "common/instruction_sets.h"
#include "common/workspace.h"

namespace cvt_kernels {

#ifdef __x86_64__
// What the CPU says of itself.
struct CpuId {
  explicit CpuId(unsigned int leaf, unsigned int subleaf = 0) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Whether the CPU multiplies tiles of bfloat16 and of 8-bit integers, and Linux lets this process use them, which it does
// on request.
inline bool has_tiles() {
  constexpr unsigned int kFlags = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, -TILE, -INT8: GCC 12 has no names for them
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA of Linux
  return (CpuId(7).edx & kFlags) == kFlags && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Whether the CPU multiplies pairs of bfloat16 at half of float32's rate, so that widened numbers are multiplied faster: Intel's
// cores with AMX do, of which a virtual machine may hide AMX (Emerald Rapids, 2026-11-30: 86 and 176 GFLOP/s). No flag says it;
// they have 16-bit floats, as AMD's from Zen 6 on, but not AVX512-VP2INTERSECT, as AMD's from Zen 5 on.
inline bool has_slow_pairs() {
  constexpr unsigned int kIntersect = 1u << 8, kHalf = 1u << 23;
  return (CpuId(7).edx & (kIntersect | kHalf)) == kHalf;
}

// Whether products in tiles are right here. It is tried once, in a process of its own, which a tile that the CPU refuses
// would end. Defined in linear/cpu_operators.cpp.
bool tiles_work();
#endif

// Whether the build has the loops for an instruction set, by its name.
inline bool is_compiled_for(const std::string& set) {
  return std::string(CVT_KERNELS_CPU_SETS).find(" " + set + " ") != std::string::npos;
}

// The latest instruction set that this CPU and the build have, or the one of a name, if this CPU has it. An avx512_bf16 whose pairs
// are slow is taken only without avx512_vnni.
inline InstructionSet find_instruction_set(const std::string& name) {
  const auto is_wanted = [&](const char* set) { return name.empty() ? is_compiled_for(set) : name == set; };
#ifdef __x86_64__
  const bool f16c = CpuId(1).ecx & 1u << 29, avx_vnni = CpuId(7, 1).eax & 1u << 4;  // compilers may have no names for them
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  const bool wants_tiles = bf16 && is_wanted("amx_bf16");
  if (wants_tiles && has_tiles() && (!name.empty() || tiles_work())) return InstructionSet::amx_bf16;
  if (bf16 && is_wanted("avx512_bf16") && !has_slow_pairs()) return InstructionSet::avx512_bf16;
  if (vnni && is_wanted("avx512_vnni")) return InstructionSet::avx512_vnni;
  if (bf16 && is_wanted("avx512_bf16")) return InstructionSet::avx512_bf16;
  if (avx512 && is_wanted("avx512")) return InstructionSet::avx512;
  if (avx2 && avx_vnni && is_wanted("avx2_vnni")) return InstructionSet::avx2_vnni;
  if (avx2 && is_wanted("avx2")) return InstructionSet::avx2;
#endif
  expect(name.empty() || name == "plain", "CVT_KERNELS_CPU", name,
         "plain, or avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16 or amx_bf16 on a CPU that has it");
  expect(!name.empty() || is_compiled_for("plain"), "CVT_KERNELS_CPU_SETS", std::string(CVT_KERNELS_CPU_SETS),
         "an instruction set of this CPU in the build of the extension");
  return InstructionSet::plain;
}

// The instruction set to use: CVT_KERNELS_CPU may name one.
inline InstructionSet find_instruction_set() {
  const char* requested = std::getenv("CVT_KERNELS_CPU");
  const std::string name = requested == nullptr ? "" : requested;
  const InstructionSet set = find_instruction_set(name);
  expect(name.empty() || is_compiled_for(name), "CVT_KERNELS_CPU", name,
         "an instruction set that the extension was built for, which are", CVT_KERNELS_CPU_SETS,
         "here; CVT_KERNELS_CPU_SETS=all builds it for all");
  return set;
}

// The table for this CPU among KERNEL_TABLES and the like, of which a family has one: the first call of its Kernels chooses, and
// takes the last one where there is none for its latest set.
template <class Kernels, int count>
const Kernels* choose(const Kernels* const (&tables)[count]) {
  static const Kernels* const chosen = tables[std::min(static_cast<int>(find_instruction_set()), count - 1)];
  return chosen;
}

constexpr int64_t kGrain = 16384;  // numbers that are worth a thread

// As many units, of some numbers each, as are worth a thread.
inline int64_t grain_of(int64_t numbers) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, numbers)); }

// Calls f(begin, end) for parts of 0 to `size` in several threads, each part of at least `grain`. What f throws is thrown
// here again: torch's own function loses what was said.
template <class F>
void parallel_for(int64_t size, int64_t grain, const F& f) {
  std::exception_ptr failure;
  std::mutex mutex;
  torch::stable::parallel_for(0, size, grain, [&](int64_t begin, int64_t end) {
    try {
      f(begin, end);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

// The same, each part with `bytes` of memory of its own.
template <class F>
void parallel_for_with_scratch(int64_t size, int64_t grain, int64_t bytes, const F& f) {
  parallel_for(size, grain, [&](int64_t begin, int64_t end) {
    const Workspace scratch(bytes);
    f(begin, end, scratch.data());
  });
}

// The totals over parts of `size` numbers each, which are added in their order.
template <class A>
std::vector<double> totals_of(const std::vector<A>& sums, int64_t parts, int64_t size) {
  std::vector<double> totals(size);
  parallel_for(size, grain_of(parts), [&](int64_t begin, int64_t end) {
    for (int64_t part = 0; part < parts; part++) {
      for (int64_t i = begin; i < end; i++) totals[i] += sums[part * size + i];
    }
  });
  return totals;
}

}  // namespace cvt_kernels

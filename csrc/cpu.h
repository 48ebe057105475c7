// Which of the loops, compiled once per instruction set, serve this CPU, and memory for them. For the operators only: the
// loops themselves must not include it, since the linker would merge what they share.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include <torch/csrc/stable/library.h>

namespace cvt_kernels {

enum class InstructionSet { plain, avx2, avx512, avx512_bf16 };

// The latest that this CPU has, or the one that CVT_KERNELS_CPU asks for.
inline InstructionSet find_instruction_set() {
  const char* requested = std::getenv("CVT_KERNELS_CPU");
  const std::string name = requested == nullptr ? "" : requested;
#ifdef __x86_64__
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (bf16 && (name.empty() || name == "avx512_bf16")) return InstructionSet::avx512_bf16;
  if (avx512 && (name.empty() || name == "avx512")) return InstructionSet::avx512;
  if (avx2 && (name.empty() || name == "avx2")) return InstructionSet::avx2;
#endif
  STD_TORCH_CHECK(name.empty() || name == "plain", "CVT_KERNELS_CPU: got '", name,
                  "', expected plain, or avx2, avx512 or avx512_bf16 on a CPU that has it");
  return InstructionSet::plain;
}

// Tables of loops, in the order of InstructionSet; only the first where there is no x86-64.
template <class Kernels, int count>
const Kernels& choose(const Kernels* const (&tables)[count]) {
  return *tables[static_cast<int>(find_instruction_set())];
}

constexpr std::align_val_t kCacheLine{64};

struct FreeScratch {
  void operator()(void* memory) const { ::operator delete(memory, kCacheLine); }
};

// For one thread, aligned as vectors like it.
using Scratch = std::unique_ptr<void, FreeScratch>;

inline Scratch make_scratch(int64_t bytes) { return Scratch(::operator new(bytes, kCacheLine)); }

#ifdef __x86_64__
#define KERNEL_TABLES {&kernels_plain, &kernels_avx2, &kernels_avx512, &kernels_avx512_bf16}
#else
#define KERNEL_TABLES {&kernels_plain}
#endif

}  // namespace cvt_kernels

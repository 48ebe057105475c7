// Prints the instruction set that the loops of a build would be taken for, or the refusal. SETS are those of the build.
#include <cstdio>
#include <cstdlib>

#define CVT_KERNELS_CPU_SETS std::getenv("SETS")
#include "common/cpu.h"

#ifdef __x86_64__
bool cvt_kernels::tiles_work() { return true; }
#endif

int main() {
  try {
    std::printf("%d", static_cast<int>(cvt_kernels::find_instruction_set()));
  } catch (const std::exception& refusal) {
    std::printf("%s", refusal.what());
  }
}

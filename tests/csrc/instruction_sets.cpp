// Prints, for each line of a build's sets and one for CVT_KERNELS_CPU, the set that its loops would be taken for, or the refusal.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

std::string sets;

#define CVT_KERNELS_CPU_SETS sets.c_str()
#include "common/cpu.h"

#ifdef __x86_64__
bool cvt_kernels::tiles_work() { return true; }
#endif

int main() {
  for (std::string requested; std::getline(std::cin, sets) && std::getline(std::cin, requested);) {
    setenv("CVT_KERNELS_CPU", requested.c_str(), 1);
    try {
      std::printf("%d\n", static_cast<int>(cvt_kernels::find_instruction_set()));
    } catch (const std::exception& refusal) {
      std::printf("%s\n", refusal.what());
    }
  }
}

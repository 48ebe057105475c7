// The launches of CUDA kernels that a host program makes, handed on to the emulator (cuda.py).
#pragma once
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

// Of the sanitizers, which a library is not linked with; kernels do not run on the host here.
extern "C" inline void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
extern "C" inline void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}

namespace emulated {

struct Launched {  // as cuda.py unpacks it
  const char* kernel;
  int64_t blocks, threads;
  const char* arguments;  // 8 bytes for one's size, then its bytes, and so on
  int64_t argument_bytes;
  const std::pair<const char*, size_t>* arrays;  // the memory that it may touch
  int64_t array_count;
};
using Emulate = void (*)(const Launched*);
inline Emulate emulate;

// Starts kernel(arguments...): by its name, since the compilers for the host and for the GPU give it the same.
template <class... Parameters, class... Arguments>
void launch(const std::vector<std::pair<const char*, size_t>>& arrays, void (*kernel)(Parameters...), int64_t blocks, int threads,
            const Arguments&... arguments) {
  std::vector<char> bytes;
  const auto append = [&](const void* from, size_t size) {
    bytes.insert(bytes.end(), static_cast<const char*>(from), static_cast<const char*>(from) + size);
  };
  const std::tuple<Parameters...> converted{arguments...};
  std::apply([&](const auto&... each) {
    ([&] {
      const auto size = static_cast<int64_t>(sizeof each);
      append(&size, sizeof size);
      append(&each, sizeof each);
    }(), ...);
  }, converted);
  Dl_info symbol;
  dladdr(reinterpret_cast<void*>(kernel), &symbol);
  const Launched launched{symbol.dli_sname, blocks, threads, bytes.data(), static_cast<int64_t>(bytes.size()),
                          arrays.data(), static_cast<int64_t>(arrays.size())};
  if (blocks > 0) emulate(&launched);
}

}  // namespace emulated

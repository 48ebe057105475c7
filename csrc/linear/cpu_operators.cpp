// The packing of weights on the CPU.

#ifdef __x86_64__
#include <sys/wait.h>

#include <cerrno>
#include <csignal>
#endif

#include "linear/packed.h"

#ifdef __x86_64__
namespace cvt_kernels {

bool tiles_work() {
  static const bool work = [] {
    const pid_t child = fork();
    if (child == 0) {
      for (const int number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE}) std::signal(number, SIG_DFL);
      const bool right =
          linear::kernels_amx_bf16.products_are_right() && linear_int8::kernels_amx_int8.products_are_right();
      _exit(right ? 0 : 1);
    }
    int status = 0;
    pid_t ended = child;
    if (child > 0) {
      do ended = waitpid(child, &status, 0);
      while (ended < 0 && errno == EINTR);
    }
    return child > 0 && ended == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }();
  return work;
}

}  // namespace cvt_kernels
#endif

namespace cvt_kernels::linear {
namespace {

Tensor pack_linear(const Tensor& weight) {
  const DType dtype = served_dtype("weight", weight);
  expect(weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) > 0, "weight", weight, "(outputs, inputs)");
  numbers_of("weight", weight);
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const Tensor rows = inputs == 1 || weight.stride(1) == 1 ? weight : made_contiguous("weight", weight);
  const Tensor out = empty({kernels().packed_bytes(dtype, outputs, inputs)}, ScalarType::Byte, weight);
  kernels().pack(dtype, rows.const_data_ptr(), rows.stride(0), outputs, inputs, out.mutable_data_ptr());
  return out;
}

IMPLEMENT("pack_linear", pack_linear)

}  // namespace
}  // namespace cvt_kernels::linear

// The launches of the CUDA kernels. setup.py compiles this file once per dtype, with KERNELS naming the table it fills and
// TYPE the elements; it includes nothing of torch.

#include <cuda_runtime.h>

#include "layer_norm_gelu/cuda_kernels.cuh"

namespace cvt_kernels::layer_norm_gelu::cuda {
namespace {

// Starts the kernels that f hands over, on a stream, and returns the first error.
template <class F>
const char* run(void* stream, F f) {
  cudaError_t error = cudaSuccess;
  f([&](auto kernel, int64_t blocks, int threads, const auto&... arguments) {
    if (error != cudaSuccess || blocks == 0) return;
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, static_cast<cudaStream_t>(stream)>>>(
        arguments...);
    error = cudaGetLastError();
  });
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// A function of the table that launches what a function of cuda_kernels.cuh hands over.
#define LAUNCHES(function) \
  [](void* stream, auto... given) { return run(stream, [&](auto launch) { function<TYPE>(given..., launch); }); }

}  // namespace

const Kernels KERNELS{
    LAUNCHES(layer_norm), LAUNCHES(layer_norm_backward), LAUNCHES(gelu), LAUNCHES(gelu_backward), LAUNCHES(sum_over_blocks),
    [](int* count) {
      int device = 0;
      cudaError_t error = cudaGetDevice(&device);
      if (error == cudaSuccess) error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
      return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
    },
};

}  // namespace cvt_kernels::layer_norm_gelu::cuda

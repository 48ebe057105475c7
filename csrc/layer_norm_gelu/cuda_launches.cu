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

}  // namespace

const Kernels KERNELS{
    [](const LayerNormForward& call, Activation activation, DType result, const Layout& layout, void* stream) {
      return run(stream, [&](auto launch) { layer_norm<TYPE>(call, activation, result, layout, launch); });
    },
    [](const LayerNormBackward& call, Activation activation, DType result, const Layout& layout, int64_t blocks,
       void* stream) {
      return run(stream,
                 [&](auto launch) { layer_norm_backward<TYPE>(call, activation, result, layout, blocks, launch); });
    },
    [](const GeluForward& call, Activation activation, const Layout& layout, void* stream) {
      return run(stream, [&](auto launch) { gelu<TYPE>(call, activation, layout, launch); });
    },
    [](const GeluBackward& call, Activation activation, const Layout& layout, int64_t blocks, void* stream) {
      return run(stream, [&](auto launch) { gelu_backward<TYPE>(call, activation, layout, blocks, launch); });
    },
    [](const SumOverBlocks& call, void* stream) {
      return run(stream, [&](auto launch) { sum_over_blocks<TYPE>(call, launch); });
    },
    [](int* count) {
      int device = 0;
      cudaError_t error = cudaGetDevice(&device);
      if (error == cudaSuccess) error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
      return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
    },
};

}  // namespace cvt_kernels::layer_norm_gelu::cuda

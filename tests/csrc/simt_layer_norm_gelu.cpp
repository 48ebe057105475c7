// Runs the CUDA kernels of csrc/layer_norm_gelu on the host: calls on standard input, results on standard output,
// both as test_layer_norm_gelu_cuda.py packs them. Every array is a block of memory of its own and of its very size, so
// that the sanitizers see what is read or written beside it.
#include "simt.h"

#include "layer_norm_gelu/cuda_kernels.cuh"

#include <list>

using namespace cvt_kernels;
using namespace cvt_kernels::layer_norm_gelu;

namespace {

struct KernelCall {
  int64_t operation, dtype, activation, rows, channels, misalignment, multiprocessors, backwards;
  int64_t has_addend, has_weight, has_bias, float_parameters;
  double eps;
};

// Arrays of a call. `misalignment` elements come before the first one.
struct Memory {
  std::list<std::vector<char>> blocks;
  std::vector<std::pair<const char*, size_t>> results;

  char* allocate(size_t size, size_t offset) {
    blocks.emplace_back(offset + size, '\xff');
    return blocks.back().data() + offset;
  }
  const void* input(bool present, size_t size, size_t offset) {
    if (!present) return nullptr;
    char* data = allocate(size, offset);
    if (size > 0 && std::fread(data, 1, size, stdin) != size) simt::fail("the input ends early");
    return data;
  }
  void* output(size_t size, size_t offset) {
    char* data = allocate(size, offset);
    results.emplace_back(data, size);
    return data;
  }
  void write_results() const {
    for (const auto& [data, size] : results) {
      if (size > 0) std::fwrite(data, 1, size, stdout);
    }
  }
};

template <class T>
void run(const KernelCall& call) {
  Memory memory;
  const bool backwards = call.backwards != 0, float_parameters = call.float_parameters != 0;
  const auto launch = [&](auto kernel, int64_t blocks, int threads, const auto&... arguments) {
    simt::launch(backwards, kernel, blocks, threads, arguments...);
  };
  const auto dtype = static_cast<DType>(call.dtype);
  const auto activation = static_cast<Activation>(call.activation);
  const int channels = static_cast<int>(call.channels);
  const size_t element = sizeof(T), parameter = float_parameters ? sizeof(float) : element;
  const size_t offset = static_cast<size_t>(call.misalignment) * element;
  const size_t size = static_cast<size_t>(call.rows * call.channels) * element;
  const size_t vector = static_cast<size_t>(call.channels) * parameter;
  const size_t statistics = static_cast<size_t>(call.rows) * sizeof(float);
  const auto sum = [&](const float* sums, int64_t index, int64_t count, int64_t blocks) {
    void* out = memory.output(vector, 0);
    cuda::sum_over_blocks<T>({sums + index * channels, out, count * channels, static_cast<int>(blocks), channels,
                              float_parameters},
                             launch);
  };
  const auto sums_of = [&](int64_t blocks, int64_t count) {
    const size_t bytes = static_cast<size_t>(blocks * count * call.channels) * sizeof(float);
    return reinterpret_cast<float*>(memory.allocate(bytes, 0));
  };
  const bool aligned = call.misalignment == 0 && call.channels % (16 / static_cast<int64_t>(element)) == 0;
  cuda::Layout layout = cuda::layout_of(dtype, channels, aligned);

  const void* x = memory.input(true, size, offset);
  const void* addend = memory.input(call.has_addend != 0, size, offset);
  const void* weight = memory.input(call.has_weight != 0, vector, 0);
  const void* bias = memory.input(call.has_bias != 0, vector, 0);
  if (call.operation == 0 || call.operation == 4) {  // layer_norm: addend is the residual
    void* h = addend == nullptr ? nullptr : memory.output(size, offset);
    void* out = memory.output(size, offset);
    auto* mean = static_cast<float*>(memory.output(statistics, 0));
    auto* rstd = static_cast<float*>(memory.output(statistics, 0));
    const int64_t rows = call.rows + (call.operation == 4);  // one too many
    cuda::layer_norm<T>({x, addend, weight, bias, h, out, mean, rstd, rows, static_cast<float>(call.eps), channels,
                         float_parameters},
                        activation, layout, launch);
  } else if (call.operation == 1) {  // its backward: addend is dh
    const auto* mean = static_cast<const float*>(memory.input(true, statistics, 0));
    const auto* rstd = static_cast<const float*>(memory.input(true, statistics, 0));
    const void* dout = memory.input(true, size, offset);
    void* dx = memory.output(size, offset);
    const int64_t blocks = cuda::resident_blocks(layout, call.rows, static_cast<int>(call.multiprocessors));
    float* sums = sums_of(blocks, 2);
    cuda::layer_norm_backward<T>({dout, addend, x, weight, bias, mean, rstd, dx, sums, call.rows, channels,
                                  float_parameters},
                                 activation, layout, blocks, launch);
    if (weight != nullptr) sum(sums, 0, 2, blocks);
    if (bias != nullptr) sum(sums, 1, 2, blocks);
  } else {  // gelu, and its backward
    const int64_t elements = call.rows * call.channels;
    if (bias == nullptr) {
      const bool whole = elements % (16 / static_cast<int64_t>(element)) == 0;
      layout = cuda::flat_layout(dtype, call.misalignment == 0 && whole, call.operation == 3);
    }
    const int width = bias == nullptr ? cuda::width_of(layout) : channels;
    if (call.operation == 2) {
      void* out = memory.output(size, offset);
      cuda::gelu<T>({x, bias, out, elements, width, float_parameters}, activation, layout, launch);
    } else {
      const void* dout = memory.input(true, size, offset);
      void* dx = memory.output(size, offset);
      const int64_t rows = (elements + width - 1) / width;
      const int64_t blocks = cuda::resident_blocks(layout, rows, static_cast<int>(call.multiprocessors));
      float* sums = bias == nullptr ? nullptr : sums_of(blocks, 1);
      cuda::gelu_backward<T>({dout, x, bias, dx, sums, elements, width, float_parameters}, activation, layout,
                             blocks, launch);
      if (bias != nullptr) sum(sums, 0, 1, blocks);
    }
  }
  memory.write_results();
}

}  // namespace

int main() {
  KernelCall call;
  while (std::fread(&call, sizeof call, 1, stdin) == 1) {
    switch (static_cast<DType>(call.dtype)) {
      case DType::float32: run<float>(call); break;
      case DType::bfloat16: run<BFloat16>(call); break;
      case DType::float16: run<Half>(call); break;
      default: simt::fail("unknown dtype");
    }
  }
}

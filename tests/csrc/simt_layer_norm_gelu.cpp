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
  int64_t operation, dtype, result, activation, rows, channels, misalignment, multiprocessors, backwards;
  int64_t has_addend, has_shift, has_weight, has_bias, float_parameters, float_shift;
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
  const bool float_parameters = call.float_parameters != 0;
  const auto launch = [&](auto kernel, int64_t blocks, int threads, const auto&... arguments) {
    simt::launch(call.backwards != 0, kernel, blocks, threads, arguments...);
  };
  const auto dtype = static_cast<DType>(call.dtype), result = static_cast<DType>(call.result);
  const auto activation = static_cast<Activation>(call.activation);
  const int channels = static_cast<int>(call.channels);
  const size_t element = sizeof(T), parameter = float_parameters ? sizeof(float) : element;
  const size_t offset = static_cast<size_t>(call.misalignment) * element;
  const size_t size = static_cast<size_t>(call.rows * call.channels) * element;
  const size_t result_element = result == DType::float32 ? sizeof(float) : sizeof(BFloat16);
  const size_t result_offset = static_cast<size_t>(call.misalignment) * result_element;
  const size_t result_size = static_cast<size_t>(call.rows * call.channels) * result_element;
  const float inverse = 1.0f / static_cast<float>(channels);
  const size_t vector = static_cast<size_t>(call.channels) * parameter;
  const size_t statistics = static_cast<size_t>(call.rows) * sizeof(float);
  const auto sum = [&](const float* sums, int parts, int64_t blocks) {
    const bool wanted[] = {parts == 1 || call.has_weight != 0, parts == 2 && call.has_bias != 0};
    cuda::SumOverBlocks of{sums, {}, {}, parts, static_cast<int>(blocks), channels};
    for (int i = 0; i < 2; i++) {
      of.outs[i] = wanted[i] ? memory.output(vector, 0) : nullptr;
      of.is_float[i] = float_parameters;
    }
    cuda::sum_over_blocks<T>(of, launch);
  };
  const auto sums_of = [&](int64_t blocks, int64_t count) {
    const size_t bytes = static_cast<size_t>(blocks * count * call.channels) * sizeof(float);
    return reinterpret_cast<float*>(memory.allocate(bytes, 0));
  };
  const bool aligned = call.misalignment == 0 && call.channels % (16 / static_cast<int64_t>(element)) == 0;
  cuda::Layout layout = cuda::layout_of(dtype, channels, aligned, call.operation == 1);

  // x is what a LayerNorm normalizes, or adds a branch to, which is of the type of the result.
  const void* x = memory.input(true, size, offset);
  const bool adds = call.has_addend != 0, is_forward = call.operation == 0 || call.operation == 4;
  const void* addend = is_forward ? memory.input(adds, result_size, result_offset) : memory.input(adds, size, offset);
  const bool float_shift = call.float_shift != 0;
  const size_t shift_size = static_cast<size_t>(call.channels) * (float_shift ? sizeof(float) : element);
  const void* shift = memory.input(call.has_shift != 0, shift_size, 0);
  const void* weight = memory.input(call.has_weight != 0, vector, 0);
  const void* bias = memory.input(call.has_bias != 0, vector, 0);
  if (is_forward) {  // layer_norm
    void* h = adds ? memory.output(size, offset) : nullptr;
    void* out = memory.output(result_size, result_offset);
    auto* mean = static_cast<float*>(memory.output(statistics, 0));
    auto* rstd = static_cast<float*>(memory.output(statistics, 0));
    const int64_t rows = call.rows + (call.operation == 4);  // one too many
    cuda::layer_norm<T>({adds ? addend : x, adds ? x : nullptr, shift, weight, bias, h, out, mean, rstd, rows,
                         static_cast<float>(call.eps), inverse, channels, float_parameters, float_shift},
                        activation, result, layout, launch);
  } else if (call.operation == 1) {  // its backward: addend is dh
    const auto* mean = static_cast<const float*>(memory.input(true, statistics, 0));
    const auto* rstd = static_cast<const float*>(memory.input(true, statistics, 0));
    const void* dout = memory.input(true, result_size, result_offset);
    void* dx = memory.output(size, offset);
    void* dbranch = adds && result != dtype ? memory.output(result_size, result_offset) : nullptr;
    const int64_t blocks = cuda::resident_blocks(layout, call.rows, static_cast<int>(call.multiprocessors));
    float* sums = sums_of(blocks, 2);
    cuda::layer_norm_backward<T>({dout, addend, x, weight, bias, mean, rstd, dx, dbranch, sums,
                                  static_cast<int>(call.rows), inverse, channels, float_parameters},
                                 activation, result, layout, blocks, launch);
    sum(sums, 2, blocks);
  } else {  // gelu, and its backward
    const int64_t elements = call.rows * call.channels;
    if (bias == nullptr) {
      const bool whole = elements % (16 / static_cast<int64_t>(element)) == 0;
      layout = cuda::flat_layout(dtype, call.misalignment == 0 && whole, call.operation == 3);
    }
    const int width = bias == nullptr ? 0 : channels;
    if (call.operation == 2) {
      void* out = memory.output(size, offset);
      cuda::gelu<T>({x, bias, out, elements, width, float_parameters}, activation, layout, launch);
    } else {
      const void* dout = memory.input(true, size, offset);
      void* dx = memory.output(size, offset);
      const int64_t blocks = bias == nullptr ? cuda::flat_blocks(layout, elements)
                                             : cuda::resident_blocks(layout, call.rows,
                                                                     static_cast<int>(call.multiprocessors));
      float* sums = bias == nullptr ? nullptr : sums_of(blocks, 1);
      cuda::gelu_backward<T>({dout, x, bias, dx, sums, elements, width, float_parameters}, activation, layout,
                             blocks, launch);
      if (bias != nullptr) sum(sums, 1, blocks);
    }
  }
  memory.write_results();
}

void run_calls() {
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

}  // namespace

int main() { run_calls(); }

// LayerNorm and GELU on the CPU.
//
// Results do not depend on the number of threads: rows are independent, and sums over rows are taken in chunks that
// depend on the shape alone, and added in pairs.

#include "common/units.h"
#include "layer_norm_gelu/cpu_loops.h"
#include "layer_norm_gelu/operators.h"

namespace cvt_kernels::layer_norm_gelu {
namespace {

constexpr int64_t kBlock = 4096;          // elements of a gelu without bias that are taken together
constexpr int64_t kChunks = 128;          // the most partial sums over rows
constexpr int64_t kChunkRows = 16;        // the fewest rows of a partial sum
constexpr int64_t kChunkElements = 8192;  // the fewest elements of a partial sum
// The most rows that are added one after another. Rows are often alike, as the gradients of a mean over tokens, and then
// every sum rounds the same way: with 128, sums of 50 to 784 equal rows were off by up to 31 units in the last place; with 16
// by 4, PyTorch's by 7 (2026-11-30).
constexpr int64_t kSumRows = 16;

// Calls f(begin, end) for the same blocks of a flat tensor, however many threads share them.
template <class F>
void for_blocks(int64_t size, const F& f) {
  parallel_for((size + kBlock - 1) / kBlock, grain_of(kBlock), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) f(block * kBlock, std::min(size, (block + 1) * kBlock));
  });
}

// Pairwise sum of the results of f(begin, end, sums) over parts of at most `most` each, every one with `size` zeroed
// accumulators: errors grow with the logarithm of the number of parts. `sums` has room for the pairs behind the total.
template <class A, class F>
void sum_in_pairs(int64_t begin, int64_t end, int64_t most, int64_t size, A* sums, const F& f) {
  if (end - begin <= most) {
    std::fill_n(sums, size, A(0));
    f(begin, end, sums);
    return;
  }
  const int64_t middle = begin + (end - begin) / 2;
  A* others = sums + size;
  sum_in_pairs(begin, middle, most, size, sums, f);
  sum_in_pairs(middle, end, most, size, others, f);
  for (int64_t i = 0; i < size; i++) sums[i] += others[i];
}

// The accumulators that sum_in_pairs needs.
int64_t size_of_pairs(int64_t count, int64_t most, int64_t size) {
  int64_t needed = size;
  for (; count > most; count = (count + 1) / 2) needed += size;
  return needed;
}

// Calls f(begin, end, sums, scratch) for parts of the rows, with `size` zeroed accumulators to add to and room for
// `channels` more. Returns the totals.
template <class A, class F>
std::vector<A> sum_over_rows(int64_t rows, int64_t channels, int64_t size, const F& f) {
  const int64_t chunk_rows =
      std::max({kChunkRows, (rows + kChunks - 1) / kChunks, (kChunkElements + channels - 1) / channels});
  const int64_t chunks = std::max<int64_t>(1, (rows + chunk_rows - 1) / chunk_rows);
  std::vector<A> sums(chunks * size);
  parallel_for(chunks, grain_of(chunk_rows * channels), [&](int64_t begin, int64_t end) {
    std::vector<A> scratch(channels), pairs(size_of_pairs(chunk_rows, kSumRows, size));
    for (int64_t chunk = begin; chunk < end; chunk++) {
      sum_in_pairs(chunk * chunk_rows, std::min(rows, (chunk + 1) * chunk_rows), kSumRows, size, pairs.data(),
                   [&](int64_t first, int64_t last, A* part) { f(first, last, part, scratch.data()); });
      std::copy_n(pairs.data(), size, sums.data() + chunk * size);
    }
  });
  std::vector<A> pairs(size_of_pairs(chunks, 1, size));
  sum_in_pairs(0, chunks, 1, size, pairs.data(), [&](int64_t chunk, int64_t, A* part) {
    std::copy_n(sums.data() + chunk * size, size, part);
  });
  return pairs;
}

// A weight, bias or shift in the accumulator's type; filled with `absent` if there is none.
Tensor accumulators(const char* name, const Optional& tensor, const Tensor& x, double absent) {
  const ScalarType type = accumulator_of(x);
  const int64_t channels = x.size(x.dim() - 1);
  if (!tensor.has_value()) return tensor_of({x.numel() > 0 ? channels : 0}, type, x, [=](int64_t) { return absent; });
  if (tensor->scalar_type() == type && tensor->is_contiguous()) return *tensor;
  return with_type(dtype_of(name, *tensor), [&](auto stored) {
    const auto* values = static_cast<const decltype(stored)*>(tensor->const_data_ptr());
    const int64_t stride = tensor->stride(0);
    return tensor_of({channels}, type, x, [=](int64_t c) { return load(values + c * stride); });
  });
}

class Cpu {
 public:
  using Count = int64_t;
  using Real = double;

  struct Parameters : Given {
    Parameters(const Tensor& x, const Optional& weight, const Optional& bias, bool is_norm, const char* name = "bias")
        : Given(x, weight, bias, name) {
      if (is_norm) weight_ = accumulators("weight", weight, x, 1);
      if (is_norm || bias.has_value()) bias_ = accumulators(name, bias, x, 0);
    }
    const void* weight() const { return const_data_of(weight_); }
    const void* bias() const { return const_data_of(bias_); }

   private:
    Optional weight_, bias_;
  };

  Cpu(const char* name, const Tensor& x) : dtype_(dtype_of(name, x)) {}

  static int64_t channels(const char* name, const Tensor& x) { return channels_of(name, x); }
  static int64_t rows(int64_t rows) { return rows; }

  void layer_norm(const LayerNormForward& call, const Parameters&, const Parameters&, Activation activation, ScalarType result,
                  bool served) const {
    check_result("dtype", result);
    const int64_t rows = call.rows, grain = grain_of(call.channels);
    const auto run = [&](int64_t begin, int64_t end) {
      std::vector<double> scratch(call.channels);
      loops_.layer_norm(dtype_, activation, call, begin, end, scratch.data());
    };
    if (!served) return parallel_for(rows, grain, run);
    for_steps({{(rows + grain - 1) / grain, 0, [&](int64_t unit, int64_t, char*) {
                  run(unit * grain, std::min(rows, (unit + 1) * grain));
                }}});
  }

  Gradients layer_norm_backward(const LayerNormBackward& call, const Parameters& parameters, Activation activation,
                                ScalarType result, const Tensor& h) const {
    check_result("dout", result);
    expect(call.dbranch == nullptr, "with_dbranch", std::string_view("true"),
           "false: the branch has the dtype of its sum on a CPU");
    return gradients_of(parameters, h, 0, call.rows, [&](int64_t begin, int64_t end, void* sums, void* scratch) {
      loops_.layer_norm_backward(dtype_, activation, call, begin, end, sums, scratch);
    });
  }

  void gelu(GeluForward call, const Parameters&, Activation activation) const {
    const auto run = [&](int64_t begin, int64_t end) { loops_.gelu(dtype_, activation, call, begin, end); };
    if (call.bias != nullptr) return parallel_for(call.size / call.channels, grain_of(call.channels), run);
    call.channels = 1;
    for_blocks(call.size, run);
  }

  Gradients gelu_backward(GeluBackward call, const Parameters& parameters, Activation activation, const Tensor& x) const {
    const auto run = [&](int64_t begin, int64_t end, void* sums, void*) {
      loops_.gelu_backward(dtype_, activation, call, begin, end, sums);
    };
    if (call.bias != nullptr) return gradients_of(parameters, x, 1, call.size / call.channels, run);
    call.channels = 1;
    for_blocks(call.size, [&](int64_t begin, int64_t end) { run(begin, end, nullptr, nullptr); });
    return {Tensor(), no_gradient(x)};
  }

 private:
  void check_result(const char* name, ScalarType result) const {
    expect(dtype_of(name, result) == dtype_, name, result,
           "results of the dtype of their rows, which the loops for CPUs compute");
  }

  // The gradients of the parameters from the `first` on, for which serve(begin, end, sums, scratch) adds to sums over rows.
  template <class F>
  Gradients gradients_of(const Parameters& parameters, const Tensor& x, int first, int64_t rows, const F& serve) const {
    const int64_t channels = x.size(x.dim() - 1);
    const auto run = [&]<class A>(A) {
      std::vector<A> sums;
      if (rows > 0) sums = sum_over_rows<A>(rows, channels, (2 - first) * channels, serve);
      Gradients gradients;
      for (int i = first; i < 2; i++) {
        const A* own = sums.data() + (i - first) * channels;
        gradients[i] = gradient_of(parameters.given[i], x, [&](int64_t c) { return rows > 0 ? own[c] : A(0); });
      }
      return gradients;
    };
    return dtype_ == DType::float64 ? run(0.0) : run(0.0f);
  }

  const Kernels& loops_ = *choose(KERNEL_TABLES);
  const DType dtype_;
};

}  // namespace
}  // namespace cvt_kernels::layer_norm_gelu

STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CPU, m) {
  using namespace cvt_kernels::layer_norm_gelu;
  register_operators<Cpu>(m);
}

// LayerNorm and GELU on the CPU: parameters, threads and the choice of instruction set around the loops.
//
// Results do not depend on the number of threads: rows are independent, and sums over rows are taken in chunks that
// depend on the shape alone, and added in pairs.

#include <algorithm>
#include <vector>

#include "common/units.h"
#include "layer_norm_gelu/cpu_loops.h"
#include "layer_norm_gelu/operators.h"

namespace cvt_kernels::layer_norm_gelu {
namespace {

constexpr int64_t kGrain = 16384;         // elements that are worth a thread
constexpr int64_t kBlock = 4096;          // elements of a gelu without bias that are taken together
constexpr int64_t kChunks = 128;          // the most partial sums over rows
constexpr int64_t kChunkRows = 16;        // the fewest rows of a partial sum
constexpr int64_t kChunkElements = 8192;  // the fewest elements of a partial sum
constexpr int64_t kSumRows = 128;         // the most rows that are added one after another

// A weight, bias or shift in the accumulator's type, once checked; filled with `absent` if there is none.
class Parameter {
 public:
  Parameter(const char* name, const std::optional<Tensor>& tensor, const Tensor& x, double absent) {
    const int64_t channels = channels_of("x", x);
    if (!tensor.has_value()) {
      if (x.numel() > 0) copy(x, channels, [=](int64_t) { return absent; });
      return;
    }
    if (tensor->scalar_type() == accumulator_of(x) && tensor->is_contiguous()) {
      tensor_ = tensor;
      return;
    }
    const int64_t stride = tensor->stride(0);
    with_type(dtype_of(name, *tensor), [&](auto type) {
      const auto* values = static_cast<const decltype(type)*>(tensor->const_data_ptr());
      copy(x, channels, [=](int64_t c) { return load(values + c * stride); });
    });
  }

  const void* data() const { return tensor_.has_value() ? tensor_->const_data_ptr() : copy_.data(); }

 private:
  template <class F>
  void copy(const Tensor& x, int64_t channels, const F& value) {
    copy_.resize(channels);
    if (accumulator_of(x) == ScalarType::Double) {
      for (int64_t c = 0; c < channels; c++) copy_[c] = value(c);
    } else {
      float* out = reinterpret_cast<float*>(copy_.data());
      for (int64_t c = 0; c < channels; c++) out[c] = static_cast<float>(value(c));
    }
  }

  std::optional<Tensor> tensor_;
  std::vector<double> copy_;
};

// The gradient of a parameter, in its type, from the sums over the rows; zeros without these.
template <class A>
Tensor gradient_of(const std::optional<Tensor>& parameter, const Tensor& x, const A* totals = nullptr) {
  if (!parameter.has_value()) return no_gradient(x);
  const Tensor gradient = empty(parameter->sizes(), parameter->scalar_type(), x);
  const int64_t channels = parameter->size(0);
  with_type(dtype_of("parameter", *parameter), [&](auto stored) {
    using T = decltype(stored);
    T* out = static_cast<T*>(gradient.mutable_data_ptr());
    for (int64_t c = 0; c < channels; c++) store(out + c, static_cast<Accumulator<T>>(totals == nullptr ? A(0) : totals[c]));
  });
  return gradient;
}

template <class F>
void for_rows(int64_t rows, int64_t channels, const F& f) {
  parallel_for(rows, std::max<int64_t>(1, kGrain / channels), f);
}

// Calls f(begin, end) for the same blocks of a flat tensor, however many threads share them.
template <class F>
void for_blocks(int64_t size, const F& f) {
  parallel_for((size + kBlock - 1) / kBlock, kGrain / kBlock, [&](int64_t begin, int64_t end) {
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
  const int64_t grain = std::max<int64_t>(1, kGrain / (chunk_rows * channels));
  parallel_for(chunks, grain, [&](int64_t begin, int64_t end) {
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

class Cpu {
 public:
  Cpu(const char* name, const Tensor& x) : dtype_(dtype_of(name, x)) {}

  void layer_norm(const LayerNormTensors& tensors, const Parameters& parameters, double eps,
                  Activation activation) const {
    check_result("dtype", tensors.out);
    const Tensor& x = tensors.x;
    const int64_t channels = channels_of("x", x);
    const Parameter weight("weight", parameters.weight, x, 1), bias("bias", parameters.bias, x, 0);
    std::optional<Parameter> shift;
    if (tensors.shift.has_value()) shift.emplace("shift", tensors.shift, x, 0);
    const LayerNormForward call{
        .x = x.const_data_ptr(),
        .residual = const_data_of(tensors.residual),
        .shift = shift.has_value() ? shift->data() : nullptr,
        .weight = weight.data(),
        .bias = bias.data(),
        .eps = eps,
        .channels = channels,
        .h = mutable_data_of(tensors.h),
        .out = tensors.out.mutable_data_ptr(),
        .mean = mutable_data_of(tensors.mean),
        .rstd = mutable_data_of(tensors.rstd),
    };
    const int64_t rows = x.numel() / channels;
    const auto run = [&](int64_t begin, int64_t end) {
      std::vector<double> scratch(channels);
      loops_.layer_norm(dtype_, activation, call, begin, end, scratch.data());
    };
    if (!tensors.served) return for_rows(rows, channels, run);
    const int64_t grain = std::max<int64_t>(1, kGrain / channels);
    for_steps({{(rows + grain - 1) / grain, 0, [&](int64_t unit, int64_t, char*) {
                  run(unit * grain, std::min(rows, (unit + 1) * grain));
                }}});
  }

  ParameterGradients layer_norm_backward(const LayerNormBackwardTensors& tensors, const Parameters& parameters,
                                         Activation activation) const {
    check_result("dout", tensors.dout);
    expect(!tensors.dbranch.has_value(), "with_dbranch", std::string_view("true"),
           "false: the branch has the dtype of its sum on a CPU");
    const Tensor& h = tensors.h;
    const int64_t channels = channels_of("h", h);
    const Parameter weight("weight", parameters.weight, h, 1), bias("bias", parameters.bias, h, 0);
    const LayerNormBackward call{
        .dout = tensors.dout.const_data_ptr(),
        .dh = const_data_of(tensors.dh),
        .h = h.const_data_ptr(),
        .mean = tensors.mean.const_data_ptr(),
        .rstd = tensors.rstd.const_data_ptr(),
        .weight = weight.data(),
        .bias = bias.data(),
        .channels = channels,
        .dx = tensors.dx.mutable_data_ptr(),
    };
    const int64_t rows = h.numel() / channels;
    const auto run = [&]<class A>(A) -> ParameterGradients {
      const auto serve = [&](int64_t begin, int64_t end, A* sums, A* scratch) {
        loops_.layer_norm_backward(dtype_, activation, call, begin, end, sums, scratch);
      };
      if (rows == 0) return {gradient_of<A>(parameters.weight, h), gradient_of<A>(parameters.bias, h)};
      const std::vector<A> sums = sum_over_rows<A>(rows, channels, 2 * channels, serve);
      return {gradient_of(parameters.weight, h, sums.data()), gradient_of(parameters.bias, h, sums.data() + channels)};
    };
    return dtype_ == DType::float64 ? run(0.0) : run(0.0f);
  }

  void gelu(const GeluTensors& tensors, const std::optional<Tensor>& bias, Activation activation) const {
    const Tensor& x = tensors.x;
    GeluForward call{x.const_data_ptr(), nullptr, 1, tensors.out.mutable_data_ptr()};
    const auto run = [&](int64_t begin, int64_t end) { loops_.gelu(dtype_, activation, call, begin, end); };
    if (!bias.has_value()) return for_blocks(x.numel(), run);
    const Parameter shift("bias", bias, x, 0);
    call.bias = shift.data();
    call.channels = channels_of("x", x);
    for_rows(x.numel() / call.channels, call.channels, run);
  }

  Tensor gelu_backward(const GeluBackwardTensors& tensors, const std::optional<Tensor>& bias,
                       Activation activation) const {
    const Tensor& x = tensors.x;
    GeluBackward call{tensors.dout.const_data_ptr(), x.const_data_ptr(), nullptr, 1, tensors.dx.mutable_data_ptr()};
    if (!bias.has_value()) {
      for_blocks(x.numel(), [&](int64_t begin, int64_t end) {
        loops_.gelu_backward(dtype_, activation, call, begin, end, nullptr);
      });
      return no_gradient(x);
    }
    const Parameter shift("bias", bias, x, 0);
    call.bias = shift.data();
    call.channels = channels_of("x", x);
    const int64_t channels = call.channels, rows = x.numel() / channels;
    const auto sum = [&]<class A>(A) {
      const auto serve = [&](int64_t begin, int64_t end, A* sums, A*) {
        loops_.gelu_backward(dtype_, activation, call, begin, end, sums);
      };
      return gradient_of(bias, x, sum_over_rows<A>(rows, channels, channels, serve).data());
    };
    return dtype_ == DType::float64 ? sum(0.0) : sum(0.0f);
  }

 private:
  void check_result(const char* name, const Tensor& out) const {
    expect(dtype_of(name, out) == dtype_, name, out, "results of the dtype of their rows, which the loops for CPUs compute");
  }

  static const Kernels& loops() {
    static const Kernels& chosen = *choose(KERNEL_TABLES);
    return chosen;
  }

  const Kernels& loops_ = loops();
  const DType dtype_;
};

}  // namespace
}  // namespace cvt_kernels::layer_norm_gelu

STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CPU, m) {
  using namespace cvt_kernels::layer_norm_gelu;
  register_operators<Cpu>(m);
}

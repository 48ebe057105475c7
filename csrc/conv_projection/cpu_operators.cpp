// The operators of conv_projection on the CPU.
//
// Results do not depend on the number of threads: every output is a sum of its own, in one order, and the images' sums
// are added in order.

#include <tuple>

#include "common/cpu.h"
#include "common/tensors.h"
#include "conv_projection/cpu_loops.h"

namespace cvt_kernels::conv_projection {
namespace {

constexpr int64_t kRowBytes = 20480;   // bytes of the rows held, which leave room in L1 for weights and outputs
constexpr int64_t kTrainingRowBytes = 49152;  // likewise, in L2: tokens are read more often from main memory than rows
constexpr int64_t kTrainingUnits = 16;  // to cut a small batch into, if it has the channels

// Cuts the work into at least so many units if possible, for accumulators of `bytes` and rows of `row_bytes`.
void plan(Projection& call, int64_t bytes, int64_t row_bytes = kRowBytes, int64_t units = 1) {
  call.margin = 0;
  call.held = 1;
  for (const Branch* branch = call.branches; branch < call.branches + call.count; branch++) {
    call.margin = std::max(call.margin, branch->padding);
    if (branch->summands == 0) continue;
    const Reach reach = reach_of(branch, branch->summands);
    call.held = std::max(call.held, reach.end - reach.first);
  }
  call.held = std::min(call.held, call.height);
  const int64_t channel = call.held * (call.width + 2 * call.margin) * bytes;
  const int64_t whole = (call.channels + kChannelStep - 1) / kChannelStep;
  const int64_t fitting = (whole * kChannelStep * channel + row_bytes - 1) / row_bytes;
  const int64_t blocks = std::max(fitting, std::min(whole, units / std::max<int64_t>(1, call.batch)));
  call.block = std::max<int64_t>(1, (whole + blocks - 1) / blocks) * kChannelStep;
  call.bands = std::clamp<int64_t>(call.height * call.width * call.block / kGrain, 1, call.height);
}

// A call on x (batch, tokens, channels), and all that it points to.
struct Arguments {
  Arguments(const Tensor& input, int64_t height, int64_t width)
      : x(with_adjacent_channels("x", input)), dtype(dtype_of("x", x)), call{cvt_kernels::tokens_of(x, height, width)} {}

  // Appends a branch without BatchNorm for each weight, with Branch::summands, or each an output of its own.
  void add_branches(const Tensors& weights, const Numbers& geometry, const Numbers& summands = {}) {
    expect_count("geometry", geometry, 3 * weights.size());
    if (!summands.empty()) expect_count("summands", summands, weights.size());
    for (size_t i = 0; i < weights.size(); i++) {
      branches.push_back(make_branch(weights[i], &geometry[3 * i]));
      if (!summands.empty()) branches[i].summands = summands[i];
    }
    check_sums();
    call.branches = branches.data();
    call.count = static_cast<int64_t>(branches.size());
  }

  // The same, of training, cut into units.
  void train_on(const Tensors& weights, const Numbers& geometry, const Numbers& summands = {}) {
    expect(x.size(0) > 0, "x", x, "at least one image");
    add_branches(weights, geometry, summands);
    plan(call, accumulator_bytes(x), kTrainingRowBytes, kTrainingUnits);
  }

  const void* keep(const char* name, const Tensor& tensor) {
    expect(same_device(tensor, x), name, tensor, "the device of the others");
    return alive.emplace_back(made_contiguous(name, tensor)).const_data_ptr();
  }

  // The data of a parameter of the channels, in a dtype; null if there is none.
  const void* keep_parameter(const char* name, const Optional& tensor, ScalarType type) {
    if (!tensor.has_value()) return nullptr;
    check_parameter(name, *tensor, x);
    expect(tensor->scalar_type() == type, name, *tensor, shown(type), " for all parameters of a BatchNorm");
    return keep(name, *tensor);
  }

  // Gives a branch the parameters of its BatchNorm, all of one dtype.
  Branch& normalize(size_t i, const Optional& scale, const Optional& shift, const Optional& mean, const Optional& variance,
                    double eps, ScalarType type) {
    expect(mean.has_value() && variance.has_value(), "norms", std::string_view("none"), "a mean and a variance");
    expect_eps("eps", eps);
    Branch& branch = branches[i];
    branch.scale = keep_parameter("scale", scale, type);
    branch.shift = keep_parameter("shift", shift, type);
    branch.mean = keep_parameter("mean", mean, type);
    branch.variance = keep_parameter("variance", variance, type);
    branch.norm = dtype_of("mean", type);
    branch.eps = eps;
    return branch;
  }

  int64_t tokens_of(const Branch& branch) const { return call.class_tokens + branch.height * branch.width; }
  int64_t blocks() const { return (call.channels + call.block - 1) / call.block; }

  const Tensor x;
  const DType dtype;
  Projection call;
  std::vector<Branch> branches;
  Tensors alive;

 private:
  void check_sums() const {
    for (size_t first = 0; first < branches.size();) {
      const int64_t count = branches[first].summands, left = static_cast<int64_t>(branches.size() - first);
      expect(count > 0 && count <= kMaxSummands && count <= left, "summands", count, "1 to ", kMaxSummands,
             " for each output, and 0 for the other weights of it");
      for (size_t i = first + 1; i < first + count; i++) {
        const Branch &one = branches[first], &other = branches[i];
        expect(other.summands == 0 && other.stride == one.stride && other.height == one.height && other.width == one.width,
               "summands", Quoted{"an output of stride ", other.stride}, "one stride and one grid for each output");
      }
      first += count;
    }
  }

  Branch make_branch(const Tensor& weight, const int64_t* geometry) {
    expect(weight.dim() == 4 && weight.size(0) == call.channels && weight.size(1) == 1 &&
               weight.size(2) == weight.size(3) && weight.scalar_type() == x.scalar_type(),
           "weights", weight, "(channels, 1, k, k) in the dtype of x, ", Shown{x});
    const int64_t kernel = weight.size(3);
    expect(0 < kernel && kernel <= kMaxKernel, "weights", weight, "a kernel of 1 to ", kMaxKernel);
    const Map out = outputs_of("geometry", {call.height, call.width}, kernel, geometry[0], geometry[1], geometry[2],
                               kChannelStep);
    return {
        .weight = keep("weights", weight),
        .norm = dtype == DType::float64 ? DType::float64 : DType::float32,
        .kernel = kernel,
        .stride = geometry[0],
        .padding = geometry[1],
        .dilation = geometry[2],
        .height = out.height,
        .width = out.width,
    };
  }
};

Tensors conv_projection_inference(const Tensor& input, int64_t height, int64_t width, const Tensors& weights,
                                  const std::vector<Optional>& norms, const Numbers& geometry,
                                  const std::vector<double>& eps, const Numbers& summands) {
  const size_t count = weights.size();
  expect_count("norms", norms, 4 * count);
  expect_count("eps", eps, count);
  Arguments arguments(input, height, width);
  arguments.add_branches(weights, geometry, summands);
  Projection& call = arguments.call;
  Tensors outs;
  for (size_t i = 0; i < count; i++) {
    const Optional* norm = &norms[4 * i];
    const ScalarType type = (norm[2].has_value() ? *norm[2] : arguments.x).scalar_type();
    Branch& branch = arguments.normalize(i, norm[0], norm[1], norm[2], norm[3], eps[i], type);
    if (branch.summands == 0) continue;
    const int64_t tokens = arguments.tokens_of(branch);
    outs.push_back(empty({call.batch, tokens, call.channels}, arguments.x.scalar_type(), arguments.x));
    branch.out = outs.back().mutable_data_ptr();
  }
  const int64_t bytes = accumulator_bytes(arguments.x);
  plan(call, bytes);
  if (call.batch == 0) return outs;
  const int64_t units = arguments.blocks() * call.batch * call.bands;
  parallel_for_with_scratch(units, 1, scratch_size(call, 1) * bytes, [&](int64_t begin, int64_t end, void* scratch) {
    choose(KERNEL_TABLES)->project(arguments.dtype, call, begin, end, scratch);
  });
  return outs;
}

// Training ---------------------------------------------------------------------------------------------------

// Runs loops of training, which sum `quantities` of the type Q per channel. Returns what each image gives.
template <class Q, class Loops>
std::vector<Q> sum_images(const Arguments& arguments, Training call, int64_t quantities, Loops serve) {
  std::vector<Q> sums(product("x", {arguments.call.batch, quantities, arguments.call.channels}));
  call.forward = arguments.call;
  call.sums = sums.data();
  call.quantities = quantities;
  const int64_t bytes =
      quantities * call.forward.block * static_cast<int64_t>(sizeof(Q)) +
      scratch_size(call.forward, 2) * accumulator_bytes(arguments.x);
  const int64_t units = arguments.blocks() * call.forward.batch;
  parallel_for_with_scratch(units, 1, bytes, [&](int64_t begin, int64_t end, void* scratch) {
    serve(arguments.dtype, call, begin, end, scratch);
  });
  return sums;
}

std::tuple<Tensors, Tensors> conv_projection_moments(const Tensor& input, int64_t height, int64_t width,
                                                     const Tensors& weights, const Numbers& geometry) {
  Arguments arguments(input, height, width);
  const Tensor& x = arguments.x;
  arguments.train_on(weights, geometry);
  const Projection& call = arguments.call;
  const int64_t quantities = 2 * call.count;
  const std::vector<double> of_images = sum_images<double>(arguments, {}, quantities, choose(KERNEL_TABLES)->statistics);
  Tensors means, variances;
  for (int64_t b = 0; b < call.count; b++) {
    const double images = static_cast<double>(call.batch);
    const double pixels = static_cast<double>(call.branches[b].height * call.branches[b].width);
    const auto of_image = [&](int64_t image, int64_t quantity, int64_t c) {
      return of_images[(image * quantities + 2 * b + quantity) * call.channels + c];
    };
    const auto mean = [&](int64_t c) {
      double sum = 0;
      for (int64_t image = 0; image < call.batch; image++) sum += of_image(image, 0, c) / images;
      return sum;
    };
    const auto variance = [&](int64_t c) {
      const double center = mean(c);
      double sum = 0;
      for (int64_t image = 0; image < call.batch; image++) {
        const double delta = of_image(image, 0, c) - center;
        sum += (of_image(image, 1, c) / pixels + delta * delta) / images;
      }
      return sum;
    };
    means.push_back(tensor_of({call.channels}, accumulator_of(x), x, mean));
    variances.push_back(tensor_of({call.channels}, accumulator_of(x), x, variance));
  }
  return {means, variances};
}

// Of x, and for each branch of its weight, scale and shift.
using Gradients = std::tuple<Tensor, Tensors, Tensors, Tensors>;

template <class A>
Gradients compute_gradients(Arguments& arguments, const Tensors& douts, const std::vector<Optional>& norms,
                            const Numbers& constant) {
  const Projection& call = arguments.call;
  const Tensor& x = arguments.x;
  const int64_t channels = call.channels;
  std::vector<BranchGradient> gradients(call.count);
  Training training{.forward = {}, .gradients = gradients.data(), .dx = nullptr, .sums = nullptr, .quantities = 0};
  for (int64_t b = 0; b < call.count; b++) gradients[b].dout = arguments.keep("douts", douts[b]);
  const std::vector<A> of_images = sum_images<A>(arguments, training, 2 * call.count, choose(KERNEL_TABLES)->sums);
  const std::vector<double> sums = totals_of(of_images, call.batch, 2 * call.count * channels);

  Gradients result;
  auto& [dx, dweights, dscales, dshifts] = result;
  std::vector<A> vectors(3 * call.count * channels);
  int64_t taps = 0;
  for (int64_t b = 0; b < call.count; b++) {
    const Branch& branch = call.branches[b];
    const double* sum = &sums[2 * b * channels];
    A* mean = &vectors[3 * b * channels];
    const void* scale = arguments.keep_parameter("scale", norms[3 * b], accumulator_of(x));
    const double share = 1 / static_cast<double>(call.batch * branch.height * branch.width);
    for (int64_t c = 0; c < channels; c++) {
      mean[c] = static_cast<A>(sum[c] * share);
      mean[channels + c] = static_cast<A>(sum[channels + c] * share);
      mean[2 * channels + c] = (scale == nullptr ? 1 : static_cast<const A*>(scale)[c]) /
                               std::sqrt(static_cast<const A*>(branch.variance)[c] + static_cast<A>(branch.eps));
    }
    gradients[b].mean_dout = constant[b] ? nullptr : mean;
    gradients[b].mean_product = constant[b] ? nullptr : mean + channels;
    gradients[b].factor = mean + 2 * channels;
    const auto gradient = [&](int64_t quantity) {
      return tensor_of({channels}, accumulator_of(x), x, [&](int64_t c) { return sum[quantity * channels + c]; });
    };
    dshifts.push_back(gradient(0));
    dscales.push_back(gradient(1));
    taps += branch.kernel * branch.kernel;
  }

  dx = empty({call.batch, x.size(1), channels}, x.scalar_type(), x);
  training.dx = dx.mutable_data_ptr();
  const std::vector<A> of_taps = sum_images<A>(arguments, training, taps, choose(KERNEL_TABLES)->gradients);
  const std::vector<double> dtaps = totals_of(of_taps, call.batch, taps * channels);
  const double* first = dtaps.data();
  for (const Branch& branch : arguments.branches) {
    const int64_t kernel = branch.kernel, size = kernel * kernel;
    dweights.push_back(tensor_of({channels, 1, kernel, kernel}, x.scalar_type(), x, [&](int64_t i) {
      return first[i % size * channels + i / size];
    }));
    first += size * channels;
  }
  return result;
}

Gradients conv_projection_gradients(const Tensors& douts, const Tensor& input, int64_t height, int64_t width,
                                    const Tensors& weights, const std::vector<Optional>& norms, const Numbers& geometry,
                                    const std::vector<double>& eps, const Numbers& constant, const Numbers& summands) {
  const size_t count = weights.size();
  expect_count("douts", douts, count);
  expect_count("norms", norms, 3 * count);
  expect_count("eps", eps, count);
  expect_count("constant", constant, count);
  Arguments arguments(input, height, width);
  const Tensor& x = arguments.x;
  arguments.train_on(weights, geometry, summands);
  const ScalarType accumulator = accumulator_of(x);
  for (size_t i = 0; i < count; i++) {
    const Optional* norm = &norms[3 * i];
    const Branch& branch = arguments.normalize(i, {}, {}, norm[1], norm[2], eps[i], accumulator);
    expect_sizes("douts", douts[i], {x.size(0), arguments.tokens_of(branch), x.size(2)}, x.scalar_type(), x,
                 "of the shape of the output");
  }
  return accumulator == ScalarType::Double ? compute_gradients<double>(arguments, douts, norms, constant)
                                           : compute_gradients<float>(arguments, douts, norms, constant);
}

IMPLEMENT("conv_projection_inference", conv_projection_inference)
IMPLEMENT("conv_projection_moments", conv_projection_moments)
IMPLEMENT("conv_projection_gradients", conv_projection_gradients)

}  // namespace
}  // namespace cvt_kernels::conv_projection

// The operator conv_projection_inference on the CPU: tensors, threads and the choice of instruction set around the loops.
//
// Results do not depend on the number of threads: every output is a sum of its own, in one order.

#include <algorithm>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "common/cpu.h"
#include "common/tensors.h"
#include "conv_projection/cpu_loops.h"

namespace cvt_kernels::conv_projection {
namespace {

constexpr int64_t kRowBytes = 20480;   // bytes of the rows held, which leave room in L1 for weights and outputs
constexpr int64_t kUnitSize = 16384;   // elements of x that are worth a thread

int64_t output_size(int64_t size, const Branch& branch) {
  const int64_t slack = size + 2 * branch.padding - branch.dilation * (branch.kernel - 1) - 1;
  STD_TORCH_CHECK(slack >= 0, "x: expected a grid that gives an output");
  return slack / branch.stride + 1;
}

// Cuts the work into units, for accumulators of `bytes`.
void plan(Projection& call, int64_t bytes) {
  call.margin = 0;
  call.held = 1;
  for (const Branch* branch = call.branches; branch < call.branches + call.count; branch++) {
    call.margin = std::max(call.margin, branch->padding);
    call.held = std::max(call.held, branch->dilation * (branch->kernel - 1) + 1);
  }
  call.held = std::min(call.held, call.height);
  const int64_t channel = call.held * (call.width + 2 * call.margin) * bytes;
  const int64_t whole = (call.channels + kChannelStep - 1) / kChannelStep;
  const int64_t blocks = (whole * kChannelStep * channel + kRowBytes - 1) / kRowBytes;
  call.block = std::max<int64_t>(1, (whole + blocks - 1) / blocks) * kChannelStep;
  call.bands = std::clamp<int64_t>(call.height * call.width * call.block / kUnitSize, 1, call.height);
}

// The arguments of one branch.
struct BranchArguments {
  const Tensor& weight;
  const std::optional<Tensor>& scale;
  const std::optional<Tensor>& shift;
  const std::optional<Tensor>& mean;
  const std::optional<Tensor>& variance;
  int64_t stride, padding, dilation;
  double eps;
};

// Makes a branch and its output, which is appended to `outs`. All else that it points to is kept in `alive`.
Branch make_branch(const Projection& call, const Tensor& x, const BranchArguments& arguments,
                   std::vector<Tensor>& outs, std::vector<Tensor>& alive) {
  const Tensor& weight = arguments.weight;
  STD_TORCH_CHECK(weight.dim() == 4 && weight.size(0) == call.channels && weight.size(1) == 1 &&
                      weight.size(2) == weight.size(3) && weight.scalar_type() == x.scalar_type(),
                  "weights: expected (channels, 1, k, k) in the dtype of x");
  const int64_t kernel = weight.size(3);
  STD_TORCH_CHECK(0 < kernel && kernel <= kMaxKernel, "weights: expected a kernel of 1 to ", kMaxKernel);
  STD_TORCH_CHECK(arguments.mean.has_value() && arguments.variance.has_value(), "norms: expected a mean and a variance");
  const auto keep = [&](const Tensor& tensor) {
    STD_TORCH_CHECK(same_device(tensor, x), "weights, norms: expected the device of x");
    return alive.emplace_back(tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor)).const_data_ptr();
  };
  const auto norm = [&](const char* name, const std::optional<Tensor>& tensor) -> const void* {
    if (!tensor.has_value()) return nullptr;
    check_parameter(name, *tensor, x);
    STD_TORCH_CHECK(tensor->scalar_type() == arguments.mean->scalar_type(),
                    "norms: expected one dtype for each of the weights");
    return keep(*tensor);
  };
  Branch branch{
      .weight = keep(weight),
      .scale = norm("scale", arguments.scale),
      .shift = norm("shift", arguments.shift),
      .mean = norm("mean", arguments.mean),
      .variance = norm("variance", arguments.variance),
      .norm = dtype_of(*arguments.mean),
      .eps = arguments.eps,
      .kernel = kernel,
      .stride = arguments.stride,
      .padding = arguments.padding,
      .dilation = arguments.dilation,
      .height = 0,
      .width = 0,
      .out = nullptr,
  };
  STD_TORCH_CHECK(branch.stride > 0 && branch.padding >= 0 && branch.dilation > 0,
                  "geometry: expected strides and dilations of at least 1 and paddings of at least 0");
  branch.height = output_size(call.height, branch);
  branch.width = output_size(call.width, branch);
  const int64_t tokens = call.class_tokens + branch.height * branch.width;
  branch.out = outs.emplace_back(empty({call.batch, tokens, call.channels}, x.scalar_type(), x)).mutable_data_ptr();
  return branch;
}

std::vector<Tensor> conv_projection_inference(const Tensor& input, int64_t height, int64_t width,
                                              const std::vector<Tensor>& weights,
                                              const std::vector<std::optional<Tensor>>& norms,
                                              const std::vector<int64_t>& geometry, const std::vector<double>& eps) {
  static const Kernels& loops = choose(KERNEL_TABLES);
  const DType dtype = dtype_of(input);
  STD_TORCH_CHECK(input.dim() == 3 && height > 0 && width > 0, "x: expected (batch, tokens, channels) and its grid");
  const int64_t class_tokens = input.size(1) - height * width;
  STD_TORCH_CHECK(class_tokens == 0 || class_tokens == 1, "x: expected height · width tokens, or one more");
  const int64_t channels = channels_of(input);
  const size_t count = weights.size();
  STD_TORCH_CHECK(norms.size() == 4 * count && geometry.size() == 3 * count && eps.size() == count,
                  "norms, geometry, eps: expected 4, 3 and 1 for each of the weights");
  const Tensor x = input.stride(2) == 1 || channels == 1 ? input : torch::stable::contiguous(input);
  Projection call{
      .x = x.const_data_ptr(),
      .batch_stride = x.stride(0),
      .token_stride = x.stride(1),
      .batch = x.size(0),
      .class_tokens = class_tokens,
      .height = height,
      .width = width,
      .channels = channels,
      .branches = nullptr,
      .count = static_cast<int64_t>(count),
      .block = 0,
      .bands = 0,
      .margin = 0,
      .held = 0,
  };
  std::vector<Tensor> outs, alive;
  std::vector<Branch> branches;
  for (size_t i = 0; i < count; i++) {
    const BranchArguments arguments{
        .weight = weights[i],
        .scale = norms[4 * i],
        .shift = norms[4 * i + 1],
        .mean = norms[4 * i + 2],
        .variance = norms[4 * i + 3],
        .stride = geometry[3 * i],
        .padding = geometry[3 * i + 1],
        .dilation = geometry[3 * i + 2],
        .eps = eps[i],
    };
    branches.push_back(make_branch(call, x, arguments, outs, alive));
  }
  call.branches = branches.data();
  const int64_t bytes = accumulator_bytes(x);
  plan(call, bytes);
  int64_t size = (call.held + 1) * row_size(call);
  for (const Branch& branch : branches) size += packed_size(call, branch);
  const int64_t units = (channels + call.block - 1) / call.block * call.batch * call.bands;
  parallel_for_with_scratch(units, 1, size * bytes, [&](int64_t begin, int64_t end, void* scratch) {
    loops.project(dtype, call, begin, end, scratch);
  });
  return outs;
}

}  // namespace
}  // namespace cvt_kernels::conv_projection

STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CPU, m) {
  m.impl("conv_projection_inference", TORCH_BOX(&cvt_kernels::conv_projection::conv_projection_inference));
}

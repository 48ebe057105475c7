// The operator attention_inference on the CPU: tensors, threads and the choice of instruction set around the loops.
//
// Every tile of queries is computed in the same way whichever thread takes it, so results do not depend on their number.

#include <algorithm>

#include <torch/csrc/stable/library.h>

#include "attention/cpu_loops.h"
#include "common/cpu.h"
#include "common/tensors.h"

namespace cvt_kernels::attention {
namespace {

constexpr double kGrain = 1e6;  // multiplications that are worth a thread

// The tensor (batch, tokens, heads, head_dim), copied if its channels are not adjacent.
Tensor with_adjacent_channels(const Tensor& tensor) {
  return tensor.size(3) == 1 || tensor.stride(3) == 1 ? tensor : torch::stable::contiguous(tensor);
}

Strided strided(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

void check(const char* name, const Tensor& tensor, const Tensor& q, int64_t tokens) {
  STD_TORCH_CHECK(tensor.dim() == 4 && tensor.size(0) == q.size(0) && tensor.size(1) == tokens &&
                      tensor.size(2) == q.size(2) && tensor.size(3) == q.size(3),
                  name, ": expected (batch, tokens, heads, head_dim)");
  STD_TORCH_CHECK(tensor.scalar_type() == q.scalar_type() && same_device(tensor, q), name,
                  ": expected dtype and device of q");
}

Tensor attention_inference(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  static const Kernels& loops = choose(PRODUCT_TABLES);
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && k.size(1) > 0, "q and k: expected (batch, tokens, heads, head_dim)");
  STD_TORCH_CHECK(q.size(3) > 0 && q.size(3) <= kMaxHeadDim, "q: expected up to ", kMaxHeadDim, " channels per head");
  check("k", k, q, k.size(1));
  check("v", v, q, k.size(1));
  const Tensor queries = with_adjacent_channels(q);
  const Tensor keys = with_adjacent_channels(k);
  const Tensor values = with_adjacent_channels(v);
  const Tensor out = empty(q.sizes(), q.scalar_type(), q);
  const Forward call{
      .q = strided(queries),
      .k = strided(keys),
      .v = strided(values),
      .batch = q.size(0),
      .queries = q.size(1),
      .keys = k.size(1),
      .heads = q.size(2),
      .head_dim = q.size(3),
      .scale = scale,
      .out = out.mutable_data_ptr(),
  };
  const DType dtype = dtype_of(q);
  const int64_t bytes = loops.scratch_bytes(dtype, call);
  const double work = 2.0 * kTile * call.keys * call.head_dim;
  const int64_t grain = std::max<int64_t>(1, static_cast<int64_t>(kGrain / work));
  const int64_t tiles = call.batch * call.heads * tiles_of(call.queries);
  parallel_for_with_scratch(tiles, grain, bytes, [&](int64_t begin, int64_t end, void* scratch) {
    loops.forward(dtype, call, begin, end, scratch);
  });
  return out;
}

}  // namespace
}  // namespace cvt_kernels::attention

STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CPU, m) {
  m.impl("attention_inference", TORCH_BOX(&cvt_kernels::attention::attention_inference));
}

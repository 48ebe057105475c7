// The depth head on the CPU.

#include "common/units.h"
#include "depth_head/cpu_loops.h"
#include "linear/packed.h"

namespace cvt_kernels::depth_head {
namespace {

constexpr int64_t kMostSide = 1 << 20;        // of the map
constexpr int64_t kFewestRows = 4, kMostRows = 16;  // that a thread takes together; with each, up to four more are multiplied

const float* floats_of(const char* name, const Tensor& tensor, Sizes sizes) {
  expect_sizes(name, tensor, sizes, ScalarType::Float, tensor, "of the channels of the map and of bias");
  expect(tensor.is_contiguous(), name, tensor, "one of contiguous memory");
  return static_cast<const float*>(tensor.const_data_ptr());
}

Tensor depth_head_packed(const Tensor& given, const Tensor& taps, const Tensor& bias, const Tensor& last, double last_bias,
                         double max_depth) {
  const Kernels& loops = *choose(PRODUCT_TABLES);
  expect(given.dim() == 4 && given.size(1) > 0 && given.size(2) > 0 && given.size(3) > 0, "x", given,
         "(batch, channels, height, width)");
  expect(given.size(2) <= kMostSide && given.size(3) <= kMostSide, "x", given, "heights and widths of up to ", kMostSide);
  const DType dtype = linear::served_dtype("x", given);
  expect(bias.dim() == 1 && bias.size(0) > 0, "bias", bias, "(channels,)");
  const Tensor x = made_contiguous("x", given);
  const int64_t images = x.size(0), inputs = x.size(1), height = x.size(2), width = x.size(3), channels = bias.size(0);
  product("result", {images, kScale * height, kScale * width});
  const Tensor out = empty({images, kScale * height, kScale * width}, x.scalar_type(), x);
  Head head{
      .data = x.const_data_ptr(),
      .inputs = inputs,
      .height = height,
      .width = width,
      .taps = floats_of("taps", taps, {channels, kTaps, inputs}),
      .bias = floats_of("bias", bias, {channels}),
      .channels = channels,
      .last = floats_of("last", last, {channels, kTaps}),
      .last_bias = static_cast<float>(last_bias),
      .max_depth = static_cast<float>(max_depth),
      .out = out.mutable_data_ptr(),
  };
  for_steps({over(cut(images, height, kFewestRows, kMostRows), head.rows, loops.estimate, dtype, head)}, false);
  return out;
}

IMPLEMENT("depth_head_packed", depth_head_packed)

}  // namespace
}  // namespace cvt_kernels::depth_head

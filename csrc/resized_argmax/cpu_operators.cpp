// resized_argmax on the CPU: tensors, threads and the choice of instruction set around the loops.
//
// Every pixel is computed in the same way whichever thread takes it, so results do not depend on their number.

#include "common/tensors.h"
#include "common/units.h"
#include "resized_argmax/cpu_loops.h"

namespace cvt_kernels::resized_argmax {
namespace {

Tensor resized_argmax(const Tensor& given, int64_t height, int64_t width) {
  const Kernels& loops = *choose(KERNEL_TABLES);
  expect(given.dim() == 4 && given.size(1) > 0 && given.size(2) > 0 && given.size(3) > 0, "logits", given,
         "(batch, height, width, classes)");
  expect(given.size(3) < int64_t{1} << 31, "logits", given, "fewer than 2^31 classes");
  for (const int64_t side : {given.size(1), given.size(2), height, width}) {
    expect(side > 0 && side <= kMostSide, "a side", side, "1 to ", kMostSide, " pixels");
  }
  const DType dtype = dtype_of("logits", given);
  expect(dtype != DType::float64, "logits", given, "float32, bfloat16 or float16");
  numbers_of("logits", given);
  const Tensor logits = with_adjacent_channels("logits", given);
  const int64_t images = logits.size(0);
  product("result", {images, height, width});
  const Tensor out = empty({images, height, width}, ScalarType::Long, logits);
  const int64_t pixels = product("logits", {images, logits.size(1), logits.size(2)});
  const Workspace largest(pixels * static_cast<int64_t>(sizeof(int32_t)));
  const Logits call{
      .data = logits.const_data_ptr(),
      .image_step = logits.stride(0),
      .row_step = logits.stride(1),
      .column_step = logits.stride(2),
      .height = logits.size(1),
      .width = logits.size(2),
      .classes = logits.size(3),
      .largest = reinterpret_cast<int32_t*>(largest.data()),
      .out_height = height,
      .out_width = width,
      .out = static_cast<int64_t*>(out.mutable_data_ptr()),
  };
  for_steps({
      {images * call.height, 0, [&](int64_t row, int64_t, char*) { loops.classify(dtype, call, row); }},
      {images * height, loops.scratch_bytes(call),
       [&](int64_t row, int64_t, char* scratch) { loops.resize(dtype, call, row, scratch); }},
  });
  return out;
}

IMPLEMENT("resized_argmax", resized_argmax)

}  // namespace
}  // namespace cvt_kernels::resized_argmax

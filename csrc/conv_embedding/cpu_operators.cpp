// The convolutional embedding on the CPU.

#include "common/units.h"
#include "conv_embedding/cpu_loops.h"
#include "linear/packed.h"

namespace cvt_kernels::conv_embedding {
namespace {

// Serves some images.
void serve(const Kernels& loops, DType dtype, Embedding& call) {
  const int64_t arranged = call.pixels == nullptr ? 0 : call.images * call.height;
  for_steps({{arranged, 0, [&](int64_t row, int64_t, char*) { loops.arrange(dtype, call, row); }},
             over(cut_tokens(call.images, call.out_height * call.out_width), call.tile_rows, loops.embed, dtype, call)});
}

Tensor conv_embedding_inference(const Tensor& image, const Tensor& packed, const Tensor& bias, const Tensor& norm_weight,
                                const Tensor& norm_bias, const Optional& class_token, int64_t kernel,
                                int64_t stride, int64_t padding, double eps) {
  const Kernels& loops = *choose(PRODUCT_TABLES);
  const DType dtype = linear::served_dtype("image", image);
  expect(image.dim() == 4 && image.size(1) > 0 && image.size(2) > 0 && image.size(3) > 0, "image", image,
         "(batch, channels, height, width)");
  numbers_of("image", image);
  const Map out_map =
      outputs_of("kernel, stride, padding", {image.size(2), image.size(3)}, kernel, stride, padding, 1, 0);
  expect(bias.dim() == 1 && bias.size(0) > 0, "bias", bias, "(channels,)");
  expect_eps("eps", eps);
  const int64_t channels = bias.size(0), inputs = product("kernel", {image.size(1), kernel, kernel});
  Embedding call{
      .image_step = image.stride(0),
      .channel_step = image.stride(1),
      .row_step = image.stride(2),
      .column_step = image.stride(3),
      .in_channels = image.size(1),
      .height = image.size(2),
      .width = image.size(3),
      .kernel = kernel,
      .stride = stride,
      .padding = padding,
      .out_height = out_map.height,
      .out_width = out_map.width,
      .linear = linear::layer_of(dtype, packed, bias, channels, inputs),
      .norm = {linear::vector_of("norm_weight", norm_weight, channels),
               linear::vector_of("norm_bias", norm_bias, channels), static_cast<float>(eps)},
      .class_token = class_token.has_value() ? linear::vector_of("class_token", *class_token, channels) : nullptr,
  };
  const int64_t pixels = call.out_height * call.out_width, tokens = class_token.has_value() + pixels;
  product("image", {pixels, inputs});
  const Tensor out = empty({image.size(0), tokens, channels}, image.scalar_type(), image);
  const int64_t bytes = loops.pixel_bytes(dtype, call), element = image.element_size();
  for_images(image.size(0), bytes, threads(), [&](int64_t first, int64_t count, char* copy) {
    call.images = count;
    call.image = static_cast<const char*>(image.const_data_ptr()) + first * call.image_step * element;
    call.pixels = bytes > 0 ? copy : nullptr;
    call.out = static_cast<char*>(out.mutable_data_ptr()) + first * tokens * channels * element;
    serve(loops, dtype, call);
  });
  return out;
}

IMPLEMENT("conv_embedding_inference", conv_embedding_inference)

}  // namespace
}  // namespace cvt_kernels::conv_embedding

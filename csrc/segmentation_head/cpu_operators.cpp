// The segmentation head and resized_argmax on the CPU.

#include "common/units.h"
#include "linear/packed.h"
#include "segmentation_head/cpu_loops.h"

namespace cvt_kernels::segmentation_head {
namespace {

// A tensor (batch, height, width, channels) whose channels are adjacent.
Pixels pixels_of(const Tensor& map) {
  return {map.const_data_ptr(), map.stride(0), map.stride(1), map.stride(2), map.size(1), map.size(2), map.size(3)};
}

// A map (batch, height, width, channels) with its channels adjacent.
Tensor with_channels_adjacent(const Tensor& map, const Tensor& like) {
  expect(map.dim() == 4 && map.size(0) == like.size(0) && map.size(1) > 0 && map.size(2) > 0 && map.size(3) > 0, "maps", map,
         "(batch, height, width, channels) of ", like.size(0), " images");
  expect(map.size(1) <= kMostSide && map.size(2) <= kMostSide, "maps", map, "heights and widths of up to ", kMostSide);
  expect(map.scalar_type() == like.scalar_type(), "maps", map, "all of one dtype, ", shown(like.scalar_type()));
  numbers_of("maps", map);
  return with_adjacent_channels("maps", map);
}

// Serves some images, whose products have room from `next` on.
void serve(const Kernels& loops, DType dtype, int64_t images, std::vector<Source>& maps, Head& head, float* next) {
  std::vector<Step> steps;
  for (size_t i = 1; i < maps.size(); i++) {
    Source& map = maps[i];
    map.product = next;
    next += images * map.height * map.width * map.linear.outputs;
    steps.push_back(over(cut_tokens(images, map.height * map.width), map.tile_rows, loops.project, dtype, map));
  }
  steps.push_back(over(images * maps[0].height * head.segments, loops.classify, dtype, head));
  for_steps(steps);
}

Tensor segmentation_head_packed(const std::vector<Tensor>& maps, const std::vector<Tensor>& packed, const Tensor& bias,
                                const Tensor& classifier, const Tensor& classifier_bias) {
  const Kernels& loops = *choose(PRODUCT_TABLES);
  expect(!maps.empty(), "maps", maps, "at least 1");
  expect_count("packed", packed, maps.size());
  const DType dtype = linear::served_dtype("maps", maps[0]);
  expect(maps[0].dim() == 4, "maps", maps[0], "(batch, height, width, channels)");
  expect(bias.dim() == 1 && bias.size(0) > 0, "bias", bias, "(channels,)");
  expect(classifier_bias.dim() == 1 && classifier_bias.size(0) > 0, "classifier_bias", classifier_bias, "(classes,)");
  const int64_t channels = bias.size(0), classes = classifier_bias.size(0), images = maps[0].size(0);
  const int64_t height = maps[0].size(1), width = maps[0].size(2);
  const std::vector<float> zeros(channels);
  std::vector<Tensor> adjacent;
  std::vector<Source> sources;
  int64_t bytes = 0;  // of the products of an image
  for (size_t i = 0; i < maps.size(); i++) {
    const Tensor& map = adjacent.emplace_back(with_channels_adjacent(maps[i], maps[0]));
    const int64_t numbers = product("maps", {map.size(1), map.size(2), channels});
    if (i > 0) bytes += numbers * static_cast<int64_t>(sizeof(float));
    sources.push_back({pixels_of(map), linear::layer_of(dtype, packed[i], bias, channels, map.size(3))});
    if (i > 0) sources[i].linear.bias = zeros.data();
  }
  product("maps", {images, height, width, std::max(channels, classes)});
  const Tensor out = empty({images, height * width, classes}, maps[0].scalar_type(), maps[0]);
  Head head{
      .maps = sources.data(),
      .others = static_cast<int64_t>(maps.size()) - 1,
      .segments = (width + kTileRows - 1) / kTileRows,
      .classifier = linear::layer_of(dtype, classifier, classifier_bias, classes, channels),
  };
  const int64_t element = maps[0].element_size();
  for_images(images, bytes, 1, [&](int64_t first, int64_t count, char* products) {
    for (size_t i = 0; i < maps.size(); i++) {
      const char* data = static_cast<const char*>(adjacent[i].const_data_ptr());
      sources[i].data = data + first * sources[i].image_step * element;
    }
    head.out = static_cast<char*>(out.mutable_data_ptr()) + first * height * width * classes * element;
    serve(loops, dtype, count, sources, head, reinterpret_cast<float*>(products));
  });
  return out;
}

Tensor resized_argmax(const Tensor& given, int64_t height, int64_t width) {
  const Kernels& loops = *choose(PRODUCT_TABLES);
  expect(given.dim() == 4 && given.size(1) > 0 && given.size(2) > 0 && given.size(3) > 0, "logits", given,
         "(batch, height, width, classes)");
  expect(given.size(3) < int64_t{1} << 31, "logits", given, "fewer than 2^31 classes");
  for (const int64_t side : {given.size(1), given.size(2), height, width}) {
    expect(side > 0 && side <= kMostSide, "a side", side, "1 to ", kMostSide, " pixels");
  }
  const DType dtype = linear::served_dtype("logits", given);
  numbers_of("logits", given);
  const Tensor logits = with_adjacent_channels("logits", given);
  const int64_t images = logits.size(0);
  product("result", {images, height, width});
  const Tensor out = empty({images, height, width}, ScalarType::Long, logits);
  const int64_t pixels = product("logits", {images, logits.size(1), logits.size(2)});
  const Workspace largest(pixels * static_cast<int64_t>(sizeof(int32_t)));
  const Logits call{pixels_of(logits), reinterpret_cast<int32_t*>(largest.data()), height, width,
                    static_cast<int64_t*>(out.mutable_data_ptr())};
  for_steps({{images * call.height, 0, [&](int64_t row, int64_t, char*) { loops.classify_row(dtype, call, row); }},
             over(images * height, loops.resize, dtype, call)});
  return out;
}

IMPLEMENT("segmentation_head_packed", segmentation_head_packed)
IMPLEMENT("resized_argmax", resized_argmax)

}  // namespace
}  // namespace cvt_kernels::segmentation_head

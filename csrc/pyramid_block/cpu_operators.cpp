// The pyramid block on the CPU: tensors, threads, memory and the choice of instruction set around the loops.
//
// Every row is computed in the same way whichever thread takes it, so results do not depend on their number.

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "common/units.h"
#include "linear/packed.h"
#include "pyramid_block/cpu_loops.h"

namespace cvt_kernels::pyramid_block {
namespace {

constexpr int64_t kBetweenBytes = 16 << 20;  // between the steps, if images are small
constexpr int64_t kFewImages = 4;            // per thread, from which on images are not cut so that all have as many units
constexpr int64_t kMostTwice = 8;            // in how many rows one may have its hidden channels made twice

const Kernels& kernels() {
  static const Kernels& chosen = choose(PRODUCT_TABLES);
  return chosen;
}

Tensor pack_depthwise(const Tensor& weight, const std::optional<Tensor>& bias) {
  const DType dtype = linear::served_dtype("weight", weight);
  expect(weight.dim() == 4 && weight.size(0) > 0 && weight.size(1) == 1 && weight.size(2) == 3 && weight.size(3) == 3 &&
             weight.is_contiguous(),
         "weight", weight, "contiguous (channels, 1, 3, 3)");
  const int64_t channels = weight.size(0);
  if (bias.has_value()) {
    expect(bias->dim() == 1 && bias->size(0) == channels && bias->is_contiguous() &&
               bias->scalar_type() == weight.scalar_type(),
           "bias", *bias, "contiguous (channels,) in the dtype of weight, ", Shown{weight});
  }
  const Tensor out = empty({kernels().packed_convolution_size(channels)}, ScalarType::Float, weight);
  kernels().pack_convolution(dtype, weight.const_data_ptr(), bias.has_value() ? bias->const_data_ptr() : nullptr, channels,
                             static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

// The block -----------------------------------------------------------------------------------------------

// Arguments of the operator as they come: see module.cpp.
struct Arguments {
  const std::vector<Tensor>& packed;
  const std::vector<Tensor>& reduction;
  const std::optional<Tensor>& conv;
  const std::vector<Tensor>& vectors;
  const std::vector<int64_t>& widths;
  const std::vector<double>& eps;
};

Norm norm_of(const Arguments& given, int first, int number, int64_t channels) {
  return {linear::vector_of("vectors", given.vectors[first], channels),
          linear::vector_of("vectors", given.vectors[first + 1], channels), static_cast<float>(given.eps[number])};
}

// Fills `slices` with the linear layers of a reduction.
void reduce_by(Block& block, DType dtype, const Arguments& given, std::vector<Linear>& slices) {
  block.ratio = static_cast<int64_t>(given.reduction.size());
  if (block.ratio == 0) return;
  expect(block.ratio <= std::min(block.height, block.width), "reduction", block.ratio, "at most the rows and columns of x, ",
         block.height, " × ", block.width);
  for (const Tensor& packed : given.reduction) {
    slices.push_back(linear::layer_of(dtype, packed, given.vectors[10], block.channels, block.ratio * block.channels));
  }
  block.reduction = slices.data();
  block.norm_kept = norm_of(given, 11, 2, block.channels);
}

Block block_of(DType dtype, const Tensor& x, int64_t height, int64_t width, const Arguments& given,
               std::vector<Linear>& slices) {
  expect(height > 0, "height", height, "at least 1");
  expect(width > 0, "width", width, "at least 1");
  expect(x.dim() == 3 && x.is_contiguous() && x.size(1) == product("height and width", {height, width}), "x", x,
         "contiguous (batch, tokens, channels) of ", height, " · ", width, " tokens");
  const bool reduces = !given.reduction.empty();
  expect_count("packed", given.packed, 6);
  expect_count("vectors", given.vectors, reduces ? 13 : 10);
  expect_count("widths", given.widths, 3);
  expect_count("eps", given.eps, reduces ? 3 : 2);
  for (const double eps : given.eps) expect_eps("eps", eps);
  const int64_t channels = x.size(2), projected = given.widths[0], hidden = given.widths[1], heads = given.widths[2];
  expect(channels > 0, "x", x, "(batch, tokens, channels)");
  numbers_of("x", x);
  linear::expect_widths(projected, hidden, heads, kMaxHeadDim);
  product("widths", {x.size(1), projected});
  product("widths", {x.size(1), hidden});
  Block block{};
  block.height = height;
  block.width = width;
  block.channels = channels;
  block.heads = heads;
  const auto layer = [&](int i, int64_t outputs, int64_t inputs) {
    return linear::layer_of(dtype, given.packed[i], given.vectors[4 + i], outputs, inputs);
  };
  for (int i = 0; i < 3; i++) block.linears[i] = layer(i, projected, channels);
  block.proj = layer(3, channels, projected);
  block.fc1 = layer(4, hidden, channels);
  block.fc2 = layer(5, channels, hidden);
  block.norm1 = norm_of(given, 0, 0, channels);
  block.norm2 = norm_of(given, 2, 1, channels);
  reduce_by(block, dtype, given, slices);
  if (given.conv.has_value()) {
    expect(given.conv->scalar_type() == ScalarType::Float && given.conv->is_contiguous() &&
               given.conv->numel() == kernels().packed_convolution_size(hidden),
           "conv", *given.conv, "a convolution of the ", hidden, " hidden channels that pack_depthwise packed");
    block.conv = static_cast<const float*>(given.conv->const_data_ptr());
  }
  return block;
}

// Parts of an image whose units are at most as many rows of some tokens as pass through a linear layer together.
int64_t parts_of(int64_t images, Grid grid) {
  const int64_t together = rows_together(grid.width);
  return balanced(images, (grid.height + together - 1) / together, grid.height);
}

// Parts of an image for the third step, if it makes the hidden channels: those beside a part are made twice. So they are as
// few as occupy all threads.
int64_t bands_of(const Block& block) {
  if (block.images >= kFewImages * threads()) return 1;
  const int64_t parts = (threads() + block.images - 1) / block.images;
  return balanced(block.images, std::min(parts, block.height), block.height);
}

// Whether so many hidden channels would be made twice that the second step had better make all of them.
bool holds_hidden(const Block& block) {
  return block.conv != nullptr && 2 * (bands_of(block) - 1) * kMostTwice > block.height;
}

struct Bytes {
  int64_t hidden, keys, stream;  // of an image

  int64_t sum() const { return hidden + 2 * keys + stream; }
};

Bytes between_bytes(DType dtype, const Block& block, int64_t element) {
  return {holds_hidden(block) ? tokens_of(block) * kernels().hidden_bytes(dtype, block) : 0,
          kept_tokens(block) * block.proj.inputs * kernels().element_bytes(dtype),
          tokens_of(block) * block.channels * element};
}

// Serves some images.
void serve(DType dtype, Block& block, const Bytes& bytes, char* between) {
  block.hidden = bytes.hidden == 0 ? nullptr : between;
  block.keys = between += block.images * bytes.hidden;
  block.values = between += block.images * bytes.keys;
  block.stream = between += block.images * bytes.keys;
  block.groups = parts_of(block.images, kept_grid(block));
  block.tiles = parts_of(block.images, {tokens_of(block), 1});
  const bool cuts_freely = block.conv == nullptr || block.hidden != nullptr;
  block.bands = cuts_freely ? parts_of(block.images, mixed_grid(block)) : bands_of(block);
  for_units(block.images * block.groups, kernels().project_bytes(dtype, block),
            [&](int64_t unit, int64_t, void* scratch) { kernels().project(dtype, block, unit, scratch); });
  for_units(block.images * block.tiles, kernels().attend_bytes(dtype, block),
            [&](int64_t unit, int64_t previous, void* scratch) {
              kernels().attend(dtype, block, unit, previous, scratch);
            });
  for_units(block.images * block.bands, kernels().mix_bytes(dtype, block),
            [&](int64_t unit, int64_t, void* scratch) { kernels().mix(dtype, block, unit, scratch); });
}

Activation activation_of(const std::string& name) {
  if (name == "none") return Activation::none;
  if (name == "tanh") return Activation::tanh;
  expect(name == "quick", "activation", name, "none, tanh or quick");
  return Activation::quick;
}

Tensor pyramid_block(const Tensor& x, int64_t height, int64_t width, const std::vector<Tensor>& packed,
                     const std::vector<Tensor>& reduction, const std::optional<Tensor>& conv,
                     const std::vector<Tensor>& vectors, const std::vector<int64_t>& widths,
                     const std::vector<double>& eps, double scale, const std::string& activation) {
  const DType dtype = linear::served_dtype("x", x);
  std::vector<Linear> slices;
  Block block = block_of(dtype, x, height, width, {packed, reduction, conv, vectors, widths, eps}, slices);
  block.scale = scale;
  block.activation = activation_of(activation);
  const Tensor out = empty(x.sizes(), x.scalar_type(), x);
  if (x.size(0) == 0) return out;
  const int64_t batch = block.images = x.size(0), element = x.element_size();
  const Bytes between_steps = between_bytes(dtype, block, element);
  const int64_t most = std::max(kBetweenBytes / between_steps.sum(), threads());
  const Workspace between(std::min(batch, most) * between_steps.sum());
  const int64_t bytes = element * tokens_of(block) * block.channels;
  for (int64_t first = 0; first < batch; first += most) {
    block.x = static_cast<const char*>(x.const_data_ptr()) + first * bytes;
    block.out = static_cast<char*>(out.mutable_data_ptr()) + first * bytes;
    block.images = std::min(most, batch - first);
    serve(dtype, block, between_steps, between.data());
  }
  return out;
}

}  // namespace
}  // namespace cvt_kernels::pyramid_block

STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CPU, m) {
  IMPLEMENT(m, "pack_depthwise", &cvt_kernels::pyramid_block::pack_depthwise);
  IMPLEMENT(m, "pyramid_block_packed", &cvt_kernels::pyramid_block::pyramid_block);
}

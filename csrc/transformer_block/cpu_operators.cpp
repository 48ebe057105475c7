// Transformer blocks of both kinds on the CPU: tensors, threads, memory and the choice of instruction set around the loops.
//
// Every row is computed in the same way whichever thread takes it, so results do not depend on their number.

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/units.h"
#include "linear/packed.h"
#include "linear_int8/packed.h"
#include "transformer_block/cpu_loops.h"
#include "transformer_block/pyramid_cpu_loops.h"

namespace cvt_kernels::transformer_block {
namespace {

// What both kinds share ---------------------------------------------------------------------------------------

constexpr int64_t kBetweenBytes = 16 << 20;  // between the steps, if images are small

Activation activation_of(const std::string& name) {
  if (name == "none") return Activation::none;
  if (name == "tanh") return Activation::tanh;
  expect(name == "quick", "activation", name, "none, tanh or quick");
  return Activation::quick;
}

Norm norm_of(const std::vector<Tensor>& vectors, int first, int64_t channels, double eps) {
  return {linear::vector_of("vectors", vectors[first], channels), linear::vector_of("vectors", vectors[first + 1], channels),
          static_cast<float>(eps)};
}

// Fills in the fields of blocks of both kinds, except the linear layers. `vectors` begins with the LayerNorms' vectors.
void fill(AnyBlock& block, const Tensor& x, int64_t height, int64_t width, const std::vector<Tensor>& vectors,
          const std::vector<int64_t>& widths, double eps1, double eps2, double scale, const std::string& activation) {
  expect_count("widths", widths, 3);
  block.height = height;
  block.width = width;
  block.channels = x.size(2);
  block.heads = widths[2];
  expect(block.channels > 0, "x", x, "(batch, tokens, channels)");
  numbers_of("x", x);
  linear::expect_widths(widths[0], widths[1], widths[2], kMaxHeadDim);
  product("widths", {x.size(1), widths[0]});
  product("widths", {x.size(1), widths[1]});
  block.norm1 = norm_of(vectors, 0, block.channels, eps1);
  block.norm2 = norm_of(vectors, 2, block.channels, eps2);
  block.scale = scale;
  block.activation = activation_of(activation);
}

// Fills in the linear layers; layer(i, outputs, inputs) returns the i-th.
template <class F>
void fill_layers(AnyBlock& block, const std::vector<int64_t>& widths, const F& layer) {
  const int64_t channels = block.channels, projected = widths[0], hidden = widths[1];
  for (int i = 0; i < 3; i++) block.linears[i] = layer(i, projected, channels);
  block.proj = layer(3, channels, projected);
  block.fc1 = layer(4, hidden, channels);
  block.fc2 = layer(5, channels, hidden);
}

// A linear layer, which is quantized if its weight has scales.
Linear layer_of(DType dtype, const Tensor& packed, const Tensor& bias, const Tensor& scales, int64_t outputs,
                int64_t inputs) {
  if (scales.numel() == 0) return linear::layer_of(dtype, packed, bias, outputs, inputs);
  linear_int8::expect_weight(packed, outputs, inputs);
  return {packed.const_data_ptr(),
          linear::vector_of("bias", bias, outputs),
          inputs,
          outputs,
          &linear_int8::kernels(),
          linear::vector_of("weight_scales", scales, outputs)};
}

// Calls serve(first, memory) for as many images at a time as find room between the steps, at least one for each thread.
template <class F>
void for_images(AnyBlock& block, int64_t batch, int64_t image_bytes, const F& serve) {
  const int64_t most = std::max(kBetweenBytes / image_bytes, threads());
  const Workspace between(std::min(batch, most) * image_bytes);
  for (int64_t first = 0; first < batch; first += most) {
    block.images = std::min(most, batch - first);
    serve(first, between.data());
  }
}

// The step with attention, on `queries` queries of each image.
template <class Kernels, class Block>
Step attend(const Kernels& kernels, DType dtype, Block& block, int64_t queries) {
  const std::vector<Run> runs = cut_tokens(block.images, queries);
  block.tile_rows = longest(runs);
  return over_runs(runs, kernels.attend_bytes(dtype, block), [&, dtype](const Run& run, int64_t previous, char* scratch) {
    kernels.attend(dtype, block, run, previous, scratch);
  });
}

// Blocks with three convolutions ------------------------------------------------------------------------------

const Kernels& kernels() { return *choose(PRODUCT_TABLES); }

// Packs the weight (channels, 1, k, k) of a convolution with the scale, shift, mean and variance of its BatchNorm, which
// are contiguous and of one dtype.
Tensor pack_convolution(const Tensor& weight, const Tensor& scale, const Tensor& shift, const Tensor& mean,
                        const Tensor& variance, double eps) {
  const DType dtype = linear::served_dtype("weight", weight);
  expect(weight.dim() == 4 && weight.size(0) > 0 && weight.size(1) == 1 && weight.size(2) == weight.size(3) &&
             weight.size(3) > 0 && weight.size(3) <= conv_projection::kMaxKernel,
         "weight", weight, "(channels, 1, k, k) with a kernel of 1 to ", conv_projection::kMaxKernel);
  const int64_t channels = weight.size(0), kernel = weight.size(3);
  const Tensor taps = made_contiguous("weight", weight);
  Branch branch{};
  const auto norm = [&](const char* name, const Tensor& tensor) {
    expect(tensor.dim() == 1 && tensor.size(0) == channels && tensor.is_contiguous() &&
               tensor.scalar_type() == mean.scalar_type(),
           name, tensor, "contiguous (channels,) of one dtype, ", shown(mean.scalar_type()), " (", channels, ",)");
    return tensor.const_data_ptr();
  };
  expect_eps("eps", eps);
  branch.weight = taps.const_data_ptr();
  branch.scale = norm("scale", scale);
  branch.shift = norm("shift", shift);
  branch.mean = norm("mean", mean);
  branch.variance = norm("variance", variance);
  branch.norm = dtype_of("mean", mean);
  branch.eps = eps;
  branch.kernel = kernel;
  const Tensor out = empty({kernels().packed_convolution_size(kernel, channels)}, ScalarType::Float, weight);
  kernels().pack_convolution(dtype, branch, channels, static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

// Arguments of the operator as they come: see module.cpp.
struct Arguments {
  const std::vector<Tensor>& packed;
  const std::vector<Tensor>& vectors;
  const std::vector<int64_t>& geometry;
  const std::vector<int64_t>& widths;
  const std::vector<Tensor>& weight_scales;
  double eps1, eps2, scale;
  const std::string& activation;
};

Branch branch_of(const Block& block, const int64_t* geometry) {
  Branch branch{};
  branch.kernel = geometry[0];
  branch.stride = geometry[1];
  branch.padding = geometry[2];
  branch.dilation = geometry[3];
  expect(branch.kernel > 0 && branch.kernel <= conv_projection::kMaxKernel, "geometry", branch.kernel, "kernels of 1 to ",
         conv_projection::kMaxKernel);
  const Map out = outputs_of("geometry", {block.height, block.width}, branch.kernel, branch.stride, branch.padding,
                             branch.dilation, block.channels);
  branch.height = out.height;
  branch.width = out.width;
  return branch;
}

Block block_of(DType dtype, const Tensor& x, int64_t height, int64_t width, const Arguments& given) {
  expect(x.dim() == 3 && x.is_contiguous(), "x", x, "contiguous (batch, tokens, channels)");
  expect(height > 0, "height", height, "at least 1");
  expect(width > 0, "width", width, "at least 1");
  expect_count("packed", given.packed, 9);
  expect_count("vectors", given.vectors, 10);
  expect_count("geometry", given.geometry, 12);
  expect_count("weight_scales", given.weight_scales, 6);
  expect_eps("eps1", given.eps1);
  expect_eps("eps2", given.eps2);
  Block block{};
  fill(block, x, height, width, given.vectors, given.widths, given.eps1, given.eps2, given.scale, given.activation);
  block.class_tokens = x.size(1) - product("height and width", {height, width});
  expect(block.class_tokens == 0 || block.class_tokens == 1, "x", x, height, " · ", width, " tokens, or one more");
  for (int i = 0; i < 3; i++) {
    Branch& branch = block.branches[i] = branch_of(block, &given.geometry[4 * i]);
    block.margin = std::max(block.margin, branch.padding);
    const Tensor& packed = given.packed[i];
    expect(packed.scalar_type() == ScalarType::Float && packed.is_contiguous() &&
               packed.numel() == kernels().packed_convolution_size(branch.kernel, block.channels),
           "packed", packed, "convolutions of the geometry, that pack_convolution packed");
    block.packed[i] = static_cast<const float*>(packed.const_data_ptr());
  }
  expect(tokens_of(block, 0) == tokens_of(block), "geometry", Quoted{"queries, ", tokens_of(block, 0)},
         "as many queries as tokens, ", tokens_of(block));
  expect(tokens_of(block, 1) == tokens_of(block, 2), "geometry", Quoted{"keys, ", tokens_of(block, 1)},
         "as many keys as values, ", tokens_of(block, 2));
  for (int i = 0; i < 3; i++) product("widths", {tokens_of(block, i), given.widths[0]});
  fill_layers(block, given.widths, [&](int i, int64_t outputs, int64_t inputs) {
    return layer_of(dtype, given.packed[3 + i], given.vectors[4 + i], given.weight_scales[i], outputs,
                    inputs);
  });
  return block;
}

// Returns the rows of all images; each image's must be ascending, followed by -1 only.
const int64_t* rows_of(const Tensor& rows, int64_t images, int64_t tokens) {
  expect(rows.scalar_type() == ScalarType::Long && rows.dim() == 2 && rows.size(0) == images && rows.size(1) > 0 &&
             rows.is_contiguous(),
         "rows", rows, "contiguous int64 (batch, rows) of a batch of ", images);
  const int64_t* data = static_cast<const int64_t*>(rows.const_data_ptr());
  const int64_t kept = rows.size(1);
  for (int64_t place = 0, number = numbers_of("rows", rows); place < number; place++) {
    const int64_t row = data[place];
    expect(row >= -1 && row < tokens, "rows", row, "indices of ", tokens, " tokens, or -1");
    const bool ascends = place % kept == 0 || row == -1 || row > data[place - 1];
    const bool ended = place % kept != 0 && data[place - 1] == -1;
    expect(ascends && !(ended && row != -1), "rows", row, "those of an image ascending, then -1");
  }
  return data;
}

// Gives the block the place of its scores, and whose they are.
void score_by(Block& block, const Tensor& scores, const std::string& query, int64_t images) {
  expect(query == "cls" || query == "avg", "query", query, "cls or avg");
  expect(scores.scalar_type() == ScalarType::Float && scores.dim() == 2 && scores.size(0) == images &&
             scores.size(1) == tokens_of(block, 1) && scores.is_contiguous(),
         "scores", scores, "contiguous float32 (batch, keys), (", images, ", ", tokens_of(block, 1), ")");
  block.scored = query == "cls" ? Scored::class_token : Scored::mean;
  block.scores = static_cast<float*>(scores.mutable_data_ptr());
  if (query == "avg") return;
  expect(block.class_tokens == 1, "query", query, "avg without a class token");
  for (int64_t image = 0; block.rows != nullptr && image < images; image++) {
    expect(block.rows[image * block.kept] == 0, "rows", block.rows[image * block.kept],
           "the class token of each image, 0, for its scores");
  }
}

constexpr int64_t kFewestHeld = 4;  // rows of a run, since the rows beside it are normalized again for the next one

// The rows that a run may have so that it holds about kHeldBytes at most, at least one.
int64_t rows_to_hold(const Block& block) {
  const int64_t bytes = (block.width + 2 * block.margin) * block.channels * static_cast<int64_t>(sizeof(float));
  const Rows of_one = held_rows(block, {0, block.height / 2, block.height / 2 + 1});
  return std::max<int64_t>(kHeldBytes / bytes - (of_one.end - of_one.begin - 1), 1);
}

// The step that computes queries, keys and values.
Step project(DType dtype, Block& block) {
  const std::vector<Run> runs = cut(block.images, block.height, kFewestHeld, rows_to_hold(block));
  block.band_rows = 0;
  for (const Run& run : runs) {
    const Rows held = held_rows(block, run);
    block.band_rows = std::max(block.band_rows, held.end - held.begin);
  }
  return over_runs(runs, kernels().project_bytes(dtype, block), [&block, dtype](const Run& run, int64_t, char* scratch) {
    kernels().project(dtype, block, run, scratch);
  });
}

// Serves some images, whose queries, keys and values find room in `projected`.
void serve(DType dtype, Block& block, char* projected) {
  for (int i = 0; i < 3; i++) {
    block.projected[i] = projected;
    projected += block.images * projected_tokens(block, i) * block.linears[i].outputs * kernels().element_bytes(dtype);
  }
  std::vector<Step> steps{project(dtype, block)};
  if (block.scores != nullptr) {
    steps.push_back({block.images, kernels().score_bytes(dtype, block),
                     [&](int64_t image, int64_t, char* scratch) { kernels().score(dtype, block, image, scratch); }});
  }
  steps.push_back(attend(kernels(), dtype, block, queries_of(block)));
  for_steps(steps);
}

// What is overwritten is x, and the scores.
void expect_all_apart(const Tensor& x, const std::vector<Tensor>& packed, const std::vector<Tensor>& vectors,
                      const std::vector<Tensor>& weight_scales, const std::optional<Tensor>& rows,
                      const std::optional<Tensor>& scores) {
  const auto apart = [&](const char* name, const Tensor& tensor) {
    expect_apart(name, tensor, x);
    if (scores.has_value()) expect_apart(name, tensor, *scores, "the scores");
  };
  for (const Tensor& each : packed) apart("packed", each);
  for (const Tensor& each : vectors) apart("vectors", each);
  for (const Tensor& each : weight_scales) apart("weight_scales", each);
  if (rows.has_value()) apart("rows", *rows);
  if (scores.has_value()) expect_apart("scores", *scores, x);
}

void transformer_block(const Tensor& x, int64_t height, int64_t width, const std::vector<Tensor>& packed,
                       const std::vector<Tensor>& vectors, const std::vector<int64_t>& geometry,
                       const std::vector<int64_t>& widths, const std::vector<Tensor>& weight_scales,
                       double eps1, double eps2, double scale,
                       const std::string& activation, const std::optional<Tensor>& rows,
                       const std::optional<Tensor>& scores, const std::string& query) {
  const DType dtype = linear::served_dtype("x", x);
  Block block = block_of(dtype, x, height, width, {packed, vectors, geometry, widths, weight_scales,
                                                 eps1, eps2, scale, activation});
  if (rows.has_value()) {
    block.rows = rows_of(*rows, x.size(0), tokens_of(block));
    block.kept = rows->size(1);
  }
  if (scores.has_value()) score_by(block, *scores, query, x.size(0));
  expect_all_apart(x, packed, vectors, weight_scales, rows, scores);
  product("rows", {queries_of(block), widths[0]});
  if (x.size(0) == 0) return;
  int64_t image_bytes = 0;
  for (int i = 0; i < 3; i++) image_bytes += projected_tokens(block, i) * block.linears[i].outputs;
  image_bytes *= kernels().element_bytes(dtype);
  char* data = static_cast<char*>(x.mutable_data_ptr());
  const int64_t bytes = x.element_size() * tokens_of(block) * block.channels;
  for_images(block, x.size(0), image_bytes, [&](int64_t first, char* projected) {
    block.x = data + first * bytes;
    serve(dtype, block, projected);
    if (block.rows != nullptr) block.rows += block.images * block.kept;
    if (block.scores != nullptr) block.scores += block.images * tokens_of(block, 1);
  });
}

// Blocks of SegFormer and PVT ---------------------------------------------------------------------------------

}  // namespace

namespace pyramids {
namespace {

constexpr int64_t kMostTwice = 8;  // in how many rows one may have its hidden channels made twice

const Kernels& kernels() { return *choose(PRODUCT_TABLES); }

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

// Arguments of the operator as they come: see module.cpp.
struct Arguments {
  const std::vector<Tensor>& packed;
  const std::vector<Tensor>& reduction;
  const std::optional<Tensor>& conv;
  const std::vector<Tensor>& vectors;
  const std::vector<int64_t>& widths;
  const std::vector<Tensor>& weight_scales;
  const std::vector<double>& eps;
  double scale;
  const std::string& activation;
};

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
  block.norm_kept = norm_of(given.vectors, 11, block.channels, given.eps[2]);
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
  expect_count("weight_scales", given.weight_scales, 6);
  expect_count("eps", given.eps, reduces ? 3 : 2);
  for (const double eps : given.eps) expect_eps("eps", eps);
  Block block{};
  fill(block, x, height, width, given.vectors, given.widths, given.eps[0], given.eps[1], given.scale, given.activation);
  fill_layers(block, given.widths, [&](int i, int64_t outputs, int64_t inputs) {
    return layer_of(dtype, given.packed[i], given.vectors[4 + i], given.weight_scales[i], outputs,
                    inputs);
  });
  reduce_by(block, dtype, given, slices);
  if (given.conv.has_value()) {
    const int64_t hidden = block.fc1.outputs;
    expect(given.conv->scalar_type() == ScalarType::Float && given.conv->is_contiguous() &&
               given.conv->numel() == kernels().packed_convolution_size(hidden),
           "conv", *given.conv, "a convolution of the ", hidden, " hidden channels that pack_depthwise packed");
    block.conv = static_cast<const float*>(given.conv->const_data_ptr());
  }
  return block;
}

// Threads for an image in the third step, if it makes the hidden channels: those of the rows beside a thread's are made twice.
int64_t threads_of_image(const Block& block) { return (threads() + block.images - 1) / block.images; }

// Whether so many hidden channels would be made twice that the second step had better make all of them.
bool holds_hidden(const Block& block) {
  return block.conv != nullptr && 2 * (threads_of_image(block) - 1) * kMostTwice > block.height;
}

struct Bytes {
  int64_t hidden, keys, stream;  // of an image

  int64_t sum() const { return hidden + 2 * keys + stream; }
};

Bytes between_bytes(DType dtype, const Block& block, int64_t element) {
  return {holds_hidden(block) ? tokens_of(block) * kernels().hidden_bytes(dtype, block) : 0,
          kept_tokens(block) * block.proj.inputs * kernels().element_bytes(dtype),
          block.queries * block.channels * element};
}

// The step that computes keys and values.
Step project(DType dtype, Block& block) {
  const std::vector<Run> runs = cut_tokens(block.images, kept_tokens(block));
  block.group_rows = longest(runs);
  return over_runs(runs, kernels().project_bytes(dtype, block), [&block, dtype](const Run& run, int64_t, char* scratch) {
    kernels().project(dtype, block, run, scratch);
  });
}

// The third step, on runs of rows.
Step mix_runs(DType dtype, Block& block, const std::vector<Run>& runs) {
  block.band_rows = longest(runs);
  return over_runs(runs, kernels().mix_bytes(dtype, block), [&block, dtype](const Run& run, int64_t, char* scratch) {
    kernels().mix(dtype, block, {run, nullptr, false}, scratch);
  });
}

// The third step, on bands of images. Each is computed from its top by one thread, and the last ones, one for each thread, also
// from the bottom by a second thread, until they meet: there, few rows have their hidden channels made twice.
Step mix_bands(DType dtype, Block& block) {
  const int64_t parts = std::min((threads_of_image(block) + 1) / 2, block.height), bands = block.images * parts;
  std::vector<Run> runs;
  for (int64_t band = 0; band < bands; band++) {
    const int64_t image = band / parts, part = band % parts;
    runs.push_back({image, block.height * part / parts, block.height * (part + 1) / parts});
  }
  const int64_t shared = threads() == 1 ? 0 : std::min(threads(), bands);
  block.band_rows = longest(runs);
  const auto taken = std::make_shared<std::vector<int64_t>>(bands);
  const auto mix = [=, &block](int64_t unit, int64_t, char* scratch) {
    const bool upward = unit >= bands;
    const int64_t band = upward ? unit - shared : unit;
    kernels().mix(dtype, block, {runs[band], band < bands - shared ? nullptr : &(*taken)[band], upward}, scratch);
  };
  return {bands + shared, kernels().mix_bytes(dtype, block), mix};
}

Step mix(DType dtype, Block& block) {
  if (block.conv == nullptr) return mix_runs(dtype, block, cut_tokens(block.images, block.queries));
  if (block.hidden == nullptr) return mix_bands(dtype, block);
  return mix_runs(dtype, block, cut_rows(block.images, block.height, block.width, rows_together(block.width)));
}

// Serves some images.
void serve(DType dtype, Block& block, const Bytes& bytes, char* between) {
  block.hidden = bytes.hidden == 0 ? nullptr : between;
  block.keys = between += block.images * bytes.hidden;
  block.values = between += block.images * bytes.keys;
  block.stream = between += block.images * bytes.keys;
  for_steps({project(dtype, block), attend(kernels(), dtype, block, block.queries), mix(dtype, block)});
}

// Calls f(row, chosen) for the places of all rows of x in memory, and of the tokens that are chosen of it; places of -1 are
// left out.
template <class F>
void for_rows(const Tensor& x, const int64_t* rows, int64_t kept, const F& f) {
  const int64_t bytes = x.element_size() * x.size(2);
  for (int64_t place = 0; place < x.size(0) * kept; place++) {
    if (rows[place] >= 0) f((place / kept * x.size(1) + rows[place]) * bytes, place * bytes, bytes);
  }
}

Tensor pyramid_block(const Tensor& x, int64_t height, int64_t width, const std::vector<Tensor>& packed,
                     const std::vector<Tensor>& reduction, const std::optional<Tensor>& conv,
                     const std::vector<Tensor>& vectors, const std::vector<int64_t>& widths,
                     const std::vector<Tensor>& weight_scales,
                     const std::vector<double>& eps, double scale, const std::string& activation,
                     const std::optional<Tensor>& rows) {
  const DType dtype = linear::served_dtype("x", x);
  std::vector<Linear> slices;
  Block block = block_of(dtype, x, height, width,
                         {packed, reduction, conv, vectors, widths, weight_scales, eps, scale, activation},
                         slices);
  const int64_t* chosen = nullptr;
  block.queries = tokens_of(block);
  if (rows.has_value()) {
    expect(block.conv == nullptr, "rows", *rows, "none with a convolution");
    chosen = rows_of(*rows, x.size(0), tokens_of(block));
    block.queries = rows->size(1);
    product("rows", {x.size(0), block.queries, std::max({block.channels, widths[0], widths[1]})});
  }
  const Tensor out = empty(x.sizes(), x.scalar_type(), x);
  if (x.size(0) == 0) return out;
  block.images = x.size(0);
  const Bytes of_image = between_bytes(dtype, block, x.element_size());
  const int64_t row_bytes = x.element_size() * block.channels;
  const int64_t bytes = row_bytes * tokens_of(block), bytes_asking = row_bytes * block.queries;
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const Workspace some(chosen == nullptr ? 0 : block.images * bytes_asking);
  if (chosen != nullptr) {
    std::memset(some.data(), 0, block.images * bytes_asking);
    for_rows(x, chosen, block.queries, [&](int64_t row, int64_t place, int64_t size) {
      std::memcpy(some.data() + place, from + row, size);
    });
  }
  for_images(block, x.size(0), of_image.sum(), [&](int64_t first, char* between) {
    block.x = from + first * bytes;
    block.asking = chosen == nullptr ? block.x : some.data() + first * bytes_asking;
    block.out = chosen == nullptr ? to + first * bytes : some.data() + first * bytes_asking;
    serve(dtype, block, of_image, between);
  });
  if (chosen != nullptr) {
    std::memcpy(to, from, x.size(0) * bytes);
    for_rows(x, chosen, block.queries, [&](int64_t row, int64_t place, int64_t size) {
      std::memcpy(to + row, some.data() + place, size);
    });
  }
  return out;
}

}  // namespace
}  // namespace pyramids

IMPLEMENT("pack_convolution", pack_convolution)
IMPLEMENT("transformer_block_", transformer_block)
IMPLEMENT("pack_depthwise", pyramids::pack_depthwise)
IMPLEMENT("pyramid_block_packed", pyramids::pyramid_block)

}  // namespace cvt_kernels::transformer_block

// Transformer blocks of both kinds on the CPU.

#include "common/units.h"
#include "layer_norm_gelu/operators.h"
#include "linear/packed.h"
#include "transformer_block/pyramid_cpu_loops.h"

namespace cvt_kernels::transformer_block {
namespace {

// What both kinds share ---------------------------------------------------------------------------------------

Norm norm_of(const Tensors& vectors, int first, int64_t channels, double eps) {
  expect_eps("eps", eps);
  return {linear::vector_of("vectors", vectors[first], channels), linear::vector_of("vectors", vectors[first + 1], channels),
          static_cast<float>(eps)};
}

// Fills in what blocks of both kinds have, from arguments of the operators as they come; x has at most so many class tokens,
// and `layers` are the packed weights of Q, K, V, proj, fc1 and fc2. Returns how many class tokens there are.
int64_t fill(AnyBlock& block, DType dtype, const Tensor& x, int64_t height, int64_t width, int64_t most_class_tokens,
             const Tensor* layers, const Tensors& vectors, const Numbers& widths, const Tensors& weight_scales, double eps1,
             double eps2, double scale, const std::string& activation) {
  const int64_t class_tokens = class_tokens_of(x, height, width, most_class_tokens);
  expect(x.is_contiguous() && x.size(2) > 0, "x", x, "contiguous (batch, tokens, channels)");
  expect_count("widths", widths, 3);
  expect_count("weight_scales", weight_scales, 6);
  const int64_t channels = x.size(2), projected = widths[0], hidden = widths[1], heads = widths[2];
  expect(heads > 0, "widths", Quoted{"heads, ", heads}, "at least 1 head");
  expect(projected > 0 && projected % heads == 0 && projected / heads <= kMaxHeadDim, "widths", projected, "channels of ",
         heads, " heads, up to ", kMaxHeadDim, " each");
  expect(hidden > 0, "widths", Quoted{"hidden channels, ", hidden}, "at least 1");
  product("widths", {x.size(1), projected});
  product("widths", {x.size(1), hidden});
  const auto layer = [&](int i, int64_t outputs, int64_t inputs) {
    return linear::layer_of(dtype, layers[i], vectors[4 + i], outputs, inputs, weight_scales[i]);
  };
  block.height = height;
  block.width = width;
  block.channels = channels;
  block.norm1 = norm_of(vectors, 0, channels, eps1);
  block.norm2 = norm_of(vectors, 2, channels, eps2);
  for (int i = 0; i < 3; i++) block.linears[i] = layer(i, projected, channels);
  block.proj = layer(3, channels, projected);
  block.fc1 = layer(4, hidden, channels);
  block.fc2 = layer(5, channels, hidden);
  block.heads = heads;
  block.scale = scale;
  block.activation = layer_norm_gelu::gelu_of(activation);
  return class_tokens;
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
  kernels().pack_convolution(dtype, branch, 0, channels, static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

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

// Fills in the convolutions, which pack_convolution has packed.
void convolve_by(Block& block, const Tensors& packed, const Numbers& geometry, int64_t projected) {
  for (int i = 0; i < 3; i++) {
    const Branch& branch = block.branches[i] = branch_of(block, &geometry[4 * i]);
    block.margin = std::max(block.margin, branch.padding);
    expect(packed[i].scalar_type() == ScalarType::Float && packed[i].is_contiguous() &&
               packed[i].numel() == kernels().packed_convolution_size(branch.kernel, block.channels),
           "packed", packed[i], "convolutions of the geometry, that pack_convolution packed");
    block.packed[i] = static_cast<const float*>(packed[i].const_data_ptr());
    product("widths", {tokens_of(block, i), projected});
  }
  expect(tokens_of(block, 0) == tokens_of(block), "geometry", Quoted{"queries, ", tokens_of(block, 0)},
         "as many queries as tokens, ", tokens_of(block));
  expect(tokens_of(block, 1) == tokens_of(block, 2), "geometry", Quoted{"keys, ", tokens_of(block, 1)},
         "as many keys as values, ", tokens_of(block, 2));
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
  const Reach of_one = held_rows(block, {0, block.height / 2, block.height / 2 + 1});
  return std::max<int64_t>(kHeldBytes / bytes - (of_one.end - of_one.first - 1), 1);
}

// The step that computes queries, keys and values.
Step project(DType dtype, Block& block) {
  const std::vector<Run> runs = cut(block.images, block.height, kFewestHeld, rows_to_hold(block));
  block.band_rows = 0;
  for (const Run& run : runs) {
    const Reach held = held_rows(block, run);
    block.band_rows = std::max(block.band_rows, held.end - held.first);
  }
  return over(runs, kernels().project, dtype, block);
}

// Serves some images, whose queries, keys and values find room in `projected`.
void serve(DType dtype, Block& block, char* projected) {
  for (int i = 0; i < 3; i++) {
    block.projected[i] = projected;
    projected += block.images * projected_tokens(block, i) * block.linears[i].outputs * kernels().element_bytes(dtype);
  }
  std::vector<Step> steps{project(dtype, block)};
  if (block.scores != nullptr) steps.push_back(over(block.images, kernels().score, dtype, block));
  steps.push_back(over(cut_tokens(block.images, queries_of(block)), block.tile_rows, kernels().attend, dtype, block));
  for_steps(steps);
}

// What is overwritten is x, and the scores.
void expect_all_apart(const Tensor& x, const Tensors& packed, const Tensors& vectors, const Tensors& weight_scales,
                      const Optional& rows, const Optional& scores) {
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

void transformer_block(const Tensor& x, int64_t height, int64_t width, const Tensors& packed, const Tensors& vectors,
                       const Numbers& geometry, const Numbers& widths, const Tensors& weight_scales, double eps1, double eps2,
                       double scale, const std::string& activation, const Optional& rows, const Optional& scores,
                       const std::string& query) {
  const DType dtype = linear::served_dtype("x", x);
  expect_count("packed", packed, 9);
  expect_count("vectors", vectors, 10);
  expect_count("geometry", geometry, 12);
  Block block{};
  block.class_tokens = fill(block, dtype, x, height, width, 1, &packed[3], vectors, widths, weight_scales, eps1, eps2, scale,
                            activation);
  convolve_by(block, packed, geometry, widths[0]);
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
  for_images(x.size(0), image_bytes, threads(), [&](int64_t first, int64_t count, char* projected) {
    block.images = count;
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

Tensor pack_depthwise(const Tensor& weight, const Optional& bias) {
  const DType dtype = linear::served_dtype("weight", weight);
  expect(weight.dim() == 4 && weight.size(0) > 0 && weight.size(1) == 1 && weight.size(2) == 3 && weight.size(3) == 3 &&
             weight.is_contiguous(),
         "weight", weight, "contiguous (channels, 1, 3, 3)");
  const int64_t channels = weight.size(0);
  if (bias.has_value()) {
    expect_sizes("bias", *bias, {channels}, weight.scalar_type(), weight, "contiguous (channels,)");
    expect(bias->is_contiguous(), "bias", *bias, "contiguous (channels,)");
  }
  const Tensor out = empty({kernels().packed_convolution_size(channels)}, ScalarType::Float, weight);
  kernels().pack_convolution(dtype, weight.const_data_ptr(), const_data_of(bias), 0, channels,
                             static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

// Fills in a reduction, whose linear layers go to `slices`.
void reduce_by(Block& block, DType dtype, const Tensors& reduction, const Tensors& vectors, const std::vector<double>& eps,
               std::vector<Linear>& slices) {
  block.ratio = static_cast<int64_t>(reduction.size());
  if (block.ratio == 0) return;
  expect(block.ratio <= std::min(block.height, block.width), "reduction", block.ratio, "at most the rows and columns of x, ",
         block.height, " × ", block.width);
  for (const Tensor& packed : reduction) {
    slices.push_back(linear::layer_of(dtype, packed, vectors[10], block.channels, block.ratio * block.channels));
  }
  block.reduction = slices.data();
  block.norm_kept = norm_of(vectors, 11, block.channels, eps[2]);
}

// Fills in a convolution of the hidden channels, which pack_depthwise has packed.
void convolve_by(Block& block, const Optional& conv) {
  if (!conv.has_value()) return;
  const int64_t hidden = block.fc1.outputs;
  expect(conv->scalar_type() == ScalarType::Float && conv->is_contiguous() &&
             conv->numel() == kernels().packed_convolution_size(hidden),
         "conv", *conv, "a convolution of the ", hidden, " hidden channels that pack_depthwise packed");
  block.conv = static_cast<const float*>(conv->const_data_ptr());
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

// Bands of images for the third step. Each is computed from its top by one thread, and the last ones, one for each thread, also
// from the bottom by a second thread, until they meet: there, few rows have their hidden channels made twice. `taken` has room
// for what both threads together have taken.
std::vector<Band> shared_bands(const Block& block, std::vector<int64_t>& taken) {
  const int64_t parts = std::min((threads_of_image(block) + 1) / 2, block.height), count = block.images * parts;
  const int64_t alone = threads() == 1 ? count : std::max<int64_t>(count - threads(), 0);
  std::vector<Band> bands;
  taken.resize(count);
  for (int64_t band = 0; band < count; band++) {
    const int64_t image = band / parts, part = band % parts;
    const Run run{image, block.height * part / parts, block.height * (part + 1) / parts};
    bands.push_back({run, band < alone ? nullptr : &taken[band], false});
  }
  for (int64_t band = alone; band < count; band++) bands.push_back({bands[band], &taken[band], true});
  return bands;
}

// The third step.
Step mix(DType dtype, Block& block, std::vector<int64_t>& taken) {
  std::vector<Band> bands;
  if (block.conv != nullptr && block.hidden == nullptr) {
    bands = shared_bands(block, taken);
  } else {
    const int64_t fewest = (kAtOnce + block.width - 1) / block.width, most = rows_together(block.width);
    const std::vector<Run> runs = block.conv == nullptr ? cut_tokens(block.images, block.queries)
                                                        : cut(block.images, block.height, fewest, most);
    for (const Run& run : runs) bands.push_back({run, nullptr, false});
  }
  return over(bands, block.band_rows, kernels().mix, dtype, block);
}

// Serves some images.
void serve(DType dtype, Block& block, const Bytes& bytes, char* between) {
  block.hidden = bytes.hidden == 0 ? nullptr : between;
  block.keys = between += block.images * bytes.hidden;
  block.values = between += block.images * bytes.keys;
  block.stream = between += block.images * bytes.keys;
  std::vector<int64_t> taken;
  for_steps({over(cut_tokens(block.images, kept_tokens(block)), block.group_rows, kernels().project, dtype, block),
             over(cut_tokens(block.images, block.queries), block.tile_rows, kernels().attend, dtype, block),
             mix(dtype, block, taken)});
}

Tensor pyramid_block(const Tensor& x, int64_t height, int64_t width, const Tensors& packed, const Tensors& reduction,
                     const Optional& conv, const Tensors& vectors, const Numbers& widths, const Tensors& weight_scales,
                     const std::vector<double>& eps, double scale, const std::string& activation, const Optional& rows) {
  const DType dtype = linear::served_dtype("x", x);
  expect_count("packed", packed, 6);
  expect_count("vectors", vectors, reduction.empty() ? 10 : 13);
  expect_count("eps", eps, reduction.empty() ? 2 : 3);
  std::vector<Linear> slices;
  Block block{};
  fill(block, dtype, x, height, width, 0, packed.data(), vectors, widths, weight_scales, eps[0], eps[1], scale, activation);
  reduce_by(block, dtype, reduction, vectors, eps, slices);
  convolve_by(block, conv);
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
  const int64_t row_bytes = x.element_size() * block.channels;
  const int64_t bytes = row_bytes * tokens_of(block), bytes_asking = row_bytes * block.queries;
  const Bytes of_image{holds_hidden(block) ? tokens_of(block) * kernels().hidden_bytes(dtype, block) : 0,
                       kept_tokens(block) * block.proj.inputs * transformer_block::kernels().element_bytes(dtype),
                       bytes_asking};
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const Workspace some(chosen == nullptr ? 0 : block.images * bytes_asking);
  const auto for_chosen = [&](const auto& f) {  // calls it with the places of rows of x, and of the tokens that are chosen of it
    for (int64_t i = 0; i < x.size(0) * block.queries; i++) {
      if (chosen[i] >= 0) f((i / block.queries * x.size(1) + chosen[i]) * row_bytes, i * row_bytes);
    }
  };
  if (chosen != nullptr) {
    std::memset(some.data(), 0, block.images * bytes_asking);
    for_chosen([&](int64_t row, int64_t place) { std::memcpy(some.data() + place, from + row, row_bytes); });
  }
  for_images(x.size(0), of_image.sum(), threads(), [&](int64_t first, int64_t count, char* between) {
    block.images = count;
    block.x = from + first * bytes;
    block.asking = chosen == nullptr ? block.x : some.data() + first * bytes_asking;
    block.out = chosen == nullptr ? to + first * bytes : some.data() + first * bytes_asking;
    serve(dtype, block, of_image, between);
  });
  if (chosen != nullptr) {
    std::memcpy(to, from, x.size(0) * bytes);
    for_chosen([&](int64_t row, int64_t place) { std::memcpy(to + row, some.data() + place, row_bytes); });
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

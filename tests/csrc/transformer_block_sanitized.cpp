// Runs the loops of csrc/transformer_block/cpu_loops.cpp, without torch, over odd sizes in buffers that end where the data
// does, and compares them with the formula. test_sanitized.py compiles them with AddressSanitizer and UBSan.
#include <algorithm>
#include <array>

#include "linear/cpu_loops.h"
#include "linear_int8/cpu_loops.h"
#include "sanitized.h"
#include "transformer_block/cpu_loops.h"

using namespace cvt_kernels;
using namespace sanitized;
using transformer_block::Activation;
using transformer_block::Block;
using transformer_block::Branch;
using transformer_block::Scored;
using transformer_block::tokens_of;

struct Geometry {
  int64_t kernel, stride, padding, dilation;
};

struct Sizes {
  int64_t height, width, class_tokens, channels, heads, head_dim, hidden, bands, tiles;
  Geometry queries, keys;
  Activation activation;
};

using Rows = std::vector<std::vector<double>>;

template <class T>
Rows rows_of(const T* data, int64_t rows, int64_t columns) {
  Rows made(rows, std::vector<double>(columns));
  for (auto& row : made) {
    for (double& x : row) x = load(data++);
  }
  return made;
}

// How the inputs of a layer are rounded: not at all, each row by its largest number, or all by one scale.

// A linear layer with random parameters.
template <class T>
struct RandomLinear {
  std::vector<T> weight;
  std::vector<float> bias;
  Memory packed;
  Linear linear;
  std::vector<float> scales;  // of a quantized weight

  RandomLinear(DType dtype, int64_t outputs, int64_t inputs)
      : weight(random_buffer<T>(outputs * inputs, 0.8 / std::sqrt(inputs))), bias(random_buffer<float>(outputs, 0.3)),
        packed(memory(linear::KERNELS.packed_bytes(dtype, outputs, inputs))),
        linear{packed.get(), bias.data(), inputs, outputs} {
    linear::KERNELS.pack(dtype, weight.data(), inputs, outputs, inputs, packed.get());
  }

  void quantize() {
    const auto& kernels = linear_int8::KERNELS;
    std::vector<int8_t> numbers(weight.size());
    scales = random_buffer<float>(linear.outputs, 0.2 / 127);
    for (size_t i = 0; i < weight.size(); i++) {
      const float scale = scales[i / linear.inputs];
      const float number = std::nearbyint(load(&weight[i]) / scale);
      numbers[i] = static_cast<int8_t>(std::max(-127.0f, std::min(127.0f, number)));
      store(&weight[i], numbers[i] * scale);
    }
    packed = memory(kernels.packed_bytes(linear.outputs, linear.inputs));
    kernels.pack(numbers.data(), linear.outputs, linear.inputs, packed.get());
    linear.weight = packed.get();
    linear.integers = &kernels;
    linear.weight_scales = scales.data();
  }

  std::vector<double> rounded(std::vector<double> row) const {
    if (linear.integers == nullptr) return row;
    double largest = 0;
    for (const double x : row) largest = std::max(largest, std::abs(x));
    const double scale = largest / 127;
    for (double& x : row) x = scale == 0 ? 0 : std::max(-127.0, std::min(127.0, std::nearbyint(x / scale))) * scale;
    return row;
  }

  Rows operator()(Rows rows) const {
    for (auto& row : rows) row = rounded(row);
    Rows out(rows.size(), std::vector<double>(bias.begin(), bias.end()));
    for (size_t row = 0; row < rows.size(); row++) {
      for (int64_t o = 0; o < linear.outputs; o++) {
        for (int64_t i = 0; i < linear.inputs; i++) out[row][o] += rows[row][i] * load(&weight[o * linear.inputs + i]);
      }
    }
    return out;
  }
};

struct RandomNorm {
  std::vector<float> weight, bias;
  Norm norm;

  explicit RandomNorm(int64_t channels)
      : weight(random_buffer<float>(channels)), bias(random_buffer<float>(channels, 0.5)),
        norm{weight.data(), bias.data(), 0.1f} {}

  Rows operator()(Rows rows) const {
    for (auto& row : rows) {
      double mean = 0, variance = 0;
      for (const double x : row) mean += x / row.size();
      for (const double x : row) variance += (x - mean) * (x - mean) / row.size();
      for (size_t i = 0; i < row.size(); i++) {
        row[i] = (row[i] - mean) / std::sqrt(variance + norm.eps) * weight[i] + bias[i];
      }
    }
    return rows;
  }
};

// A depthwise convolution with its BatchNorm.
template <class T>
struct RandomConvolution {
  std::vector<T> weight, scale, shift, mean, variance;
  std::vector<float> packed;
  Branch branch{};

  RandomConvolution(DType dtype, const Sizes& sizes, const Geometry& geometry)
      : weight(random_buffer<T>(sizes.channels * geometry.kernel * geometry.kernel, 1.0 / geometry.kernel)),
        scale(random_buffer<T>(sizes.channels)), shift(random_buffer<T>(sizes.channels)),
        mean(random_buffer<T>(sizes.channels)), variance(random_buffer<T>(sizes.channels)) {
    for (T& x : variance) store(&x, std::abs(load(&x)) + 0.5f);
    branch.weight = weight.data();
    branch.scale = scale.data(), branch.shift = shift.data();
    branch.mean = mean.data(), branch.variance = variance.data();
    branch.norm = dtype;
    branch.eps = 0.1;
    branch.kernel = geometry.kernel, branch.stride = geometry.stride;
    branch.padding = geometry.padding, branch.dilation = geometry.dilation;
    const int64_t reach = geometry.dilation * (geometry.kernel - 1) + 1;
    branch.height = (sizes.height + 2 * geometry.padding - reach) / geometry.stride + 1;
    branch.width = (sizes.width + 2 * geometry.padding - reach) / geometry.stride + 1;
    const auto& kernels = transformer_block::KERNELS;
    packed.resize(kernels.packed_convolution_size(geometry.kernel, sizes.channels));
    kernels.pack_convolution(dtype, branch, sizes.channels, packed.data());
  }

  Rows operator()(const Sizes& sizes, const Rows& rows) const {
    Rows out(rows.begin(), rows.begin() + sizes.class_tokens);
    for (int64_t place = 0; place < branch.height * branch.width; place++) {
      const int64_t top = place / branch.width * branch.stride - branch.padding;
      const int64_t left = place % branch.width * branch.stride - branch.padding;
      std::vector<double> token(sizes.channels);
      for (int64_t tap = 0; tap < branch.kernel * branch.kernel; tap++) {
        const int64_t y = top + tap / branch.kernel * branch.dilation, x = left + tap % branch.kernel * branch.dilation;
        if (y < 0 || y >= sizes.height || x < 0 || x >= sizes.width) continue;
        const auto& pixel = rows[sizes.class_tokens + y * sizes.width + x];
        for (int64_t c = 0; c < sizes.channels; c++) {
          token[c] += pixel[c] * load(&weight[c * branch.kernel * branch.kernel + tap]);
        }
      }
      for (int64_t c = 0; c < sizes.channels; c++) {
        const double factor = load(&scale[c]) / std::sqrt(load(&variance[c]) + branch.eps);
        token[c] = (token[c] - load(&mean[c])) * factor + load(&shift[c]);
      }
      out.push_back(token);
    }
    return out;
  }
};

// The probabilities of a head's keys.
std::vector<double> probabilities_of(const Sizes& sizes, double scale, int64_t head, const std::vector<double>& q,
                                     const Rows& k) {
  std::vector<double> shares(k.size());
  double total = 0;
  for (size_t key = 0; key < k.size(); key++) {
    double score = 0;
    for (int64_t d = head * sizes.head_dim; d < (head + 1) * sizes.head_dim; d++) score += q[d] * k[key][d];
    total += shares[key] = std::exp(scale * score);
  }
  for (double& share : shares) share /= total;
  return shares;
}

Rows attention_of(const Sizes& sizes, double scale, const Rows& q, const Rows& k, const Rows& v) {
  Rows out(q.size(), std::vector<double>(sizes.heads * sizes.head_dim));
  for (size_t query = 0; query < q.size(); query++) {
    for (int64_t head = 0; head < sizes.heads; head++) {
      const std::vector<double> shares = probabilities_of(sizes, scale, head, q[query], k);
      for (size_t key = 0; key < k.size(); key++) {
        for (int64_t d = head * sizes.head_dim; d < (head + 1) * sizes.head_dim; d++) out[query][d] += shares[key] * v[key][d];
      }
    }
  }
  return out;
}

// How much the class token, or the mean of the queries of other tokens, attends to each key; `rows` are the queries' tokens.
std::vector<double> scores_of(const Sizes& sizes, double scale, Scored scored, const std::vector<int64_t>& rows,
                              const Rows& q, const Rows& k) {
  std::vector<double> query(q[0].size()), scores(k.size());
  double count = 0;
  for (const int64_t row : rows) {
    if ((scored == Scored::mean) != (row >= sizes.class_tokens)) continue;
    for (size_t d = 0; d < query.size(); d++) query[d] += q[row][d];
    count++;
  }
  for (double& d : query) d /= std::max(count, 1.0);
  for (int64_t head = 0; head < sizes.heads; head++) {
    const std::vector<double> shares = probabilities_of(sizes, scale, head, query, k);
    for (size_t key = 0; key < k.size(); key++) scores[key] += shares[key];
  }
  return scores;
}

double activated(Activation activation, double x) {
  if (activation == Activation::none) return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
  if (activation == Activation::quick) return x / (1 + std::exp(-1.702 * x));
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

void add(Rows& rows, const Rows& others) {
  for (size_t row = 0; row < rows.size(); row++) {
    for (size_t i = 0; i < rows[row].size(); i++) rows[row][i] += others[row][i];
  }
}

// Which of Q, K, V, proj, fc1 and fc2 are quantized.
using Quantized = std::array<bool, 6>;

// The tokens of each image that are computed: all of them; or every second one, in the second image a token less.
enum class Chosen { all, some };

std::vector<std::vector<int64_t>> rows_of_images(Chosen chosen, int64_t images, int64_t tokens) {
  std::vector<std::vector<int64_t>> rows(images);
  for (int64_t image = 0; image < images; image++) {
    for (int64_t token = 0; token < tokens; token += chosen == Chosen::all ? 1 : 2) rows[image].push_back(token);
    if (chosen == Chosen::some && image == 1 && rows[image].size() > 2) rows[image].pop_back();
  }
  return rows;
}

template <class T>
void run(DType dtype, double tolerance, const Sizes& sizes, const Quantized& quantized = {}, Chosen chosen = Chosen::all) {
  const auto& kernels = transformer_block::KERNELS;
  const int64_t width = sizes.heads * sizes.head_dim, images = 2;
  const RandomNorm norm1(sizes.channels), norm2(sizes.channels);
  const RandomConvolution<T> convolutions[] = {{dtype, sizes, sizes.queries}, {dtype, sizes, sizes.keys},
                                               {dtype, sizes, sizes.keys}};
  RandomLinear<T> linears[] = {{dtype, width, sizes.channels}, {dtype, width, sizes.channels},
                                     {dtype, width, sizes.channels}};
  RandomLinear<T> proj(dtype, sizes.channels, width), fc1(dtype, sizes.hidden, sizes.channels),
      fc2(dtype, sizes.channels, sizes.hidden);
  RandomLinear<T>* layers[] = {&linears[0], &linears[1], &linears[2], &proj, &fc1, &fc2};
  for (int i = 0; i < 6; i++) {
    if (quantized[i]) layers[i]->quantize();
  }
  Block block{};
  block.images = images, block.class_tokens = sizes.class_tokens;
  block.height = sizes.height, block.width = sizes.width, block.channels = sizes.channels;
  block.norm1 = norm1.norm, block.norm2 = norm2.norm;
  block.proj = proj.linear, block.fc1 = fc1.linear, block.fc2 = fc2.linear;
  block.heads = sizes.heads, block.scale = 0.7, block.activation = sizes.activation;
  const std::vector<std::vector<int64_t>> rows = rows_of_images(chosen, images, tokens_of(block));
  std::vector<int64_t> all_rows;
  if (chosen == Chosen::some) {
    block.kept = rows[0].size();
    for (int64_t image = 0; image < images; image++) {
      all_rows.insert(all_rows.end(), rows[image].begin(), rows[image].end());
      all_rows.resize((image + 1) * block.kept, -1);
    }
    block.rows = all_rows.data();
  }
  Memory projected[3];
  for (int i = 0; i < 3; i++) block.linears[i] = linears[i].linear;
  for (int i = 0; i < 3; i++) {
    block.branches[i] = convolutions[i].branch;
    block.packed[i] = convolutions[i].packed.data();
    block.margin = std::max(block.margin, block.branches[i].padding);
    projected[i] = memory(images * transformer_block::projected_tokens(block, i) * width * kernels.element_bytes(dtype));
    block.projected[i] = projected[i].get();
  }
  const int64_t tokens = tokens_of(block);
  std::vector<T> x = random_buffer<T>(images * tokens * sizes.channels);
  const std::vector<T> before = x;
  block.x = x.data();
  std::vector<Run> runs = cut(images, sizes.height, sizes.bands);
  for (const Run& run : runs) {
    const transformer_block::Rows held = held_rows(block, run);
    block.band_rows = std::max(block.band_rows, held.end - held.begin);
  }
  for (size_t i = runs.size(); i-- > 0;) {  // in any order
    const Memory scratch = memory(kernels.project_bytes(dtype, block));
    kernels.project(dtype, block, runs[i], scratch.get());
  }
  const Scored scored[] = {Scored::mean, Scored::class_token};
  const int64_t keys = tokens_of(block, 1), queries_scored = 1 + sizes.class_tokens;
  std::vector<float> scores[] = {std::vector<float>(images * keys), std::vector<float>(images * keys)};
  for (int64_t query = 0; query < queries_scored; query++) {
    block.scored = scored[query], block.scores = scores[query].data();
    for (int64_t image = 0; image < images; image++) {
      const Memory scratch = memory(kernels.score_bytes(dtype, block));
      kernels.score(dtype, block, image, scratch.get());
    }
  }
  runs = cut(images, queries_of(block), std::min(sizes.tiles, queries_of(block)));
  block.tile_rows = longest(runs);
  const Memory scratch = memory(kernels.attend_bytes(dtype, block));
  int64_t previous = -1;
  for (const Run& run : runs) {
    kernels.attend(dtype, block, run, previous, scratch.get());
    previous = run.image;
  }

  for (int64_t image = 0; image < images; image++) {
    Rows expected = rows_of(&before[image * tokens * sizes.channels], tokens, sizes.channels);
    const Rows normal = norm1(expected);
    Rows q_k_v[3];
    for (int i = 0; i < 3; i++) q_k_v[i] = linears[i](convolutions[i](sizes, normal));
    add(expected, proj(attention_of(sizes, block.scale, q_k_v[0], q_k_v[1], q_k_v[2])));
    Rows hidden = fc1(norm2(expected));
    for (auto& row : hidden) {
      for (double& h : row) h = activated(sizes.activation, h);
    }
    add(expected, fc2(hidden));
    const Rows given = rows_of(&before[image * tokens * sizes.channels], tokens, sizes.channels);
    for (int64_t row = 0; row < tokens; row++) {
      if (std::find(rows[image].begin(), rows[image].end(), row) == rows[image].end()) expected[row] = given[row];
    }
    for (int64_t query = 0; query < queries_scored; query++) {
      const auto wanted = scores_of(sizes, block.scale, scored[query], rows[image], q_k_v[0], q_k_v[1]);
      for (int64_t key = 0; key < keys; key++) {
        expect_close("a score", scores[query][image * keys + key], wanted[key], tolerance);
      }
    }
    const Rows actual = rows_of(&x[image * tokens * sizes.channels], tokens, sizes.channels);
    for (int64_t row = 0; row < tokens; row++) {
      for (int64_t c = 0; c < sizes.channels; c++) {
        expect_close("a token", actual[row][c], expected[row][c], tolerance);
      }
    }
  }
}

int main() {
  constexpr Geometry kSame{3, 1, 1, 1}, kHalved{3, 2, 1, 1}, kPoint{1, 1, 0, 1};
  constexpr Sizes kSizes[] = {
      {1, 1, 1, 1, 1, 1, 1, 1, 1, kPoint, kPoint, Activation::none},
      {1, 1, 0, 18, 2, 3, 5, 1, 1, kSame, kHalved, Activation::tanh},
      {5, 7, 0, 37, 1, 37, 70, 3, 2, kSame, kHalved, Activation::none},
      {6, 5, 1, 19, 3, 11, 530, 1, 3, kSame, kHalved, Activation::quick},   // hidden channels in two parts
      {9, 14, 1, 5, 1, 17, 9, 2, 1, {5, 1, 2, 1}, {2, 3, 0, 2}, Activation::tanh},  // rows for several tiles
      {4, 3, 1, 33, 2, 32, 33, 4, 13, {3, 1, 2, 2}, kSame, Activation::none},  // a token per tile
  };
  for (const Sizes& sizes : kSizes) {
    run<float>(DType::float32, 1e-4, sizes);
    run<BFloat16>(DType::bfloat16, 0.1, sizes);
    run<Half>(DType::float16, 1e-2, sizes);
    run<float>(DType::float32, 1e-4, sizes, {}, Chosen::some);
    run<BFloat16>(DType::bfloat16, 0.1, sizes, {}, Chosen::some);
    run<Half>(DType::float16, 1e-2, sizes, {}, Chosen::some);
    // A number that lies between two integers may be rounded to the other one: the formula is in float64.
    run<float>(DType::float32, 0.1, sizes, {true, true, true, true, true, true});
    run<float>(DType::float32, 0.1, sizes, {true, false, true, true, false, true});
    run<float>(DType::float32, 0.1, sizes, {true, false, true, true, true, true}, Chosen::some);
    run<float>(DType::float32, 0.1, sizes, {false, true, false, false, true, false});
    run<BFloat16>(DType::bfloat16, 0.2, sizes, {true, true, true, true, true, true});
    run<BFloat16>(DType::bfloat16, 0.2, sizes, {true, false, true, true, false, true}, Chosen::some);
    run<Half>(DType::float16, 0.1, sizes, {true, false, true, true, true, false});
  }
  std::printf("done\n");
}

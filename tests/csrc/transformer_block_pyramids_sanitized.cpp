// Runs the loops of csrc/transformer_block/pyramid_cpu_loops.cpp, without torch, over odd sizes in buffers that end where the
// data does, and compares them with the formula. test_sanitized.py compiles them with AddressSanitizer and UBSan.
#include <algorithm>
#include <thread>

#include "linear/cpu_loops.h"
#include "sanitized.h"
#include "transformer_block/pyramid_cpu_loops.h"

using namespace cvt_kernels;
using namespace sanitized;
namespace pyramids = transformer_block::pyramids;
using transformer_block::Activation;
using pyramids::Block;
using pyramids::kept_grid;
using pyramids::kept_tokens;
using pyramids::mixed_grid;
using pyramids::tokens_of;

struct Sizes {
  int64_t height, width, channels, heads, head_dim, hidden, ratio, groups, tiles, bands;
  bool convolves;
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

// A linear layer with random parameters, packed in parts of its inputs.
template <class T>
struct RandomLinear {
  std::vector<T> weight;
  std::vector<float> bias;
  std::vector<Memory> packed;
  std::vector<Linear> parts;
  int64_t outputs, inputs;

  RandomLinear(DType dtype, int64_t outputs, int64_t inputs, int64_t count = 1)
      : weight(random_buffer<T>(outputs * inputs, 0.8 / std::sqrt(inputs))), bias(random_buffer<float>(outputs, 0.3)),
        outputs(outputs), inputs(inputs) {
    const auto& kernels = linear::KERNELS;
    const int64_t size = inputs / count;
    for (int64_t part = 0; part < count; part++) {
      packed.push_back(memory(kernels.packed_bytes(dtype, outputs, size)));
      kernels.pack(dtype, weight.data() + part * size, inputs, outputs, size, packed.back().get());
      parts.push_back({packed.back().get(), bias.data(), size, outputs});
    }
  }

  Rows operator()(const Rows& rows) const {
    Rows out(rows.size(), std::vector<double>(bias.begin(), bias.end()));
    for (size_t row = 0; row < rows.size(); row++) {
      for (int64_t o = 0; o < outputs; o++) {
        for (int64_t i = 0; i < inputs; i++) out[row][o] += rows[row][i] * load(&weight[o * inputs + i]);
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

Rows squares_of(const Sizes& sizes, const Rows& rows) {
  Rows squares;
  for (int64_t y = 0; y < sizes.height / sizes.ratio; y++) {
    for (int64_t x = 0; x < sizes.width / sizes.ratio; x++) {
      std::vector<double> square;
      for (int64_t i = 0; i < sizes.ratio * sizes.ratio; i++) {
        const auto& token = rows[(y * sizes.ratio + i / sizes.ratio) * sizes.width + x * sizes.ratio + i % sizes.ratio];
        square.insert(square.end(), token.begin(), token.end());
      }
      squares.push_back(square);
    }
  }
  return squares;
}

Rows attention_of(const Sizes& sizes, double scale, const Rows& q, const Rows& k, const Rows& v) {
  Rows out(q.size(), std::vector<double>(sizes.heads * sizes.head_dim));
  for (size_t query = 0; query < q.size(); query++) {
    for (int64_t first = 0; first < sizes.heads * sizes.head_dim; first += sizes.head_dim) {
      double total = 0;
      std::vector<double> sums(sizes.head_dim);
      for (size_t key = 0; key < k.size(); key++) {
        double score = 0;
        for (int64_t d = first; d < first + sizes.head_dim; d++) score += q[query][d] * k[key][d];
        const double share = std::exp(scale * score);
        total += share;
        for (int64_t d = 0; d < sizes.head_dim; d++) sums[d] += share * v[key][first + d];
      }
      for (int64_t d = 0; d < sizes.head_dim; d++) out[query][first + d] = sums[d] / total;
    }
  }
  return out;
}

template <class T>
Rows convolution_of(const Sizes& sizes, const Rows& rows, const std::vector<T>& weight, const std::vector<T>& bias) {
  Rows out(rows.size(), std::vector<double>(sizes.hidden));
  for (int64_t place = 0; place < sizes.height * sizes.width; place++) {
    for (int64_t c = 0; c < sizes.hidden; c++) out[place][c] = load(&bias[c]);
    for (int64_t tap = 0; tap < 9; tap++) {
      const int64_t y = place / sizes.width + tap / 3 - 1, x = place % sizes.width + tap % 3 - 1;
      if (y < 0 || y >= sizes.height || x < 0 || x >= sizes.width) continue;
      for (int64_t c = 0; c < sizes.hidden; c++) out[place][c] += rows[y * sizes.width + x][c] * load(&weight[c * 9 + tap]);
    }
  }
  return out;
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

// Who computes the rows of a band: one thread from the top, one from the bottom, or both until they meet.
enum class Sharing { none, upward, both };

void mix(DType dtype, const Block& block, const Run& run, Sharing sharing) {
  int64_t taken = 0;
  const auto serve = [&](bool upward) {
    const Memory scratch = memory(pyramids::KERNELS.mix_bytes(dtype, block));
    pyramids::KERNELS.mix(dtype, block, {run, sharing == Sharing::none ? nullptr : &taken, upward}, scratch.get());
  };
  if (sharing != Sharing::both) return serve(sharing == Sharing::upward);
  std::thread other(serve, true);
  serve(false);
  other.join();
  expect("all rows were taken", taken == run.end - run.begin);
}

template <class T>
void run(DType dtype, double tolerance, const Sizes& sizes, bool holds_hidden = false, Sharing sharing = Sharing::none) {
  const auto& kernels = pyramids::KERNELS;
  const int64_t width = sizes.heads * sizes.head_dim, images = 2, channels = sizes.channels;
  const RandomNorm norm1(channels), norm2(channels), norm_kept(channels);
  const RandomLinear<T> q(dtype, width, channels), k(dtype, width, channels), v(dtype, width, channels),
      proj(dtype, channels, width), fc1(dtype, sizes.hidden, channels), fc2(dtype, channels, sizes.hidden),
      reduction(dtype, channels, channels * std::max<int64_t>(1, sizes.ratio * sizes.ratio), std::max<int64_t>(1, sizes.ratio));
  const std::vector<T> taps = random_buffer<T>(sizes.hidden * 9, 0.3), bias = random_buffer<T>(sizes.hidden, 0.3);
  std::vector<float> packed(kernels.packed_convolution_size(sizes.hidden));
  kernels.pack_convolution(dtype, taps.data(), bias.data(), sizes.hidden, packed.data());
  const std::vector<T> x = random_buffer<T>(images * sizes.height * sizes.width * channels);
  std::vector<T> out(x.size()), stream(x.size());
  Block block{};
  block.x = block.asking = x.data(), block.out = out.data(), block.stream = stream.data();
  block.queries = sizes.height * sizes.width;
  block.images = images, block.height = sizes.height, block.width = sizes.width, block.channels = channels;
  block.norm1 = norm1.norm, block.norm2 = norm2.norm, block.norm_kept = norm_kept.norm;
  block.ratio = sizes.ratio, block.reduction = reduction.parts.data();
  block.linears[0] = q.parts[0], block.linears[1] = k.parts[0], block.linears[2] = v.parts[0];
  block.proj = proj.parts[0], block.fc1 = fc1.parts[0], block.fc2 = fc2.parts[0];
  block.heads = sizes.heads, block.scale = 0.7, block.activation = sizes.activation;
  block.conv = sizes.convolves ? packed.data() : nullptr;
  const Memory keys = memory(images * kept_tokens(block) * width * kernels.element_bytes(dtype));
  const Memory values = memory(images * kept_tokens(block) * width * kernels.element_bytes(dtype));
  block.keys = keys.get(), block.values = values.get();
  const Memory hidden = memory(images * tokens_of(block) * kernels.hidden_bytes(dtype, block));
  block.hidden = holds_hidden ? hidden.get() : nullptr;
  std::vector<Run> runs = cut(images, kept_tokens(block), sizes.groups);
  block.group_rows = longest(runs);
  for (size_t i = runs.size(); i-- > 0;) {  // in any order
    const Memory scratch = memory(kernels.project_bytes(dtype, block));
    kernels.project(dtype, block, runs[i], scratch.get());
  }
  runs = cut(images, tokens_of(block), sizes.tiles);
  block.tile_rows = longest(runs);
  const Memory scratch = memory(kernels.attend_bytes(dtype, block));
  int64_t previous = -1;
  for (const Run& run : runs) {
    kernels.attend(dtype, block, run, previous, scratch.get());
    previous = run.image;
  }
  runs = cut(images, mixed_grid(block).height, sizes.bands);
  block.band_rows = longest(runs);
  for (size_t i = runs.size(); i-- > 0;) mix(dtype, block, runs[i], sharing);

  const int64_t tokens = tokens_of(block);
  for (int64_t image = 0; image < images; image++) {
    Rows expected = rows_of(&x[image * tokens * channels], tokens, channels);
    const Rows normal = norm1(expected);
    const Rows kept = sizes.ratio == 0 ? normal : norm_kept(reduction(squares_of(sizes, normal)));
    add(expected, proj(attention_of(sizes, block.scale, q(normal), k(kept), v(kept))));
    Rows hidden = fc1(norm2(expected));
    if (sizes.convolves) hidden = convolution_of(sizes, hidden, taps, bias);
    for (auto& row : hidden) {
      for (double& h : row) h = activated(sizes.activation, h);
    }
    add(expected, fc2(hidden));
    const Rows actual = rows_of(&out[image * tokens * channels], tokens, channels);
    for (int64_t row = 0; row < tokens; row++) {
      for (int64_t c = 0; c < channels; c++) expect_close("a token", actual[row][c], expected[row][c], tolerance);
    }
  }
}

int main() {
  constexpr Sizes kSizes[] = {
      {1, 1, 1, 1, 1, 1, 0, 1, 1, 1, true, Activation::none},
      {1, 7, 5, 1, 3, 9, 1, 1, 7, 1, true, Activation::quick},
      {5, 7, 17, 2, 11, 530, 2, 2, 2, 2, true, Activation::none},   // hidden channels in two parts
      {9, 38, 3, 1, 5, 21, 3, 3, 4, 1, true, Activation::tanh},     // steps of rows in a band
      {8, 3, 33, 3, 7, 33, 0, 8, 1, 5, true, Activation::none},     // bands of one row and of two
      {4, 130, 2, 1, 2, 3, 4, 1, 5, 3, true, Activation::none},     // rows of more tokens than pass together
      {11, 12, 19, 1, 19, 37, 5, 2, 3, 2, false, Activation::tanh},  // no convolution
  };
  for (const Sizes& sizes : kSizes) {
    run<float>(DType::float32, 1e-4, sizes);
    run<BFloat16>(DType::bfloat16, 0.15, sizes);
    run<Half>(DType::float16, 1e-2, sizes);
    if (sizes.convolves) run<float>(DType::float32, 1e-4, sizes, true);
    if (sizes.convolves) run<BFloat16>(DType::bfloat16, 0.15, sizes, true);
    for (const Sharing sharing : {Sharing::upward, Sharing::both}) {
      run<float>(DType::float32, 1e-4, sizes, false, sharing);
      run<BFloat16>(DType::bfloat16, 0.15, sizes, false, sharing);
    }
  }
  std::printf("done\n");
}

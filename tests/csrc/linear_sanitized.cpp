// Runs the products of csrc/common/product.h and the linear layers of csrc/linear over odd sizes, without torch, in buffers
// that end where the data does, and compares them with the formula. test_sanitized.py compiles them with AddressSanitizer and
// UBSan. With -DKERNELS_TILES the products pass through emulated tiles of AMX, whose arithmetic is tested too.
#include "linear/cpu_loops.h"
#include "linear/layer_loops.h"
#include "sanitized.h"

using namespace cvt_kernels;
using namespace sanitized;

// A linear layer with random parameters, on `rows` random rows.
template <class T>
struct Layer {
  using E = Element<T>;

  int64_t rows, outputs, inputs, weight_stride, stride, depth;
  std::vector<T> weight;
  std::vector<float> bias;
  std::vector<E> a;
  Memory packed;
  Linear linear;

  Layer(DType dtype, int64_t rows, int64_t outputs, int64_t inputs)
      : rows(rows), outputs(outputs), inputs(inputs), weight_stride(inputs + 3), stride(stride_of<E>(inputs)),
        depth(ceil_div(inputs, kDepth<E>)), weight(random_buffer<T>((outputs - 1) * weight_stride + inputs)),
        bias(random_buffer<float>(outputs)), a(random_buffer<E>((rows - 1) * stride + depth * kDepth<E>)),
        packed(memory(linear::KERNELS.packed_bytes(dtype, outputs, inputs))),
        linear{packed.get(), bias.data(), inputs, outputs} {
    linear::KERNELS.pack(dtype, weight.data(), weight_stride, outputs, inputs, packed.get());
    pad_rows(a.data(), rows, stride, inputs);
  }

  double product(int64_t row, int64_t output) const {
    double sum = 0;
    for (int64_t d = 0; d < inputs; d++) {
      sum += static_cast<double>(load(&a[row * stride + d])) * load(&weight[output * weight_stride + d]);
    }
    return sum;
  }

  // The results for some of the rows, which need not begin where tiles do.
  std::vector<float> results(int64_t first, int64_t count) const {
    std::vector<float> tile(count * kColumns), out(count * outputs);
    apply(linear, 0, outputs, a.data() + first * stride, stride, count, tile.data(),
          [&](int64_t row, int64_t output, F sums, auto lanes) { store(&out[row * outputs + output], sums, lanes); });
    return out;
  }

  // The first panel's products, added to `sums`.
  void add_panel(std::vector<float>& sums) const {
    const Factor<E>* weights = static_cast<const Factor<E>*>(linear.weight);
    const auto add = [&](auto vectors) {
      multiply<vectors>(factors(a.data()), stride / kDepth<E>, rows, weights, depth, sums.data(), kColumns, true);
    };
    if (outputs > kLanes) add(std::integral_constant<int, 2>{});
    else add(std::integral_constant<int, 1>{});
  }
};

template <class T>
void run(DType dtype, int64_t rows, int64_t outputs, int64_t inputs) {
  const TileUse tiles;
  const Layer<T> layer(dtype, rows, outputs, inputs);
  const std::vector<float> out = layer.results(0, rows);
  const double tolerance = 2e-6 * (inputs + 1);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t output = 0; output < outputs; output++) {
      const double expected = layer.product(row, output) + layer.bias[output];
      expect_close("a linear layer", out[row * outputs + output], expected, tolerance);
    }
  }

  const int64_t middle = rows / 3;  // how rows are cut into parts must change nothing
  std::vector<float> parts = layer.results(0, middle), rest = layer.results(middle, rows - middle);
  parts.insert(parts.end(), rest.begin(), rest.end());
  expect("a row depends on the number of rows", std::memcmp(out.data(), parts.data(), out.size() * sizeof(float)) == 0);

  std::vector<float> sums((rows - 1) * kColumns + (outputs > kLanes ? 2 : 1) * kLanes, 1.0f);
  layer.add_panel(sums);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t i = 0; i < at_most<int64_t>(outputs, kColumns); i++) {
      expect_close("a product that is added", sums[row * kColumns + i], 1 + layer.product(row, i), tolerance);
    }
  }
}

#ifdef KERNELS_TILES

uint32_t pair(float first, float second) {
  BFloat16 both[2];
  store(&both[0], first), store(&both[1], second);
  return both[0].bits | uint32_t{both[1].bits} << 16;
}

// One sum of `depth` pairs, as TDPBF16PS makes it.
float emulated_sum(float before, std::vector<uint32_t> a, std::vector<uint32_t> b) {
  const int depth = static_cast<int>(a.size());
  TileUse::configure({1, depth});
  std::vector<uint32_t> right(depth * kTileSide);  // the other columns are 0
  for (int d = 0; d < depth; d++) right[d * kTileSide] = b[d];
  float sums[kTileSide] = {before};
  load_tile<0>(sums, sizeof sums);
  load_tile<5>(a.data(), 0);
  load_tile<7>(right.data(), kTileSide * sizeof(uint32_t));
  multiply_tile<Pair, 0, 5, 7>();
  store_tile<0>(sums, sizeof sums);
  for (int i = 1; i < kTileSide; i++) expect("a column that should be 0", sums[i] == 0);
  return sums[0];
}

void check_emulation() {
  const TileUse tiles;
  const float tiny = 0x1p-30f, big = 0x1p30f, small = 0x1p-63f;
  // First numbers and second ones are summed apart, and both before they meet the sum so far.
  expect("sums of their own", emulated_sum(0, {pair(big, 1), pair(-big, 1)}, {pair(1, 1), pair(1, 1)}) == 2);
  expect("the sum so far comes last", emulated_sum(big, {pair(1, -1)}, {pair(big, big)}) == big);
  expect("fused", emulated_sum(0, {pair(1 + 0x1p-7f, 0), pair(-1, 0)}, {pair(1 + 0x1p-7f, 0), pair(1, 0)}) ==
                      0x1p-6f + 0x1p-14f);
  expect("ties to even", emulated_sum(0x1p24f, {pair(1, 0)}, {pair(1, 0)}) == 0x1p24f);
  // Numbers below 2^-126 count as 0, as factors, sums and results.
  expect("a factor", emulated_sum(0, {pair(0x1p-127f, 0)}, {pair(big, 0)}) == 0);
  expect("a sum", emulated_sum(0x1p-127f, {pair(0, 0)}, {pair(1, 0)}) == 0);
  expect("a product", emulated_sum(0, {pair(small * tiny, 0)}, {pair(small, 0)}) == 0);
  expect("the smallest that counts", emulated_sum(0, {pair(small, 0)}, {pair(small, 0)}) == 0x1p-126f);
}

void check_that_tiles_are_released() { expect("tiles are left in use", emulated.config.palette == 0); }

#else
void check_emulation() {}
void check_that_tiles_are_released() {}
#endif

int main() {
  check_emulation();
  for (const int64_t rows : {1, 5, 16, 17, 33, 40}) {
    for (const int64_t outputs : {1, 16, 37}) {
      for (const int64_t inputs : {1, 31, 32, 70, 132}) {
        run<float>(DType::float32, rows, outputs, inputs);
        run<BFloat16>(DType::bfloat16, rows, outputs, inputs);
        check_that_tiles_are_released();
        if (rows == 5) run<Half>(DType::float16, rows, outputs, inputs);
      }
    }
  }
  expect("products in tiles", linear::KERNELS.products_are_right());
  std::printf("done\n");
}

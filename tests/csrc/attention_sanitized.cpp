// Runs the loops of csrc/attention/cpu_loops.cpp, without torch, over odd sizes in buffers that end where the data does,
// and compares them with the formula. test_sanitized.py compiles both with AddressSanitizer and UBSan.
#include "attention/cpu_loops.h"
#include "sanitized.h"

using namespace cvt_kernels;
using namespace sanitized;
using attention::Forward;

template <class T>
double number(const attention::Strided& t, int64_t image, int64_t token, int64_t head, int64_t channel) {
  return load(static_cast<const T*>(t.data) + image * t.batch + token * t.token + head * t.head + channel);
}

// The bias of a query and a key, from a table that is not packed.
double bias_of(const Forward& call, const std::vector<double>& table, int64_t image, int64_t head, int64_t query,
               int64_t key) {
  if (call.position == nullptr) return 0;
  const attention::PositionGrids& g = call.position->grids;
  const int64_t* rows = call.position->rows;
  const int64_t token = (rows == nullptr ? query : rows[image * call.queries + query]) - g.class_tokens;
  const int64_t place = key - g.class_tokens;
  if (token < 0 || place < 0) return 0;
  const int64_t down = token / g.width - g.stride * (place / g.key_width - g.key_height + 1);
  const int64_t across = token % g.width - g.stride * (place % g.key_width - g.key_width + 1);
  return table[(head * g.table_height() + down) * g.table_width() + across];
}

template <class T>
void compare(const Forward& call, const std::vector<T>& out, double tolerance, const std::vector<double>& table = {}) {
  for (int64_t row = 0; row < call.batch * call.queries * call.heads; row++) {
    const int64_t head = row % call.heads, query = row / call.heads % call.queries;
    const int64_t image = row / call.heads / call.queries;
    std::vector<double> weights(call.keys);
    double total = 0;
    for (int64_t key = 0; key < call.keys; key++) {
      double score = 0;
      for (int64_t d = 0; d < call.head_dim; d++) {
        score += number<T>(call.q, image, query, head, d) * number<T>(call.k, image, key, head, d);
      }
      total += weights[key] = std::exp(call.scale * score + bias_of(call, table, image, head, query, key));
    }
    for (int64_t d = 0; d < call.head_dim; d++) {
      double expected = 0;
      for (int64_t key = 0; key < call.keys; key++) {
        expected += weights[key] / total * number<T>(call.v, image, key, head, d);
      }
      expect_close("a channel", load(&out[row * call.head_dim + d]), expected, tolerance);
    }
  }
}

constexpr int64_t kBatch = 2, kHeads = 2;

template <class T>
void run(DType dtype, double tolerance, int64_t queries, int64_t keys, int64_t head_dim,
         const attention::Position* position = nullptr, const std::vector<double>& table = {}) {
  const int64_t batch = kBatch, heads = kHeads, token = heads * head_dim + 3;
  const auto q = random_buffer<T>(batch * queries * token - 3), k = random_buffer<T>(batch * keys * token - 3),
             v = random_buffer<T>(batch * keys * token - 3);
  std::vector<T> out(batch * queries * heads * head_dim);
  const Forward call{.q = {q.data(), queries * token, token, head_dim},
                     .k = {k.data(), keys * token, token, head_dim},
                     .v = {v.data(), keys * token, token, head_dim},
                     .batch = batch,
                     .queries = queries,
                     .keys = keys,
                     .heads = heads,
                     .head_dim = head_dim,
                     .scale = queries % 2 == 0 ? 0.3 : -0.3,
                     .out = out.data(),
                     .position = position};
  const Memory scratch = memory(attention::KERNELS.scratch_bytes(dtype, call));
  const int64_t tiles = batch * heads * attention::tiles_of(queries);
  attention::KERNELS.forward(dtype, call, 0, 1, scratch.get());
  attention::KERNELS.forward(dtype, call, 1, tiles, scratch.get());
  compare(call, out, tolerance, table);
}

// Attention with a table, of all tokens or of every other one and one that has no place.
template <class T>
void run_with_table(DType dtype, double tolerance, attention::PositionGrids grids, bool every_other) {
  using A = Accumulator<T>;
  const int64_t tokens = grids.height * grids.width + grids.class_tokens;
  const int64_t queries = every_other ? tokens / 2 + 1 : tokens;
  const attention::Scale scale = attention::split(queries % 2 == 0 ? 0.3 : -0.3);  // as run has it
  std::vector<int64_t> rows;
  for (int64_t i = 0; every_other && i < kBatch * queries; i++) {
    rows.push_back(i % queries < tokens / 2 ? 2 * (i % queries) : -1);
  }
  const int64_t table_size = grids.table_height() * grids.table_width(), size = grids.packed_size();
  const auto numbers = random_buffer<A>(kHeads * table_size);
  std::vector<A> packed(kHeads * size + attention::kPackedPadding);
  for (int64_t head = 0; head < kHeads; head++) {
    const A* table = numbers.data() + head * table_size;
    attention::pack_table<A>(table, grids, static_cast<A>(scale.of_scores), &packed[head * size]);
  }
  const attention::Position position{grids, packed.data(), every_other ? rows.data() : nullptr};
  const int64_t keys = grids.key_height * grids.key_width + grids.class_tokens;
  run<T>(dtype, tolerance, queries, keys, 16, &position, std::vector<double>(numbers.begin(), numbers.end()));
}

int main() {
  for (const int64_t queries : {1, 32, 35}) {
    for (const int64_t keys : {1, 9, 50, 530}) {
      for (const int64_t head_dim : {1, 7, 16, 36, 256}) {
        if (keys * head_dim > 13000) continue;  // time
        run<float>(DType::float32, 2e-5, queries, keys, head_dim);
        run<double>(DType::float64, 1e-12, queries, keys, head_dim);
        run<BFloat16>(DType::bfloat16, 3e-2, queries, keys, head_dim);
        run<Half>(DType::float16, 3e-3, queries, keys, head_dim);
      }
    }
  }
  for (const attention::PositionGrids grids :
       {attention::PositionGrids{4, 6, 2, 3, 2, 0}, {5, 7, 3, 4, 2, 1}, {6, 41, 6, 41, 1, 1}, {7, 4, 3, 2, 3, 0}}) {
    for (const bool every_other : {false, true}) {
      run_with_table<float>(DType::float32, 2e-5, grids, every_other);
      run_with_table<double>(DType::float64, 1e-12, grids, every_other);
      run_with_table<BFloat16>(DType::bfloat16, 3e-2, grids, every_other);
      run_with_table<Half>(DType::float16, 3e-3, grids, every_other);
    }
  }
  std::printf("done\n");
}

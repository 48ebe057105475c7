// Runs the loops of csrc/attention/cpu_loops.cpp, without torch, over odd sizes in buffers that end where the data does,
// and compares them with the formula. tests/checks.py compiles both with AddressSanitizer and UBSan.
#include "attention/cpu_loops.h"
#include "sanitized.h"

using namespace cvt_kernels;
using namespace sanitized;
using attention::Forward;

template <class T>
double number(const attention::Strided& t, int64_t image, int64_t token, int64_t head, int64_t channel) {
  return load(static_cast<const T*>(t.data) + image * t.batch + token * t.token + head * t.head + channel);
}

template <class T>
void compare(const Forward& call, const std::vector<T>& out, double tolerance) {
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
      total += weights[key] = std::exp(call.scale * score);
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

template <class T>
void run(DType dtype, double tolerance, int64_t queries, int64_t keys, int64_t head_dim) {
  const int64_t batch = 2, heads = 2, token = heads * head_dim + 3;
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
                     .out = out.data()};
  const Memory scratch = memory(attention::KERNELS.scratch_bytes(dtype, call));
  const int64_t tiles = batch * heads * attention::tiles_of(queries);
  attention::KERNELS.forward(dtype, call, 0, 1, scratch.get());
  attention::KERNELS.forward(dtype, call, 1, tiles, scratch.get());
  compare(call, out, tolerance);
}

int main() {
  for (const int64_t queries : {1, 32, 35}) {
    for (const int64_t keys : {1, 9, 50, 530}) {
      for (const int64_t head_dim : {1, 7, 16, 36, 256}) {
        if (keys * head_dim > 20000) continue;  // time
        run<float>(DType::float32, 2e-5, queries, keys, head_dim);
        run<double>(DType::float64, 1e-12, queries, keys, head_dim);
        run<BFloat16>(DType::bfloat16, 3e-2, queries, keys, head_dim);
        run<Half>(DType::float16, 3e-3, queries, keys, head_dim);
      }
    }
  }
  std::printf("done\n");
}

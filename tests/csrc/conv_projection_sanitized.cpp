// Runs the loops of csrc/conv_projection/cpu_loops.cpp, without torch, over odd sizes in buffers that end where the data
// does. test_sanitized.py compiles both with AddressSanitizer and UBSan, with KERNELS naming the table. Every output starts
// as NaN and must not be NaN at the end.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common/half.h"
#include "conv_projection/cpu_loops.h"

using namespace cvt_kernels;
using namespace cvt_kernels::conv_projection;

struct Geometry {
  int64_t kernel, stride, padding, dilation;
};

template <class T>
std::vector<T> buffer(int64_t size, float value) {
  std::vector<T> made(size);
  for (int64_t i = 0; i < size; i++) store(&made[i], static_cast<Accumulator<T>>(value + 0.37f * (i % 11)));
  return made;
}

template <class T>
void check(const std::vector<T>& values) {
  for (const T& value : values) {
    if (std::isnan(load(&value))) {
      std::printf("a value was not written, or read where there is none\n");
      std::exit(1);
    }
  }
}

// Runs the loops of training; the outputs serve as their gradients.
template <class T>
void train(DType dtype, Projection forward, int64_t tokens) {
  using A = Accumulator<T>;
  const int64_t units = (forward.channels + forward.block - 1) / forward.block * forward.batch;
  const auto vectors = buffer<A>(forward.channels, 0.5f);
  std::vector<BranchGradient> gradients;
  int64_t taps = 0;
  for (const Branch* branch = forward.branches; branch < forward.branches + forward.count; branch++) {
    const A* means = branch->stride == 1 ? nullptr : vectors.data();  // null where the statistics are constants
    gradients.push_back({branch->out, means, means, vectors.data()});
    taps += branch->kernel * branch->kernel;
  }
  auto dx = buffer<T>(forward.batch * tokens * forward.channels, NAN);
  const auto serve = [&](auto kind, int64_t quantities, auto loops) {
    using Q = decltype(kind);
    auto sums = buffer<Q>(forward.batch * quantities * forward.channels, NAN);
    const Training call{forward, gradients.data(), dx.data(), sums.data(), quantities};
    for (int64_t unit = 0; unit < units; unit += 3) {
      const int64_t own = quantities * forward.block * sizeof(Q) / sizeof(A);
      std::vector<A> scratch(own + scratch_size(forward, 2), std::nanf(""));
      loops(dtype, call, unit, std::min(units, unit + 3), scratch.data());
    }
    check(sums);
  };
  serve(double{}, 2 * forward.count, KERNELS.statistics);
  serve(A{}, 2 * forward.count, KERNELS.sums);
  serve(A{}, taps, KERNELS.gradients);
  check(dx);
}

template <class T>
void run(DType dtype, int64_t height, int64_t width, int64_t channels, int64_t class_tokens, int64_t block, int64_t bands,
         const std::vector<Geometry>& geometries) {
  using A = Accumulator<T>;
  const int64_t batch = 2, tokens = class_tokens + height * width;
  const auto x = buffer<T>(batch * tokens * channels, -2);
  const DType accumulator = dtype == DType::float64 ? DType::float64 : DType::float32;
  const auto norm = buffer<A>(channels, 0.5f);
  std::vector<std::vector<T>> weights, outs;
  std::vector<Branch> branches;
  int64_t margin = 0, held = 1;
  for (const Geometry& g : geometries) {
    const int64_t reach = g.dilation * (g.kernel - 1) + 1;
    const int64_t rows = (height + 2 * g.padding - reach) / g.stride + 1;
    const int64_t columns = (width + 2 * g.padding - reach) / g.stride + 1;
    weights.push_back(buffer<T>(channels * g.kernel * g.kernel, -1));
    outs.push_back(buffer<T>(batch * (class_tokens + rows * columns) * channels, NAN));
    branches.push_back({weights.back().data(), g.stride == 1 ? norm.data() : nullptr, g.stride == 1 ? norm.data() : nullptr,
                        norm.data(), norm.data(), accumulator, 1e-5, g.kernel, g.stride, g.padding, g.dilation, rows,
                        columns, outs.back().data()});
    margin = std::max(margin, g.padding);
    held = std::max(held, reach);
  }
  const Projection call{x.data(), tokens * channels, channels, batch,  class_tokens,
                        height,   width,             channels, branches.data(), static_cast<int64_t>(branches.size()),
                        block,    bands,             margin,   std::min(held, height)};
  const int64_t size = scratch_size(call, 1);
  const int64_t units = (channels + block - 1) / block * batch * bands;
  for (int64_t unit = 0; unit < units; unit += 3) {
    std::vector<A> scratch(size, std::nanf(""));
    KERNELS.project(dtype, call, unit, std::min(units, unit + 3), scratch.data());
  }
  for (const auto& out : outs) check(out);
  train<T>(dtype, call, tokens);
}

int main() {
  const std::vector<Geometry> cvt{{3, 1, 1, 1}, {3, 2, 1, 1}, {3, 2, 1, 1}};
  const std::vector<Geometry> odd{{1, 1, 0, 1}, {2, 3, 2, 1}, {3, 1, 2, 2}, {4, 5, 3, 1}};
  for (const int64_t channels : {1, 17, 37}) {
    for (const int64_t class_tokens : {0, 1}) {
      for (const int64_t block : {16, 48}) {
        const int64_t bands = class_tokens == (block == 16) ? 1 : 3;
        const auto call = [&](auto type, DType dtype) {
          using T = decltype(type);
          run<T>(dtype, 1, 1, channels, class_tokens, block, 1, cvt);
          run<T>(dtype, 4, 16, channels, class_tokens, block, bands, cvt);
          run<T>(dtype, 5, 3, channels, class_tokens, block, bands, cvt);
          run<T>(dtype, 3, 6, channels, class_tokens, block, bands, odd);
        };
        call(double{}, DType::float64);
        call(float{}, DType::float32);
        call(BFloat16{}, DType::bfloat16);
        call(Half{}, DType::float16);
      }
    }
  }
  std::puts("done");
}

// The loops on rows of tokens on the CPU. setup.py compiles this file once per instruction set, with KERNELS naming the
// table it fills; it includes nothing whose code the linker could merge between them.

#include "rows/cpu_loops.h"

#include "layer_norm_gelu/moments.h"

namespace cvt_kernels::rows {
namespace {

using layer_norm_gelu::statistics;

template <class T, class A = Accumulator<T>>
void add_rows(const T* a, const T* b, int64_t size, T* out) {
  for_vectors<Vector<A>::lanes>(size, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
    store(out + c, load(a + c, lanes) + load(b + c, lanes), lanes);
  });
}

// h, rounded to its type, as accumulators: they lie in `scratch` unless h is of that type already.
template <class T, class A = Accumulator<T>>
const A* accumulators(const T* h, int64_t channels, [[maybe_unused]] A* scratch) {
  if constexpr (std::is_same_v<T, A>) {
    return h;
  } else {
    for_vectors<Vector<A>::lanes>(channels, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
      store(scratch + c, load(h + c, lanes), lanes);
    });
    return scratch;
  }
}

template <class T, class A = Accumulator<T>>
void normalize(const Gather& call, int64_t row, A* scratch) {
  using F = Vector<A>;
  const int64_t channels = call.channels;
  const A* weight = static_cast<const A*>(call.weight);
  const A* bias = static_cast<const A*>(call.bias);
  const A* h = accumulators(static_cast<const T*>(call.h) + row * channels, channels, scratch);
  const auto of_row = statistics(h, channels);
  const A rstd = 1 / std::sqrt(of_row.variance + static_cast<A>(call.eps));
  const F origin = of_row.origin, scale = rstd, shift = -of_row.shift * rstd;
  T* out = static_cast<T*>(call.out) + row * channels;
  for_vectors<F::lanes>(channels, [&](int64_t c, auto lanes, int) LAMBDA_INLINE {
    const F normal = (load(h + c, lanes) - origin) * scale + shift;
    store(out + c, normal * load(weight + c, lanes) + load(bias + c, lanes), lanes);
  });
  if (call.mean != nullptr) {
    static_cast<A*>(call.mean)[row] = of_row.origin + of_row.shift;
    static_cast<A*>(call.rstd)[row] = rstd;
  }
}

template <class T>
void gather_rows(const Gather& call, int64_t begin, int64_t end, Accumulator<T>* scratch) {
  for (int64_t row = begin; row < end; row++) {
    const int64_t token = call.index[row], offset = row * call.channels;
    const T* branch = static_cast<const T*>(call.branch) + offset;
    T* h = static_cast<T*>(call.h) + offset;
    if (token < 0) {
      std::memcpy(h, branch, call.channels * sizeof(T));
    } else {
      const T* x = static_cast<const T*>(call.x) + row / call.count * call.image_stride + token * call.token_stride;
      add_rows(x, branch, call.channels, h);
    }
    normalize<T>(call, row, scratch);
  }
}

void gather_add_layer_norm(DType dtype, const Gather& call, int64_t begin, int64_t end, void* scratch) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    gather_rows<T>(call, begin, end, static_cast<Accumulator<T>*>(scratch));
  });
}

void add(DType dtype, const void* a, const void* b, int64_t size, void* out) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    add_rows(static_cast<const T*>(a), static_cast<const T*>(b), size, static_cast<T*>(out));
  });
}

}  // namespace

const Kernels KERNELS{gather_add_layer_norm, add};

}  // namespace cvt_kernels::rows

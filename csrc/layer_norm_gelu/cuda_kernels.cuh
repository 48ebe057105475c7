// The CUDA kernels of LayerNorm and GELU, without their launches, so that they also compile for the host, where the tests
// run them (tests/csrc/simt.h).
//
// Bytes move once: a row is read into registers, reduced there by warp shuffles (across warps, for rows that one warp does
// not hold, through shared memory) and written. Statistics and sums are float. Sums over rows: each block keeps
// its own in registers while it walks over its rows, adds those of its threads in fixed order and writes them out;
// sum_over_blocks_kernel adds the blocks', again in fixed order. Nothing is atomic: the same bits every time.
#pragma once

#include <iterator>
#include <utility>

#include "common/half.h"
#include "layer_norm_gelu/activation.h"
#include "layer_norm_gelu/cuda_launches.h"

namespace cvt_kernels::layer_norm_gelu::cuda {

constexpr unsigned kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

template <class T>
constexpr Precision kPrecision = std::is_same_v<T, float> ? Precision::full : Precision::half;

// Vectors of values -----------------------------------------------------------------------------------------

__device__ __forceinline__ void unpack(uint32_t bits, BFloat16, float& low, float& high) {
  low = float_of_bfloat16(bits);
  high = float_of(bits & 0xffff0000u);
}

__device__ __forceinline__ void unpack(uint32_t bits, Half, float& low, float& high) {
#ifdef __CUDA_ARCH__
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
      : "=f"(low), "=f"(high)
      : "r"(bits));
#else
  low = float_of_half(bits & 0xffffu);
  high = float_of_half(bits >> 16);
#endif
}

__device__ __forceinline__ uint32_t pack(float low, float high, BFloat16) {
  uint32_t bits;
#ifdef __CUDA_ARCH__
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
  bits = bfloat16_of(low) | bfloat16_of(high) << 16;
#endif
  return bits;
}

__device__ __forceinline__ uint32_t pack(float low, float high, Half) {
  uint32_t bits;
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
  bits = half_of(low) | half_of(high) << 16;
#endif
  return bits;
}

// Reads VECTOR adjacent values, by one access of 16 bytes, or a single value.
template <int VECTOR, class T>
__device__ __forceinline__ void read(float (&values)[VECTOR], const T* from) {
  if constexpr (VECTOR == 1) {
    if constexpr (std::is_same_v<T, float>) {
      values[0] = *from;
    } else {
      float unused;
      unpack(from->bits, T{}, values[0], unused);
    }
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < VECTOR; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
    }
  } else {
    static_assert(VECTOR == 8);
    const uint4 eight = *reinterpret_cast<const uint4*>(from);
    unpack(eight.x, T{}, values[0], values[1]);
    unpack(eight.y, T{}, values[2], values[3]);
    unpack(eight.z, T{}, values[4], values[5]);
    unpack(eight.w, T{}, values[6], values[7]);
  }
}

// Writes as read() reads, and rounds `values` to what is stored.
template <int VECTOR, class T>
__device__ __forceinline__ void write(T* to, float (&values)[VECTOR]) {
  if constexpr (VECTOR == 1) {
    if constexpr (std::is_same_v<T, float>) {
      *to = values[0];
    } else {
      const uint32_t bits = pack(values[0], 0.0f, T{});
      to->bits = static_cast<uint16_t>(bits);
      float unused;
      unpack(bits, T{}, values[0], unused);
    }
  } else if constexpr (std::is_same_v<T, float>) {
    static_assert(VECTOR == 4);
    *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
  } else {
    static_assert(VECTOR == 8);
    const uint4 eight = make_uint4(pack(values[0], values[1], T{}), pack(values[2], values[3], T{}),
                                   pack(values[4], values[5], T{}), pack(values[6], values[7], T{}));
    *reinterpret_cast<uint4*>(to) = eight;
    unpack(eight.x, T{}, values[0], values[1]);
    unpack(eight.y, T{}, values[2], values[3]);
    unpack(eight.z, T{}, values[4], values[5]);
    unpack(eight.w, T{}, values[6], values[7]);
  }
}

// Reads adjacent values of weight or bias; they are `absent` if there is none.
template <int VECTOR, class T>
__device__ __forceinline__ void read_parameter(float (&values)[VECTOR], const void* from, int channel, bool is_float,
                                               float absent) {
  if (from == nullptr) {
#pragma unroll
    for (float& value : values) value = absent;
  } else if (is_float) {
    read<VECTOR>(values, static_cast<const float*>(from) + channel);
  } else {
    read<VECTOR>(values, static_cast<const T*>(from) + channel);
  }
}

// Keeps the compiler from moving the reads after it to before it.
__device__ __forceinline__ void keep_reads_here() {
#ifdef __CUDA_ARCH__
  asm volatile("" ::: "memory");
#endif
}

// Rows in threads -------------------------------------------------------------------------------------------

// The place of a thread's vectors in its row: those of adjacent threads are adjacent. Single values are adjacent in the
// thread instead, since the compiler keeps an address for each that it cannot tell from the one before.
template <int VECTOR, int VECTORS>
struct Place {
  int lanes, lane;

  __device__ explicit Place(int lanes) : lanes(lanes), lane(static_cast<int>(threadIdx.x) & (lanes - 1)) {}
  __device__ int channel(int i) const { return VECTOR == 1 ? lane * VECTORS + i : (i * lanes + lane) * VECTOR; }
  __device__ int rows_at_once() const { return static_cast<int>(blockDim.x) / lanes; }
  __device__ int64_t first_row() const {
    return int64_t{blockIdx.x} * rows_at_once() + static_cast<int>(threadIdx.x) / lanes;
  }
};

struct Pair {
  float first, second;
};

// Sums over the threads of a row, of which each gets the same bits. All threads of the block take part.
__device__ __forceinline__ Pair sum_over_row(Pair pair, int lanes) {
  for (int step = min(lanes, static_cast<int>(kWarp)) / 2; step > 0; step /= 2) {
    pair.first += __shfl_xor_sync(kAllLanes, pair.first, step);
    pair.second += __shfl_xor_sync(kAllLanes, pair.second, step);
  }
  if (lanes <= static_cast<int>(kWarp)) return pair;
  __shared__ Pair warps[kMaxThreads / kWarp];
  __syncthreads();  // the sums before these have been read
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = pair;
  __syncthreads();
  const int count = lanes / static_cast<int>(kWarp);
  const int first = static_cast<int>(threadIdx.x) / lanes * count;
  pair = {0, 0};
  for (int i = first; i < first + count; i++) {
    pair.first += warps[i].first;
    pair.second += warps[i].second;
  }
  return pair;
}

// Adds the sums that the block's threads have kept for the same channels, in fixed order, and writes them.
template <int VECTOR, int VECTORS>
__device__ __forceinline__ void write_sums(float (&sums)[VECTORS][VECTOR], float* out,
                                           const Place<VECTOR, VECTORS>& at, int channels) {
  __shared__ float total[kMaxChannels / 4];  // longer rows have the block for themselves
  for (int step = at.lanes; step < static_cast<int>(kWarp); step *= 2) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
#pragma unroll
      for (float& sum : sums[i]) sum += __shfl_xor_sync(kAllLanes, sum, step);
    }
  }
  const int width = max(at.lanes, static_cast<int>(kWarp));  // threads whose sums are of different channels
  const int owners = static_cast<int>(blockDim.x) / width, owner = static_cast<int>(threadIdx.x) / width;
  const bool writes = static_cast<int>(threadIdx.x) % width < at.lanes;  // the others hold the same sums
  for (int turn = 0; turn < owners; turn++) {
    if (turn == owner && writes) {
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        const int channel = at.channel(i);
        if (channel >= channels) continue;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
          if (turn > 0) sums[i][j] += total[channel + j];
          if (turn + 1 < owners) total[channel + j] = sums[i][j];
          else out[channel + j] = sums[i][j];
        }
      }
    }
    __syncthreads();
  }
}

// LayerNorm -------------------------------------------------------------------------------------------------

// LayerNorm in two passes over the registers. The second also sums the deviations, which exact arithmetic would make 0:
// where the mean is large and the variance tiny, rounding the mean costs more than all the rest.
template <class T, Activation activation, int VECTOR, int VECTORS>
__global__ void __launch_bounds__(kMaxThreadsOf<VECTOR>, 1) layer_norm_kernel(LayerNormForward call, int lanes) {
  const Place<VECTOR, VECTORS> at(lanes);
  const int64_t row = at.first_row();
  const bool present = row < call.rows;
  const int64_t start = row * call.channels;
  float h[VECTORS][VECTOR];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int channel = at.channel(i);
    if (!present || channel >= call.channels) continue;
    read<VECTOR>(h[i], static_cast<const T*>(call.x) + start + channel);
    if (call.residual != nullptr) {
      float residual[VECTOR];
      read<VECTOR>(residual, static_cast<const T*>(call.residual) + start + channel);
#pragma unroll
      for (int j = 0; j < VECTOR; j++) h[i][j] += residual[j];
      write<VECTOR>(static_cast<T*>(call.h) + start + channel, h[i]);
    }
#pragma unroll
    for (float value : h[i]) sum += value;
  }
  const float inverse = 1.0f / static_cast<float>(call.channels);
  const float mean = sum_over_row({sum, 0}, lanes).first * inverse;
  Pair moments{0, 0};
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    if (!present || at.channel(i) >= call.channels) continue;
#pragma unroll
    for (float& value : h[i]) {
      value -= mean;
      moments.first += value;
      moments.second += value * value;
    }
  }
  moments = sum_over_row(moments, lanes);
  const float correction = moments.first * inverse;
  const float variance = moments.second * inverse - correction * correction;
  const float rstd = 1.0f / sqrtf((variance < 0 ? 0.0f : variance) + call.eps);
  if (!present) return;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int channel = at.channel(i);
    if (channel >= call.channels) continue;
    float weight[VECTOR], bias[VECTOR];
    read_parameter<VECTOR, T>(weight, call.weight, channel, call.float_parameters, 1);
    read_parameter<VECTOR, T>(bias, call.bias, channel, call.float_parameters, 0);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) {
      h[i][j] = activate<activation, kPrecision<T>>((h[i][j] - correction) * rstd * weight[j] + bias[j]);
    }
    write<VECTOR>(static_cast<T*>(call.out) + start + channel, h[i]);
  }
  if (at.lane == 0 && call.mean != nullptr) {
    call.mean[row] = mean + correction;
    call.rstd[row] = rstd;
  }
}

// With n = normalized h and g = dout · activation'(n · weight + bias): sums of g · n and of g over the rows, and
// dx = rstd · (g · weight − mean(g · weight) − n · mean(g · weight · n)) + dh.
template <class T, Activation activation, int VECTOR, int VECTORS>
__global__ void __launch_bounds__(kMaxThreadsOf<VECTOR>, 1)
    layer_norm_backward_kernel(LayerNormBackward call, int lanes) {
  const Place<VECTOR, VECTORS> at(lanes);
  const float inverse = 1.0f / static_cast<float>(call.channels);
  float dweight[VECTORS][VECTOR] = {}, dbias[VECTORS][VECTOR] = {};
  const int64_t step = int64_t{gridDim.x} * at.rows_at_once();
  // The number of turns is that of the block, whose threads meet in sum_over_row.
  for (int64_t first = int64_t{blockIdx.x} * at.rows_at_once(); first < call.rows; first += step) {
    const int64_t row = first + static_cast<int>(threadIdx.x) / lanes;
    const bool present = row < call.rows;
    const int64_t start = row * call.channels;
    const float mean = present ? call.mean[row] : 0.0f, rstd = present ? call.rstd[row] : 0.0f;
    float normal[VECTORS][VECTOR], g[VECTORS][VECTOR];
    Pair sums{0, 0};
    const auto read_both = [&](int i) {
      const int64_t offset = start + at.channel(i);
      read<VECTOR>(normal[i], static_cast<const T*>(call.h) + offset);
      read<VECTOR>(g[i], static_cast<const T*>(call.dout) + offset);
    };
    // Vectors are all under way before the first is used. So many single values would take all registers.
    if constexpr (VECTOR > 1) {
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        if (present && at.channel(i) < call.channels) read_both(i);
      }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int channel = at.channel(i);
      if (!present || channel >= call.channels) continue;
      if constexpr (VECTOR == 1) {
        keep_reads_here();
        read_both(i);
      }
      float weight[VECTOR], bias[VECTOR];
      read_parameter<VECTOR, T>(weight, call.weight, channel, call.float_parameters, 1);
      if constexpr (activation != Activation::identity) {
        read_parameter<VECTOR, T>(bias, call.bias, channel, call.float_parameters, 0);
      }
#pragma unroll
      for (int j = 0; j < VECTOR; j++) {
        const float n = (normal[i][j] - mean) * rstd;
        float gradient = g[i][j];
        if constexpr (activation != Activation::identity) {
          gradient *= activation_derivative<activation, kPrecision<T>>(n * weight[j] + bias[j]);
        }
        dweight[i][j] += gradient * n;
        dbias[i][j] += gradient;
        gradient *= weight[j];
        sums.first += gradient;
        sums.second += gradient * n;
        normal[i][j] = n;
        g[i][j] = gradient;
      }
    }
    sums = sum_over_row(sums, lanes);
    const float mean_g = sums.first * inverse, mean_gn = sums.second * inverse;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int channel = at.channel(i);
      if (!present || channel >= call.channels) continue;
#pragma unroll
      for (int j = 0; j < VECTOR; j++) g[i][j] = (g[i][j] - mean_g - normal[i][j] * mean_gn) * rstd;
      if (call.dh != nullptr) {
        float dh[VECTOR];
        read<VECTOR>(dh, static_cast<const T*>(call.dh) + start + channel);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) g[i][j] += dh[j];
      }
      write<VECTOR>(static_cast<T*>(call.dx) + start + channel, g[i]);
    }
  }
  float* sums = call.sums + int64_t{blockIdx.x} * 2 * call.channels;
  write_sums(dweight, sums, at, call.channels);
  write_sums(dbias, sums + call.channels, at, call.channels);
}

// GELU ------------------------------------------------------------------------------------------------------

template <class T, Activation activation, int VECTOR, int VECTORS>
__global__ void __launch_bounds__(kMaxThreadsOf<VECTOR>, 1) gelu_kernel(GeluForward call, int lanes) {
  const Place<VECTOR, VECTORS> at(lanes);
  const int64_t start = at.first_row() * call.channels;
  float x[VECTORS][VECTOR];
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int channel = at.channel(i);
    if (channel < call.channels && start + channel < call.size) {
      read<VECTOR>(x[i], static_cast<const T*>(call.x) + start + channel);
    }
  }
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int channel = at.channel(i);
    if (channel >= call.channels || start + channel >= call.size) continue;
    float bias[VECTOR];
    read_parameter<VECTOR, T>(bias, call.bias, channel, call.float_parameters, 0);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) x[i][j] = activate<activation, kPrecision<T>>(x[i][j] + bias[j]);
    write<VECTOR>(static_cast<T*>(call.out) + start + channel, x[i]);
  }
}

template <class T, Activation activation, int VECTOR, int VECTORS>
__global__ void __launch_bounds__(kMaxThreadsOf<VECTOR>, 1) gelu_backward_kernel(GeluBackward call, int lanes) {
  const Place<VECTOR, VECTORS> at(lanes);
  const int64_t step = int64_t{gridDim.x} * at.rows_at_once() * call.channels;
  float dbias[VECTORS][VECTOR] = {};
  for (int64_t start = at.first_row() * call.channels; start < call.size; start += step) {
    float x[VECTORS][VECTOR], g[VECTORS][VECTOR];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int channel = at.channel(i);
      if (channel < call.channels && start + channel < call.size) {
        read<VECTOR>(x[i], static_cast<const T*>(call.x) + start + channel);
        read<VECTOR>(g[i], static_cast<const T*>(call.dout) + start + channel);
      }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int channel = at.channel(i);
      if (channel >= call.channels || start + channel >= call.size) continue;
      float bias[VECTOR];
      read_parameter<VECTOR, T>(bias, call.bias, channel, call.float_parameters, 0);
#pragma unroll
      for (int j = 0; j < VECTOR; j++) {
        g[i][j] *= activation_derivative<activation, kPrecision<T>>(x[i][j] + bias[j]);
        dbias[i][j] += g[i][j];
      }
      write<VECTOR>(static_cast<T*>(call.dx) + start + channel, g[i]);
    }
  }
  if (call.sums != nullptr) {
    write_sums(dbias, call.sums + int64_t{blockIdx.x} * call.channels, at, call.channels);
  }
}

// Sums over blocks ------------------------------------------------------------------------------------------

constexpr int kSumThreads = 256;  // 32 channels, and 8 threads that share the blocks of each

template <class T>
__global__ void __launch_bounds__(kSumThreads) sum_over_blocks_kernel(SumOverBlocks call) {
  const int channel = static_cast<int>(blockIdx.x * kWarp + threadIdx.x % kWarp);
  const int part = static_cast<int>(threadIdx.x / kWarp), parts = kSumThreads / kWarp;
  float sum = 0;
  if (channel < call.channels) {
#pragma unroll 8
    for (int block = part; block < call.blocks; block += parts) sum += call.sums[block * call.stride + channel];
  }
  __shared__ float sums[kSumThreads];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (part != 0 || channel >= call.channels) return;
  for (int other = 1; other < parts; other++) sum += sums[other * kWarp + threadIdx.x];
  float value[1] = {sum};
  if (call.float_parameters) write<1>(static_cast<float*>(call.out) + channel, value);
  else write<1>(static_cast<T*>(call.out) + channel, value);
}

// From a call to a kernel. launch(kernel, blocks, threads, arguments...) starts it. ---------------------------

template <int vector, const auto& counts, class F>
void with_count(int vectors, F f) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    (void)((counts[i] == vectors && (f(Constant<vector>{}, Constant<counts[i]>{}), true)) || ...);
  }(std::make_index_sequence<std::size(counts)>{});
}

template <class T, class F>
void with_layout(const Layout& layout, F f) {
  if (layout.vector == 1) with_count<1, kScalars>(layout.vectors, f);
  else if constexpr (std::is_same_v<T, float>) with_count<4, kFloatVectors>(layout.vectors, f);
  else with_count<8, kVectors>(layout.vectors, f);
}

// Calls f with the activation, the elements of a vector and the vectors of a thread as constants, which are the
// parameters of a kernel's template.
template <class T, bool or_identity, class F>
void with_kernel(Activation activation, const Layout& layout, F f) {
  with_activation<or_identity>(activation, [&](auto kind) {
    with_layout<T>(layout, [&](auto vector, auto vectors) { f(kind, vector, vectors); });
  });
}

template <class T, class Launch>
void layer_norm(const LayerNormForward& call, Activation activation, const Layout& layout, Launch launch) {
  with_kernel<T, true>(activation, layout, [&](auto kind, auto vector, auto vectors) {
    launch(layer_norm_kernel<T, kind.value, vector.value, vectors.value>, blocks_for(layout, call.rows), layout.threads,
           call, layout.lanes);
  });
}

template <class T, class Launch>
void layer_norm_backward(const LayerNormBackward& call, Activation activation, const Layout& layout, int64_t blocks,
                         Launch launch) {
  with_kernel<T, true>(activation, layout, [&](auto kind, auto vector, auto vectors) {
    launch(layer_norm_backward_kernel<T, kind.value, vector.value, vectors.value>, blocks, layout.threads, call,
           layout.lanes);
  });
}

template <class T, class Launch>
void gelu(const GeluForward& call, Activation activation, const Layout& layout, Launch launch) {
  with_kernel<T, false>(activation, layout, [&](auto kind, auto vector, auto vectors) {
    const int64_t rows = (call.size + call.channels - 1) / call.channels;
    launch(gelu_kernel<T, kind.value, vector.value, vectors.value>, blocks_for(layout, rows), layout.threads, call,
           layout.lanes);
  });
}

template <class T, class Launch>
void gelu_backward(const GeluBackward& call, Activation activation, const Layout& layout, int64_t blocks,
                   Launch launch) {
  with_kernel<T, false>(activation, layout, [&](auto kind, auto vector, auto vectors) {
    launch(gelu_backward_kernel<T, kind.value, vector.value, vectors.value>, blocks, layout.threads, call,
           layout.lanes);
  });
}

template <class T, class Launch>
void sum_over_blocks(const SumOverBlocks& call, Launch launch) {
  launch(sum_over_blocks_kernel<T>, (call.channels + kWarp - 1) / kWarp, kSumThreads, call);
}

}  // namespace cvt_kernels::layer_norm_gelu::cuda

// The CUDA kernels of LayerNorm and GELU, without their launches, so that they also compile for the host, where the tests
// run them (tests/csrc/simt.h).
//
// Bytes move once: a row is read into registers, reduced there by warp shuffles (across warps, for rows that one warp does
// not hold, through shared memory) and written. Statistics and sums are float. Sums over rows: each block keeps
// its own in registers while it walks over its rows, adds its threads' sums in fixed order and writes them out;
// sum_over_blocks_kernel adds the blocks', again in fixed order. Nothing is atomic: the same bits every time.
#pragma once

#include <utility>

#include "layer_norm_gelu/cuda_launches.h"

namespace cvt_kernels::layer_norm_gelu::cuda {

constexpr unsigned kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// The blocks of the most threads whose registers a multiprocessor holds together where nothing is summed over rows: 32
// warps in all, or 24 where a thread holds 32 values and adds something to each. Single values may take all registers.
template <int vector, int vectors, bool adds = false>
constexpr int kBlocksOf = vector == 1 ? 1 : adds && vector * vectors == 32 ? 3 : 4;

// Whether the GPU holds 48 warps, where LayerNorm's rows of 32 floats in a thread spill with 4 blocks.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr bool kFewWarps = true;
#else
constexpr bool kFewWarps = false;
#endif

// What is added to the rows before a LayerNorm.
enum class Addend { none, residual, shift };

// Likewise of LayerNorm. A shift comes, for 32 floats, in as many registers again; some spilled with more blocks.
template <int vector, int vectors, Addend addend>
constexpr int kBlocksToNormalize = vectors == 8 && addend == Addend::shift ? 2
                                   : vectors == 8 && addend == Addend::none && kFewWarps
                                       ? 3
                                       : kBlocksOf<vector, vectors, addend != Addend::none>;

template <int VECTOR, int VECTORS>
constexpr bool kFitsWarp = fits_warp(VECTOR, VECTORS);

template <int VECTOR, int VECTORS, bool ADDS>
constexpr int kRowsOfThread = rows_of_thread(VECTOR, VECTORS, ADDS);

template <class T>
constexpr DType kDType = std::is_same_v<T, float> ? DType::float32
                                                  : std::is_same_v<T, BFloat16> ? DType::bfloat16 : DType::float16;

template <class T>
constexpr Precision kPrecision = std::is_same_v<T, float> ? Precision::full : Precision::half;

// Calls f(i) for the numbers up to `count`, in code of their own.
template <int count, class F>
__device__ __forceinline__ void unroll(F f) {
#pragma unroll
  for (int i = 0; i < count; i++) f(i);
}

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

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high, T) {
  constexpr bool is_half = std::is_same_v<T, Half>;
#ifdef __CUDA_ARCH__
  uint32_t bits;
  if constexpr (is_half) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#else
  if constexpr (is_half) return half_of(low) | half_of(high) << 16;
  else return bfloat16_of(low) | bfloat16_of(high) << 16;
#endif
}

// VECTOR adjacent values as they lie in memory, which take half as many registers as floats where they have 16 bits.
template <int VECTOR, class T>
struct Packed {
  static constexpr int kWords = (VECTOR * sizeof(T) + 3) / sizeof(uint32_t);
  uint32_t words[kWords];
};

// Reads by accesses of 16 bytes, or of 8 for four halves.
template <int VECTOR, class T>
__device__ __forceinline__ void read_packed(Packed<VECTOR, T>& packed, const T* from) {
  if constexpr (Packed<VECTOR, T>::kWords == 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    packed.words[0] = two.x, packed.words[1] = two.y;
  } else {
#pragma unroll
    for (int i = 0; i < Packed<VECTOR, T>::kWords; i += 4) {
      const uint4 four = *(reinterpret_cast<const uint4*>(from) + i / 4);
      packed.words[i] = four.x, packed.words[i + 1] = four.y, packed.words[i + 2] = four.z, packed.words[i + 3] = four.w;
    }
  }
}

template <int VECTOR, class T>
__device__ __forceinline__ void unpack(const Packed<VECTOR, T>& packed, float (&values)[VECTOR]) {
  if constexpr (std::is_same_v<T, float>) {
    unroll<VECTOR>([&](int i) { values[i] = float_of(packed.words[i]); });
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; i += 2) unpack(packed.words[i / 2], T{}, values[i], values[i + 1]);
  }
}

// Reads VECTOR adjacent values, or a single one.
template <int VECTOR, class T>
__device__ __forceinline__ void read(float (&values)[VECTOR], const T* from) {
  if constexpr (VECTOR > 1) {
    Packed<VECTOR, T> packed;
    read_packed(packed, from);
    unpack(packed, values);
  } else if constexpr (std::is_same_v<T, float>) {
    values[0] = *from;
  } else {
    float unused;
    unpack(from->bits, T{}, values[0], unused);
  }
}

// Writes as read() reads.
template <int VECTOR, class T>
__device__ __forceinline__ void write(T* to, const float (&values)[VECTOR]) {
  if constexpr (VECTOR == 1) {
    if constexpr (std::is_same_v<T, float>) *to = values[0];
    else to->bits = static_cast<uint16_t>(pack(values[0], 0.0f, T{}));
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < VECTOR; i += 4) {
      *reinterpret_cast<float4*>(to + i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    }
  } else if constexpr (VECTOR == 4) {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack(values[0], values[1], T{}), pack(values[2], values[3], T{}));
  } else {
    static_assert(VECTOR == 8);
    *reinterpret_cast<uint4*>(to) = make_uint4(pack(values[0], values[1], T{}), pack(values[2], values[3], T{}),
                                               pack(values[4], values[5], T{}), pack(values[6], values[7], T{}));
  }
}

// Rounds values to those that write() stores.
template <class T, int VECTOR>
__device__ __forceinline__ void round_to(float (&values)[VECTOR]) {
  if constexpr (std::is_same_v<T, float>) {
    return;
  } else if constexpr (VECTOR == 1) {
    float unused;
    unpack(pack(values[0], 0.0f, T{}), T{}, values[0], unused);
  } else {
    unroll<VECTOR / 2>([&](int i) {
      float &low = values[2 * i], &high = values[2 * i + 1];
      unpack(pack(low, high, T{}), T{}, low, high);
    });
  }
}

// Reads adjacent values of weight or bias; they are `absent` if there is none.
template <int VECTOR, class T>
__device__ __forceinline__ void read_parameter(float (&values)[VECTOR], const void* from, int channel, bool is_float,
                                               float absent) {
  if (from == nullptr) {
#pragma unroll
    for (float& value : values) value = absent;
  } else if (is_float || std::is_same_v<T, float>) {
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

// The address of element `start`, hidden from the compiler, which would add `start` to every offset from it instead: six
// instructions of 64 bits for each access, where the address plus an offset of 32 bits is one. Single values, which have
// their registers full, keep one offset for all pointers.
template <int VECTOR, class T>
__device__ __forceinline__ T* advance(T* pointer, int64_t start) {
  pointer += start;
#ifdef __CUDA_ARCH__
  if constexpr (VECTOR > 1) {
    asm("" : "+l"(pointer));
    __builtin_assume(__isGlobal(pointer));
  }
#endif
  return pointer;
}

// 1 / sqrt(x).
__device__ __forceinline__ float reciprocal_root(float x) {
#ifdef __CUDA_ARCH__
  return rsqrtf(x);
#else
  return 1 / std::sqrt(x);
#endif
}

// Rows in threads -------------------------------------------------------------------------------------------

// The place of a thread's vectors in its row: vectors of adjacent threads are adjacent. Single values are adjacent in
// the thread instead, since the compiler keeps an address for each that it cannot derive from the one before.
template <int VECTOR, int VECTORS>
struct Place {
  const int channels;
  const int lanes, lane;
  const int row, rows_at_once;  // in the block

  __device__ Place(int channels, int lanes_log2)
      : channels(channels),
        lanes(1 << lanes_log2),
        lane(static_cast<int>(threadIdx.x) & (lanes - 1)),
        row(static_cast<int>(threadIdx.x) >> lanes_log2),
        rows_at_once(static_cast<int>(blockDim.x) >> lanes_log2) {}

  __device__ int channel(int i) const { return VECTOR == 1 ? lane * VECTORS + i : (i * lanes + lane) * VECTOR; }
  __device__ bool has(int i) const { return channel(i) < channels; }

  // Calls f with the channel from which vector i is read. A vector beyond the end of the row is read from its end, which
  // takes no branch; a single value is not read. Neither may count.
  template <class F>
  __device__ void with_readable(int i, F f) const {
    if constexpr (VECTOR > 1) f(min(channel(i), channels - VECTOR));
    else if (has(i)) f(channel(i));
  }
};

// The first value of the row, for all its threads.
template <int VECTOR, int VECTORS>
__device__ __forceinline__ float first_of_row(float value, const Place<VECTOR, VECTORS>& at) {
  const unsigned thread = threadIdx.x;
  if (kFitsWarp<VECTOR, VECTORS> || at.lanes <= static_cast<int>(kWarp)) {
    return __shfl_sync(kAllLanes, value, static_cast<int>(thread % kWarp) & -at.lanes);
  }
  __shared__ float firsts[kMaxThreads / kWarp];
  __syncthreads();  // those before have been read
  if (at.lane == 0) firsts[at.row] = value;
  __syncthreads();
  return firsts[at.row];
}

// Sums over the threads of a row; all of them get the same bits. Several sums hide the latency of each other's
// exchanges. All threads of the block take part.
template <int VECTOR, int VECTORS, int COUNT>
__device__ __forceinline__ void sum_over_row(float (&sums)[COUNT], const Place<VECTOR, VECTORS>& at) {
#pragma unroll 1
  for (int step = min(at.lanes, static_cast<int>(kWarp)) >> 1; step > 0; step >>= 1) {
    unroll<COUNT>([&](int i) { sums[i] += __shfl_xor_sync(kAllLanes, sums[i], step); });
  }
  if (kFitsWarp<VECTOR, VECTORS> || at.lanes <= static_cast<int>(kWarp)) return;
  __shared__ float warps[kMaxThreads / kWarp][COUNT];
  __syncthreads();  // the sums before these have been read
  if (threadIdx.x % kWarp == 0) {
    unroll<COUNT>([&](int i) { warps[threadIdx.x / kWarp][i] = sums[i]; });
  }
  __syncthreads();
  const int count = at.lanes / static_cast<int>(kWarp);
  unroll<COUNT>([&](int i) { sums[i] = 0; });
#pragma unroll 1
  for (int warp = at.row * count; warp < (at.row + 1) * count; warp++) {
    unroll<COUNT>([&](int i) { sums[i] += warps[warp][i]; });
  }
}

// Adds the sums that the block's threads have kept for the same channels, in fixed order, and writes them.
template <int VECTOR, int VECTORS>
__device__ __forceinline__ void write_sums(float (&sums)[VECTORS][VECTOR], float* out,
                                           const Place<VECTOR, VECTORS>& at) {
  __shared__ float total[kMaxChannels / 4];  // longer rows have the block for themselves
  for (int step = at.lanes; step < static_cast<int>(kWarp); step *= 2) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      unroll<VECTOR>([&](int j) { sums[i][j] += __shfl_xor_sync(kAllLanes, sums[i][j], step); });
    }
  }
  // Warps, or longer rows, whose sums are of the same channels. In a warp the first of them writes for all.
  const bool shared = at.lanes < static_cast<int>(kWarp);
  const int owner = shared ? static_cast<int>(threadIdx.x / kWarp) : at.row;
  const int owners = shared ? static_cast<int>(blockDim.x / kWarp) : at.rows_at_once;
  const bool writes = static_cast<int>(threadIdx.x % kWarp) < at.lanes;
  for (int turn = 0; turn < owners; turn++) {
    if (turn == owner && writes) {
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        const int channel = at.channel(i);
        if (!at.has(i)) continue;
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

// LayerNorm of rows of type T, or of their sums with a residual of type T or with a shift, in two passes over the
// registers; a thread holds its part of several rows. Where the mean of floats is large and the variance tiny, rounding
// the mean would cost more than all the rest, so that floats count from the first of their row. Values of 16 bits are too
// coarse to need it.
template <class T, Activation activation, int VECTOR, int VECTORS, class Out, Addend ADDEND>
__global__ void __launch_bounds__(kMaxThreadsOf<VECTOR>, kBlocksToNormalize<VECTOR, VECTORS, ADDEND>)
    layer_norm_kernel(LayerNormForward call, int lanes_log2) {
  constexpr bool ADDS = ADDEND == Addend::residual;
  constexpr int ROWS = kRowsOfThread<VECTOR, VECTORS, ADDS>;
  using In = std::conditional_t<ADDS, Out, T>;
  const Place<VECTOR, VECTORS> at(call.channels, lanes_log2);
  const unsigned rows_of_block = static_cast<unsigned>(at.rows_at_once * ROWS);
  const int64_t first = static_cast<int64_t>(uint64_t{blockIdx.x} * rows_of_block), start = first * call.channels;
  const int rows = static_cast<int>(min(call.rows - first, int64_t{rows_of_block}));
  const In* x = advance<VECTOR>(static_cast<const In*>(call.x), start);

  // Rows that are absent repeat the last one.
  const auto row_of = [&](int r) { return at.row + r * at.rows_at_once; };
  const auto offset_of = [&](int r) { return min(row_of(r), rows - 1) * call.channels; };
  float h[ROWS][VECTORS][VECTOR] = {};
  unroll<ROWS>([&](int r) {
    unroll<VECTORS>([&](int i) {
      at.with_readable(i, [&](int channel) { read<VECTOR>(h[r][i], x + (offset_of(r) + channel)); });
    });
  });
  if constexpr (ADDS) {
    const T* residual = advance<VECTOR>(static_cast<const T*>(call.residual), start);
    T* sum = advance<VECTOR>(static_cast<T*>(call.h), start);
    unroll<ROWS>([&](int r) {
      unroll<VECTORS>([&](int i) {
        at.with_readable(i, [&](int channel) {
          float addend[VECTOR];
          read<VECTOR>(addend, residual + (offset_of(r) + channel));
          unroll<VECTOR>([&](int j) { h[r][i][j] += addend[j]; });
          round_to<T>(h[r][i]);
        });
        if (row_of(r) < rows && at.has(i)) write<VECTOR>(sum + (offset_of(r) + at.channel(i)), h[r][i]);
      });
    });
  }
  if constexpr (ADDEND == Addend::shift) {
    const auto add = [&](const auto* shift) {
      unroll<VECTORS>([&](int i) {
        at.with_readable(i, [&](int channel) {
          float addend[VECTOR];
          read<VECTOR>(addend, shift + channel);
          unroll<ROWS>([&](int r) {
            unroll<VECTOR>([&](int j) { h[r][i][j] += addend[j]; });
          });
        });
      });
    };
    if (std::is_same_v<T, float> || call.float_shift) add(static_cast<const float*>(call.shift));
    else add(static_cast<const T*>(call.shift));
  }

  float means[ROWS] = {}, squares[ROWS] = {}, origins[ROWS] = {};
  unroll<ROWS>([&](int r) {
    if constexpr (std::is_same_v<T, float>) origins[r] = first_of_row(h[r][0][0], at);
    unroll<VECTORS>([&](int i) {
      if constexpr (std::is_same_v<T, float>) {
        unroll<VECTOR>([&](int j) { h[r][i][j] -= origins[r]; });
      }
      float sum = h[r][i][0];
      unroll<VECTOR - 1>([&](int j) { sum += h[r][i][j + 1]; });
      sum = at.has(i) ? sum : 0;
      means[r] = i == 0 ? sum : means[r] + sum;
    });
  });
  sum_over_row(means, at);
  unroll<ROWS>([&](int r) {
    means[r] *= call.inverse;
    unroll<VECTORS>([&](int i) {
      unroll<VECTOR>([&](int j) { h[r][i][j] -= means[r]; });
      float sum = h[r][i][0] * h[r][i][0];
      unroll<VECTOR - 1>([&](int j) { sum += h[r][i][j + 1] * h[r][i][j + 1]; });
      sum = at.has(i) ? sum : 0;
      squares[r] = i == 0 ? sum : squares[r] + sum;
    });
  });
  sum_over_row(squares, at);

  Out* out = advance<VECTOR>(static_cast<Out*>(call.out), start);
  float rstds[ROWS];
  unroll<ROWS>([&](int r) { rstds[r] = reciprocal_root(squares[r] * call.inverse + call.eps); });
  unroll<VECTORS>([&](int i) {
    float weight[VECTOR] = {}, bias[VECTOR] = {};
    at.with_readable(i, [&](int channel) {
      read_parameter<VECTOR, T>(weight, call.weight, channel, call.float_parameters, 1);
      read_parameter<VECTOR, T>(bias, call.bias, channel, call.float_parameters, 0);
    });
    unroll<ROWS>([&](int r) {
      unroll<VECTOR>([&](int j) {
        h[r][i][j] = activate<activation, kPrecision<Out>>(h[r][i][j] * rstds[r] * weight[j] + bias[j]);
      });
      if (row_of(r) < rows && at.has(i)) write<VECTOR>(out + (offset_of(r) + at.channel(i)), h[r][i]);
    });
  });
  if (at.lane != 0 || call.mean == nullptr) return;
  float* mean = advance<VECTOR>(static_cast<float*>(call.mean), first);
  float* rstd = advance<VECTOR>(static_cast<float*>(call.rstd), first);
  unroll<ROWS>([&](int r) {
    if (row_of(r) >= rows) return;
    if constexpr (std::is_same_v<T, float>) means[r] += origins[r];
    mean[row_of(r)] = means[r];
    rstd[row_of(r)] = rstds[r];
  });
}

// With n = normalized h and g = dout · activation'(n · weight + bias): sums of g · n and of g over the rows, and
// dx = rstd · (g · weight − mean(g · weight) − n · mean(g · weight · n)) + dh.
template <class T, Activation activation, int VECTOR, int VECTORS, class Out>
__global__ void __launch_bounds__(kMaxThreadsOf<VECTOR>, 1)
    layer_norm_backward_kernel(LayerNormBackward call, int lanes_log2) {
  constexpr bool keeps_parameters = VECTORS * VECTOR <= 8;
  // No operator activates a LayerNorm whose rows have another use, so that dh may come late there.
  constexpr bool reads_dh_ahead = VECTOR > 1 && activation == Activation::identity;
  const Place<VECTOR, VECTORS> at(call.channels, lanes_log2);
  float dweight[VECTORS][VECTOR] = {}, dbias[VECTORS][VECTOR] = {};
  float weight[VECTORS][VECTOR] = {}, bias[VECTORS][VECTOR] = {};
  const auto read_parameters = [&](int i) {
    at.with_readable(i, [&](int channel) {
      read_parameter<VECTOR, T>(weight[i], call.weight, channel, call.float_parameters, 1);
      if constexpr (activation != Activation::identity) {
        read_parameter<VECTOR, T>(bias[i], call.bias, channel, call.float_parameters, 0);
      }
    });
  };
  if constexpr (keeps_parameters) {
    unroll<VECTORS>([&](int i) { read_parameters(i); });
  }
  const int step = static_cast<int>(gridDim.x) * at.rows_at_once;
  // The number of turns is the block's, since its threads meet in sum_over_row.
  for (int first = static_cast<int>(blockIdx.x) * at.rows_at_once; first < call.rows; first += step) {
    const bool present = first + at.row < call.rows;  // else the row is the last one again, and does not count
    const int row = min(first + at.row, call.rows - 1);
    const int64_t start = int64_t{row} * call.channels;
    const float mean = static_cast<const float*>(call.mean)[row], rstd = static_cast<const float*>(call.rstd)[row];
    const T* h = advance<VECTOR>(static_cast<const T*>(call.h), start);
    const Out* dout = advance<VECTOR>(static_cast<const Out*>(call.dout), start);
    float normal[VECTORS][VECTOR] = {}, g[VECTORS][VECTOR] = {};
    Packed<VECTOR, T> other[VECTORS] = {};
    const auto read_both = [&](int i) {
      at.with_readable(i, [&](int channel) {
        read<VECTOR>(normal[i], h + channel);
        read<VECTOR>(g[i], dout + channel);
      });
    };
    // Vectors are all under way before the first is used. So many single values would take all registers.
    if constexpr (VECTOR > 1) {
      unroll<VECTORS>([&](int i) { read_both(i); });
    }
    if constexpr (reads_dh_ahead) {  // later, each vector of it would wait until the one before is written to dx
      if (call.dh != nullptr) {
        const T* dh = advance<VECTOR>(static_cast<const T*>(call.dh), start);
        unroll<VECTORS>([&](int i) {
          at.with_readable(i, [&](int channel) { read_packed(other[i], dh + channel); });
        });
      }
    }
    float sums[2] = {0, 0};
    unroll<VECTORS>([&](int i) {
      if constexpr (VECTOR == 1) {
        if (!present || !at.has(i)) return;
        keep_reads_here();
        read_both(i);
      }
      // A branch, so that few derivatives are under way at once: registers spill otherwise (sm_120).
      if constexpr (VECTORS == 8 && activation != Activation::identity) {
        if (!at.has(i)) return;
      }
      if constexpr (!keeps_parameters) read_parameters(i);
      float part[2] = {};
      unroll<VECTOR>([&](int j) {
        const float n = (normal[i][j] - mean) * rstd;
        float gradient = g[i][j];
        if constexpr (activation != Activation::identity) {
          gradient *= activation_derivative<activation, kPrecision<Out>>(n * weight[i][j] + bias[i][j]);
        }
        if (present) {
          dweight[i][j] += gradient * n;
          dbias[i][j] += gradient;
        }
        gradient *= weight[i][j];
        part[0] = j == 0 ? gradient : part[0] + gradient;
        part[1] = j == 0 ? gradient * n : part[1] + gradient * n;
        normal[i][j] = n;
        g[i][j] = gradient;
      });
      unroll<2>([&](int k) {
        const float sum = at.has(i) ? part[k] : 0;
        sums[k] = VECTOR > 1 && i == 0 ? sum : sums[k] + sum;
      });
    });
    sum_over_row(sums, at);
    const float factor = -rstd * call.inverse, shift = factor * sums[0], slope = factor * sums[1];
    T* dx = advance<VECTOR>(static_cast<T*>(call.dx), start);
    unroll<VECTORS>([&](int i) {
      if (!present || !at.has(i)) return;
      const int channel = at.channel(i);
      unroll<VECTOR>([&](int j) { g[i][j] = g[i][j] * rstd + (normal[i][j] * slope + shift); });
      if (call.dh != nullptr) {
        float addend[VECTOR];
        if constexpr (reads_dh_ahead) unpack(other[i], addend);
        else read<VECTOR>(addend, static_cast<const T*>(call.dh) + (start + channel));
        unroll<VECTOR>([&](int j) { g[i][j] += addend[j]; });
      }
      write<VECTOR>(dx + channel, g[i]);
      if constexpr (!std::is_same_v<T, Out>) {
        if (call.dbranch != nullptr) write<VECTOR>(static_cast<Out*>(call.dbranch) + (start + channel), g[i]);
      }
    });
  }
  float* sums = call.sums + int64_t{blockIdx.x} * 2 * call.channels;
  write_sums(dweight, sums, at);
  write_sums(dbias, sums + call.channels, at);
}

// GELU ------------------------------------------------------------------------------------------------------

// GELU of a row, or of a piece of a flat tensor, which begins at `start`.
template <class T, Activation activation, bool has_bias, int VECTOR, int VECTORS>
__device__ __forceinline__ void activate_row(const GeluForward& call, const Place<VECTOR, VECTORS>& at, int64_t start) {
  float x[VECTORS][VECTOR];
  unroll<VECTORS>([&](int i) {
    if (at.has(i)) read<VECTOR>(x[i], static_cast<const T*>(call.x) + start + at.channel(i));
  });
  unroll<VECTORS>([&](int i) {
    if (!at.has(i)) return;
    if constexpr (has_bias) {
      float bias[VECTOR];
      read_parameter<VECTOR, T>(bias, call.bias, at.channel(i), call.float_parameters, 0);
      unroll<VECTOR>([&](int j) { x[i][j] = activate<activation, kPrecision<T>>(x[i][j] + bias[j]); });
    } else {
      unroll<VECTOR>([&](int j) { x[i][j] = activate<activation, kPrecision<T>>(x[i][j]); });
    }
    write<VECTOR>(static_cast<T*>(call.out) + start + at.channel(i), x[i]);
  });
}

// A block has a piece of a flat tensor for itself.
template <int VECTOR, int VECTORS>
constexpr int64_t kPiece = int64_t{kFlatThreads} * VECTOR * VECTORS;

template <class T, Activation activation, int VECTOR, int VECTORS>
__global__ void __launch_bounds__(kMaxThreadsOf<VECTOR>, kBlocksOf<VECTOR, VECTORS>) gelu_kernel(GeluForward call) {
  const int64_t first = int64_t{blockIdx.x} * kPiece<VECTOR, VECTORS>;
  const int size = static_cast<int>(min(call.size - first, kPiece<VECTOR, VECTORS>));
  activate_row<T, activation, false>(call, Place<VECTOR, VECTORS>(size, kFlatThreadsLog2), first);
}

template <class T, Activation activation, int VECTOR, int VECTORS>
__global__ void __launch_bounds__(kMaxThreadsOf<VECTOR>, kBlocksOf<VECTOR, VECTORS, true>)
    bias_gelu_kernel(GeluForward call, int lanes_log2) {
  const Place<VECTOR, VECTORS> at(call.channels, lanes_log2);
  const int64_t start = (int64_t{blockIdx.x} * at.rows_at_once + at.row) * call.channels;
  if (start < call.size) activate_row<T, activation, true>(call, at, start);
}

template <class T, Activation activation, int VECTOR, int VECTORS>
__global__ void __launch_bounds__(kMaxThreadsOf<VECTOR>, kBlocksOf<VECTOR, VECTORS>) gelu_backward_kernel(GeluBackward call) {
  const int64_t first = int64_t{blockIdx.x} * kPiece<VECTOR, VECTORS>;
  const Place<VECTOR, VECTORS> at(static_cast<int>(min(call.size - first, kPiece<VECTOR, VECTORS>)), kFlatThreadsLog2);
  float x[VECTORS][VECTOR], g[VECTORS][VECTOR];
  unroll<VECTORS>([&](int i) {
    if (!at.has(i)) return;
    read<VECTOR>(x[i], static_cast<const T*>(call.x) + first + at.channel(i));
    read<VECTOR>(g[i], static_cast<const T*>(call.dout) + first + at.channel(i));
  });
  unroll<VECTORS>([&](int i) {
    if (!at.has(i)) return;
    unroll<VECTOR>([&](int j) { g[i][j] *= activation_derivative<activation, kPrecision<T>>(x[i][j]); });
    write<VECTOR>(static_cast<T*>(call.dx) + first + at.channel(i), g[i]);
  });
}

template <class T, Activation activation, int VECTOR, int VECTORS>
__global__ void __launch_bounds__(kMaxThreadsOf<VECTOR>, 1)
    bias_gelu_backward_kernel(GeluBackward call, int lanes_log2) {
  constexpr bool keeps_parameters = VECTORS * VECTOR <= 8;
  const Place<VECTOR, VECTORS> at(call.channels, lanes_log2);
  const int64_t step = int64_t{gridDim.x} * at.rows_at_once * call.channels;
  float dbias[VECTORS][VECTOR] = {}, bias[VECTORS][VECTOR];
  if constexpr (keeps_parameters) {
    unroll<VECTORS>([&](int i) {
      if (at.has(i)) read_parameter<VECTOR, T>(bias[i], call.bias, at.channel(i), call.float_parameters, 0);
    });
  }
  const int64_t first = (int64_t{blockIdx.x} * at.rows_at_once + at.row) * call.channels;
  for (int64_t start = first; start < call.size; start += step) {
    float x[VECTORS][VECTOR], g[VECTORS][VECTOR];
    unroll<VECTORS>([&](int i) {
      if (!at.has(i)) return;
      read<VECTOR>(x[i], static_cast<const T*>(call.x) + start + at.channel(i));
      read<VECTOR>(g[i], static_cast<const T*>(call.dout) + start + at.channel(i));
    });
    unroll<VECTORS>([&](int i) {
      if (!at.has(i)) return;
      if constexpr (!keeps_parameters) {
        read_parameter<VECTOR, T>(bias[i], call.bias, at.channel(i), call.float_parameters, 0);
      }
      unroll<VECTOR>([&](int j) {
        g[i][j] *= activation_derivative<activation, kPrecision<T>>(x[i][j] + bias[i][j]);
        dbias[i][j] += g[i][j];
      });
      write<VECTOR>(static_cast<T*>(call.dx) + start + at.channel(i), g[i]);
    });
  }
  write_sums(dbias, call.sums + int64_t{blockIdx.x} * call.channels, at);
}

// Sums over blocks ------------------------------------------------------------------------------------------

constexpr int kSumThreads = 256;  // 32 sums, and 8 threads that share the blocks of each

template <class T>
__global__ void __launch_bounds__(kSumThreads) sum_over_blocks_kernel(SumOverBlocks call) {
  const int width = call.parts * call.channels, index = static_cast<int>(blockIdx.x * kWarp + threadIdx.x % kWarp);
  const int share = static_cast<int>(threadIdx.x / kWarp), shares = kSumThreads / kWarp;
  float sum = 0;
  if (index < width) {
#pragma unroll 8
    for (int block = share; block < call.blocks; block += shares) sum += call.sums[int64_t{block} * width + index];
  }
  __shared__ float sums[kSumThreads];
  sums[threadIdx.x] = sum;
  __syncthreads();
  const bool second = index >= call.channels;
  void* out = second ? call.outs[1] : call.outs[0];
  if (share != 0 || index >= width || out == nullptr) return;
  for (int other = 1; other < shares; other++) sum += sums[other * kWarp + threadIdx.x];
  const float value[1] = {sum};
  const int channel = second ? index - call.channels : index;
  if (second ? call.is_float[1] : call.is_float[0]) write<1>(static_cast<float*>(out) + channel, value);
  else write<1>(static_cast<T*>(out) + channel, value);
}

// From a call to a kernel. launch(kernel, blocks, threads, arguments...) starts it. ---------------------------

template <int vector, const auto& counts, class F>
void with_count(int vectors, F f) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    (void)((counts[i] == vectors && (f(Constant<vector>{}, Constant<counts[i]>{}), true)) || ...);
  }(std::make_index_sequence<std::size(counts)>{});
}

// Calls f with the elements of a vector and the vectors of a thread as constants.
template <class T, bool sums = false, class F>
void with_layout(const Layout& layout, F f) {
  if (layout.vector == 1) with_count<1, kScalars>(layout.vectors, f);
  else if constexpr (!std::is_same_v<T, float>) with_count<8, kVectors>(layout.vectors, f);
  else if constexpr (sums) with_count<4, kSumsFloatVectors>(layout.vectors, f);
  else with_count<4, kFloatVectors>(layout.vectors, f);
}

template <class T, int vectors, class F>
void with_flat_layout(const Layout& layout, F f) {
  if (layout.vector == 1) with_count<1, kScalars>(layout.vectors, f);
  else f(Constant<std::is_same_v<T, float> ? 4 : 8>{}, Constant<vectors>{});
}

// Calls f with the activation and the type of a result that differs from T. Those are of LayerNorm alone, and either
// 16 bits of float, or float of 16 bits.
template <class T, class F>
void with_result(DType result, Activation activation, F f) {
  const auto alone = [&](auto type) { f(Constant<Activation::identity>{}, type); };
  if (result == kDType<T>) return with_activation(activation, [&](auto kind) { f(kind, T{}); });
  if constexpr (!std::is_same_v<T, float>) return alone(float{});
  else if (result == DType::bfloat16) return alone(BFloat16{});
  else return alone(Half{});
}

template <class T, class Launch>
void layer_norm(const LayerNormForward& call, Activation activation, DType result, const Layout& layout,
                Launch launch) {
  const int64_t blocks = blocks_to_normalize(layout, call.rows, call.residual != nullptr);
  with_result<T>(result, activation, [&](auto kind, auto out) {
    with_layout<T>(layout, [&](auto vector, auto vectors) {
      using Out = decltype(out);
      const auto start = [&](auto addend) {
        launch(layer_norm_kernel<T, kind.value, vector.value, vectors.value, Out, addend.value>, blocks, layout.threads,
               call, log2_of(layout.lanes));
      };
      if (call.residual == nullptr && call.shift == nullptr) {
        start(Constant<Addend::none>{});
      } else if constexpr (kind.value == Activation::identity) {
        if (call.shift != nullptr) start(Constant<Addend::shift>{});
        else if constexpr (std::is_same_v<T, float> || std::is_same_v<T, Out>) start(Constant<Addend::residual>{});
      }
    });
  });
}

template <class T, class Launch>
void layer_norm_backward(const LayerNormBackward& call, Activation activation, DType result, const Layout& layout,
                         int64_t blocks, Launch launch) {
  with_result<T>(result, activation, [&](auto kind, auto out) {
    with_layout<T, true>(layout, [&](auto vector, auto vectors) {
      launch(layer_norm_backward_kernel<T, kind.value, vector.value, vectors.value, decltype(out)>, blocks,
             layout.threads, call, log2_of(layout.lanes));
    });
  });
}

template <class T, class Launch>
void gelu(const GeluForward& call, Activation activation, const Layout& layout, Launch launch) {
  with_activation<false>(activation, [&](auto kind) {
    if (call.bias == nullptr) {
      with_flat_layout<T, kFlatVectors>(layout, [&](auto vector, auto vectors) {
        launch(gelu_kernel<T, kind.value, vector.value, vectors.value>, flat_blocks(layout, call.size), layout.threads,
               call);
      });
    } else {
      with_layout<T>(layout, [&](auto vector, auto vectors) {
        launch(bias_gelu_kernel<T, kind.value, vector.value, vectors.value>,
               blocks_for(layout, call.size / call.channels), layout.threads, call, log2_of(layout.lanes));
      });
    }
  });
}

template <class T, class Launch>
void gelu_backward(const GeluBackward& call, Activation activation, const Layout& layout, int64_t blocks,
                   Launch launch) {
  with_activation<false>(activation, [&](auto kind) {
    if (call.bias == nullptr) {
      with_flat_layout<T, kFlatBackwardVectors>(layout, [&](auto vector, auto vectors) {
        launch(gelu_backward_kernel<T, kind.value, vector.value, vectors.value>, blocks, layout.threads, call);
      });
    } else {
      with_layout<T>(layout, [&](auto vector, auto vectors) {
        launch(bias_gelu_backward_kernel<T, kind.value, vector.value, vectors.value>, blocks, layout.threads, call,
               log2_of(layout.lanes));
      });
    }
  });
}

template <class T, class Launch>
void sum_over_blocks(const SumOverBlocks& call, Launch launch) {
  launch(sum_over_blocks_kernel<T>, (call.parts * call.channels + kWarp - 1) / kWarp, kSumThreads, call);
}

}  // namespace cvt_kernels::layer_norm_gelu::cuda

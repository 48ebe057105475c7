// The interface between the operators on the GPU (cuda_operators.cpp) and the launches (cuda_launches.cu) of the CUDA
// kernels (cuda_kernels.cuh): the arguments of a call, and the layout of its rows in threads.
//
// A row of `channels` adjacent values belongs to `lanes` adjacent threads, which hold it in registers: rows of CvT are
// short, and several fit a warp. Plain C++: no header of CUDA is needed to read it.
#pragma once

#include <algorithm>
#include <bit>
#include <iterator>
#include <span>

#include "layer_norm_gelu/activation.h"
#include "layer_norm_gelu/calls.h"

namespace cvt_kernels::layer_norm_gelu::cuda {

constexpr int kMaxChannels = 8192;
constexpr int64_t kMaxRows = int64_t{1} << 30;  // of a LayerNorm's backward, which counts them in 32 bits

// The most threads of a block. A thread holds up to 32 values of a row, 16 where it reads them one by one.
template <int vector>
inline constexpr int kMaxThreadsOf = vector == 1 ? 512 : 256;
inline constexpr int kMaxThreads = 512;

// The layout of rows in threads.
struct Layout {
  int vector;   // elements of one load: 16 bytes, or 1 where the rows are not aligned to that
  int vectors;  // of a thread
  int lanes;    // threads of a row, a power of two
  int threads;  // of a block
};

// A LayerNorm has two types: its rows' (x or h), which names the kernels, and its result's. With a residual,
// x is of the type of the result: a branch of 16 bits beside a stream of floats, under autocast. mean and rstd are floats.
using LayerNormForward = LayerNormForwardOf<int, float>;
using LayerNormBackward = LayerNormBackwardOf<int>;
using GeluForward = GeluForwardOf<int>;
using GeluBackward = GeluBackwardOf<int>;

struct SumOverBlocks {
  const float* sums;  // (blocks, parts, channels)
  void* outs[2];      // of each part (channels), or null
  bool is_float[2];   // whether that is float, whatever the type of the rows
  int parts;          // 1 or 2
  int blocks;
  int channels;
};

// The counts of vectors of a thread that the kernels are compiled for: those that the widths of CvT need, and one more
// for all other widths.
inline constexpr int kVectors[] = {1, 3, 4};          // of 8 elements of 16 bits
inline constexpr int kFloatVectors[] = {2, 4, 6, 8};  // of 4 elements of 32 bits
inline constexpr int kSumsFloatVectors[] = {2, 3, 4, 6, 8};  // likewise in the backward of LayerNorm
inline constexpr int kScalars[] = {16};
inline constexpr int kFlatVectors = 4;  // of GELU without a bias, which knows no rows
inline constexpr int kFlatBackwardVectors = 2;
inline constexpr int kFlatThreadsLog2 = 7, kFlatThreads = 1 << kFlatThreadsLog2;

// Says whether rows that are held so never need more than a warp: layout_of takes more vectors instead.
constexpr bool fits_warp(int vector, int vectors) { return vector > 1 && vector * vectors <= 8; }

// The rows of a thread in the forward of LayerNorm. Short parts of rows come several at once, which share the parameters
// and the addresses: as many as 64 registers hold.
constexpr int rows_of_thread(int vector, int vectors, bool adds) {
  return vector > 1 && vector * vectors <= 8 ? (adds ? 2 : 3) : 1;
}

// The layout that wastes the fewest threads, then the one with the most vectors in a thread (several loads under way,
// few exchanges between threads), but with 8 threads to a row so that a load reads whole cache lines. The backward of
// LayerNorm, which keeps two sums and reads three numbers for each of a row, takes the fewest vectors that leave a row
// in a warp: more warps then have loads under way.
inline Layout layout_of(DType dtype, int channels, bool aligned, bool sums = false) {
  const int vector = !aligned ? 1 : dtype == DType::float32 ? 4 : 8;
  const int needed = channels / vector;
  Layout best{vector, 0, 0, 0};
  const std::span<const int> counts = vector == 1   ? std::span<const int>(kScalars)
                                      : vector == 8 ? std::span<const int>(kVectors)
                                      : sums        ? std::span<const int>(kSumsFloatVectors)
                                                    : std::span<const int>(kFloatVectors);
  for (const int vectors : counts) {
    int lanes = 1;
    while (lanes * vectors < needed) lanes *= 2;
    if (lanes > (vector == 1 ? kMaxThreadsOf<1> : kMaxThreadsOf<8>)) continue;
    const int size = lanes * vectors, best_size = best.lanes * best.vectors;
    const bool smaller = best.vectors == 0 || size < best_size;
    const bool better = sums ? best.lanes > 32 : lanes >= 8;
    if (smaller || (size == best_size && better)) best = {vector, vectors, lanes, std::max(lanes, 128)};
  }
  return best;
}

// Without a bias, GELU knows no rows, and a block takes a piece of the tensor. The backward has two tensors to read, and
// takes fewer vectors of each.
inline Layout flat_layout(DType dtype, bool aligned, bool backward) {
  if (!aligned) return {1, 16, kFlatThreads, kFlatThreads};
  return {dtype == DType::float32 ? 4 : 8, backward ? kFlatBackwardVectors : kFlatVectors, kFlatThreads, kFlatThreads};
}

// The number of blocks that cover a flat tensor.
inline int64_t flat_blocks(const Layout& layout, int64_t size) {
  const int64_t piece = int64_t{layout.vector} * layout.vectors * layout.threads;
  return (size + piece - 1) / piece;
}

// The number of blocks that cover all rows at once, with one row of each thread.
inline int64_t blocks_for(const Layout& layout, int64_t rows) {
  const int together = layout.threads / layout.lanes;  // the rows that a block works on at a time
  return (rows + together - 1) / together;
}

// Likewise in the forward of LayerNorm, with all rows of each thread.
inline int64_t blocks_to_normalize(const Layout& layout, int64_t rows, bool adds) {
  const int together = rows_of_thread(layout.vector, layout.vectors, adds);
  return blocks_for(layout, (rows + together - 1) / together);
}

// The kernels shift by it instead of dividing by a number that they do not know.
inline int log2_of(int lanes) { return std::countr_zero(static_cast<unsigned>(lanes)); }

// The number of blocks that stay and walk over the rows, for sums over them: as many as the registers hold on sm_80 and
// sm_90 (docs/kernels.md; sm_100 holds one less of some), each of 128 threads or the equivalent.
inline int64_t resident_blocks(const Layout& layout, int64_t rows, int multiprocessors) {
  const int elements = layout.vector * layout.vectors;
  const int threads = 128 * (6 - (elements + 7) / 8);
  const int64_t most = static_cast<int64_t>(multiprocessors) * std::max(1, threads / layout.threads);
  return std::max<int64_t>(1, std::min(blocks_for(layout, rows), most));
}

// The launches, for one type of elements, on a stream of the current device. Each returns an error, or null.
struct Kernels {
  const char* (*layer_norm)(void* stream, const LayerNormForward&, Activation, DType result, const Layout&);
  const char* (*layer_norm_backward)(void* stream, const LayerNormBackward&, Activation, DType result, const Layout&,
                                     int64_t blocks);
  const char* (*gelu)(void* stream, const GeluForward&, Activation, const Layout&);
  const char* (*gelu_backward)(void* stream, const GeluBackward&, Activation, const Layout&, int64_t blocks);
  const char* (*sum_over_blocks)(void* stream, const SumOverBlocks&);
  const char* (*multiprocessors)(int* count);  // of the current device
};

extern const Kernels kernels_float32, kernels_bfloat16, kernels_float16;

}  // namespace cvt_kernels::layer_norm_gelu::cuda

// The arguments of a call of LayerNorm or GELU, for loops of the CPU and for CUDA kernels, which count by different types.
// Activations are `channels` adjacent values per row. What has a value here is for the kernels alone.
#pragma once

#include <cstdint>

namespace cvt_kernels::layer_norm_gelu {

template <class Count, class Real>
struct LayerNormForwardOf {
  const void* x;
  const void* residual;  // or null: h = x + residual, else h is x and not written
  const void* shift;     // or null: added to x; there is no residual then, and a kernel does not activate the result
  const void* weight;    // of a kernel, or null, as bias
  const void* bias;
  void* h;
  void* out;
  void* mean;  // or null, with rstd
  void* rstd;
  int64_t rows;
  Real eps;
  Real inverse = 0;  // 1 / channels
  Count channels;
  bool float_parameters = false;  // weight and bias are float, whatever the type of x
  bool float_shift = false;
};

template <class Count>
struct LayerNormBackwardOf {
  const void* dout;  // of the type of the result
  const void* dh;    // or null: added to dx
  const void* h;
  const void* weight;  // of a kernel, or null, as bias
  const void* bias;
  const void* mean;
  const void* rstd;
  void* dx;
  void* dbranch;          // dx in the type of the result, where that differs from the rows'; or null
  float* sums = nullptr;  // (blocks, 2, channels): the parts of dweight and of dbias
  Count rows;
  float inverse = 0;
  Count channels;
  bool float_parameters = false;
};

template <class Count>
struct GeluForwardOf {
  const void* x;
  const void* bias;  // or null
  void* out;
  int64_t size;
  Count channels;  // of a row; 0 without a bias
  bool float_parameters = false;
};

template <class Count>
struct GeluBackwardOf {
  const void* dout;
  const void* x;
  const void* bias;  // or null
  void* dx;
  float* sums = nullptr;  // (blocks, channels): the parts of dbias; null without a bias
  int64_t size;
  Count channels;
  bool float_parameters = false;
};

}  // namespace cvt_kernels::layer_norm_gelu

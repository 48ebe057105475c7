// The instruction sets that the loops of the CPU are compiled for. Each gives a table `kernels_<name>` of a family's
// Kernels; the operators choose one of them (cpu.h).
//
// A family's cpu_loops.h is the interface between its operators (cpu_operators.cpp) and its loops (cpu_loops.cpp). setup.py
// compiles the loops once per instruction set, with KERNELS naming the table that they fill; they include nothing whose code
// the linker could merge between the sets.
#pragma once

#include "common/half.h"

namespace cvt_kernels {

// A build may leave sets out: tables are declared weak, and one that is missing has the address null.
//
// Those with VNNI have products of 8-bit integers, as has amx_bf16: every CPU with its tiles of bfloat16 has those too.
enum class InstructionSet { plain, avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16, amx_bf16 };

// DECLARE_TABLES declares the tables in a family's namespace; KERNEL_TABLES lists them in the order of
// InstructionSet. Where there is no x86-64, there is only the first. AMX serves products of matrices (product.h) only:
// families that have them take PRODUCT_TABLES, the others are not compiled for it. INTEGER_TABLES are for products of
// 8-bit integers (linear_int8/), for which bfloat16 does not matter.
#ifdef __x86_64__
#define DECLARE_TABLES                                                                                       \
  extern __attribute__((weak)) const Kernels kernels_plain, kernels_avx2, kernels_avx2_vnni, kernels_avx512, \
      kernels_avx512_vnni, kernels_avx512_bf16, kernels_amx_bf16, kernels_amx_int8
#define KERNEL_TABLES \
  {&kernels_plain, &kernels_avx2, &kernels_avx2, &kernels_avx512, &kernels_avx512, &kernels_avx512_bf16}
#define PRODUCT_TABLES                                                       \
  {&kernels_plain,  &kernels_avx2,        &kernels_avx2,    &kernels_avx512, \
   &kernels_avx512, &kernels_avx512_bf16, &kernels_amx_bf16}
#define INTEGER_TABLES                                                              \
  {&kernels_plain,       &kernels_avx2,        &kernels_avx2_vnni, &kernels_avx512, \
   &kernels_avx512_vnni, &kernels_avx512_vnni, &kernels_amx_int8}
#else
#define DECLARE_TABLES extern __attribute__((weak)) const Kernels kernels_plain
#define KERNEL_TABLES {&kernels_plain}
#define PRODUCT_TABLES KERNEL_TABLES
#define INTEGER_TABLES KERNEL_TABLES
#endif

// Tokens of a height × width grid after a class token or none, of `channels` adjacent values each; steps are in elements.
struct Tokens {
  const void* x;
  int64_t batch_stride, token_stride;
  int64_t batch, class_tokens, height, width, channels;
};

// A loop of a table: the bytes of memory that a thread needs for it, and the function that serves a unit of the work.
template <class Call, class... Unit>
struct Loop {
  int64_t (*bytes)(DType, const Call&);
  void (*run)(DType, const Call&, Unit..., void* memory);
};

// Functions of a table that call a template for the type of a call: one of up to 32 bits, or any.
#define BY_FLOAT(function) BY_DTYPE(with_float, function)
#define BY_TYPE(function) BY_DTYPE(with_type, function)
#define BY_DTYPE(with, function) \
  [](DType dtype, auto... given) { return with(dtype, [&](auto type) { return function<decltype(type)>(given...); }); }

}  // namespace cvt_kernels

// The operators attention_inference and attention_by_position on the CPU: tensors, threads and the choice of instruction set around the loops.
//
// Every tile of queries is computed in the same way whichever thread takes it, so results do not depend on their number.

#include <algorithm>
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "attention/cpu_loops.h"
#include "common/cpu.h"
#include "common/tensors.h"

namespace cvt_kernels::attention {
namespace {

constexpr double kGrain = 1e6;  // multiplications that are worth a thread

// The tensor (batch, tokens, heads, head_dim), copied if its channels are not adjacent.
Tensor with_adjacent_channels(const Tensor& tensor) {
  return tensor.size(3) == 1 || tensor.stride(3) == 1 ? tensor : torch::stable::contiguous(tensor);
}

Strided strided(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

void check(const char* name, const Tensor& tensor, const Tensor& q, int64_t tokens) {
  STD_TORCH_CHECK(tensor.dim() == 4 && tensor.size(0) == q.size(0) && tensor.size(1) == tokens &&
                      tensor.size(2) == q.size(2) && tensor.size(3) == q.size(3),
                  name, ": expected (batch, tokens, heads, head_dim)");
  STD_TORCH_CHECK(tensor.scalar_type() == q.scalar_type() && same_device(tensor, q), name,
                  ": expected dtype and device of q");
}

Tensor attend_to(const Tensor& q, const Tensor& k, const Tensor& v, double scale, const Position* position) {
  static const Kernels& loops = choose(PRODUCT_TABLES);
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && k.size(1) > 0, "q and k: expected (batch, tokens, heads, head_dim)");
  STD_TORCH_CHECK(q.size(3) > 0 && q.size(3) <= kMaxHeadDim, "q: expected up to ", kMaxHeadDim, " channels per head");
  check("k", k, q, k.size(1));
  check("v", v, q, k.size(1));
  const Tensor queries = with_adjacent_channels(q);
  const Tensor keys = with_adjacent_channels(k);
  const Tensor values = with_adjacent_channels(v);
  const Tensor out = empty(q.sizes(), q.scalar_type(), q);
  const Forward call{
      .q = strided(queries),
      .k = strided(keys),
      .v = strided(values),
      .batch = q.size(0),
      .queries = q.size(1),
      .keys = k.size(1),
      .heads = q.size(2),
      .head_dim = q.size(3),
      .scale = scale,
      .out = out.mutable_data_ptr(),
      .position = position,
  };
  const DType dtype = dtype_of(q);
  const int64_t bytes = loops.scratch_bytes(dtype, call);
  const double work = 2.0 * kTile * call.keys * call.head_dim;
  const int64_t grain = std::max<int64_t>(1, static_cast<int64_t>(kGrain / work));
  const int64_t tiles = call.batch * call.heads * tiles_of(call.queries);
  parallel_for_with_scratch(tiles, grain, bytes, [&](int64_t begin, int64_t end, void* scratch) {
    loops.forward(dtype, call, begin, end, scratch);
  });
  return out;
}

Tensor attention_inference(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  return attend_to(q, k, v, scale, nullptr);
}

// The table (heads, H + s (Hk - 1), W + s (Wk - 1)), packed by head; it and the result are in accumulators.
Tensor packed_table(const Tensor& table, const PositionGrids& grids, double scale) {
  const int64_t heads = table.size(0), size = grids.packed_size();
  const std::vector<int64_t> sizes{heads * size + kPackedPadding};
  const Tensor packed = empty(sizes, table.scalar_type(), table);
  const int64_t table_size = grids.table_height() * grids.table_width();
  const auto pack = [&]<class A>(A type) {
    const A* from = static_cast<const A*>(table.const_data_ptr());
    A* to = static_cast<A*>(packed.mutable_data_ptr());
    for (int64_t head = 0; head < heads; head++) {
      pack_table(from + head * table_size, grids, static_cast<A>(split(scale).of_scores), to + head * size);
    }
    std::fill_n(to + heads * size, kPackedPadding, type);
  };
  if (table.scalar_type() == ScalarType::Double) pack(0.0);
  else pack(0.0f);
  return packed;
}

Tensor attention_by_position(const Tensor& q, const Tensor& k, const Tensor& v, double scale, const Tensor& table,
                             const std::optional<Tensor>& rows, int64_t key_height, int64_t key_width, int64_t stride) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4, "q and k: expected (batch, tokens, heads, head_dim)");
  STD_TORCH_CHECK(key_height > 0 && key_width > 0 && stride > 0, "key_height, key_width and stride: expected at least 1");
  const int64_t class_tokens = k.size(1) - key_height * key_width;
  STD_TORCH_CHECK(class_tokens == 0 || class_tokens == 1, "k: expected keys of a grid, and a class token or none");
  STD_TORCH_CHECK(table.dim() == 3 && table.size(0) == q.size(2) && table.size(1) > stride * (key_height - 1) &&
                      table.size(2) > stride * (key_width - 1),
                  "table: expected (heads, offsets down, offsets across)");
  STD_TORCH_CHECK(table.scalar_type() == accumulator_of(q) && same_device(table, q),
                  "table: expected the dtype of accumulators and the device of q");
  if (rows.has_value()) {
    STD_TORCH_CHECK(rows->dim() == 2 && rows->size(0) == q.size(0) && rows->size(1) == q.size(1) &&
                        rows->scalar_type() == ScalarType::Long && same_device(*rows, q),
                    "rows: expected int64 (batch, queries)");
  }
  const auto contiguous = [](const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); };
  const Tensor tokens = rows.has_value() ? contiguous(*rows) : table;
  const PositionGrids grids{
      .height = table.size(1) - stride * (key_height - 1),
      .width = table.size(2) - stride * (key_width - 1),
      .key_height = key_height,
      .key_width = key_width,
      .stride = stride,
      .class_tokens = class_tokens,
  };
  const Tensor packed = packed_table(contiguous(table), grids, scale);
  const Position position{
      .grids = grids,
      .packed = packed.const_data_ptr(),
      .rows = rows.has_value() ? static_cast<const int64_t*>(tokens.const_data_ptr()) : nullptr,
  };
  return attend_to(q, k, v, scale, &position);
}

}  // namespace
}  // namespace cvt_kernels::attention

STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CPU, m) {
  m.impl("attention_inference", TORCH_BOX(&cvt_kernels::attention::attention_inference));
  m.impl("attention_by_position", TORCH_BOX(&cvt_kernels::attention::attention_by_position));
}

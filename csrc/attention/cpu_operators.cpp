// The operators attention_inference and attention_by_position on the CPU. Every tile of queries is computed in the same way
// whichever thread takes it, so results do not depend on their number.

#include "attention/cpu_loops.h"
#include "common/cpu.h"
#include "common/tensors.h"

namespace cvt_kernels::attention {
namespace {

constexpr double kGrain = 1e6;  // multiplications that are worth a thread

Strided strided(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// Checks all arguments but the scale, which may be any number.
void check(const Tensor& q, const Tensor& k, const Tensor& v) {
  dtype_of("q", q);
  expect(q.dim() == 4, "q", q, "(batch, tokens, heads, head_dim)");
  expect(q.size(3) > 0 && q.size(3) <= kMaxHeadDim, "q", q, "up to ", kMaxHeadDim, " channels per head");
  expect(k.dim() == 4 && k.size(1) > 0, "k", k, "(batch, tokens, heads, head_dim) of at least one token");
  const std::vector<int64_t> sizes{q.size(0), k.size(1), q.size(2), q.size(3)};
  expect_sizes("k", k, sizes, q.scalar_type(), q, "(batch, tokens, heads, head_dim) beside q");
  expect_sizes("v", v, sizes, q.scalar_type(), q, "(batch, tokens, heads, head_dim) beside q");
  numbers_of("q", q);
  numbers_of("k", k);
}

Tensor attend_to(const Tensor& q, const Tensor& k, const Tensor& v, double scale, const Position* position) {
  const Kernels& loops = *choose(PRODUCT_TABLES);
  const Tensor queries = with_adjacent_channels("q", q);
  const Tensor keys = with_adjacent_channels("k", k);
  const Tensor values = with_adjacent_channels("v", v);
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
  if (out.numel() == 0) return out;
  const DType dtype = dtype_of("q", q);
  const double work = 2.0 * kTile * call.keys * call.head_dim;
  const int64_t grain = std::max<int64_t>(1, static_cast<int64_t>(kGrain / work));
  const int64_t tiles = call.batch * call.heads * tiles_of(call.queries);
  const int64_t bytes = loops.forward.bytes(dtype, call);
  parallel_for_with_scratch(tiles, grain, bytes, [&](int64_t begin, int64_t end, void* scratch) {
    loops.forward.run(dtype, call, begin, end, scratch);
  });
  return out;
}

Tensor attention_inference(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  check(q, k, v);
  return attend_to(q, k, v, scale, nullptr);
}

// Packs the table of one head; what belongs to no offset is zero.
template <class A>
void pack_table(const A* table, const PositionGrids& g, A scale, A* packed) {
  for (int64_t phase = 0; phase < g.stride; phase++) {
    for (int64_t j = 0; j < g.width; j++) {
      for (int64_t line = 0; line < g.plane_height(); line++) {
        const int64_t down = phase + g.stride * (g.plane_height() - 1 - line);
        const A* row = table + down * g.table_width() + j;
        for (int64_t b = 0; b < g.key_width; b++) {
          *packed++ = down < g.table_height() ? row[g.stride * (g.key_width - 1 - b)] / scale : A(0);
        }
      }
    }
  }
}

// The table (heads, H + s (Hk - 1), W + s (Wk - 1)), packed by head; it and the result are in accumulators.
Tensor packed_table(const Tensor& table, const PositionGrids& grids, double scale) {
  const int64_t heads = table.size(0), size = grids.packed_size();
  const std::vector<int64_t> sizes{product("table", {heads, size}) + kPackedPadding};
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
  check(q, k, v);
  for (const auto& [name, value] : {std::pair{"key_height", key_height}, {"key_width", key_width}, {"stride", stride}}) {
    expect(value > 0 && value <= kMostNumbers, name, value, "at least 1, and no more than a table has");
  }
  const int64_t keys = product("key_height and key_width", {key_height, key_width}), class_tokens = k.size(1) - keys;
  expect(class_tokens == 0 || class_tokens == 1, "k", k, "keys of a grid of ", key_height, " × ", key_width,
         ", and a class token or none");
  expect(table.dim() == 3 && table.size(0) == q.size(2) &&
             table.size(1) > product("stride and key_height", {stride, key_height - 1}) &&
             table.size(2) > product("stride and key_width", {stride, key_width - 1}),
         "table", table, "(heads, offsets down, offsets across) of ", q.size(2), " heads and a grid of queries");
  expect(table.scalar_type() == accumulator_of(q) && same_device(table, q), "table", table,
         "the dtype of accumulators and the device of q");
  if (rows.has_value()) {
    expect_sizes("rows", *rows, {q.size(0), q.size(1)}, ScalarType::Long, q, "(batch, queries)");
  }
  const Tensor tokens = rows.has_value() ? made_contiguous("rows", *rows) : table;
  const auto* numbers = static_cast<const int64_t*>(tokens.const_data_ptr());
  for (int64_t i = 0; rows.has_value() && i < tokens.numel(); i++) {
    expect(numbers[i] > INT64_MIN, "rows", numbers[i], "tokens");
  }
  const PositionGrids grids{
      .height = table.size(1) - stride * (key_height - 1),
      .width = table.size(2) - stride * (key_width - 1),
      .key_height = key_height,
      .key_width = key_width,
      .stride = stride,
      .class_tokens = class_tokens,
  };
  product("table", {stride, grids.width, grids.plane_height(), key_width});
  if (q.numel() == 0) return empty(q.sizes(), q.scalar_type(), q);
  const Tensor packed = packed_table(made_contiguous("table", table), grids, scale);
  const Position position{
      .grids = grids,
      .packed = packed.const_data_ptr(),
      .rows = rows.has_value() ? numbers : nullptr,
  };
  return attend_to(q, k, v, scale, &position);
}

IMPLEMENT("attention_inference", attention_inference)
IMPLEMENT("attention_by_position", attention_by_position)

}  // namespace
}  // namespace cvt_kernels::attention

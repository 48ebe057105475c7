// Rows of tokens on the CPU, which are copied by their index; every row is written by one thread.

#include "common/cpu.h"
#include "common/tensors.h"

namespace cvt_kernels::rows {
namespace {

// The index (images, count) of rows, each a token of its image or negative; it refuses others.
class Index {
 public:
  Index(const Tensor& rows, int64_t tokens) : tokens_(tokens) {
    expect(rows.dim() == 2 && rows.scalar_type() == ScalarType::Long, "rows", rows, "(batch, rows) of int64");
    images = rows.size(0), count = rows.size(1);
    const int64_t number = product("rows", {images, count});
    product("tokens", {images, tokens});
    rows_ = made_contiguous("rows", rows);
    data = static_cast<const int64_t*>(rows_.const_data_ptr());
    for (int64_t i = 0; i < number; i++) {
      expect(data[i] < tokens, "rows", data[i], "the tokens 0 to ", tokens - 1, ", or -1");
    }
  }

  // For each token of each image, its place among the rows of all images, or -1.
  std::vector<int64_t> places() const {
    std::vector<int64_t> result(images * tokens_, -1);
    for (int64_t i = 0; i < images * count; i++) {
      if (data[i] >= 0) result[i / count * tokens_ + data[i]] = i;
    }
    return result;
  }

  int64_t images, count;
  const int64_t* data;

 private:
  int64_t tokens_;
  Tensor rows_;
};

// Tokens (images, tokens, channels) whose channels are adjacent.
struct Tokens {
  explicit Tokens(const Tensor& given) : x(with_adjacent_channels("x", given)) {
    expect(x.dim() == 3, "x", x, "(batch, tokens, channels)");
    dtype_of("x", x);
    row_bytes = x.size(2) * x.element_size();
  }

  const char* row(int64_t image, int64_t token) const {
    const int64_t place = image * x.stride(0) + token * x.stride(1);
    return static_cast<const char*>(x.const_data_ptr()) + place * static_cast<int64_t>(x.element_size());
  }

  const Tensor x;
  int64_t row_bytes;
};

void check_images(const Index& index, int64_t images) {
  expect(index.images == images, "rows", Quoted{"a batch of ", index.images}, "the batch of x, ", images);
}

// The values in contiguous memory, after a check that there is a row of channels, of the dtype of `like`, for each of an index.
Optional values_of(const Optional& given, const Index& index, int64_t channels, const Tensor& like) {
  if (!given.has_value()) return std::nullopt;
  expect_sizes("values", *given, {index.images, index.count, channels}, like.scalar_type(), like, "(batch, rows, channels)");
  return made_contiguous("values", *given);
}

// Copies rows to where they lie one after the other: from(i), or zeros where that is null.
template <class F>
void copy_rows(int64_t rows, int64_t channels, int64_t bytes, void* out, const F& from) {
  parallel_for(rows, grain_of(channels), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      char* to = static_cast<char*>(out) + i * bytes;
      if (const char* row = from(i)) std::memcpy(to, row, bytes);
      else std::memset(to, 0, bytes);
    }
  });
}

Tensor gather_rows(const Tensor& x, const Tensor& rows) {
  const Tokens tokens(x);
  const Index index(rows, x.size(1));
  check_images(index, x.size(0));
  const Tensor out = empty({index.images, index.count, x.size(2)}, x.scalar_type(), x);
  copy_rows(index.images * index.count, x.size(2), tokens.row_bytes, out.mutable_data_ptr(), [&](int64_t i) {
    return index.data[i] < 0 ? nullptr : tokens.row(i / index.count, index.data[i]);
  });
  return out;
}

Tensor scatter_rows(const Optional& x, const Tensor& rows, const Optional& values, int64_t tokens) {
  expect(x.has_value() || values.has_value(), "x", x, "it, or values");
  expect(tokens >= 0, "tokens", tokens, "at least 0");
  const Tensor& like = x.has_value() ? *x : *values;
  std::optional<Tokens> from;
  if (x.has_value()) from.emplace(*x);
  const Index index(rows, tokens);
  const int64_t images = index.images, channels = channels_of(x.has_value() ? "x" : "values", like);
  if (x.has_value()) {
    check_images(index, x->size(0));
    expect(x->size(1) == tokens, "tokens", tokens, "those of x, ", x->size(1));
  }
  dtype_of("values", like);
  const Optional written = values_of(values, index, channels, like);
  const char* data = static_cast<const char*>(const_data_of(written));
  const Tensor out = empty({images, tokens, channels}, like.scalar_type(), like);
  const std::vector<int64_t> places = index.places();
  const int64_t bytes = channels * like.element_size();
  copy_rows(images * tokens, channels, bytes, out.mutable_data_ptr(), [&](int64_t i) -> const char* {
    if (places[i] >= 0) return data == nullptr ? nullptr : data + places[i] * bytes;
    return from.has_value() ? from->row(i / tokens, i % tokens) : nullptr;
  });
  return out;
}

void scatter_rows_(const Tensor& x, const Tensor& rows, const Tensor& values) {
  expect(x.dim() == 3 && x.size(2) > 0 && x.is_contiguous(), "x", x, "contiguous (batch, tokens, channels)");
  dtype_of("x", x);
  numbers_of("x", x);
  expect_apart("rows", rows, x);
  expect_apart("values", values, x);
  const Index index(rows, x.size(1));
  check_images(index, x.size(0));
  const Tensor written = *values_of(values, index, x.size(2), x);
  const char* from = static_cast<const char*>(written.const_data_ptr());
  char* to = static_cast<char*>(x.mutable_data_ptr());
  const int64_t tokens = x.size(1), bytes = x.size(2) * x.element_size();
  parallel_for(index.images * index.count, grain_of(x.size(2)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t token = index.data[i];
      if (token >= 0) std::memcpy(to + (i / index.count * tokens + token) * bytes, from + i * bytes, bytes);
    }
  });
}

IMPLEMENT("gather_rows", gather_rows)
IMPLEMENT("scatter_rows", scatter_rows)
IMPLEMENT("scatter_rows_", scatter_rows_)

}  // namespace
}  // namespace cvt_kernels::rows

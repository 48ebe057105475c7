// Rows of tokens on the CPU, which are copied by their index; every row is written by one thread.

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "common/cpu.h"
#include "common/tensors.h"

namespace cvt_kernels::rows {
namespace {

constexpr int64_t kGrain = 16384;  // elements that are worth a thread

template <class F>
void for_rows(int64_t rows, int64_t channels, const F& f) {
  parallel_for(rows, std::max<int64_t>(1, kGrain / channels), f);
}

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

int64_t element_bytes(const char* name, const Tensor& x) {
  int64_t bytes = 0;
  with_type(dtype_of(name, x), [&](auto type) { bytes = sizeof(type); });
  return bytes;
}

// Tokens (images, tokens, channels) whose channels are adjacent; strides are in values.
class Tokens {
 public:
  explicit Tokens(const Tensor& given) : x_(given) {
    expect(given.dim() == 3 && given.size(2) > 0, "x", given, "(batch, tokens, channels)");
    bytes_ = element_bytes("x", given);
    if (given.stride(2) != 1) x_ = made_contiguous("x", given);
    images = x_.size(0), tokens = x_.size(1), channels = x_.size(2);
    image_stride = x_.stride(0), token_stride = x_.stride(1);
    data = static_cast<const char*>(x_.const_data_ptr());
  }

  int64_t row_bytes() const { return channels * bytes_; }
  const char* row(int64_t image, int64_t token) const {
    return data + (image * image_stride + token * token_stride) * bytes_;
  }

  int64_t images, tokens, channels, image_stride, token_stride;
  const char* data;

 private:
  Tensor x_;
  int64_t bytes_;
};

void check_images(const Index& index, int64_t images) {
  expect(index.images == images, "rows", Quoted{"a batch of ", index.images}, "the batch of x, ", images);
}

// The tensor in contiguous memory, after a check that it has a row of channels, of the dtype of `like`, for each of an index.
std::optional<Tensor> rows_of(const char* name, const std::optional<Tensor>& given, const Index& index, int64_t channels,
                              const Tensor& like) {
  if (!given.has_value()) return std::nullopt;
  expect(given->dim() == 3 && given->size(0) == index.images && given->size(1) == index.count &&
             given->size(2) == channels && given->scalar_type() == like.scalar_type(),
         name, *given, "(batch, rows, channels) of the dtype of x: ", shown(like.scalar_type()), " (", index.images, ", ",
         index.count, ", ", channels, ")");
  return made_contiguous(name, *given);
}

Tensor gather_rows(const Tensor& x, const Tensor& rows) {
  const Tokens tokens(x);
  const Index index(rows, tokens.tokens);
  check_images(index, tokens.images);
  const Tensor out = empty({tokens.images, index.count, tokens.channels}, x.scalar_type(), x);
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t bytes = tokens.row_bytes();
  for_rows(tokens.images * index.count, tokens.channels, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t token = index.data[i];
      if (token < 0) std::memset(to + i * bytes, 0, bytes);
      else std::memcpy(to + i * bytes, tokens.row(i / index.count, token), bytes);
    }
  });
  return out;
}

// Copies row i of values; fills with zeros where there are none.
class Writer {
 public:
  Writer(const std::optional<Tensor>& values, const Index& index, int64_t channels, const Tensor& like)
      : values_(rows_of("values", values, index, channels, like)), bytes_(channels * element_bytes("x", like)) {}

  void operator()(int64_t i, char* to) const {
    if (!values_.has_value()) std::memset(to, 0, bytes_);
    else std::memcpy(to, static_cast<const char*>(values_->const_data_ptr()) + i * bytes_, bytes_);
  }

 private:
  std::optional<Tensor> values_;
  int64_t bytes_;
};

Tensor scatter_rows(const std::optional<Tensor>& x, const Tensor& rows, const std::optional<Tensor>& values, int64_t tokens) {
  expect(x.has_value() || values.has_value(), "x", x, "it, or values");
  expect(tokens >= 0, "tokens", tokens, "at least 0");
  const Tensor& like = x.has_value() ? *x : *values;
  const std::optional<Tokens> from = x.has_value() ? std::optional<Tokens>(*x) : std::nullopt;
  const Index index(rows, tokens);
  const int64_t images = index.images, channels = channels_of(x.has_value() ? "x" : "values", like);
  if (from.has_value()) {
    check_images(index, from->images);
    expect(from->tokens == tokens, "tokens", tokens, "those of x, ", from->tokens);
  }
  const Writer write(values, index, channels, like);
  const Tensor out = empty({images, tokens, channels}, like.scalar_type(), like);
  const std::vector<int64_t> places = index.places();
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t bytes = channels * element_bytes("x", like);
  for_rows(images * tokens, channels, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      if (places[i] >= 0) write(places[i], to + i * bytes);
      else if (from.has_value()) std::memcpy(to + i * bytes, from->row(i / tokens, i % tokens), bytes);
      else std::memset(to + i * bytes, 0, bytes);
    }
  });
  return out;
}

void scatter_rows_(const Tensor& x, const Tensor& rows, const Tensor& values) {
  expect(x.dim() == 3 && x.size(2) > 0 && x.is_contiguous(), "x", x, "contiguous (batch, tokens, channels)");
  numbers_of("x", x);
  expect_apart("rows", rows, x);
  expect_apart("values", values, x);
  const Index index(rows, x.size(1));
  check_images(index, x.size(0));
  const Writer write(values, index, x.size(2), x);
  char* to = static_cast<char*>(x.mutable_data_ptr());
  const int64_t tokens = x.size(1), bytes = x.size(2) * element_bytes("x", x);
  for_rows(index.images * index.count, x.size(2), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t token = index.data[i];
      if (token >= 0) write(i, to + (i / index.count * tokens + token) * bytes);
    }
  });
}

}  // namespace
}  // namespace cvt_kernels::rows

STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CPU, m) {
  using namespace cvt_kernels::rows;
  IMPLEMENT(m, "gather_rows", &gather_rows);
  IMPLEMENT(m, "scatter_rows", &scatter_rows);
  IMPLEMENT(m, "scatter_rows_", &scatter_rows_);
}

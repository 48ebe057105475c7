// Rows of tokens on the CPU: their index, threads and the choice of instruction set around the loops.
//
// Every row is written by one thread, so results do not depend on the number of threads.

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "common/cpu.h"
#include "common/tensors.h"
#include "rows/cpu_loops.h"

namespace cvt_kernels::rows {
namespace {

constexpr int64_t kGrain = 16384;  // elements that are worth a thread

const Kernels& kernels() {
  static const Kernels& chosen = *choose(KERNEL_TABLES);
  return chosen;
}

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

const char* data_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const char*>(tensor->const_data_ptr()) : nullptr;
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

// A weight or bias of accumulators, `absent` throughout if there is none.
class Vector {
 public:
  Vector(const char* name, const std::optional<Tensor>& given, const Tensor& x, double absent) : given_(given) {
    const int64_t channels = x.numel() == 0 ? 0 : x.size(2);
    if (given.has_value()) {
      check_parameter(name, *given, x);
      expect(given->scalar_type() == accumulator_of(x) && given->is_contiguous(), name, *given,
             "adjacent accumulators, ", shown(accumulator_of(x)));
    } else if (accumulator_of(x) == ScalarType::Double) {
      absent_.assign(channels, absent);
    } else {
      absent_.resize(channels);
      std::fill_n(reinterpret_cast<float*>(absent_.data()), channels, static_cast<float>(absent));
    }
  }

  const void* data() const { return given_.has_value() ? given_->const_data_ptr() : absent_.data(); }

 private:
  std::optional<Tensor> given_;
  std::vector<double> absent_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> gather_add_layer_norm(const Tensor& x, const Tensor& rows, const Tensor& branch,
                                                                 const std::optional<Tensor>& weight,
                                                                 const std::optional<Tensor>& bias, double eps,
                                                                 bool with_statistics) {
  const Tokens tokens(x);
  const Index index(rows, tokens.tokens);
  check_images(index, tokens.images);
  const Tensor added = *rows_of("branch", branch, index, tokens.channels, x);
  const Vector scale("weight", weight, added, 1), shift("bias", bias, added, 0);
  expect_eps("eps", eps);
  const int64_t count = with_statistics ? tokens.images * index.count : 0;
  const DType dtype = dtype_of("x", x);
  const Tensor h = empty(added.sizes(), x.scalar_type(), x), out = empty(added.sizes(), x.scalar_type(), x);
  const Tensor mean = empty({count}, accumulator_of(x), x), rstd = empty({count}, accumulator_of(x), x);
  const Gather call{
      .x = tokens.data,
      .image_stride = tokens.image_stride,
      .token_stride = tokens.token_stride,
      .index = index.data,
      .count = index.count,
      .channels = tokens.channels,
      .branch = added.const_data_ptr(),
      .weight = scale.data(),
      .bias = shift.data(),
      .eps = eps,
      .h = h.mutable_data_ptr(),
      .out = out.mutable_data_ptr(),
      .mean = with_statistics ? mean.mutable_data_ptr() : nullptr,
      .rstd = with_statistics ? rstd.mutable_data_ptr() : nullptr,
  };
  for_rows(tokens.images * index.count, tokens.channels, [&](int64_t begin, int64_t end) {
    std::vector<double> scratch(tokens.channels);
    kernels().gather_add_layer_norm(dtype, call, begin, end, scratch.data());
  });
  return {h, out, mean, rstd};
}

// Writes row i of values + branch, of values, or zeros.
class Writer {
 public:
  Writer(const std::optional<Tensor>& values, const std::optional<Tensor>& branch, const Index& index, int64_t channels,
         const Tensor& like)
      : values_(rows_of("values", values, index, channels, like)),
        branch_(rows_of("branch", branch, index, channels, like)),
        values_data_(data_of(values_)),
        branch_data_(data_of(branch_)),
        dtype_(dtype_of("x", like)),
        channels_(channels),
        bytes_(channels * element_bytes("x", like)) {
    expect(values.has_value() || !branch.has_value(), "values", values, "them beside a branch");
  }

  void operator()(int64_t i, char* to) const {
    const int64_t offset = i * bytes_;
    if (values_data_ == nullptr) std::memset(to, 0, bytes_);
    else if (branch_data_ == nullptr) std::memcpy(to, values_data_ + offset, bytes_);
    else kernels().add(dtype_, values_data_ + offset, branch_data_ + offset, channels_, to);
  }

 private:
  std::optional<Tensor> values_, branch_;
  const char *values_data_, *branch_data_;
  DType dtype_;
  int64_t channels_, bytes_;
};

Tensor scatter_rows(const std::optional<Tensor>& x, const Tensor& rows, const std::optional<Tensor>& values,
                    const std::optional<Tensor>& branch, int64_t tokens) {
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
  const Writer write(values, branch, index, channels, like);
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

void scatter_rows_(const Tensor& x, const Tensor& rows, const Tensor& values, const std::optional<Tensor>& branch) {
  expect(x.dim() == 3 && x.size(2) > 0 && x.is_contiguous(), "x", x, "contiguous (batch, tokens, channels)");
  numbers_of("x", x);
  expect_apart("rows", rows, x);
  expect_apart("values", values, x);
  if (branch.has_value()) expect_apart("branch", *branch, x);
  const Index index(rows, x.size(1));
  check_images(index, x.size(0));
  const Writer write(values, branch, index, x.size(2), x);
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
  IMPLEMENT(m, "gather_add_layer_norm", &gather_add_layer_norm);
  IMPLEMENT(m, "scatter_rows", &scatter_rows);
  IMPLEMENT(m, "scatter_rows_", &scatter_rows_);
}

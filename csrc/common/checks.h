// Checks of what operators are given, in one place for the CPU and the GPU: each refusal says which operator and argument,
// what came, and what was expected. Sizes are multiplied here, where no product wraps around.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <new>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

namespace cvt_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Numbers = std::vector<int64_t>;

// What came, as messages have it -------------------------------------------------------------------------------

inline const char* shown(ScalarType type) {
  switch (type) {
    case ScalarType::Double: return "float64";
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Long: return "int64";
    case ScalarType::Int: return "int32";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    default: return torch::headeronly::toString(type);
  }
}

inline std::string listed(torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  std::ostringstream text;
  for (size_t i = 0; i < sizes.size(); i++) text << (i == 0 ? "(" : ", ") << sizes[i];
  text << (sizes.size() == 0 ? "()" : ")");
  return text.str();
}

inline std::string shown(const Tensor& tensor) {
  std::ostringstream text;
  text << shown(tensor.scalar_type()) << ' ' << listed(tensor.sizes());
  if (!tensor.is_contiguous()) text << " of strides " << listed(tensor.strides());
  if (!tensor.is_cpu()) text << " on another device";
  return text.str();
}

inline std::string shown(const Optional& tensor) { return tensor.has_value() ? shown(*tensor) : "none"; }
inline std::string shown(const std::string& given) {
  std::string text = given.substr(0, 60);
  std::replace_if(text.begin(), text.end(), [](char c) { return c >= 0 && c < ' '; }, '?');
  return "'" + text + "'";
}
inline std::string_view shown(std::string_view text) { return text; }
template <class Number>
  requires std::is_arithmetic_v<Number>
Number shown(Number number) {
  return number;
}

// A number with words before it.
struct Quoted {
  const char* words;
  int64_t number;
};

inline std::string shown(Quoted quoted) { return quoted.words + std::to_string(quoted.number); }

// How many a list has.
template <class T>
std::string shown(const std::vector<T>& list) {
  return std::to_string(list.size()) + " of them";
}

// What a message has of a tensor that was expected; it is put together when the message is.
struct Shown {
  const Tensor& tensor;
  friend std::ostream& operator<<(std::ostream& out, const Shown& self) { return out << shown(self.tensor); }
};

template <class Got, class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const char* name, const Got& got, const Parts&... expected) {
  std::ostringstream text;
  text << name << ": got " << shown(got) << ", expected ";
  (text << ... << expected);
  throw std::runtime_error(text.str());
}

// Refuses an argument unless the condition holds.
template <class Got, class... Parts>
inline void expect(bool condition, const char* name, const Got& got, const Parts&... expected) {
  if (!condition) [[unlikely]] refuse(name, got, expected...);
}

template <class T>
void expect_count(const char* name, const std::vector<T>& list, size_t count) {
  expect(list.size() == count, name, list, count);
}

// A number that is added to a variance.
inline void expect_eps(const char* name, double eps) {
  expect(eps >= 0 && eps < INFINITY, name, eps, "a finite number of at least 0");
}

// Sizes ----------------------------------------------------------------------------------------------------

// The most numbers that an operator works with. What it needs besides is a small multiple, which int64_t can hold.
constexpr int64_t kMostNumbers = int64_t{1} << 40;

// Returns the product of sizes, after a check that it has no more than kMostNumbers; zeros count as ones there, so that
// the same holds for the product of any of them.
template <class Iterator>
int64_t product(const char* name, Iterator begin, Iterator end) {
  int64_t numbers = 1;
  bool fits = true, empty = false;
  for (Iterator size = begin; size != end; ++size) {
    empty |= *size == 0;
    fits = fits && *size >= 0 && !__builtin_mul_overflow(numbers, std::max<int64_t>(1, *size), &numbers);
  }
  if (!fits || numbers > kMostNumbers) [[unlikely]] {
    std::ostringstream text;
    for (Iterator size = begin; size != end; ++size) text << (size == begin ? "" : " · ") << *size;
    refuse(name, std::string_view(text.str()), "sizes of up to 2**40 numbers");
  }
  return empty ? 0 : numbers;
}

inline int64_t product(const char* name, std::initializer_list<int64_t> sizes) {
  return product(name, sizes.begin(), sizes.end());
}

// The height and width of a map of tokens or pixels.
struct Map {
  int64_t height, width;
};

constexpr int64_t kMostSteps = 1 << 20;  // the largest stride, padding and dilation, as in cvt_kernels/checks.py
constexpr int64_t kFewSteps = 64;        // a padding that is taken whatever the sizes are
constexpr int64_t kMostHeld = 1 << 26;   // numbers of rows that a thread holds, where their padding is wider

// Returns the map of outputs of a convolution, after checks of all that its loops count with. `name` is the argument,
// or the arguments, with the settings; `channels` is the number of channels of the padded rows that the loops hold, or
// 0.
inline Map outputs_of(const char* name, Map map, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation,
                      int64_t channels) {
  const auto within = [&](const char* what, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) [[unlikely]] refuse(name, Quoted{what, value}, least, " to ", most);
  };
  within("a kernel of ", kernel, 1, kMostSteps);
  within("a stride of ", stride, 1, kMostSteps);
  within("a padding of ", padding, 0, kMostSteps);
  within("a dilation of ", dilation, 1, kMostSteps);
  product("x", {map.height, map.width});
  const int64_t reach = dilation * (kernel - 1);
  if (padding > kFewSteps) {
    within("a padding of ", padding, 0, std::max({map.height, map.width, kFewSteps - reach}) + reach);
    const int64_t held = product(name, {std::min(map.height, reach + 1) + 1, map.width + 2 * padding});
    expect(product(name, {held, std::max<int64_t>(1, channels)}) <= kMostHeld || channels == 0, name, padding,
           "less padding around rows of ", map.width, " tokens");
  }
  const int64_t rows = map.height + 2 * padding - reach - 1, columns = map.width + 2 * padding - reach - 1;
  if (rows < 0 || columns < 0) [[unlikely]] {
    refuse(name, Quoted{"a reach of ", reach + 1}, "a grid that gives an output, for one of ", map.height, " × ", map.width);
  }
  const Map out{rows / stride + 1, columns / stride + 1};
  product(name, {out.height, out.width});
  return out;
}

// Operators --------------------------------------------------------------------------------------------------

template <size_t size>
struct Name {
  char text[size];
  consteval Name(const char (&given)[size]) { std::copy_n(given, size, text); }
};

// Python's None may come as a tensor.
inline void expect_defined(int place, const Tensor& tensor) {
  if (!tensor.defined()) [[unlikely]] {
    refuse(("argument " + std::to_string(place)).c_str(), std::string_view("none"), "a tensor");
  }
}
inline void expect_defined(int place, const std::vector<Tensor>& list) {
  for (const Tensor& tensor : list) expect_defined(place, tensor);
}
template <class Other>
void expect_defined(int, const Other&) {}

// The function of an operator, whose errors have its name.
template <Name name, auto function>
struct Operator;

template <Name name, class Result, class... Arguments, Result (*function)(Arguments...)>
struct Operator<name, function> {
  static Result run(Arguments... arguments) {
    try {
      int place = 0;
      (expect_defined(++place, arguments), ...);
      return function(std::forward<Arguments>(arguments)...);
    } catch (const std::bad_alloc&) {
      throw std::runtime_error(std::string(name.text) + ": out of memory");
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(name.text) + ": " + error.what());
    }
  }
};

}  // namespace cvt_kernels

// Registers the function of an operator in a library, or on a CPU.
#define IMPLEMENT_IN(library, name, function) \
  (library).impl(name, TORCH_BOX((&cvt_kernels::Operator<name, &function>::run)))
#define IMPLEMENT(name, function) \
  STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CPU, library) { IMPLEMENT_IN(library, name, function); }

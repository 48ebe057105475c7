// A part of a tensor's bytes, by which writes that PyTorch does not count are noticed.
//
// Of a tensor, eight lines of 64 bytes are read: the first, the last, and one at random in each sixth between them; all of
// a smaller one. So 128 numbers of float32 are compared for eight misses of the cache. Of a tensor with gaps between its
// numbers, or with numbers that share memory, 64 single ones are.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

namespace cvt_kernels::snapshots {

class Sample {
 public:
  static constexpr int64_t kLine = 64, kBetween = 6, kLines = kBetween + 2, kSingles = 64;

  // Of numbers of `item` bytes; `place` differs from tensor to tensor. Begins to load the bytes.
  Sample(const void* address, int64_t item, int64_t dim, const int64_t* sizes, const int64_t* strides, uint64_t place)
      : address_(static_cast<const char*>(address)), item_(item), dim_(dim), sizes_(sizes), strides_(strides) {
    int64_t extent = 1;  // from the first to the last number
    for (int64_t i = 0; i < dim; i++) {
      numbers_ *= sizes[i];
      extent += (sizes[i] - 1) * strides[i];
    }
    if (address == nullptr) numbers_ = 0;
    bytes_ = numbers_ * item;
    is_dense_ = extent == numbers_;
    random_ = mixed(place + 1);
    if (numbers_ == 0 || !is_dense_) return;
    lines_ = std::min(kLines, bytes_ / kLine);
    for (int64_t i = 0; i < lines_; i++) __builtin_prefetch(line_[i] = address_ + offset_of_line(i));
    if (rest() > 0) __builtin_prefetch(address_ + bytes_ - 1);
  }

  uint64_t hash() const {
    Hash hash;
    for (int64_t i = 0; i < lines_; i++) hash.add(line_[i], kLine);
    if (numbers_ > 0 && is_dense_) {
      if (rest() > 0) hash.add(address_ + lines_ * kLine, rest());
    } else {
      for (int64_t i = 0; i < std::min(kSingles, numbers_); i++) hash.add(address_ + single(i), item_);
    }
    return hash.of_all();
  }

 private:
  // Words go to eight sums in turn, each a bijection of every word in it, so that one changed word always shows.
  struct Hash {
    void add(const char* bytes, int64_t count) {
      uint64_t words[kLine / 8] = {};
      if (count == kLine) {
        std::memcpy(words, bytes, kLine);
      } else {
        std::memcpy(words, bytes, static_cast<size_t>(count));
      }
      for (int64_t i = 0; i < kLine / 8; i++) sums[i] = with(sums[i], words[i]);
    }

    uint64_t of_all() const {
      uint64_t hash = 0;
      for (const uint64_t sum : sums) hash = with(hash, sum);
      return hash;
    }

    static uint64_t with(uint64_t sum, uint64_t word) { return std::rotl(sum ^ word, 29) * 0x9E3779B97F4A7C15u; }

    uint64_t sums[kLine / 8] = {};
  };

  static uint64_t mixed(uint64_t x) {
    x *= 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }

  // A place at random in each of several equal parts of less than 2⁴⁰ places.
  template <int64_t kParts>
  int64_t within(int64_t part, int64_t places) const {
    const auto fraction = static_cast<int64_t>((random_ >> (10 * (part % 6))) % 1024);
    return (part * 1024 + fraction) * places / (1024 * kParts);
  }

  // The bytes behind the lines of a small tensor.
  int64_t rest() const { return lines_ < kLines ? bytes_ - lines_ * kLine : 0; }

  // The offset of a line from the beginning; those between begin where lines of the cache do.
  int64_t offset_of_line(int64_t i) const {
    if (bytes_ <= kLines * kLine) return i * kLine;
    if (i == 0) return 0;
    if (i == kLines - 1) return bytes_ - kLine;
    const auto skipped = kLine - static_cast<int64_t>(reinterpret_cast<uintptr_t>(address_) % kLine);
    return skipped + kLine * within<kBetween>(i - 1, (bytes_ - kLine - skipped) / kLine);
  }

  // The offset of a number, the first and the last among them.
  int64_t single(int64_t i) const {
    int64_t number = numbers_ <= kSingles ? i : within<kSingles>(i, numbers_), offset = 0;
    if (i == 0) number = 0;
    if (i == kSingles - 1) number = numbers_ - 1;
    for (int64_t axis = dim_ - 1; axis >= 0; axis--) {
      offset += number % sizes_[axis] * strides_[axis];
      number /= sizes_[axis];
    }
    return offset * item_;
  }

  const char* address_;
  int64_t item_, dim_;
  const int64_t *sizes_, *strides_;
  int64_t numbers_ = 1, bytes_;
  bool is_dense_;
  uint64_t random_;
  int64_t lines_ = 0;
  const char* line_[kLines];
};

}  // namespace cvt_kernels::snapshots

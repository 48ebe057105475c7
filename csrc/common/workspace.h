// Memory that operators use while they run, kept for the next call: fresh memory has to be mapped page by page, which on a
// CPU takes longer than to fill it. For the operators only, as cpu.h.
#pragma once

#include <cstdint>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace cvt_kernels {

// The buffers that no call uses now. Calls of several threads at once each take a buffer of their own.
class WorkspacePool {
 public:
  struct Buffer {
    void* data = nullptr;
    int64_t bytes = 0;
  };

  static WorkspacePool& instance() {
    static WorkspacePool* pool = new WorkspacePool;  // never destroyed: threads may outlive the end of main
    return *pool;
  }

  // A buffer of at least so many bytes, aligned to a page: the smallest that is large enough, or a new one in the place of
  // the largest.
  Buffer take(int64_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto best = free_.end();
      for (auto each = free_.begin(); each != free_.end(); ++each) {
        const bool fits = each->bytes >= bytes;
        if (best == free_.end() || (best->bytes >= bytes ? fits && each->bytes < best->bytes : each->bytes > best->bytes)) {
          best = each;
        }
      }
      if (best != free_.end()) {
        const Buffer found = *best;
        free_.erase(best);
        held_ -= found.bytes;
        if (found.bytes >= bytes) return found;
        release(found);
      }
    }
    return {::operator new(bytes, kPage), bytes};
  }

  void give_back(Buffer buffer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (held_ + buffer.bytes > kMost) return release(buffer);
    free_.push_back(buffer);
    held_ += buffer.bytes;
  }

  // Frees what no call uses now.
  void release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Buffer& buffer : free_) release(buffer);
    free_.clear();
    held_ = 0;
  }

  int64_t held() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return held_;
  }

 private:
  static constexpr std::align_val_t kPage{4096};
  static constexpr int64_t kMost = int64_t{256} << 20;  // bytes that are kept at most

  static void release(const Buffer& buffer) { ::operator delete(buffer.data, kPage); }

  std::mutex mutex_;
  std::vector<Buffer> free_;
  int64_t held_ = 0;
};

// A buffer of the pool for as long as this object lives.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : buffer_(WorkspacePool::instance().take(bytes)) {}
  ~Workspace() { WorkspacePool::instance().give_back(buffer_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  char* data() const { return static_cast<char*>(buffer_.data); }

 private:
  WorkspacePool::Buffer buffer_;
};

}  // namespace cvt_kernels

// Threads for the steps of served models. A thread without work spins for some microseconds and then sleeps, so that other
// programs and other threads of ours have its core; PyTorch's threads spin for milliseconds, unless they are hushed (below).
// For the operators only, as cpu.h.
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace cvt_kernels {

// Calls ready() until it is true, for 300 µs at most, longer than Python takes from one block to the next; returns what it
// said last. Gives up at once where this thread did not have the core meanwhile.
template <class F>
bool spin(const F& ready) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kMost = std::chrono::microseconds(300), kAway = std::chrono::microseconds(50);
  const auto start = Clock::now();
  for (auto last = start; !ready();) {
    for (int i = 0; i < 16; i++) {
#ifdef __x86_64__
      __builtin_ia32_pause();
#endif
    }
    const auto now = Clock::now();
    if (now - start > kMost || now - last > kAway) return ready();
    last = now;
  }
  return true;
}

// Waits for what other threads are at.
template <class F>
void wait_until(const F& ready) {
  while (!spin(ready)) std::this_thread::yield();
}

// As many threads as the calls at one time have asked for, which stay until the process ends.
class Pool {
 public:
  static Pool& instance() {
    // A forked process has none of the threads.
    static const int at_fork = pthread_atfork(nullptr, nullptr, [] { current() = new Pool; });
    static_cast<void>(at_fork);
    return *current();
  }

  // Calls f(0) here, and f(1) to f(count - 1) in other threads, each unless f(0) has returned before a thread came for it.
  // f must not throw.
  template <class F>
  void run(int64_t count, const F& f) {
    if (count == 1) return f(0);
    Job job{[](const void* given, int64_t place) { (*static_cast<const F*>(given))(place); }, &f, count - 1, count - 1};
    open(job);
    f(0);
    close(job);
  }

  // Keeps PyTorch's threads, of which there are `theirs`, from spinning behind its operators on the cores of ours, while models
  // are served. They are libgomp's, which spin for long only if there are no more of them than CPUs (its manual,
  // GOMP_SPINCOUNT): so a thread starts a team that brings libgomp above the number of CPUs, and leaves it idle. It ends when no
  // call has come for 0.1 s, lest training wait for threads that sleep. With twice as many CPUs both have cores of their own.
  // A process that is forked meanwhile inherits libgomp's count.
  void hush(int64_t theirs) {
    if (theirs == 1 || hushes_.load(std::memory_order_relaxed) || hushes_.exchange(true)) return;
    try {
      std::thread([this, theirs] {
        const int64_t available = cpus();
        if (theirs <= available && available < 2 * theirs) start_team(available - theirs + 2);
        while (is_serving()) {
        }
        hushes_.store(false);
      }).detach();
    } catch (const std::system_error&) {  // Linux has no more threads
      hushes_.store(false);
    }
  }

 private:
  struct Job {
    void (*run)(const void* f, int64_t place);
    const void* f;
    const int64_t places;
    int64_t left;                    // places that nobody has taken
    std::atomic<int64_t> active{0};  // threads within f
    Job* next = nullptr;
  };

  // Held for some instructions.
  struct Lock {
    explicit Lock(std::atomic_flag& flag) : flag_(flag) {
      while (flag.test_and_set(std::memory_order_acquire)) {
        wait_until([&] { return !flag.test(std::memory_order_relaxed); });
      }
    }
    ~Lock() { flag_.clear(std::memory_order_release); }

   private:
    std::atomic_flag& flag_;
  };

  static Pool*& current() {
    static Pool* pool = new Pool;  // never destroyed: its threads may outlive the end of main
    return pool;
  }

  void open(Job& job) {
    int64_t missing;
    {
      const Lock lock(flag_);
      job.next = first_;
      first_ = &job;
      wanted_ += job.places;
      missing = std::max<int64_t>(wanted_ - threads_, 0);
      threads_ += missing;
    }
    for (; missing > 0; missing--) {
      try {
        std::thread([this] { work(); }).detach();
      } catch (const std::system_error&) {  // Linux has no more: the others do the work
        const Lock lock(flag_);
        threads_ -= missing;
        break;
      }
    }
    posted_.fetch_add(1);
    posted_.notify_all();
  }

  void close(Job& job) {
    {
      const Lock lock(flag_);
      Job** place = &first_;
      while (*place != &job) place = &(*place)->next;
      *place = job.next;
      wanted_ -= job.places;
    }
    wait_until([&] { return job.active.load(std::memory_order_acquire) == 0; });
  }

  // Takes a place of a job; returns null where none is left.
  Job* take(int64_t& place) {
    const Lock lock(flag_);
    for (Job* job = first_; job != nullptr; job = job->next) {
      if (job->left == 0) continue;
      place = job->left--;
      job->active.fetch_add(1, std::memory_order_relaxed);
      return job;
    }
    return nullptr;
  }

  static int64_t cpus() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
  }

  // Starts threads of libgomp's that belong to this one, and do nothing.
  static void start_team(int64_t count) {
    using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
    static const auto parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    static const bool is_libgomp = parallel != nullptr && dlsym(RTLD_DEFAULT, "__kmpc_fork_call") == nullptr;
    if (!is_libgomp) return;
    // Where Linux refuses a thread, libgomp ends the process: so many are tried before.
    std::atomic<bool> ends{false};
    std::vector<std::thread> tried;
    bool refused = false;
    try {
      for (int64_t i = 1; i < count; i++) tried.emplace_back([&] { ends.wait(false); });
    } catch (const std::system_error&) {
      refused = true;
    }
    ends.store(true);
    ends.notify_all();
    for (std::thread& each : tried) each.join();
    if (!refused) parallel([](void*) {}, nullptr, static_cast<unsigned>(count), 0);
  }

  // Whether a call came or ran within the next 0.1 s.
  bool is_serving() {
    const int32_t seen = posted_.load();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const Lock lock(flag_);
    return posted_.load() != seen || first_ != nullptr;
  }

  void work() {
    for (;;) {
      const int32_t seen = posted_.load();
      int64_t place;
      if (Job* job = take(place)) {
        job->run(job->f, place);
        job->active.fetch_sub(1, std::memory_order_release);  // the caller may free the job now
      } else if (!spin([&] { return posted_.load() != seen; })) {
        posted_.wait(seen);
      }
    }
  }

  std::atomic_flag flag_;           // of the three below
  Job* first_ = nullptr;            // the calls that are running
  int64_t wanted_ = 0, threads_ = 0;  // threads that they ask for, and that there are
  std::atomic<int32_t> posted_{0};   // calls so far
  std::atomic<bool> hushes_{false};  // whether there is a thread that does
};

}  // namespace cvt_kernels

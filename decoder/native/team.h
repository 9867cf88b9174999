// A few threads that share the work of a prefill; a team of one runs everything where it is called.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <sched.h>

static inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int member = 1; member < size; ++member) threads_.emplace_back([this, member] { serve(member); });
  }

  ~Team() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Every member calls region(member); returns when all have.
  void run(const std::function<void(int)>& region) {
    if (size_ == 1) return region(0);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      region_ = &region;
      ++round_;
    }
    wake_.notify_all();
    region(0);
    wait_for_all();
  }

  // Inside run: tasks 0 ... count - 1, each taken by whoever is free; all are done when this returns, for everyone.
  template <class F>
  void tasks(int count, F&& task) {
    if (size_ == 1) {
      for (int i = 0; i < count; ++i) task(i);
      return;
    }
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
    wait_for_all();
  }

 private:
  void serve(int member) {
    for (long seen = 0;;) {
      const std::function<void(int)>* region;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return closing_ || round_ != seen; });
        if (closing_) return;
        seen = round_;
        region = region_;
      }
      (*region)(member);
      wait_for_all();
    }
  }

  // A barrier. Phases are short, so it spins; another process may need the core, so not for long.
  void wait_for_all() {
    const unsigned phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins < 4000)
        pause();
      else
        sched_yield();
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool closing_ = false;
  long round_ = 0;
  const std::function<void(int)>* region_ = nullptr;
  std::atomic<int> next_{0}, arrived_{0};
  std::atomic<unsigned> phase_{0};
};

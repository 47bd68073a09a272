#include "engine/sampler_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <thread>

#ifdef _WIN32
#include <process.h>
#else
#include <unistd.h>
#endif

#include "engine/error.h"

namespace lfmfast {

namespace {

int process_id() {
#ifdef _WIN32
    return _getpid();
#else
    return getpid();
#endif
}

inline void relax() {
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    __builtin_ia32_pause();
#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
    __asm__ volatile("yield");
#endif
}

class worker_pool {
  public:
    // Never destroyed: its threads sleep until the process ends. A child of fork() has none of them and gets a pool of its own.
    static worker_pool & instance() {
        static std::mutex    mutex;
        static worker_pool * pool = nullptr;
        static int           pid  = 0;
        std::lock_guard<std::mutex> lock(mutex);
        if (!pool || pid != process_id()) {
            pool = new worker_pool;
            pid  = process_id();
        }
        return *pool;
    }

    // Calls work(0) to work(n - 1), each once. `work` must not throw.
    void run(size_t n, size_t n_threads, const std::function<void(size_t)> & work) {
        std::unique_lock<std::mutex> only(run_mutex_, std::try_to_lock);
        n_threads = std::min(n_threads, n);
        if (n_threads < 2 || !only.owns_lock()) {  // alone, or the pool is busy with another batch
            for (size_t i = 0; i < n; ++i) work(i);
            return;
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            start(n_threads - 1);
            work_ = &work;
            n_    = n;
            next_.store(0, std::memory_order_relaxed);
            seats_ = std::min(n_threads - 1, n_workers_);
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        take_part(work);
        std::unique_lock<std::mutex> lock(mutex_);
        seats_ = 0;
        done_.wait(lock, [this] { return busy_ == 0; });
        work_ = nullptr;
    }

  private:
    void start(size_t n) {
        while (n_workers_ < n) {
            try {
                std::thread([this] { loop(); }).detach();
            } catch (const std::system_error &) {
                return;  // no more threads: with fewer it only takes longer
            }
            ++n_workers_;
        }
    }

    void take_part(const std::function<void(size_t)> & work) {
        for (size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < n_;) work(i);
    }

    void loop() {
        uint64_t seen = 0;
        for (;;) {
            // Batches come in quick succession while decoding is fast; a sleep and a wake-up cost as much as some rows.
            for (int i = 0; i < 2000 && generation_.load(std::memory_order_acquire) == seen; ++i) relax();
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
            seen = generation_.load(std::memory_order_relaxed);
            if (seats_ == 0) continue;
            --seats_;
            ++busy_;
            const auto * work = work_;
            lock.unlock();
            take_part(*work);
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    std::mutex              run_mutex_;  // one batch at a time
    std::mutex              mutex_;
    std::condition_variable wake_, done_;
    std::atomic<uint64_t>   generation_{0};
    std::atomic<size_t>     next_{0};
    size_t                  n_ = 0, n_workers_ = 0, seats_ = 0, busy_ = 0;
    const std::function<void(size_t)> * work_ = nullptr;
};

}  // namespace

void run_parallel(size_t n, size_t n_threads, const std::function<void(size_t)> & work) {
    if (n_threads < 2 || n < 2) {
        for (size_t i = 0; i < n; ++i) work(i);
        return;
    }
    worker_pool::instance().run(n, n_threads, work);
}

std::vector<sampled> sample_batch(const float * logits, int32_t n_vocab, const std::vector<shared_sampler *> & samplers,
                                  int n_threads) {
    auto sorted = samplers;
    std::sort(sorted.begin(), sorted.end(), std::less<shared_sampler *>());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
        throw error(error_code::invalid_argument, "chains must all be different; one is listed twice");
    }
    for (const auto * s : samplers) {
        if (s->n_vocab() != n_vocab) {
            throw error(error_code::invalid_argument,
                        "chains must be for rows of " + std::to_string(n_vocab) + " logits, not of " +
                            std::to_string(s->n_vocab()),
                        s->n_vocab(), n_vocab);
        }
    }
    if (n_threads < 1) {
        throw error(error_code::invalid_argument, "n_threads must be 1 or more, not " + std::to_string(n_threads));
    }
    std::vector<sampled> out(samplers.size());
    run_parallel(samplers.size(), static_cast<size_t>(n_threads), [&](size_t i) {
        try {
            out[i].token = samplers[i]->sample(logits + i * static_cast<size_t>(n_vocab));
        } catch (...) {
            out[i].error = current_error().message;
        }
    });
    return out;
}

}  // namespace lfmfast

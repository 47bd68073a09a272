#include "engine/mailbox.h"

#include <algorithm>
#include <chrono>

#ifdef _WIN32
#include <io.h>
#else
#include <unistd.h>
#endif

namespace lfmfast {

namespace {

void write_one(int fd) {
    const uint64_t one = 1;  // what an eventfd takes; a pipe takes any bytes
#ifdef _WIN32
    (void) _write(fd, &one, sizeof(one));
#else
    // A full pipe means that the reader has a wake-up to come already.
    if (write(fd, &one, sizeof(one)) < 0) {
        return;
    }
#endif
}

}  // namespace

void mailbox::put(uint64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_ && std::find(ids_.begin(), ids_.end(), id) == ids_.end()) {
        ids_.push_back(id);
    }
}

void mailbox::ring() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (ids_.empty() || rung_) {
            return;
        }
        rung_ = true;
    }
    changed_.notify_one();
    std::lock_guard<std::mutex> lock(fd_mutex_);
    if (fd_ >= 0) {
        write_one(fd_);
    }
}

bool mailbox::wait(int timeout_ms, std::vector<uint64_t> & ids) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return closed_ || !ids_.empty(); });
    ids.swap(ids_);
    ids_.clear();
    rung_ = false;
    return !closed_ || !ids.empty();
}

void mailbox::close() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
    }
    changed_.notify_all();
    std::lock_guard<std::mutex> lock(fd_mutex_);
    fd_ = -1;
}

}  // namespace lfmfast

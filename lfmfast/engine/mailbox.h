// Tells one consumer of many streams which of them have news: one wake-up for all that happened since it last looked. Pure.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace lfmfast {

class mailbox {
  public:
    // `fd`: a descriptor to write one byte (eight, for an eventfd) to when the first news come in, for event loops; -1: none.
    // It must stay open until close().
    explicit mailbox(int fd = -1) : fd_(fd) {}

    // From any thread: put() in each of several ids, then ring() for all of them at once; or post() a single one. Who is woken
    // may take the waker's core, and would find but the first of several that are posted.
    void put(uint64_t id);
    void ring();
    void post(uint64_t id) {
        put(id);
        ring();
    }

    // The ids with news, each once, waiting for some for at most `timeout_ms`. True: open; false: closed and nothing left.
    bool wait(int timeout_ms, std::vector<uint64_t> & ids);
    void close();  // nothing is written to the descriptor after this

  private:
    std::mutex              mutex_;
    std::condition_variable changed_;
    std::vector<uint64_t>   ids_;
    bool                    rung_   = false;  // for what is in ids_
    bool                    closed_ = false;
    // Held while the descriptor is written to: not mutex_, which whoever is woken by that takes at once.
    std::mutex              fd_mutex_;
    int                     fd_;  // -1 after close()
};

}  // namespace lfmfast

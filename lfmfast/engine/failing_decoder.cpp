#include "engine/failing_decoder.h"

#include "engine/error.h"

namespace lfmfast {

void failing_decoder::decode(const batch & batch, const stop_request * stop, const stop_request * stop_too) {
    failed_ = fails();
    if (!failed_) {
        inner_->decode(batch, stop, stop_too);
        return;
    }
    const uint32_t kind = rng_() % 4;
    if (kind == 0) {  // as llama_decode's 1: nothing was done
        throw error(error_code::context_full, "injected: no room");
    }
    stop_request soon;  // breaks the pass off after up to a millisecond: the sequences are in an unknown state
    soon.grace_us.store(static_cast<int64_t>(rng_() % 1000));
    soon.ask();
    try {
        inner_->decode(batch, &soon, stop_too);
    } catch (const error &) {
    }
    throw error(kind == 1 ? error_code::cancelled : error_code::decode,
                kind == 1 ? "injected: aborted" : kind == 2 ? "injected: llama_decode returned -1" : "injected: llama_decode returned -3");
}

bool failing_decoder::seq_rm(int64_t seq, int64_t p0, int64_t p1) {
    const bool whole = p0 <= 0 && p1 < 0;  // that never fails
    return (whole || !fails()) && inner_->seq_rm(seq, p0, p1);
}

void failing_decoder::state_seq_set(int64_t seq, const uint8_t * data, size_t size, bool partial) {
    if (fails()) {
        if (!inner_->seq_rm(seq, -1, -1)) {
            inner_->clear(false);
        }
        throw error(error_code::state, "injected: the state was refused");
    }
    inner_->state_seq_set(seq, data, size, partial);
}

}  // namespace lfmfast

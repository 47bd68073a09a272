// The context of the fake model: a decoder with the memory of a hybrid model of llama.cpp, one stream of attention memory for
// each sequence. It checks what the engine asks of it, and fails when told to.
#pragma once

#include "engine/error.h"
#include "fake_world.h"

#include <cstring>
#include <limits>
#include <thread>

namespace fake {

using lfmfast::error;
using lfmfast::error_code;

class decoder : public lfmfast::decoder {
  public:
    decoder(std::shared_ptr<world> w, int64_t n_seq) : w_(std::move(w)), seqs_(static_cast<size_t>(n_seq)) {}

    int64_t n_ctx_seq() const override { return w_->n_ctx; }
    int64_t n_ubatch() const override { return std::max<int64_t>(w_->n_ubatch, n_seq_max()); }
    int64_t n_seq_max() const override { return static_cast<int64_t>(seqs_.size()); }

    void decode(const lfmfast::batch & batch, const lfmfast::stop_request * stop,
                const lfmfast::stop_request * stop_too) override;
    // In new memory each time: who keeps a pointer for too long is found by the sanitizer.
    const float * logits() override { return logits_.empty() ? nullptr : logits_.data(); }

    [[nodiscard]] bool seq_rm(int64_t seq, int64_t p0, int64_t p1) override {
        sequence & s = at(seq);
        p0 = std::max<int64_t>(p0, 0);
        p1 = p1 < 0 ? INT32_MAX : p1;
        const bool tail = has_state() && s.state.pos >= 0 && p0 <= s.state.pos && s.state.pos < p1;
        if (p0 > 0 && (tail || w_->draw(w_->rm_faults))) {
            return false;
        }
        s.rows.erase(std::remove_if(s.rows.begin(), s.rows.end(), [&](const row & r) { return r.pos >= p0 && r.pos < p1; }),
                     s.rows.end());
        if (tail) {
            s.state = {};
        }
        return true;
    }
    void set_n_threads(int64_t, int64_t) override {}
    void seq_add(int64_t seq, int64_t p0, int64_t p1, int64_t shift) override {
        sequence & s = at(seq);
        const auto moves = [&](int32_t pos) { return pos >= p0 && (p1 < 0 || pos < p1); };
        for (auto & r : s.rows) {
            r.pos += moves(r.pos) ? static_cast<int32_t>(shift) : 0;
        }
        if (s.state.pos >= 0 && moves(s.state.pos)) {
            s.state.pos += shift;
        }
    }
    bool    can_shift() const override { return true; }
    int64_t seq_pos_min(int64_t seq) override {
        const sequence & s = at(seq);
        return s.rows.empty() ? -1 : has_state() ? s.state.pos : s.rows.front().pos;
    }
    void clear(bool) override {
        for (auto & s : seqs_) {
            s = {};
        }
    }
    std::vector<uint8_t> state_seq_get(int64_t seq, bool partial) override;
    void state_seq_set(int64_t seq, const uint8_t * data, size_t size, bool partial) override;

  private:
    struct sequence {
        std::vector<row> rows;
        recurrent_state  state;
    };

    bool       has_state() const { return !w_->can_cut; }
    sequence & at(int64_t seq) {
        if (seq < 0 || seq >= n_seq_max()) {
            w_->violation("sequence " + std::to_string(seq) + " of " + std::to_string(n_seq_max()));
            throw error(error_code::invalid_argument, "sequence out of range", seq);
        }
        return seqs_[static_cast<size_t>(seq)];
    }
    void check(const lfmfast::batch & batch);
    void fail(const lfmfast::batch & batch, const error & e);

    std::shared_ptr<world> w_;
    std::vector<sequence>  seqs_;
    std::vector<float>     logits_;
    uint32_t               n_get_ = 0;
};

// Every sequence of the batch goes on where it is, and what it is is whole; one pass is enough.
inline void decoder::check(const lfmfast::batch & batch) {
    const auto wrong = [&](const std::string & what) {
        w_->violation(what);
        throw error(error_code::invalid_argument, what);
    };
    if (batch.size() == 0 || static_cast<int64_t>(batch.size()) > n_ubatch()) {
        wrong("a batch of " + std::to_string(batch.size()) + " tokens, n_ubatch is " + std::to_string(n_ubatch()));
    }
    if (static_cast<int64_t>(batch.n_outputs()) > n_seq_max()) {
        wrong(std::to_string(batch.n_outputs()) + " outputs of " + std::to_string(n_seq_max()) + " sequences");
    }
    std::vector<size_t> n_new(seqs_.size(), 0);
    for (size_t i = 0; i < batch.size(); ++i) {
        if (batch.seq_ids()[i].size() != 1 || batch.tokens()[i] < 0 || batch.tokens()[i] >= n_vocab) {
            wrong("token " + std::to_string(i) + " of the batch");
        }
        const int32_t    seq  = batch.seq_ids()[i][0];
        const sequence & s    = at(seq);
        const auto       next = static_cast<int32_t>(s.rows.size() + n_new[static_cast<size_t>(seq)]++);
        const std::string where = " (sequence " + std::to_string(seq) + ", " + std::to_string(s.rows.size()) + " rows)";
        if (batch.positions()[i] != next) {
            wrong("position " + std::to_string(batch.positions()[i]) + " instead of " + std::to_string(next) + where);
        }
        if (next >= w_->n_ctx) {
            wrong("more than the context holds" + where);
        }
        if (has_state() && s.state.pos != static_cast<int64_t>(s.rows.size()) - 1) {
            wrong("a recurrent state of position " + std::to_string(s.state.pos) + where);
        }
        for (size_t k = 0; k < s.rows.size(); ++k) {
            if (s.rows[k].pos != static_cast<int32_t>(k) || s.rows[k].check != s.rows[k].right_check()) {
                wrong("row " + std::to_string(k) + " has position " + std::to_string(s.rows[k].pos) + " or is torn" + where);
            }
        }
    }
    // How llama.cpp splits a batch: the same number of tokens of sequences with consecutive ids.
    int64_t n_ubatches = 0;
    for (size_t first = 0; first < n_new.size(); ++n_ubatches) {
        while (first < n_new.size() && n_new[first] == 0) {
            ++first;
        }
        if (first == n_new.size()) {
            break;
        }
        size_t end = first, n = n_new[first];
        for (; end < n_new.size() && n_new[end] > 0; ++end) {
            n = std::min(n, n_new[end]);
        }
        for (size_t k = first; k < end; ++k) {
            n_new[k] -= n;
        }
        first = 0;
    }
    w_->n_extra_ubatches += n_ubatches - 1;
}

// As after a pass that was broken off: some of its tokens are there, some hold garbage, and so does the recurrent state.
inline void decoder::fail(const lfmfast::batch & batch, const error & e) {
    if (e.code != error_code::context_full) {
        for (size_t i = 0; i < batch.size(); ++i) {
            sequence & s = at(batch.seq_ids()[i][0]);
            row        r;
            r.pos   = batch.positions()[i];
            r.key   = w_->rng();
            r.check = r.right_check() + w_->rng() % 2;
            if (w_->rng() % 4 != 0) {
                s.rows.push_back(r);
            }
            if (has_state()) {
                s.state = {r.pos + static_cast<int64_t>(w_->rng() % 2), w_->rng(), w_->rng()};
            }
        }
    }
    tokens_t ids;
    for (const auto & seq : batch.seq_ids()) {
        ids.push_back(seq[0]);
    }
    std::sort(ids.begin(), ids.end());
    w_->n_alone += std::unique(ids.begin(), ids.end()) - ids.begin();
    ++w_->n_failed;
    throw e;
}

inline void decoder::decode(const lfmfast::batch & batch, const lfmfast::stop_request * stop,
                            const lfmfast::stop_request * stop_too) {
    std::vector<float>().swap(logits_);
    check(batch);
    if (w_->record) {
        call c{{}, batch.size(), batch.n_outputs() > 0, batch.positions()[0], batch.tokens()[0]};
        for (const auto & seq : batch.seq_ids()) {
            c.seqs.push_back(seq[0]);
        }
        std::sort(c.seqs.begin(), c.seqs.end());
        c.seqs.erase(std::unique(c.seqs.begin(), c.seqs.end()), c.seqs.end());
        std::lock_guard<std::mutex> lock(w_->mutex);
        w_->calls.push_back(c);
    }
    ++w_->n_calls;
    const auto    stops = [&] { return (stop && stop->due()) || (stop_too && stop_too->due()); };
    const int64_t until = lfmfast::now_us() + w_->pass_us + w_->token_us * static_cast<int64_t>(batch.size());
    bool stopped = !w_->pass_gate(stops) || stops();
    while (!stopped && lfmfast::now_us() < until) {
        std::this_thread::sleep_for(std::chrono::microseconds(std::min<int64_t>(200, until - lfmfast::now_us())));
        stopped = stops();
    }
    if (stopped) {
        fail(batch, error(error_code::cancelled, "a stop was asked for"));
    }
    if (w_->poison && std::count(batch.tokens().begin(), batch.tokens().end(), poison_token) > 0) {
        fail(batch, error(error_code::decode, "poison", -3));
    }
    if (w_->n_alone <= 0 && w_->draw(w_->decode_faults)) {  // never twice for the same request
        const auto which = w_->rng() % 3;
        fail(batch, which == 0 ? error(error_code::context_full, "no room")
                               : error(error_code::decode, "it failed", which == 1 ? -1 : -3));
    }
    std::vector<float>    out(batch.n_outputs() * n_vocab);
    float *               next = out.data();
    std::vector<uint64_t> sums(seqs_.size());
    for (size_t k = 0; k < seqs_.size(); ++k) {
        for (const row & r : seqs_[k].rows) {
            sums[k] += r.weight();
        }
    }
    for (size_t i = 0; i < batch.size(); ++i) {
        const auto id  = static_cast<size_t>(batch.seq_ids()[i][0]);
        sequence & s   = seqs_[id];
        s.rows.push_back(step(batch.tokens()[i], batch.positions()[i], sums[id], s.state, has_state()));
        if (batch.outputs()[i]) {
            write_logits(sums[id], s.state, next);
            if (w_->poison && batch.tokens()[i] == nan_token) {
                std::fill(next, next + n_vocab, std::numeric_limits<float>::quiet_NaN());
            }
            next += n_vocab;
        }
    }
    logits_ = std::move(out);
    w_->n_tokens += static_cast<int64_t>(batch.size());
    w_->n_alone = std::max<int64_t>(0, w_->n_alone - static_cast<int64_t>(batch.n_outputs()));
}

// --- states: the bytes that kv_state.cpp knows ---------------------------------------------------------------------------

constexpr uint32_t state_magic = 0xaf143cd8;
constexpr uint32_t state_sizes[] = {8, 8, 8, 4};  // of a row: keys of two layers, then values

inline void row_bytes(const row & r, uint8_t * out) {
    std::memcpy(out, &r.key, 8);
    std::memcpy(out + 8, &r.pos, 4);
    std::memcpy(out + 12, &r.token, 4);
    std::memcpy(out + 16, &r.value, 8);
    std::memcpy(out + 24, &r.check, 4);
}

inline row row_from(const uint8_t * in) {
    row r;
    std::memcpy(&r.key, in, 8);
    std::memcpy(&r.pos, in + 8, 4);
    std::memcpy(&r.token, in + 12, 4);
    std::memcpy(&r.value, in + 16, 8);
    std::memcpy(&r.check, in + 24, 4);
    return r;
}

inline std::vector<uint8_t> decoder::state_seq_get(int64_t seq, bool partial) {
    if (w_->draw(w_->get_faults)) {
        throw std::bad_alloc();
    }
    const sequence &     s = at(seq);
    std::vector<uint8_t> out;
    const auto put = [&](auto value) {
        const auto * p = reinterpret_cast<const uint8_t *>(&value);
        out.insert(out.end(), p, p + sizeof(value));
    };
    put(state_magic);
    put(static_cast<int32_t>(seq));
    if (!partial) {
        put(static_cast<uint32_t>(seqs_.size()));
        for (size_t k = 0; k < seqs_.size(); ++k) {
            const size_t n = k == static_cast<size_t>(seq) ? s.rows.size() : 0;
            put(static_cast<uint32_t>(n));
            if (n == 0) {
                continue;
            }
            std::vector<uint8_t> bytes(28 * n);  // in another order of cells each time
            for (size_t i = 0; i < n; ++i) {
                const row & r = s.rows[(i + n_get_) % n];
                row_bytes(r, bytes.data() + 28 * i);
                put(r.pos);
                put(uint32_t(1));
                put(static_cast<int32_t>(seq));
            }
            ++n_get_;
            put(uint32_t(w_->v_trans));
            put(uint32_t(2));
            put(uint32_t(16));
            put(uint32_t(16));
            size_t offset = 0;
            for (int part = 0; part < 4; ++part) {
                const uint32_t size = state_sizes[part];
                const bool transposed = part >= 2 && w_->v_trans;
                put(int32_t(part));
                if (transposed) {  // elements of 2 bytes
                    put(uint32_t(2));
                    put(size / 2);
                } else {
                    put(uint64_t(size));
                }
                const uint32_t el = transposed ? 2 : size;
                for (uint32_t e = 0; e < size; e += el) {
                    for (size_t i = 0; i < n; ++i) {
                        const auto * p = bytes.data() + 28 * i + offset + e;
                        out.insert(out.end(), p, p + el);
                    }
                }
                offset += size;
            }
        }
    }
    if (has_state()) {
        put(uint32_t(s.state.pos >= 0 ? 1 : 0));
        if (s.state.pos >= 0) {
            put(s.state);
        }
    }
    return out;
}

inline void decoder::state_seq_set(int64_t seq, const uint8_t * data, size_t size, bool partial) {
    sequence & s = at(seq);
    sequence   next;
    size_t     used = 0;
    bool       good = !w_->draw(w_->set_faults);
    w_->n_set_failed += good ? 0 : 1;
    const auto take = [&](void * to, size_t n) {
        good = good && n <= size - used;
        if (good) {
            std::memcpy(to, data + used, n);
            used += n;
        }
    };
    const auto expect = [&](auto value) {
        auto seen = value;
        take(&seen, sizeof(seen));
        good = good && seen == value;
    };
    const auto number = [&] {
        uint32_t n = 0;
        take(&n, 4);
        return n;
    };
    expect(state_magic);
    number();
    if (partial) {
        next.rows = s.rows;
    } else {
        const uint32_t n_stream = number();
        good = good && n_stream == seqs_.size();
        for (uint32_t k = 0; good && k < n_stream; ++k) {
            const uint32_t n = number();
            if (n == 0) {
                continue;
            }
            good = good && next.rows.empty() && static_cast<int64_t>(n) <= w_->n_ctx;
            std::vector<int32_t> positions(good ? n : 0);
            for (auto & pos : positions) {
                take(&pos, 4);
                expect(uint32_t(1));
                number();
            }
            expect(uint32_t(w_->v_trans));
            expect(uint32_t(2));
            expect(uint32_t(16));
            expect(uint32_t(16));
            std::vector<uint8_t> bytes(28 * positions.size());
            size_t               offset = 0;
            for (int part = 0; part < 4; ++part) {
                const uint32_t row_size = state_sizes[part];
                const bool     transposed = part >= 2 && w_->v_trans;
                expect(int32_t(part));
                if (transposed) {
                    expect(uint32_t(2));
                    expect(row_size / 2);
                } else {
                    expect(uint64_t(row_size));
                }
                const uint32_t el = transposed ? 2 : row_size;
                for (uint32_t e = 0; e < row_size; e += el) {
                    for (size_t i = 0; i < positions.size(); ++i) {
                        take(bytes.data() + 28 * i + offset + e, el);
                    }
                }
                offset += row_size;
            }
            for (size_t i = 0; i < positions.size(); ++i) {
                next.rows.push_back(row_from(bytes.data() + 28 * i));
                good = good && next.rows.back().pos == positions[i];
            }
        }
        std::sort(next.rows.begin(), next.rows.end(), [](const row & a, const row & b) { return a.pos < b.pos; });
    }
    if (has_state()) {
        const uint32_t n = number();
        good = good && n <= 1;
        if (n == 1) {
            take(&next.state, sizeof(next.state));
        }
    }
    if (!good || used != size) {
        s = {};
        throw error(error_code::state, "a state that does not fit");
    }
    s = std::move(next);
}

}  // namespace fake

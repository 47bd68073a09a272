// What belongs to what in a reply, when thoughts are ended, and when a constraint counts. Also grammars, on a stand-in for
// llguidance's functions.
#include "check.h"
#include "engine/grammar.h"
#include "engine/guide.h"

#include <cmath>
#include <cstring>
#include <limits>

using namespace lfmfast;

namespace {

// Tokens: 0 ends, 1 to 4 are <t> </t> <c> </c>, 5 is a blank, 6 and 7 are the halves of a character, 8 to 15 are letters.
class toy : public vocabulary {
  public:
    int32_t             n_vocab() const override { return 16; }
    bool                is_eog(int32_t token) const override { return token == 0; }
    const std::string & shown(int32_t token) const override { return texts_[static_cast<size_t>(token)]; }
    int32_t             token_id(const std::string &) const override { return -1; }
    std::vector<int32_t> suppressed_tokens() const override { return {}; }
    std::vector<int32_t> tokenize(const std::string &, bool, bool) const override { return {}; }
    std::string          detokenize(const std::vector<int32_t> &, bool) const override { return {}; }

  private:
    std::vector<std::string> texts_ = {"", "<t>", "</t>", "<c>", "</c>", "\n ", "\xC3", "\xA4",
                                       "a", "b", "c", "d", "e", "f", "g", "h"};
};

const toy vocab;

reply_format format(bool in_thought = false) { return {1, 2, 3, 4, in_thought}; }

// Wants `text` (token ids) and then nothing; throws when it is accepted anything else.
class only : public token_filter {
  public:
    explicit only(std::vector<int32_t> text) : text_(std::move(text)) {}
    bool allows(int32_t token) override { return n_ < text_.size() ? token == text_[n_] : token == 0; }
    void apply(float * logits, int32_t n) override {
        for (int32_t t = 0; t < n; ++t) {
            logits[t] = allows(t) ? logits[t] : -std::numeric_limits<float>::infinity();
        }
    }
    void accept(int32_t token) override {
        if (!allows(token)) {
            throw error(error_code::constraint, "not " + std::to_string(token));
        }
        ++n_;
    }
    void restart() override { n_ = 0; ++n_restarts; }
    bool is_over() const override { return n_ >= text_.size(); }
    int  n_restarts = 0;

  private:
    std::vector<int32_t> text_;
    size_t               n_ = 0;
};

// The channels of a reply, a letter each.
std::string channels(guide & g, const std::vector<int32_t> & tokens) {
    std::string out;
    for (int32_t token : tokens) {
        g.accept(token, vocab);
        out += "ctkm"[static_cast<size_t>(g.last())];
    }
    return out;
}

std::string channels(const reply_format & f, const std::vector<int32_t> & tokens) {
    guide_params params;
    params.format = f;
    guide g(params);
    CHECK(g.is_free());
    return channels(g, tokens);
}

void test_channels() {
    CHECK_EQ(channels(format(), {8, 9, 5}), "ccc");
    CHECK_EQ(channels(format(), {1, 8, 2, 5, 9}), "mtmcc");
    CHECK_EQ(channels(format(), {5, 1, 8, 2, 9}), "cmtmc");       // whitespace may come before a thought
    CHECK_EQ(channels(format(), {8, 1, 9, 2, 9}), "ccccc");       // nothing else
    CHECK_EQ(channels(format(), {1, 3, 8, 4, 1, 2, 9}), "mttttmc");  // no call in a thought, no thought in a thought
    CHECK_EQ(channels(format(), {1, 8, 2, 1, 9, 2, 8}), "mtmmtmc");  // a second thought
    CHECK_EQ(channels(format(true), {8, 2, 9}), "tmc");
    CHECK_EQ(channels(format(true), {8, 9}), "tt");
    CHECK_EQ(channels(format(), {2, 8}), "mc");                   // nothing to close
    CHECK_EQ(channels(format(), {8, 2, 9}), "ccc");
    CHECK_EQ(channels(format(true), {5, 1, 8, 1, 2}), "tmttm");   // opened twice
    CHECK_EQ(channels(format(), {3, 8, 4, 9, 3, 9, 4}), "mkmcmkm");
    CHECK_EQ(channels(format(), {3, 1, 2, 4, 1, 8}), "mkkmcc");   // after a call there are no thoughts
    CHECK_EQ(channels({-1, -1, -1, -1, false}, {1, 8, 2, 3, 4}), "ccccc");
    CHECK_EQ(channels({1, 2, -1, -1, false}, {1, 8, 2, 3, 8, 4}), "mtmccc");
}

// What is sampled when the model wants `wish` at every step.
std::vector<int32_t> sampled(guide_params params, std::vector<int32_t> wish) {
    guide g(std::move(params));
    std::vector<int32_t> out;
    for (int32_t token : wish) {
        if (g.forced() >= 0) {
            token = g.forced();
        } else if (!g.is_free() && !g.allows(token, vocab)) {
            std::vector<float> logits(16, 1.0f);
            g.apply(logits.data(), vocab);
            token = 0;
            while (token < 16 && !std::isfinite(logits[static_cast<size_t>(token)])) {
                ++token;
            }
            CHECK(token < 16);
            CHECK(g.allows(token, vocab));
        }
        g.accept(token, vocab);
        out.push_back(token);
        if (g.is_over()) {
            break;
        }
    }
    return out;
}

bool same(const std::vector<int32_t> & a, const std::vector<int32_t> & b) { return a == b; }

void test_budget() {
    guide_params params;
    params.format         = format(true);
    params.thought_tokens = 2;
    CHECK(same(sampled(params, {8, 9, 10, 11}), {8, 9, 2, 11}));
    CHECK(same(sampled(params, {8, 2, 10, 11}), {8, 2, 10, 11}));
    CHECK(same(sampled(params, {8, 9, 2, 10}), {8, 9, 2, 10}));
    CHECK(same(sampled(params, {8, 6, 7, 10, 11}), {8, 6, 7, 2, 11}));  // not in the middle of a character
    params.thought_end = {14, 15, 2};
    CHECK(same(sampled(params, {8, 9, 10, 11, 12, 13}), {8, 9, 14, 15, 2, 13}));
    params.thought_tokens = 0;
    CHECK(same(sampled(params, {8, 8, 8, 8}), {14, 15, 2, 8}));
    params.thought_end.clear();
    params.format.in_thought = false;
    CHECK(same(sampled(params, {1, 8, 9}), {1, 2, 9}));
    CHECK(same(sampled(params, {1, 8, 1, 8, 9}), {1, 2, 1, 2, 9}));  // each thought by itself
    CHECK(same(sampled(params, {8, 9, 10}), {8, 9, 10}));
    params.thought_tokens = 1;
    params.thought_end    = {14, 15, 2};
    CHECK(same(sampled(params, {1, 8, 9, 9, 9, 1, 10, 9, 9, 9}), {1, 8, 14, 15, 2, 1, 10, 14, 15, 2}));
    params.format = {-1, -1, 3, 4, false};
    CHECK_THROWS(invalid_argument, guide(params));
    params.thought_tokens = -2;
    CHECK_THROWS(invalid_argument, guide(params));
}

void test_constraint() {
    guide_params params;
    params.format     = format();
    params.constraint = std::make_shared<only>(std::vector<int32_t>{8, 9});
    CHECK(same(sampled(params, {15, 15, 15}), {8, 9}));  // and it is over
    params.constraint = std::make_shared<only>(std::vector<int32_t>{8, 9});
    CHECK(same(sampled(params, {1, 15, 0, 2, 15, 15}), {1, 15, 1, 2, 8, 9}));  // free in a thought, which can't be the end
    params.constraint = std::make_shared<only>(std::vector<int32_t>{5, 8, 9});
    CHECK(same(sampled(params, {5, 1, 15}), {5, 8, 9}));  // no thought once the answer has begun, were it with whitespace
    params.constraint        = std::make_shared<only>(std::vector<int32_t>{8, 1, 9});
    params.format.in_thought = true;
    CHECK(same(sampled(params, {15, 2, 8, 1, 15, 15}), {15, 2, 8, 1, 9}));  // begun: a marker is text like any other

    params.format     = format();
    params.lazy       = true;
    auto call         = std::make_shared<only>(std::vector<int32_t>{3, 10, 4});
    params.constraint = call;
    CHECK(same(sampled(params, {8, 3, 15, 15, 9, 3, 15, 4, 0}), {8, 3, 10, 4, 9, 3, 10, 4, 0}));
    CHECK_EQ(call->n_restarts, 2);
    CHECK(same(sampled(params, {1, 3, 8, 4, 2, 9}), {1, 3, 8, 4, 2, 9}));  // not in a thought
    params.single_call = true;
    CHECK(same(sampled(params, {8, 3, 15, 15, 9, 3}), {8, 3, 10, 4}));
    params.format.call_open = -1;
    CHECK_THROWS(invalid_argument, guide(params));
}

// --- llguidance's functions: a matcher that wants tokens of an even number, at most `limit` of them --------------------------

struct matcher {
    int         n_used = 0;
    int         limit  = 3;
    const char * broken = nullptr;
};
int n_matchers = 0, n_tokenizers = 0;
std::string seen_bytes;
std::vector<uint32_t> seen_lengths, seen_ends;

llg_api toy_api() {
    llg_api api{};
    api.new_tokenizer_v2 = [](const llg_tokenizer_init * init, char * message, size_t size) -> void * {
        if (init->vocab_size > 100) {
            std::strncpy(message, "too many", size - 1);
            return nullptr;
        }
        seen_lengths.assign(init->token_lens, init->token_lens + init->vocab_size);
        size_t n = 0;
        for (uint32_t length : seen_lengths) {
            n += length;
        }
        seen_bytes.assign(reinterpret_cast<const char *>(init->token_bytes), n);
        seen_ends = {init->tok_eos};
        seen_ends.insert(seen_ends.end(), init->tok_eos_extra, init->tok_eos_extra + init->tok_eos_extra_count);
        ++n_tokenizers;
        return new int(7);
    };
    api.free_tokenizer = [](void * t) {
        n_tokenizers -= t != nullptr;
        delete static_cast<int *>(t);
    };
    api.constraint_init_set_defaults = [](llg_matcher_init * init, const void * t) { init->tokenizer = t; };
    api.new_matcher = [](const llg_matcher_init *, const char * kind, const char * text) -> void * {
        ++n_matchers;
        auto * m = new matcher;
        m->limit = std::atoi(text);
        m->broken = std::strcmp(kind, "even") == 0 ? nullptr : "no such kind";
        return m;
    };
    api.clone_matcher = [](const void * m) -> void * {
        ++n_matchers;
        return new matcher(*static_cast<const matcher *>(m));
    };
    api.free_matcher = [](void * m) {
        --n_matchers;
        delete static_cast<matcher *>(m);
    };
    api.matcher_get_error = [](void * m) { return static_cast<matcher *>(m)->broken; };
    api.matcher_validate_tokens = [](void * p, const uint32_t * tokens, size_t) -> int32_t {
        auto * m = static_cast<matcher *>(p);
        return m->broken != nullptr ? -1 : m->n_used < m->limit && tokens[0] % 2 == 0;
    };
    api.matcher_compute_mask_into = [](void * p, uint32_t * mask, size_t n_bytes) -> int32_t {
        std::memset(mask, 0x55, n_bytes);
        return static_cast<matcher *>(p)->broken != nullptr ? -1 : 0;
    };
    api.matcher_get_mask_byte_size = [](const void *) -> size_t { return 8; };
    api.matcher_consume_token = [](void * p, uint32_t token) -> int32_t {
        auto * m = static_cast<matcher *>(p);
        if (token % 2 != 0) {
            m->broken = "odd";
            return -1;
        }
        ++m->n_used;
        return 0;
    };
    api.matcher_reset = [](void * p) -> int32_t {
        static_cast<matcher *>(p)->n_used = 0;
        return static_cast<matcher *>(p)->broken != nullptr ? -1 : 0;
    };
    api.matcher_is_stopped = [](const void * p) {
        const auto * m = static_cast<const matcher *>(p);
        return m->n_used >= m->limit;
    };
    return api;
}

void test_grammar() {
    {
        const llg_api api = toy_api();
        auto words = make_grammar_vocabulary(api, {"a", "<t>", "", "bc"}, {false, true, true, false}, {2, 3});
        CHECK_EQ(seen_bytes, "a\xFF<t>bc");
        CHECK(seen_lengths == std::vector<uint32_t>({1, 4, 0, 2}));
        CHECK(seen_ends == std::vector<uint32_t>({2, 3}));
        CHECK_THROWS(invalid_argument, make_grammar_vocabulary(api, {"a"}, {false}, {}));
        CHECK_THROWS(internal, make_grammar_vocabulary(api, std::vector<std::string>(101), std::vector<bool>(101), {0}));

        CHECK_THROWS(invalid_argument, make_grammar(words, "odd", "3"));
        auto whole = make_grammar(words, "even", "2");
        words.reset();  // a grammar keeps what it needs
        auto mine = copy_grammar(whole), other = copy_grammar(whole);
        whole.reset();
        CHECK(mine->allows(4));
        CHECK(!mine->allows(5));
        std::vector<float> logits(33, 1.0f);
        mine->apply(logits.data(), 33);
        CHECK(logits[32] == 1.0f && std::isinf(logits[31]) && logits[30] == 1.0f && std::isinf(logits[1]));
        mine->accept(4);
        mine->accept(2);
        CHECK(mine->is_over());
        CHECK(!other->is_over());  // each copy goes its own way
        mine->restart();
        CHECK(!mine->is_over());
        CHECK_THROWS(constraint, mine->accept(3));
        CHECK_THROWS(constraint, mine->allows(2));
        CHECK_THROWS(constraint, mine->apply(logits.data(), 33));
        CHECK_THROWS(constraint, mine->restart());
        CHECK(other->allows(2));
    }
    CHECK_EQ(n_matchers, 0);
    CHECK_EQ(n_tokenizers, 0);
}

}  // namespace

int main() {
    test_channels();
    test_budget();
    test_constraint();
    test_grammar();
    return check::failures;
}

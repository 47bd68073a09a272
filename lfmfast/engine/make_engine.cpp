#include "engine/make_engine.h"

#include "engine/failing_decoder.h"

#include <algorithm>

namespace lfmfast {

namespace {

// How attention is computed and how much of a prompt at once, where nobody said. On a CPU plain attention is the faster one:
// ggml's flash attention there takes 1.2 times as long for a token at 1,000 tokens of context and 1.4 times at 2,000, and twice
// as long for passes of 8 to 63 tokens (it has a fast path from 64 on); prompts are read equally fast. But it needs a buffer
// for the scores, so it is for contexts where that is small. Passes of 256 tokens read a prompt as fast as longer ones, keep
// that buffer small and let a cancel through sooner. Measured with the 350M shape; bench/README.md.
void choose_attention(context_params & p, const model & m) {
    constexpr int64_t n_ubatch_plain = 256, n_ubatch_flash = 512, max_score_bytes = int64_t(256) << 20;
    const auto    full  = [](const std::string & type) { return type == "f32" || type == "f16" || type == "bf16"; };
    const int64_t n_ctx = p.n_ctx == 0 ? m.n_ctx_train() : p.n_ctx;
    const int64_t n     = p.n_ubatch == 0 ? n_ubatch_plain : p.n_ubatch;
    if (p.flash_attn < 0 && m.on_cpu() && full(p.type_k) && full(p.type_v) &&
        std::min(n, n_ctx) * n_ctx * m.n_head() * 4 <= max_score_bytes) {
        p.flash_attn = 0;
    }
    if (p.n_ubatch == 0) {
        p.n_ubatch = p.flash_attn == 0 ? n_ubatch_plain : n_ubatch_flash;
    }
}

}  // namespace

std::shared_ptr<engine> make_engine(std::shared_ptr<model> m, const context_params & asked, engine_params params) {
    context_params context = asked;
    if (context.n_ctx != 0) {
        check_range("n_ctx", context.n_ctx, 8, n_tokens_limit);
    }
    check_range("n_batch", context.n_batch, 1, n_tokens_limit);
    check_range("n_ubatch", context.n_ubatch, 0, n_tokens_limit);
    choose_attention(context, *m);
    params.can_cut = !m->is_hybrid() && !m->is_recurrent();
    const auto make = [m, context, params](int64_t n_seq) -> std::unique_ptr<decoder> {
        context_params p = context;
        p.n_ctx = (context.n_ctx == 0 ? m->n_ctx_train() : context.n_ctx) * n_seq;
        // One call is one pass; a step has a token of each sequence.
        p.n_batch  = std::max(std::min(context.n_batch, context.n_ubatch), n_seq);
        p.n_ubatch = std::max(std::min(context.n_batch, context.n_ubatch), n_seq);
        p.n_seq_max     = n_seq;
        p.n_outputs_max = n_seq;
        p.kv_unified    = false;
        auto made = std::make_unique<lfmfast::context>(m, p);
        if (params.faults_every > 0) {
            return std::make_unique<failing_decoder>(std::move(made), static_cast<uint32_t>(params.faults_seed),
                                                     static_cast<uint32_t>(params.faults_every));
        }
        return made;
    };
    return std::make_shared<engine>(m, make, params);
}

}  // namespace lfmfast

#include "engine/make_engine.h"

#include "engine/failing_decoder.h"

#include <algorithm>

namespace lfmfast {

std::shared_ptr<engine> make_engine(std::shared_ptr<model> m, const context_params & context, engine_params params) {
    if (context.n_ctx != 0) {
        check_range("n_ctx", context.n_ctx, 8, n_tokens_limit);
    }
    check_range("n_batch", context.n_batch, 1, n_tokens_limit);
    check_range("n_ubatch", context.n_ubatch, 1, n_tokens_limit);
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

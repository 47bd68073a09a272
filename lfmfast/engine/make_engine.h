// An engine on a real model.
#pragma once

#include "engine/context.h"
#include "engine/engine.h"

#include <memory>

namespace lfmfast {

// `context.n_ctx` is for each sequence; n_seq_max, n_outputs_max and kv_unified are set here, and n_ubatch if it is 0.
std::shared_ptr<engine> make_engine(std::shared_ptr<model> m, const context_params & context, engine_params params);

}  // namespace lfmfast

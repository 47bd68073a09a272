#include "engine/model.h"

#include "engine/backend.h"

#include "llama.h"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>

namespace lfmfast {

namespace fs = std::filesystem;

namespace {

struct load_state {
    std::atomic<float> * progress;
    std::atomic<bool> *  cancel;
};

bool on_progress(float progress, void * data) {
    auto * state = static_cast<load_state *>(data);
    state->progress->store(progress, std::memory_order_relaxed);
    return !state->cancel->load(std::memory_order_relaxed);
}

// Control tokens that belong to an answer's format and so to its text.
const std::set<std::string> answer_tokens = {"<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>"};

template <typename F> std::string read_string(F && read) {
    std::string text(256, '\0');
    int32_t     n = read(text.data(), text.size());
    if (n >= static_cast<int32_t>(text.size())) {
        text.resize(static_cast<size_t>(n) + 1);
        n = read(text.data(), text.size());
    }
    text.resize(n < 0 ? 0 : static_cast<size_t>(n));
    return text;
}

bool has_gpu() {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        const auto type = ggml_backend_dev_type(ggml_backend_dev_get(i));
        if (type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU) {
            return true;
        }
    }
    return false;
}

}  // namespace

// Faults that are plain to see, said plainly; what is wrong inside the file is llama.cpp's to say.
void check_gguf_file(const std::string & path) {
    std::error_code ec;
    const auto      status = fs::status(fs::u8path(path), ec);
    const auto      fail   = [&](const std::string & why) {
        // c_str: a message ends at a NUL
        throw error(error_code::model_load, std::string("can't load the model '") + path.c_str() + "': " + why);
    };
    if (path.find('\0') != std::string::npos) {
        fail("the path holds a NUL character");
    }
    if (ec && status.type() != fs::file_type::not_found) {
        fail(ec.message());
    }
    if (!fs::exists(status)) {
        fail("no such file");
    }
    if (fs::is_directory(status)) {
        fail("it is a directory, not a GGUF file");
    }
    if (!fs::is_regular_file(status)) {
        fail("it is not a regular file");  // opening a pipe would wait for a writer
    }
    std::ifstream file(fs::u8path(path), std::ios::binary);
    if (!file) {
        fail("it can't be opened for reading (check its permissions)");
    }
    char magic[4] = {};
    file.read(magic, 4);
    if (file.gcount() == 0) {
        fail("the file is empty (0 bytes) or can't be read");
    }
    if (file.gcount() < 4 || std::string(magic, 4) != "GGUF") {
        fail("it is not a GGUF file (it does not begin with the letters GGUF)");
    }
}

model::model(const std::string & path, const model_params & params, std::atomic<float> & progress, std::atomic<bool> & cancel)
    : path_(path) {
    start_backends();
    check_gguf_file(path);
    load_state state{&progress, &cancel};
    auto       p = llama_model_default_params();
    p.n_gpu_layers = params.n_gpu_layers;
    ggml_backend_dev_t no_device = nullptr;
    if (params.n_gpu_layers == 0) {
        p.devices = &no_device;  // else llama.cpp lets a GPU compute passes of many tokens, and keeps buffers there
    }
    p.load_mode    = params.use_mmap ? (params.use_mlock ? LLAMA_LOAD_MODE_MMAP_MLOCK : LLAMA_LOAD_MODE_MMAP)
                                     : (params.use_mlock ? LLAMA_LOAD_MODE_MLOCK : LLAMA_LOAD_MODE_NONE);
    p.vocab_only      = params.vocab_only;
    p.check_tensors   = params.check_tensors;
    p.use_extra_bufts = params.repack;
    p.progress_callback           = on_progress;
    p.progress_callback_user_data = &state;
    log_clear_errors();
    {
        abort_guard guard(error_code::model_load);
        model_ = llama_model_load_from_file(path.c_str(), p);
    }
    if (model_ == nullptr) {
        if (cancel.load()) {
            throw error(error_code::cancelled, "loading '" + path + "' was cancelled");
        }
        throw error(error_code::model_load, with_reason("can't load the model '" + path + "'"));
    }
    try {
        check_metadata();
        read_vocabulary();
        on_cpu_ = params.n_gpu_layers == 0 || !has_gpu();
    } catch (...) {
        llama_model_free(model_);
        throw;
    }
}

model::~model() {
    llama_model_free(model_);
}

// What llama.cpp takes from a damaged file although ggml ends the process when it computes with it.
void model::check_metadata() const {
    for (const auto & [key, value] : metadata()) {
        const std::string suffix = "_epsilon";
        if (key.size() > suffix.size() && key.compare(key.size() - suffix.size(), suffix.size(), suffix) == 0) {
            const double epsilon = std::strtod(value.c_str(), nullptr);
            if (!(epsilon >= 0.0 && std::isfinite(epsilon))) {
                throw error(error_code::model_load, "can't load the model '" + path_ + "': " + key + " is " + value +
                            ", which is no number from 0 up");
            }
        }
    }
}

void model::read_vocabulary() {
    vocab_   = llama_model_get_vocab(model_);
    n_vocab_ = llama_vocab_n_tokens(vocab_);
    shown_.resize(static_cast<size_t>(n_vocab_));
    ids_.reserve(static_cast<size_t>(n_vocab_));
    const bool has_pieces = llama_vocab_type(vocab_) != LLAMA_VOCAB_TYPE_NONE;
    for (int32_t token = 0; has_pieces && token < n_vocab_; ++token) {
        const std::string text = llama_vocab_get_text(vocab_, token);
        const bool control = llama_vocab_is_control(vocab_, token);
        ids_.emplace(text, token);
        if (!control || answer_tokens.count(text) > 0) {
            shown_[static_cast<size_t>(token)] = llama_vocab_is_eog(vocab_, token) ? "" : piece(token, true);
        }
    }
}

std::string model::description() const {
    return read_string([&](char * buf, size_t n) { return llama_model_desc(model_, buf, n); });
}

uint64_t model::size() const { return llama_model_size(model_); }
uint64_t model::n_params() const { return llama_model_n_params(model_); }
int32_t  model::n_ctx_train() const { return llama_model_n_ctx_train(model_); }
int32_t  model::n_embd() const { return llama_model_n_embd(model_); }
int32_t  model::n_layer() const { return llama_model_n_layer(model_); }
int32_t  model::n_head() const { return llama_model_n_head(model_); }
bool     model::is_hybrid() const { return llama_model_is_hybrid(model_); }
bool     model::is_recurrent() const { return llama_model_is_recurrent(model_); }
bool     model::has_decoder() const { return llama_model_has_decoder(model_) && !llama_model_has_encoder(model_); }

std::vector<std::pair<std::string, std::string>> model::metadata() const {
    std::vector<std::pair<std::string, std::string>> out;
    for (int32_t i = 0; i < llama_model_meta_count(model_); ++i) {
        out.emplace_back(read_string([&](char * buf, size_t n) { return llama_model_meta_key_by_index(model_, i, buf, n); }),
                         read_string([&](char * buf, size_t n) { return llama_model_meta_val_str_by_index(model_, i, buf, n); }));
    }
    return out;
}

std::string model::chat_template() const {
    const char * text = llama_model_chat_template(model_, nullptr);
    return text == nullptr ? "" : text;
}

int32_t model::bos() const { return llama_vocab_bos(vocab_); }
int32_t model::eos() const { return llama_vocab_eos(vocab_); }
int32_t model::eot() const { return llama_vocab_eot(vocab_); }
int32_t model::pad() const { return llama_vocab_pad(vocab_); }
bool    model::add_bos() const { return llama_vocab_get_add_bos(vocab_); }

void model::check_token(int32_t token, const char * what) const {
    if (token < 0 || token >= n_vocab_) {
        throw error(error_code::invalid_argument, std::string(what) + ": token id " + std::to_string(token) +
                    " is out of range; this model's vocabulary has ids 0 to " + std::to_string(n_vocab_ - 1), token, n_vocab_ - 1);
    }
}

bool model::is_eog(int32_t token) const {
    check_token(token, "is_eog");
    return llama_vocab_is_eog(vocab_, token);
}

bool model::is_control(int32_t token) const {
    check_token(token, "is_control");
    return llama_vocab_is_control(vocab_, token);
}

std::vector<std::pair<int32_t, std::string>> model::control_tokens() const {
    std::vector<std::pair<int32_t, std::string>> out;
    for (int32_t token = 0; token < n_vocab_; ++token) {
        if (llama_vocab_is_control(vocab_, token)) {
            out.emplace_back(token, llama_vocab_get_text(vocab_, token));
        }
    }
    return out;
}

std::vector<int32_t> model::suppressed_tokens() const {
    int32_t               n      = 0;
    const int32_t * const tokens = llama_vocab_get_suppress_tokens(vocab_, &n);
    return std::vector<int32_t>(tokens, tokens + n);
}

int32_t model::token_id(const std::string & text) const {
    const auto it = ids_.find(text);
    return it == ids_.end() ? -1 : it->second;
}

std::vector<int32_t> model::tokenize(const std::string & text, bool add_special, bool parse_special) const {
    if (text.size() > static_cast<size_t>(INT32_MAX)) {
        throw error(error_code::invalid_argument, "text of " + std::to_string(text.size()) + " bytes is too long to tokenize; "
                    "the limit is " + std::to_string(INT32_MAX), static_cast<int64_t>(text.size()), INT32_MAX);
    }
    if (llama_vocab_type(vocab_) == LLAMA_VOCAB_TYPE_NONE) {
        throw error(error_code::invalid_argument, "this model has no vocabulary, so it can't tokenize text");
    }
    abort_guard          guard(error_code::internal);
    std::vector<int32_t> tokens(text.size() / 3 + 16);
    const auto run = [&] {
        return llama_tokenize(vocab_, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                              static_cast<int32_t>(tokens.size()), add_special, parse_special);
    };
    int32_t n = run();
    if (n == INT32_MIN) {
        throw error(error_code::invalid_argument, "the text gives more tokens than can be counted");
    }
    if (n < 0) {
        tokens.resize(static_cast<size_t>(-n));
        n = run();
    }
    tokens.resize(static_cast<size_t>(n));
    return tokens;
}

std::string model::piece(int32_t token, bool special) const {
    check_token(token, "piece");
    std::string text(32, '\0');
    int32_t n = llama_token_to_piece(vocab_, token, text.data(), static_cast<int32_t>(text.size()), 0, special);
    if (n < 0) {
        text.resize(static_cast<size_t>(-n));
        n = llama_token_to_piece(vocab_, token, text.data(), static_cast<int32_t>(text.size()), 0, special);
    }
    text.resize(static_cast<size_t>(std::max(n, 0)));
    return text;
}

std::string model::detokenize(const std::vector<int32_t> & tokens, bool special) const {
    for (const int32_t token : tokens) {
        check_token(token, "detokenize");
    }
    std::string text(tokens.size() * 8 + 16, '\0');
    const auto run = [&] {
        return llama_detokenize(vocab_, tokens.data(), static_cast<int32_t>(tokens.size()), text.data(),
                                static_cast<int32_t>(text.size()), false, special);
    };
    int32_t n = tokens.empty() ? 0 : run();
    if (n < 0) {
        text.resize(static_cast<size_t>(-n));
        n = run();
    }
    text.resize(static_cast<size_t>(n));
    return text;
}

// --- loader ------------------------------------------------------------------------------------------------------------

struct model_loader::shared {
    std::mutex              mutex;
    std::condition_variable finished;
    bool                    done = false;
};

model_loader::model_loader(std::string path, const model_params & params) : shared_(std::make_unique<shared>()) {
    thread_ = std::thread([this, path = std::move(path), params] {
        try {
            model_ = std::make_shared<model>(path, params, progress_, cancel_);
        } catch (...) {
            failure_ = std::current_exception();
        }
        std::lock_guard<std::mutex> lock(shared_->mutex);
        shared_->done = true;
        shared_->finished.notify_all();
    });
}

model_loader::~model_loader() {
    cancel();
    if (thread_.joinable()) {
        thread_.join();
    }
}

bool model_loader::wait(int timeout_ms) {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    return shared_->finished.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return shared_->done; });
}

std::shared_ptr<model> model_loader::take() {
    thread_.join();
    if (failure_) {
        std::rethrow_exception(failure_);
    }
    return std::move(model_);
}

std::vector<std::string> named_templates() {
    std::vector<const char *> names(llama_chat_builtin_templates(nullptr, 0));
    llama_chat_builtin_templates(names.data(), names.size());
    return {names.begin(), names.end()};
}

std::string render_named_template(const std::string & name, const std::vector<std::pair<std::string, std::string>> & messages,
                                  bool add_generation_prompt) {
    const auto names = named_templates();
    if (std::find(names.begin(), names.end(), name) == names.end()) {
        throw error(error_code::invalid_argument, "there is no chat template named '" + name + "'");
    }
    std::vector<llama_chat_message> chat;
    for (const auto & [role, content] : messages) {
        chat.push_back({role.c_str(), content.c_str()});
    }
    std::string text;
    for (int pass = 0; pass < 2; ++pass) {  // the first one finds the size
        const int32_t n = llama_chat_apply_template(name.c_str(), chat.data(), chat.size(), add_generation_prompt, text.data(),
                                                    static_cast<int32_t>(text.size()));
        if (n < 0) {
            throw error(error_code::invalid_argument, "llama.cpp's chat template '" + name + "' can't show these messages");
        }
        text.resize(static_cast<size_t>(n));
    }
    return text;
}

}  // namespace lfmfast

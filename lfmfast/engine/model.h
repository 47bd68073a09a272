// A loaded GGUF model and its vocabulary.
#pragma once

#include "engine/decoder.h"

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

struct llama_model;
struct llama_vocab;

namespace lfmfast {

struct model_params {
    int32_t n_gpu_layers  = -1;  // < 0: all
    bool    use_mmap      = true;
    bool    use_mlock     = false;
    bool    vocab_only    = false;
    bool    check_tensors = false;
    bool    repack        = true;  // let ggml convert weights into faster layouts (use_extra_bufts)
};

class model : public vocabulary {
  public:
    // Blocks until loaded. `progress` (0 to 1) is written, and `cancel` read, while it runs.
    // Throws model_load with llama.cpp's reason, or cancelled.
    model(const std::string & path, const model_params & params, std::atomic<float> & progress, std::atomic<bool> & cancel);
    ~model() override;
    model(const model &) = delete;
    model & operator=(const model &) = delete;

    llama_model *       get() const { return model_; }
    const std::string & path() const { return path_; }

    std::string                                      description() const;
    uint64_t                                         size() const;      // bytes of all tensors
    uint64_t                                         n_params() const;
    int32_t                                          n_ctx_train() const;
    int32_t                                          n_embd() const;
    int32_t                                          n_layer() const;
    int32_t                                          n_head() const;    // of the first layer
    bool                                             on_cpu() const { return on_cpu_; }  // no layer went to a GPU
    bool                                             is_hybrid() const;     // attention and recurrent layers (LFM2)
    bool                                             is_recurrent() const;  // recurrent layers only
    bool                                             has_decoder() const;
    std::vector<std::pair<std::string, std::string>> metadata() const;  // arrays are not included
    std::string                                      chat_template() const;  // empty: none

    // --- vocabulary ---
    int32_t n_vocab() const override { return n_vocab_; }
    int32_t bos() const;  // -1: the vocabulary has none; likewise below
    int32_t eos() const;
    int32_t eot() const;
    int32_t pad() const;
    bool    add_bos() const;
    bool    is_eog(int32_t token) const override;  // ends a generation; throws invalid_argument when out of range
    bool    is_control(int32_t token) const;
    std::vector<std::pair<int32_t, std::string>> control_tokens() const;
    std::vector<int32_t> suppressed_tokens() const override;  // that the file says must never be generated
    int32_t token_id(const std::string & text) const override;  // of a token with exactly this text, also a control token; -1: none

    // Bytes may hold NUL. `add_special`: put BOS (and EOS) where the vocabulary says so. `parse_special`: the text of a
    // control token becomes that token.
    std::vector<int32_t> tokenize(const std::string & text, bool add_special, bool parse_special) const override;
    // Bytes of the tokens, not necessarily valid UTF-8. `special`: control tokens are written too.
    std::string          detokenize(const std::vector<int32_t> & tokens, bool special) const override;
    std::string          piece(int32_t token, bool special) const;  // its own bytes: nothing is cleaned up or stripped
    // What a generated token shows: its bytes; of control tokens only those that are part of an answer's format (tool
    // calls, thinking).
    const std::string &  shown(int32_t token) const override { return shown_[static_cast<size_t>(token)]; }

    void check_token(int32_t token, const char * what) const;  // throws invalid_argument

  private:
    void        check_metadata() const;  // throws model_load
    void        read_vocabulary();

    std::string                              path_;
    llama_model *                            model_ = nullptr;
    const llama_vocab *                      vocab_ = nullptr;
    int32_t                                  n_vocab_ = 0;
    bool                                     on_cpu_  = true;
    std::vector<std::string>                 shown_;
    std::unordered_map<std::string, int32_t> ids_;
};

// Loads on a thread of its own, so that the caller can show progress and stop it.
class model_loader {
  public:
    model_loader(std::string path, const model_params & params);
    ~model_loader();  // cancels and joins

    bool                   wait(int timeout_ms);  // true: finished, well or not
    float                  progress() const { return progress_.load(); }
    void                   cancel() { cancel_.store(true); }
    std::shared_ptr<model> take();  // throws what the loading threw

  private:
    struct shared;
    std::unique_ptr<shared> shared_;
    std::atomic<float>      progress_{0.0f};
    std::atomic<bool>       cancel_{false};
    std::shared_ptr<model>  model_;
    std::exception_ptr      failure_;
    std::thread             thread_;
};

// The header of a GGUF file, read without loading a tensor.
struct gguf_value {
    std::string              key;
    std::string              type;      // "u32", "str", ... ; of the elements when is_array
    bool                     is_array = false;
    uint64_t                 count    = 1;
    std::vector<int64_t>     integers;  // integers and booleans
    std::vector<double>      reals;
    std::vector<std::string> strings;   // arrays are cut after `max_elements`
};
struct gguf_tensor {
    std::string          name;
    std::string          type;
    std::vector<int64_t> shape;  // ggml order: fastest dimension first
    uint64_t             n_bytes = 0;
};
struct gguf_header {
    uint32_t                 version = 0;
    std::vector<gguf_value>  metadata;
    std::vector<gguf_tensor> tensors;
};
gguf_header read_gguf(const std::string & path, uint64_t max_elements);  // throws model_load

// llama.cpp's chat templates that are known by a name; `render` throws invalid_argument for a name that is none of them.
std::vector<std::string> named_templates();
std::string              render_named_template(const std::string & name,
                                               const std::vector<std::pair<std::string, std::string>> & messages,  // role, content
                                               bool add_generation_prompt);

// Facts about the build and the machine, as (name, value); see build_info.cpp.
std::vector<std::pair<std::string, std::string>> build_info();

// Starts llama.cpp once per process: log callback, backends of the package's own folder. Throws internal without a CPU.
void start_backends();

// Loads ggml's library for a kind of device from outside the package, and returns the names of the devices ("CUDA0").
// Throws internal with the reason when there are none. Must not run while a model is loaded on another thread.
std::vector<std::string> load_plugin(const std::string & path);

}  // namespace lfmfast

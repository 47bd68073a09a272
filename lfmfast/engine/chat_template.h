// The chat formats of the LFM2 family: messages in, text with its control tokens marked out. No model, no Jinja.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace lfmfast {

enum class chat_family : int {
    lfm2,            // tool list and tool results between control tokens
    lfm25_instruct,  // thoughts of all but the last assistant turn are dropped
    lfm25_8b,        // thoughts before the last user turn are dropped; tool calls after the content
    lfm25_2_6b,      // as 8b; the reply starts with <think>
    lfm25_vl,        // as instruct; tool calls before the content; the date goes with the tools
    lfm2_vl,         // plain turns
};

// A run of plain text, or exactly one control token that the template put there. Only the latter may be parsed as one.
struct chat_segment {
    std::string text;
    bool        special;
};

// The segments of the head (BOS, system turn, tools), of one message, or of the generation prompt. No two plain ones
// follow each other: BPE must see "user\n" and the text after it as one piece.
using chat_block = std::vector<chat_segment>;

// Content as text, with one <image> between two pieces. No piece at all: the message has no content.
using chat_content = std::vector<std::string>;

struct chat_message {
    std::string  role;
    chat_content content;
    bool         has_thinking = false;
    bool         has_calls    = false;
    std::string  thinking;
    std::string  calls;  // "[f(a=1), g()]"
};

struct chat_head {
    bool         has_system = false;
    chat_content system;
    std::string  tools;  // "[{...}, {...}]", empty: none
    std::string  date;   // YYYY-MM-DD
};

struct chat_options {
    bool keep_thinking         = false;
    bool add_generation_prompt = true;
    bool open_end              = false;  // leave the last message without its end, to be continued
};

struct chat_rendering {
    size_t                  n_kept = 0;  // of the known messages, how many in front are rendered as they were before
    std::vector<chat_block> blocks;      // of the messages after those, and of the generation prompt
};

class chat_template {
  public:
    // `special` lists the texts of the vocabulary's control tokens. What the template writes and is not among them is
    // plain text.
    chat_template(chat_family family, const std::string & bos, const std::vector<std::string> & special);

    chat_block head(const chat_head & head) const;

    // Renders `messages` (a system message in front belongs to the head), of which the first `n_known` were rendered
    // before with the same options, as complete messages, and without those that follow them. `messages` may start
    // later in the conversation, as long as nothing that could change is left out: see pivot().
    chat_rendering render(const std::vector<chat_message> & messages, size_t n_known, const chat_options & options) const;

    // The role whose last message decides which thoughts are kept; empty: all are. If a new message has it, known
    // messages from the last known one with that role on can change, otherwise none can.
    std::string_view pivot() const;

  private:
    struct marker {
        std::string text;
        bool        special = false;
    };

    class writer;

    bool   keeps_thoughts(size_t i, size_t last_pivot) const;
    bool   has_thoughts(const chat_message & message) const;
    size_t last_pivot(const std::vector<chat_message> & messages, size_t end) const;
    void   write_message(writer & out, const chat_message & message, bool keep, bool open_end) const;

    chat_family family;
    marker      bos, im_start, im_end, list_start, list_end, response_start, response_end, call_start, call_end, think_start,
        think_end, image;
    std::vector<std::string> own;  // what the assistant itself may have written as control tokens
};

}  // namespace lfmfast

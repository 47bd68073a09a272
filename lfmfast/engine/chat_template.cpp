#include "engine/chat_template.h"

#include <algorithm>
#include <cstddef>

namespace lfmfast {
namespace {

constexpr size_t           none      = static_cast<size_t>(-1);
constexpr std::string_view think_tag = "</think>";

// The length of the white space character at the start of `text`, 0 if there is none. As Python's str.strip() has it:
// that is what the templates' trim does.
size_t space_length(std::string_view text) {
    const auto at = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
    const unsigned c = at(0);
    if ((c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20)) {
        return 1;
    }
    if (c == 0xc2) {
        return at(1) == 0x85 || at(1) == 0xa0 ? 2 : 0;
    }
    if (c < 0xe1 || c > 0xe3 || text.size() < 3) {
        return 0;
    }
    const unsigned code = (c & 0x0f) << 12 | (at(1) & 0x3f) << 6 | (at(2) & 0x3f);
    const bool space = code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 ||
                       code == 0x202f || code == 0x205f || code == 0x3000;
    return space ? 3 : 0;
}

std::string_view trim_left(std::string_view text) {
    while (const size_t n = space_length(text)) {
        text.remove_prefix(n);
    }
    return text;
}

std::string_view trim_right(std::string_view text) {
    for (;;) {
        size_t n = 0;  // bytes of the last character
        do {
            n++;
        } while (n < text.size() && n < 4 && (static_cast<unsigned char>(text[text.size() - n]) & 0xc0) == 0x80);
        if (text.empty() || space_length(text.substr(text.size() - n)) != n) {
            return text;
        }
        text.remove_suffix(n);
    }
}

bool holds_thoughts(const chat_content & content) {
    return std::any_of(content.begin(), content.end(),
                       [](const std::string & piece) { return piece.find(think_tag) != std::string::npos; });
}

// content.split("</think>")[-1] | trim
chat_content without_thoughts(const chat_content & content) {
    chat_content result;
    for (size_t i = content.size(); i-- > 0;) {
        const size_t end = content[i].rfind(think_tag);
        if (end == std::string::npos) {
            continue;
        }
        result.assign(content.begin() + static_cast<std::ptrdiff_t>(i), content.end());
        result.front() = std::string(trim_left(std::string_view(result.front()).substr(end + think_tag.size())));
        result.back()  = std::string(trim_right(result.back()));
        return result;
    }
    return content;
}

}  // namespace

class chat_template::writer {
  public:
    void plain(std::string_view text) {
        if (text.empty()) {
            return;
        }
        if (block.empty() || block.back().special) {
            block.push_back({std::string(text), false});
        } else {
            block.back().text += text;
        }
    }

    void control(const marker & token) {
        if (token.special) {
            block.push_back({token.text, true});
        } else {
            plain(token.text);
        }
    }

    void content(const chat_content & content, const marker & image) {
        for (size_t i = 0; i < content.size(); i++) {
            if (i > 0) {
                control(image);
            }
            plain(content[i]);
        }
    }

    // Text of the assistant, in which it may have written control tokens of its own.
    void reply(std::string_view text, const std::vector<std::string> & own) {
        size_t done = 0;
        for (size_t at = own.empty() ? text.npos : text.find('<'); at != text.npos; at = text.find('<', at)) {
            const auto found = std::find_if(own.begin(), own.end(), [&](const std::string & token) {
                return text.compare(at, token.size(), token) == 0;
            });
            if (found == own.end()) {
                at++;
                continue;
            }
            plain(text.substr(done, at - done));
            block.push_back({*found, true});
            done = at += found->size();
        }
        plain(text.substr(done));
    }

    void reply(const chat_content & content, const marker & image, const std::vector<std::string> & own) {
        for (size_t i = 0; i < content.size(); i++) {
            if (i > 0) {
                control(image);
            }
            reply(content[i], own);
        }
    }

    chat_block block;
};

chat_template::chat_template(chat_family family, const std::string & bos, const std::vector<std::string> & special)
    : family(family) {
    const auto make = [&](std::string text) {
        const bool found = std::find(special.begin(), special.end(), text) != special.end();
        return marker{std::move(text), found};
    };
    this->bos      = make(bos);
    im_start       = make("<|im_start|>");
    im_end         = make("<|im_end|>");
    list_start     = make("<|tool_list_start|>");
    list_end       = make("<|tool_list_end|>");
    response_start = make("<|tool_response_start|>");
    response_end   = make("<|tool_response_end|>");
    call_start     = make("<|tool_call_start|>");
    call_end       = make("<|tool_call_end|>");
    think_start    = make("<think>");
    think_end      = make(std::string(think_tag));
    image          = make("<image>");
    for (const marker * token : {&call_start, &call_end, &think_start, &think_end}) {
        if (token->special) {
            own.push_back(token->text);
        }
    }
}

std::string_view chat_template::pivot() const {
    switch (family) {
        case chat_family::lfm25_instruct:
        case chat_family::lfm25_vl: return "assistant";
        case chat_family::lfm25_8b:
        case chat_family::lfm25_2_6b: return "user";
        default: return "";
    }
}

chat_block chat_template::head(const chat_head & head) const {
    writer out;
    out.control(bos);
    if (family == chat_family::lfm2_vl) {  // no tools; a system message is a turn like any other, even an empty one
        if (head.has_system) {
            chat_message message;
            message.role    = "system";
            message.content = head.system;
            write_message(out, message, true, false);
        }
        return std::move(out.block);
    }
    const bool has_text = head.system.size() > 1 || (head.system.size() == 1 && !head.system.front().empty());
    if (!has_text && head.tools.empty()) {
        return std::move(out.block);
    }
    out.control(im_start);
    out.plain("system\n");
    out.content(head.system, image);
    if (!head.tools.empty()) {
        if (family == chat_family::lfm25_vl) {
            out.plain(has_text ? "\n\nToday's date: " : "Today's date: ");
            out.plain(head.date);
            out.plain("\n\n");
        } else if (has_text) {
            out.plain("\n");
        }
        out.plain("List of tools: ");
        if (family == chat_family::lfm2) {
            out.control(list_start);
        }
        out.plain(head.tools);
        if (family == chat_family::lfm2) {
            out.control(list_end);
        }
    }
    out.control(im_end);
    out.plain("\n");
    return std::move(out.block);
}

void chat_template::write_message(writer & out, const chat_message & message, bool keep, bool open_end) const {
    out.control(im_start);
    out.plain(message.role);
    out.plain("\n");
    if (message.role == "assistant") {
        const auto write_calls = [&] {
            if (message.has_calls) {
                out.control(call_start);
                out.plain(message.calls);
                out.control(call_end);
            }
        };
        if (message.has_thinking && keep) {
            out.control(think_start);
            out.reply(message.thinking, own);
            out.control(think_end);
        }
        if (family == chat_family::lfm25_vl) {
            write_calls();
        }
        if (keep || !holds_thoughts(message.content)) {
            out.reply(message.content, image, own);
        } else {
            out.reply(without_thoughts(message.content), image, own);
        }
        if (family != chat_family::lfm25_vl) {
            write_calls();
        }
    } else {
        const bool wrapped = family == chat_family::lfm2 && message.role == "tool";
        if (wrapped) {
            out.control(response_start);
        }
        out.content(message.content, image);
        if (wrapped) {
            out.control(response_end);
        }
    }
    // The VL template ends only messages that have a content.
    if (!open_end && !(family == chat_family::lfm25_vl && message.content.empty())) {
        out.control(im_end);
        out.plain("\n");
    }
}

size_t chat_template::last_pivot(const std::vector<chat_message> & messages, size_t end) const {
    for (size_t i = end; i-- > 0;) {
        if (messages[i].role == pivot()) {
            return i;
        }
    }
    return none;
}

bool chat_template::keeps_thoughts(size_t i, size_t last_pivot) const {
    if (pivot().empty()) {
        return true;
    }
    return pivot() == "user" ? last_pivot == none || i > last_pivot : i == last_pivot;
}

bool chat_template::has_thoughts(const chat_message & message) const {
    return message.role == "assistant" && (message.has_thinking || holds_thoughts(message.content));
}

chat_rendering chat_template::render(const std::vector<chat_message> & messages, size_t n_known,
                                     const chat_options & options) const {
    const size_t   size   = messages.size();
    const size_t   now    = last_pivot(messages, size);
    chat_rendering result;
    result.n_kept = std::min(n_known, options.open_end && size > 0 ? size - 1 : size);
    if (!options.keep_thinking) {
        const size_t before = last_pivot(messages, std::min(n_known, size));
        for (size_t i = 0; i < result.n_kept; i++) {
            if (keeps_thoughts(i, before) && !keeps_thoughts(i, now) && has_thoughts(messages[i])) {
                result.n_kept = i;
            }
        }
    }
    result.blocks.reserve(size - result.n_kept + 1);
    for (size_t i = result.n_kept; i < size; i++) {
        writer out;
        out.block.reserve(4);
        write_message(out, messages[i], options.keep_thinking || keeps_thoughts(i, now), options.open_end && i + 1 == size);
        result.blocks.push_back(std::move(out.block));
    }
    if (options.add_generation_prompt) {
        writer out;
        out.control(im_start);
        out.plain("assistant\n");
        if (family == chat_family::lfm25_2_6b) {
            out.control(think_start);
        }
        result.blocks.push_back(std::move(out.block));
    }
    return result;
}

}  // namespace lfmfast

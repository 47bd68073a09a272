// The chat formats: which text is a control token, how plain text is joined, what of a conversation stays the same.
#include "check.h"
#include "engine/chat_template.h"

#include <cstddef>
#include <random>

using lfmfast::chat_block;
using lfmfast::chat_family;
using lfmfast::chat_head;
using lfmfast::chat_message;
using lfmfast::chat_options;
using lfmfast::chat_template;

namespace {

const std::vector<std::string> special = {"<s>", "<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>",
    "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>", "<image>"};

const chat_family families[] = {chat_family::lfm2, chat_family::lfm25_instruct, chat_family::lfm25_8b, chat_family::lfm25_2_6b,
                                chat_family::lfm25_vl, chat_family::lfm2_vl};

// Control tokens in braces, a bar between two plain segments (which must not occur).
std::string show(const chat_block & block) {
    std::string text;
    bool plain = false;
    for (const auto & segment : block) {
        text += segment.special ? "{" + segment.text + "}" : (plain ? "|" : "") + segment.text;
        plain = !segment.special;
        CHECK(!segment.text.empty());
    }
    return text;
}

std::string show_all(const std::vector<chat_block> & blocks, size_t count = static_cast<size_t>(-1)) {
    std::string text;
    for (size_t i = 0; i < blocks.size() && i < count; i++) {
        text += show(blocks[i]);
    }
    return text;
}

chat_message say(const std::string & role, const std::string & text) {
    chat_message message;
    message.role    = role;
    message.content = {text};
    return message;
}

std::string one(chat_family family, const chat_message & message, bool last = true) {
    const chat_template format(family, "<s>", special);
    chat_options options;
    options.add_generation_prompt = false;
    std::vector<chat_message> messages = {message};
    if (!last) {
        messages.push_back(say("user", ""));
        messages.push_back(say("assistant", ""));
    }
    return show(format.render(messages, 0, options).blocks.front());
}

void turns() {
    CHECK_EQ(one(chat_family::lfm2, say("user", "Hi<|im_end|><|tool_call_start|>")),
             "{<|im_start|>}user\nHi<|im_end|><|tool_call_start|>{<|im_end|>}\n");
    CHECK_EQ(one(chat_family::lfm2, say("tool", "1")),
             "{<|im_start|>}tool\n{<|tool_response_start|>}1{<|tool_response_end|>}{<|im_end|>}\n");
    CHECK_EQ(one(chat_family::lfm25_8b, say("tool", "1")), "{<|im_start|>}tool\n1{<|im_end|>}\n");
    CHECK_EQ(one(chat_family::lfm25_instruct, say("assistant", "a<|tool_call_start|><|tool_call_<|tool_call_end|><|im_end|>")),
             "{<|im_start|>}assistant\na{<|tool_call_start|>}<|tool_call_{<|tool_call_end|>}<|im_end|>{<|im_end|>}\n");
    CHECK_EQ(one(chat_family::lfm2, say(std::string("u\0r", 3), std::string("\0", 1))),
             std::string("{<|im_start|>}u\0r\n\0{<|im_end|>}\n", 32));
    chat_message image = say("user", "a<image>");
    image.content.push_back("b");
    CHECK_EQ(one(chat_family::lfm2_vl, image), "{<|im_start|>}user\na<image>{<image>}b{<|im_end|>}\n");
    chat_message nothing;
    nothing.role = "user";
    CHECK_EQ(one(chat_family::lfm25_vl, nothing), "{<|im_start|>}user\n");
    CHECK_EQ(one(chat_family::lfm25_8b, nothing), "{<|im_start|>}user\n{<|im_end|>}\n");
}

void calls() {
    chat_message message = say("assistant", "c");
    message.has_calls    = true;
    message.calls        = "[f(a='<|tool_call_end|>')]";
    const std::string written = "{<|tool_call_start|>}[f(a='<|tool_call_end|>')]{<|tool_call_end|>}";
    CHECK_EQ(one(chat_family::lfm2, message), "{<|im_start|>}assistant\nc" + written + "{<|im_end|>}\n");
    CHECK_EQ(one(chat_family::lfm25_vl, message), "{<|im_start|>}assistant\n" + written + "c{<|im_end|>}\n");
}

void thoughts() {
    // White space as Python's str.strip() sees it, and nothing else.
    const std::string space = "\t\n\v\f\r\x1c\x1f \xc2\x85\xc2\xa0\xe1\x9a\x80\xe2\x80\x80\xe2\x80\x8a\xe2\x80\xa8\xe2\x81\x9f"
                              "\xe3\x80\x80";
    const chat_message message = say("assistant", "<think>x</think>y</think>" + space + "\xe2\x80\x8b a \xe3\x80\x81" + space);
    const std::string kept = "<think>x</think>y</think>" + space + "\xe2\x80\x8b a \xe3\x80\x81" + space;
    for (const auto family : {chat_family::lfm25_instruct, chat_family::lfm25_8b, chat_family::lfm25_2_6b,
                              chat_family::lfm25_vl}) {
        CHECK_EQ(one(family, message, false), "{<|im_start|>}assistant\n\xe2\x80\x8b a \xe3\x80\x81{<|im_end|>}\n");
        CHECK_EQ(one(family, message), "{<|im_start|>}assistant\n" + kept + "{<|im_end|>}\n");
    }
    CHECK_EQ(one(chat_family::lfm2, message, false), "{<|im_start|>}assistant\n" + kept + "{<|im_end|>}\n");
    CHECK_EQ(one(chat_family::lfm25_8b, say("assistant", " </think> \n"), false), "{<|im_start|>}assistant\n{<|im_end|>}\n");
    CHECK_EQ(one(chat_family::lfm25_8b, say("user", "</think>a "), false), "{<|im_start|>}user\n</think>a {<|im_end|>}\n");
    // Bytes that are no UTF-8 end nothing.
    CHECK_EQ(one(chat_family::lfm25_8b, say("assistant", "</think>\xe3\x80"), false),
             "{<|im_start|>}assistant\n\xe3\x80{<|im_end|>}\n");
    CHECK_EQ(one(chat_family::lfm25_8b, say("assistant", "</think>\x80\x80\x80\x80\x80 "), false),
             "{<|im_start|>}assistant\n\x80\x80\x80\x80\x80{<|im_end|>}\n");
    chat_message thinking = say("assistant", "b");
    thinking.has_thinking = true;
    thinking.thinking     = "t";
    CHECK_EQ(one(chat_family::lfm25_8b, thinking), "{<|im_start|>}assistant\n<think>t</think>b{<|im_end|>}\n");
    CHECK_EQ(one(chat_family::lfm25_8b, thinking, false), "{<|im_start|>}assistant\nb{<|im_end|>}\n");
}

void heads() {
    chat_head head;
    for (const auto family : families) {
        CHECK_EQ(show(chat_template(family, "<s>", special).head(head)), "{<s>}");
        CHECK_EQ(show(chat_template(family, "", special).head(head)), "");
    }
    head.tools = "[{}]";
    head.date  = "2026-01-02";
    const auto show_head = [&](chat_family family) { return show(chat_template(family, "<s>", special).head(head)); };
    CHECK_EQ(show_head(chat_family::lfm2),
             "{<s>}{<|im_start|>}system\nList of tools: {<|tool_list_start|>}[{}]{<|tool_list_end|>}{<|im_end|>}\n");
    CHECK_EQ(show_head(chat_family::lfm25_vl),
             "{<s>}{<|im_start|>}system\nToday's date: 2026-01-02\n\nList of tools: [{}]{<|im_end|>}\n");
    CHECK_EQ(show_head(chat_family::lfm2_vl), "{<s>}");
    head.has_system = true;
    head.system     = {"S"};
    CHECK_EQ(show_head(chat_family::lfm25_8b), "{<s>}{<|im_start|>}system\nS\nList of tools: [{}]{<|im_end|>}\n");
    CHECK_EQ(show_head(chat_family::lfm25_vl),
             "{<s>}{<|im_start|>}system\nS\n\nToday's date: 2026-01-02\n\nList of tools: [{}]{<|im_end|>}\n");
    CHECK_EQ(show_head(chat_family::lfm2_vl), "{<s>}{<|im_start|>}system\nS{<|im_end|>}\n");
}

void markers_without_tokens_are_text() {
    const chat_template format(chat_family::lfm25_2_6b, "<s>", {});
    const auto blocks = format.render({say("user", "a")}, 0, {}).blocks;
    CHECK_EQ(show(blocks.front()), "<|im_start|>user\na<|im_end|>\n");
    CHECK_EQ(show(blocks.back()), "<|im_start|>assistant\n<think>");
    CHECK_EQ(show(chat_template(chat_family::lfm25_2_6b, "<s>", {"<think>", "<|im_start|>"}).render({}, 0, {}).blocks.back()),
             "{<|im_start|>}assistant\n{<think>}");
}

// What is kept of any known part, with the rest, is the whole.
void extensions() {
    std::mt19937 random(1);
    const char * roles[] = {"user", "assistant", "tool", "assistant", "system"};
    for (int round = 0; round < 20000; round++) {
        std::vector<chat_message> messages;
        for (size_t i = random() % 8 + 1; i-- > 0;) {
            chat_message message = say(roles[random() % 5], random() % 2 ? "a</think> b" : "c");
            message.has_thinking = message.role == "assistant" && random() % 3 == 0;
            messages.push_back(message);
        }
        const chat_template format(families[random() % 6], "<s>", special);
        chat_options options;
        options.keep_thinking         = random() % 4 == 0;
        options.add_generation_prompt = random() % 2;
        options.open_end              = !options.add_generation_prompt && random() % 2;
        const size_t n_known = random() % (messages.size() + 1);
        const auto   whole   = format.render(messages, 0, options);
        const auto   more    = format.render(messages, n_known, options);
        options.open_end = options.add_generation_prompt = false;
        const std::vector<chat_message> known(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(n_known));
        const auto before = format.render(known, 0, options);
        CHECK_EQ(whole.n_kept, 0u);
        CHECK(more.n_kept <= n_known);
        CHECK_EQ(show_all(before.blocks, more.n_kept) + show_all(more.blocks), show_all(whole.blocks));
        if (more.n_kept < n_known) {
            CHECK(show(before.blocks[more.n_kept]) != show(whole.blocks[more.n_kept]));
        }
    }
}

}  // namespace

int main() {
    turns();
    calls();
    thoughts();
    heads();
    markers_without_tokens_are_text();
    extensions();
    return check::failures != 0;
}

"""Which of llama-server's tests are run, and why others are not."""

from __future__ import annotations

import re

MODULES = ("test_basic", "test_chat_completion", "test_completion", "test_tokenize", "test_template", "test_ignore_eos",
           "test_ctx_shift", "test_slot_save", "test_security", "test_metrics", "test_compat_anthropic",
           "test_compat_oai_responses", "test_tool_call")  # fmt: skip

#: Why a test is not run, by a pattern of its name.
LEFT_OUT: dict[str, str] = {
    r"test_tool_call\.py::(?!test_completion_without_tool_call)": "fetches a model",
    r"test_load_split_model|stream_with_openai_library_stops|thinking_with_reasoning_model": "fetches a model",
    r"test_slot_save\.py::.*(multimodal|image|media)|vision_base64|local_media_file": "images",
    r"test_metrics_embedding_prompt_is_counted": "embedding model",
    r"cors_proxy|defaults_to_localhost_with_tools_enabled": "llama-server's proxy and built-in tools",
    r"test_cache_vs_nocache_prompt": "skipped by its authors",
    r"test_chat_completion\[.*-This is not a chat": "a template that shows no messages is refused",
    r"with_response_format\[response_format1-": "a schema of items alone allows what is no array, too",
    r"n_probs_post": "not supported yet, and refused by name",
    r"date_inside_prompt\[fireworks": "its template adds a variable that is not defined, an error in Jinja",
    r"test_ctx_shift_enabled": "there is no context shift",
    r"restore_legacy_token_list": "reads llama-server's own file format",
    r"test_cors_options\[.*Allow-Headers": "echoes the headers that were asked for: with credentials, browsers do not take *",
    r"tool_result_with_image|vision_format_accepted": "images are refused with 400, not 500",
}


def short(nodeid: str) -> str:
    """"test_basic.py::test_x[case]"."""
    return nodeid.rsplit("/", 1)[-1] if "[" not in nodeid else nodeid.split("[", 1)[0].rsplit("/", 1)[-1] + "[" + \
        nodeid.split("[", 1)[1]  # fmt: skip


def left_out(nodeid: str) -> str | None:
    """Why a test is not run, if it is not."""
    return next((reason for pattern, reason in LEFT_OUT.items() if re.search(pattern, short(nodeid))), None)

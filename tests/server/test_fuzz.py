"""Bodies that no client should send: each is answered with a reason, never with 500, and the server lives on."""

from __future__ import annotations

import http.client
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
PROMPT = {"prompt": "Hi", "n_predict": 2, "max_tokens": 2}
# A body that each endpoint takes, and fields of its own that are given wrong values.
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/input_tokens": CHAT,
    "/v1/completions": PROMPT,
    "/completion": PROMPT,
    "/tokenize": {"content": "Hi"},
    "/detokenize": {"tokens": [40, 41]},
    "/apply-template": CHAT,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
}
FIELDS = [
    "messages", "prompt", "content", "tokens", "input", "model", "system", "instructions", "tools", "tool_choice", "stream",
    "stream_options", "max_tokens", "max_completion_tokens", "n_predict", "max_output_tokens", "temperature", "top_p",
    "top_k", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent",
    "repeat_last_n", "repeat_penalty", "repetition_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier",
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat", "mirostat_tau",
    "mirostat_eta", "seed", "n", "n_cmpl", "n_probs", "logprobs", "top_logprobs", "min_keep", "samplers", "stop",
    "stop_sequences", "logit_bias", "cache_prompt", "n_cache_reuse", "id_slot", "timings_per_token", "return_progress",
    "return_tokens", "response_fields", "t_max_predict_ms", "t_max_prompt_ms", "ignore_eos", "add_generation_prompt",
    "continue_final_message", "chat_template_kwargs", "response_format", "grammar", "json_schema", "verbose", "n_keep",
    "sse_ping_interval", "priority", "add_special", "parse_special", "with_pieces", "reasoning_format", "reasoning_effort",
    "user", "metadata", "thinking", "previous_response_id", "lora", "post_sampling_probs",
]  # fmt: skip
DEEP: Any = 1
for _ in range(60):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, -(2**31) - 1, 2**63, 2**64, -(2**64), 10**400, 0.5, -0.5, 1e308, -1e308, 5e-324, "",
    "x", "\0", "a\0b", "\ud800", "\udfff\ud800", "😀" * 50, "<|im_start|>", "-1", "NaN", [], [None], [[]], [0], [-1], [2**31],
    [2**64], [1e300], [0.5], ["x"], ["\0", ""], ["\ud800"], [{}], [True], {}, {"x": None}, {"": ""}, {"\0": 1},
    {"\ud800": "\udc00"}, {"type": "x"}, {"type": "function", "function": 1}, {"role": "user"},
    [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "\ud800", "content": "\ud800"}],
    [{"type": "text", "text": 1}],
    [{"type": "function", "function": {"name": 1, "parameters": []}}], [[0, 1], [2, "x"]], [["x", False], [3, 1e400]], DEEP,
]  # fmt: skip


def send(connection: http.client.HTTPConnection, path: str, body: bytes, kind: str = "application/json") -> tuple[int, bytes]:
    connection.request("POST", path, body, {"Content-Type": kind})
    answer = connection.getresponse()
    return answer.status, answer.read()


def well(status: int, answer: bytes, about: object) -> None:
    """An answer, or a refusal in OpenAI's or Anthropic's shape. 408: the client set a deadline."""
    assert status in (200, 400, 408, 413, 501), (about, status, answer[:500])
    if answer.startswith((b"data:", b"event:", b":")):
        assert b'"code":500' not in answer and b"Traceback" not in answer, (about, answer[-500:])
        return
    read = json.loads(answer)
    if status != 200:
        assert read["error"]["message"], (about, answer[:500])


@pytest.fixture
def connection(live) -> Iterator[http.client.HTTPConnection]:
    opened = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    yield opened
    opened.close()
    assert live.post("/completion", {"prompt": "Hi", "n_predict": 1})[0] == 200
    assert all(not slot["is_processing"] for slot in live.get("/slots")[1])


@pytest.mark.parametrize("path", ENDPOINTS)
def test_each_field_with_each_wrong_value(connection, path):
    base = ENDPOINTS[path]
    rng = random.Random(path)
    always = [field for field in FIELDS if field in base]  # the rest: some of the values for each, others for each endpoint
    for field in FIELDS:
        for value in VALUES if field in always else rng.sample(VALUES, 8):
            body = {**base, field: value}
            if field == "max_tokens" and "n_predict" in base:
                del body["n_predict"]
            if body.get("stream") is not True:  # what asks for no end gets one
                body["t_max_predict_ms"] = body.get("t_max_predict_ms", 50)
            text = json.dumps(body).replace("Infinity", "1e400")
            well(*send(connection, path, text.encode()), about=(field, value))


def bad_bodies() -> Iterator[tuple[str, bytes]]:
    """Bodies that are not JSON, or not an object, or not text."""
    good = json.dumps(CHAT).encode()
    yield "empty", b""
    yield "space", b"  \n"
    for cut in (1, 5, 20, len(good) - 1):
        yield f"cut at {cut}", good[:cut]
    yield "two", good + good
    yield "trailing", good + b"x"
    yield "NUL", good + b"\0"
    yield "NUL inside", good.replace(b"Hi", b"H\0i")
    yield "a raw newline", good.replace(b"Hi", b"H\ni")
    yield "BOM", b"\xef\xbb\xbf" + good
    yield "UTF-16", json.dumps(CHAT).encode("utf-16")
    yield "Latin-1", good.replace(b"Hi", b"caf\xe9")
    yield "cut UTF-8", good.replace(b"Hi", b"\xe2\x82")
    yield "too long UTF-8", good.replace(b"Hi", b"\xc0\xaf")
    yield "surrogates as UTF-8", good.replace(b"Hi", b"\xed\xa0\x80")
    yield "a lone surrogate", good.replace(b"Hi", rb"\ud83d")
    yield "surrogates in the wrong order", good.replace(b"Hi", rb"\udc00\ud800")
    yield "an escaped NUL", good.replace(b"Hi", rb"\u0000")
    yield "a bad escape", good.replace(b"Hi", rb"\x41")
    for word in (b"NaN", b"Infinity", b"-Infinity", b"nan", b"01", b"+1", b".5", b"1.", b"1e", b"0x10", b"1e999", b"-1e999",
                 b"None", b"True", b"9" * 5000, b"-" + b"9" * 400, b"0." + b"0" * 5000 + b"1"):  # fmt: skip
        for field in (b"temperature", b"max_tokens"):
            changed = b'"t_max_predict_ms": 50, "%s": %s}' % (field, word)
            yield f"{field!r} {word[:20]!r}", good[:-len('"max_tokens": 2}')] + changed
    for whole in (b"[]", b"null", b"1", b'"x"', b"true", b"[{}]"):
        yield f"{whole!r}", whole
    yield "same name twice", b'{"messages": 1, "max_tokens": 1, ' + good[1:]
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        for depth in (100, 500, 5000, 100_000):
            nested = opening * depth + b"1" + closing * depth
            yield f"{opening!r} {depth} deep", b'{"messages": ' + nested + b"}"
            yield f"{opening!r} {depth} deep, open", b'{"metadata": ' + opening * depth
    yield "much", b'{"messages": [{"role": "user", "content": "' + b"a" * 3_000_000 + b'"}]}'
    yield "too much", b'{"messages": "' + b"a" * (33 << 20) + b'"}'
    rng = random.Random(1)
    for i in range(60):
        broken = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        yield f"changed {i}", bytes(broken)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/completion"])
def test_bodies_that_are_no_json(live, connection, path):
    for name, body in bad_bodies():
        if path != "/v1/chat/completions" and len(body) > 1_000_000:
            continue
        try:
            well(*send(connection, path, body, "text/plain" if name == "trailing" else "application/json"), about=name)
        except (ConnectionError, http.client.HTTPException):
            assert len(body) > 1 << 20, name  # refused before all of it was sent
            connection.close()


def test_requests_that_are_no_http(live):
    post = b"POST /completion HTTP/1.1\r\nHost: x\r\n"
    for data in (b"\0" * 100, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00",
                 post + b"Content-Length: -1\r\n\r\n", post + b"Content-Length: 10\r\n\r\n{",
                 post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
                 b"GET /health HTTP/1.1\r\nX: " + b"a" * 200_000):  # fmt: skip
        with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            try:
                while connection.recv(65536):
                    pass
            except ConnectionError:
                pass
    assert live.get("/health") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    "path",
    ["/", "/nothing", "/v1", "/slots/x?action=save", "/slots/999?action=erase", "/slots/0?action=x", "/slots/0?action=save",
     "/v1/models/x", "/%00", "/%ff", "/../../etc/passwd", "/health?x=%00", "/v1/chat/completions"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "NONSENSE"])
def test_paths_and_methods(live, method, path):
    status, _, answer = live.request(method, path, b"{}" if method in ("POST", "PUT", "PATCH") else None)
    assert status < 500 or status == 501, (status, answer)

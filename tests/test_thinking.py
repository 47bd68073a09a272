"""Golden transcripts of replies with thoughts: what is reasoning, what is content, and what is a call.

``tests/data/thinking.json`` has them token by token: a text is an ordinary token, ``{"token": ...}`` a marker by its own id,
``{"hex": ...}`` some bytes. `prefilled`: the template opened the thought; `cut`: the reply ended at its limit; `stop`: its stop
strings.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lfmfast.reply import CALL, CONTENT, MARKER, THOUGHT, ReplyReader
from lfmfast.stream import Answer

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data/thinking.json").read_text("utf8"))
Item = tuple[int, bytes]


def channels(case: dict[str, Any]) -> Iterator[Item]:
    """What each token belongs to, as lfmfast::guide says it."""
    now, is_blank, is_blank_thought = THOUGHT if case["prefilled"] else CONTENT, True, True
    for piece in case["pieces"]:
        token = piece.get("token", "") if isinstance(piece, dict) else ""
        text = piece if isinstance(piece, str) else token
        data = text.encode() or bytes.fromhex(piece["hex"])
        kind = now
        if token == "<think>" and (is_blank_thought if now == THOUGHT else now == CONTENT and is_blank):
            now, kind, is_blank_thought = THOUGHT, MARKER, True
        elif token == "</think>" and (now == THOUGHT or (now == CONTENT and is_blank)):
            now, kind = CONTENT, MARKER
        elif token == "<|tool_call_start|>" and now == CONTENT:
            now, kind, is_blank = CALL, MARKER, False
        elif token == "<|tool_call_end|>" and now == CALL:
            now, kind = CONTENT, MARKER
        elif data.strip():
            is_blank, is_blank_thought = is_blank and now != CONTENT, is_blank_thought and now != THOUGHT
        yield kind, data


def stopped(items: Iterator[Item], stops: list[str]) -> Iterator[Item]:
    """Without what stands behind a stop string; none goes over a marker."""
    for kind, group in groupby(items, key=lambda item: item[0]):
        held = b""
        for _, data in group:
            held += data
            found = [at for stop in stops if (at := held.find(stop.encode())) >= 0]
            if found and kind != MARKER:
                yield kind, held[: min(found)]
                return
            keep = max((n for s in stops for n in range(1, len(s)) if held.endswith(s.encode()[:n])), default=0)
            yield kind, held[: len(held) - keep]
            held = held[len(held) - keep :]
        yield kind, held


def joined(items: Iterator[Item]) -> list[Item]:
    """As the engine joins tokens that come faster than they are read: markers are never joined."""
    out: list[Item] = []
    for kind, data in items:
        if out and kind == out[-1][0] != MARKER:
            out[-1] = kind, out[-1][1] + data
        else:
            out.append((kind, data))
    return out


def read(case: dict[str, Any], items: list[Item]) -> Any:
    native: Any = SimpleNamespace(done=False, finish_reason="length" if case["cut"] else "stop", stop_string=None)
    native.timings = collections.defaultdict(int)
    answer = Answer()
    answer.read_with(ReplyReader(in_thought=case["prefilled"]), None)
    pieces = [piece for kind, data in items for piece in answer.take(native, [(data, (), None, kind, 0)])]
    native.done = True
    pieces += answer.take(native, [])
    done = answer.completion()
    assert "".join(piece.text for piece in pieces) == done.text
    assert "".join(piece.reasoning for piece in pieces) == done.reasoning
    assert "".join(delta.arguments for piece in pieces for delta in piece.tool_calls) == "".join(
        call.arguments for call in done.tool_calls)  # fmt: skip
    return done


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_transcripts(case: dict[str, Any]) -> None:
    items = list(stopped(channels(case), case.get("stop", [])))
    for tokens in (items, joined(iter(items))):
        done = read(case, tokens)
        calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in done.tool_calls]
        assert {"reasoning": done.reasoning, "content": done.text, "calls": calls} == case["expected"]
        assert done.finish_reason == ("length" if case["cut"] else "tool_calls" if calls else "stop")
        assert done.raw.replace("\ufffd", "") == b"".join(data for _, data in items).decode("utf8", "ignore")


def test_there_are_many() -> None:
    assert len(CASES) >= 40 and len({case["name"] for case in CASES}) == len(CASES)

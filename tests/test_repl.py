"""`lfmfast chat` at a terminal: a real pseudo-terminal, a real model."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

import pexpect

MODEL = Path(__file__).parent / "data/lfm2-tiny/lfm2-tiny-f16.gguf"
ARGS = ["-m", "lfmfast", "chat", "-m", str(MODEL), "-t", "1", "--temp", "0"]
PROMPT = r"\x1b\[\?2004h[^\n]*>"  # prompt_toolkit turns bracketed paste on and draws the prompt
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    def __init__(self, folder: Path, *args: str, **env: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        # Without an answer to its question for the cursor's position, prompt_toolkit waits and warns.
        environment |= {"LFMFAST_CACHE": str(folder / "cache"), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **env}
        self.child = pexpect.spawn(
            sys.executable, [*ARGS, *args], cwd=folder, env=environment, encoding="utf-8", timeout=60, dimensions=(40, 120)
        )

    def say(self, text: str, answer: str) -> str:
        """Type a line and wait for the answer; return what was shown up to its end."""
        self.child.send(text + "\r")
        self.child.expect(answer)
        return ESCAPES.sub("", self.child.before + self.child.after)

    def ready(self) -> None:
        self.child.expect("/help for commands")
        self.child.expect(PROMPT)

    def end(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus if self.child.exitstatus is not None else -self.child.signalstatus


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Any]:
    opened: list[Terminal] = []

    def start(*args: str, **env: str) -> Terminal:
        opened.append(Terminal(tmp_path, *args, **env))
        opened[-1].ready()
        return opened[-1]

    yield start
    for each in opened:
        each.child.close(force=True)


def test_conversation(terminal: Any, tmp_path: Path) -> None:
    t = terminal("-sys", "You are a helpful assistant.")
    t.say("My name is Ada.", "Nice to meet you, Ada!")
    t.say("What is my name?", "Your name is Ada.")
    assert re.search(r"prompt \d+ tokens \(([1-9]\d*) cached\)", t.say("/stats", "first token after"))
    t.say("/regen", "Your name is Ada.")
    t.say("/system", "You are a helpful assistant.")
    t.say("/save chat.json", "5 messages written")
    messages = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[-1]["content"] == "Your name is Ada."
    t.say("/reset", "forgotten")
    t.say("What is my name?", "I do not know your name yet.")
    t.say("/system The user's name is Bob.", "forgotten")
    t.say("What is my name?", "Your name is Bob.")
    t.child.send("\x04")
    assert t.end() == 0


def test_commands(terminal: Any, tmp_path: Path) -> None:
    t = terminal()
    t.say("/help", "Ctrl-C stops an answer")
    t.say("/rest", r"There is no command /rest. Did you mean /reset\?")
    t.say("/xyzzy", "See /help")
    t.say("/stats", "no answer yet")
    t.say("/regen", "no answer to replace")
    t.say("/system", "no system prompt")
    (tmp_path / "mine.txt").write_text("precious")
    t.say("/save mine.txt", "mine.txt: File exists")
    assert (tmp_path / "mine.txt").read_text() == "precious"
    t.say("/save nowhere/x.txt", "No such file")
    t.say("/save", "needs a file name")
    t.say("//regen", PROMPT)  # said to the model
    t.say("/save out.txt", "2 messages written")
    t.say("/save out.txt", "2 messages written")  # again: this conversation's own file
    assert (tmp_path / "out.txt").read_text().startswith("user:\n/regen\n\nassistant:\n")
    t.child.send("/exit\r")
    assert t.end() == 0


def test_several_lines(terminal: Any, tmp_path: Path) -> None:
    t = terminal()
    t.child.send("Repeat:\\\r")
    t.child.send("river\x1b\r")
    t.say("lamp", "river")
    t.say("/save a.json", "messages written")
    assert json.loads((tmp_path / "a.json").read_text())[0]["content"] == "Repeat:\nriver\nlamp"
    t.say("/reset", "forgotten")
    t.child.send('"""\r/help is no command here\r')
    t.say('end"""', "tiny test model")
    t.say("/save b.json", "messages written")
    assert json.loads((tmp_path / "b.json").read_text())[0]["content"] == "/help is no command here\nend"


def test_ctrl_c_stops_the_answer_only(terminal: Any) -> None:
    t = terminal("-c", "32768", "--ignore-eos")
    t.say("Tell me a story.", "Once upon a time")
    t.child.send("\x03")
    t.child.expect(r"\[stopped\]")
    t.child.expect(PROMPT)
    t.say("What is the capital of France?", "The capital of France is Paris")
    t.child.send("\x03")
    t.child.expect(r"\[stopped\]")
    t.child.expect(PROMPT)
    t.child.send("half a line\x03")
    t.child.expect("Ctrl-D or /exit leaves")
    t.child.send("\x04")
    assert t.end() == 0


def test_history_is_kept(terminal: Any, tmp_path: Path) -> None:
    t = terminal()
    t.say("What is the capital of Japan?", "Tokyo")
    t.child.send("\x04")
    t.end()
    history = tmp_path / "cache/history"
    assert history.stat().st_mode & 0o077 == 0
    t = terminal()
    t.child.send("\x1b[A\r")
    t.child.expect("Tokyo")


def test_full_context_forgets_the_oldest(terminal: Any, tmp_path: Path) -> None:
    t = terminal("-c", "256")
    text = "river lamp green stone music " * 8
    for _ in range(6):
        t.say(text, PROMPT)
        if "the oldest" in t.child.before:
            break
    else:
        pytest.fail("the context never filled up")
    assert re.search(r"the oldest \d+ messages are forgotten", t.child.before)
    t.say("What is the capital of France?", "The capital of France is Paris.")
    t.say("word " * 500, "the prompt has")  # longer than the context: nothing is forgotten for it
    t.say("/save a.json", "messages written")
    assert json.loads((tmp_path / "a.json").read_text())[-1]["content"] == "The capital of France is Paris."
    t.say("What is the capital of Japan?", "Tokyo")


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_termination(terminal: Any, busy: bool, name: str) -> None:
    number = getattr(signal, name)
    t = terminal("-c", "32768", "--ignore-eos")
    if busy:
        t.say("Tell me a story.", "Once upon a time")
    os.kill(t.child.pid, number)
    assert t.end() == 128 + number
    assert "Traceback" not in t.child.before


def test_thoughts_are_dim(terminal: Any) -> None:
    t = terminal("-sys", "You are a helpful assistant. Think step by step.")
    t.say("What is the capital of France?", "Paris.")
    assert re.search("\x1b\\[2m[A-Z][^\x1b<>]+\x1b\\[0m\\s+The capital of France is ", t.child.before)


def test_no_color(terminal: Any) -> None:
    t = terminal("-sys", "Think step by step.", NO_COLOR="1")
    for line, answer in (("What is the capital of France?", "Paris."), ("/stats", "first token after")):
        t.say(line, answer)
        assert not re.search(r"\x1b\[[\d;]*[1-9][\d;]*m", t.child.before)


def test_escape_sequences_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lfmfast.cli.chat import Printer
    from lfmfast.types import Piece

    class Stream(list[Piece]):
        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *args: object) -> None:
            pass

    pieces = Stream([Piece("a\x1b]0;title\x07b\tc\x9b2J\n"), Piece("", finish_reason="stop")])
    Printer().show(pieces)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "a\x1b]0;title\x07b\tc\x9b2J\n"  # a pipe gets the text as it is
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    Printer().show(pieces)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "a]0;titleb\tc2J\n"

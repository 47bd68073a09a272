"""The conversation of `lfmfast chat` at a terminal."""

from __future__ import annotations

import difflib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lfmfast.cli import _options as opt
from lfmfast.cli.chat import Printer, format_stats, why_cut
from lfmfast.errors import ContextFullError, LfmfastError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    from lfmfast import Model, Piece, Stream

HELP = """\
/system TEXT   start again with this system prompt (without TEXT: show it)
/reset         forget the conversation
/regen         answer the last message again
/save FILE     write the conversation; .json gives messages, anything else text
/stats         token counts and speeds of the last answer
/exit          leave (or Ctrl-D)
Enter sends. Alt-Enter, or \\ before Enter, starts a new line; \"\"\" before and after a text of several lines.
Ctrl-C stops an answer. A message that begins with / is written //."""


class Repl:
    """Read messages, print answers, obey /commands."""

    def __init__(self, model: Model, *, system: str | None, options: dict[str, Any], stats: bool) -> None:
        self.model, self.system, self.options, self.stats = model, system, options, stats
        self.chat = model.chat(system=system)
        self.end: Piece | None = None
        self.saved: set[Path] = set()
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP, file=sys.stderr),
            "/reset": self.reset,
            "/system": self.set_system,
            "/regen": self.regenerate,
            "/save": self.save,
            "/stats": self.show_stats,
            "/exit": self.leave,
            "/quit": self.leave,
        }

    def run(self) -> None:
        session = _session(list(self.commands))
        name = self.model.metadata.get("general.name") or Path(self.model.path).name
        self.note(f"{name} · {self.model.n_ctx} tokens of context · /help for commands")
        with _terminate_cleanly():
            while True:
                try:
                    line, quoted = _read(session)
                except KeyboardInterrupt:
                    self.note("(Ctrl-D or /exit leaves)")
                    continue
                except EOFError:
                    return
                if not line.strip():
                    continue
                try:
                    self.handle(line, quoted)
                except KeyboardInterrupt:
                    self.note("[stopped]")
                except EOFError:
                    return
                except (LfmfastError, OSError) as error:
                    if isinstance(error, BrokenPipeError):
                        raise
                    opt.complain(opt.describe(error))

    def handle(self, line: str, quoted: bool) -> None:
        if quoted or not line.startswith("/"):
            self.answer(line)
        elif line.startswith("//"):
            self.answer(line[1:])
        else:
            name, _, argument = line.strip().partition(" ")
            if command := self.commands.get(name):
                command(argument.strip())
            else:
                close = difflib.get_close_matches(name, self.commands, n=1)
                hint = f"Did you mean {close[0]}?" if close else "See /help; a message that begins with / is written //."
                self.note(f"There is no command {name}. {hint}")

    def answer(self, text: str) -> None:
        whole = self.chat
        try:
            self.show(self.chat.stream(text, **self.options))
            return
        except ContextFullError as error:
            full = error
        # Half of the context first, then all but the system prompt; what does not help is not forgotten.
        for how in ({}, {"keep_turns": 0}):
            self.chat = whole.fork()
            if dropped := self.chat.trim(**how):
                try:
                    stream = self.chat.stream(text, **self.options)
                except ContextFullError:
                    continue
                self.note(f"The context is full (-c): the oldest {dropped} messages are forgotten.")
                self.show(stream)
                return
        self.chat = whole
        raise full

    def show(self, stream: Stream) -> None:
        printer = Printer()
        try:
            self.end = printer.show(stream)
        finally:
            printer.finish()
        print(file=sys.stderr)
        if self.end.finish_reason == "length":
            self.note(why_cut(self.end, self.options.get("max_tokens") or -1))
        if self.stats:
            self.show_stats("")

    def reset(self, _: str) -> None:
        self.chat = self.model.chat(system=self.system)
        self.end = None
        self.note("The conversation is forgotten.")

    def set_system(self, text: str) -> None:
        if text:
            self.system = text
            self.reset("")
        else:
            self.note(self.system or "There is no system prompt.")

    def regenerate(self, _: str) -> None:
        if [m["role"] for m in self.chat.messages[-1:]] != ["assistant"]:
            self.note("There is no answer to replace.")
        else:
            self.show(self.chat.regenerate(stream=True, **self.options))

    def save(self, name: str) -> None:
        if not name:
            self.note("/save needs a file name.")
            return
        path = Path(name).expanduser()
        messages = self.chat.messages
        if path.suffix == ".json":
            text = json.dumps(messages, ensure_ascii=False, indent=2) + "\n"
        else:
            text = "\n\n".join(f"{m['role']}:\n{m['content']}" for m in messages) + "\n"
        with path.open("w" if path in self.saved else "x", encoding="utf-8") as file:
            file.write(text)
        self.saved.add(path)
        self.note(f"{len(messages)} messages written to {path}.")

    def show_stats(self, _: str) -> None:
        self.note(format_stats(self.end) if self.end else "There is no answer yet.")

    def leave(self, _: str) -> None:
        raise EOFError

    def note(self, text: str) -> None:
        print(opt.style(text, "dim", sys.stderr), file=sys.stderr, flush=True)


class _Terminated(Exception):
    """A signal asked to end; its argument is the signal's number."""


@contextmanager
def _terminate_cleanly() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that the terminal's modes are restored."""

    from prompt_toolkit.application import get_app_or_none

    def stop(number: int, frame: object) -> None:
        app = get_app_or_none()
        if app is None or app.loop is None or not app.is_running:
            raise SystemExit(128 + number)

        # In the middle of prompt_toolkit's own work an exception would be reported as a fault of it: let it end by itself.
        def leave() -> None:
            if app.is_running and not app.is_done:
                app.exit(exception=_Terminated(number))

        app.loop.call_soon_threadsafe(leave)

    names = [s for s in ("SIGTERM", "SIGHUP") if hasattr(signal, s)]
    before = {name: signal.signal(getattr(signal, name), stop) for name in names}
    try:
        yield
    except _Terminated as terminated:
        raise SystemExit(128 + terminated.args[0]) from None
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def _session(commands: list[str]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.output import create_output

    class Commands(Completer):
        def get_completions(self, document: Document, complete_event: object) -> Iterator[Completion]:
            word = document.text
            if word.startswith("/") and " " not in word:
                for name in commands:
                    if name.startswith(word):
                        yield Completion(name, start_position=-len(word))

    return PromptSession(
        history=_history(),
        key_bindings=_keys(),
        multiline=True,
        prompt_continuation="  ",
        completer=Commands(),
        complete_while_typing=False,
        # What is typed must not end up in a file that the answers go to.
        output=None if sys.stdout.isatty() else create_output(stdout=sys.stderr),
    )


def _history() -> Any:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from lfmfast.hub import cache_dir

    path = cache_dir() / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif _open_quote(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _open_quote(text: str) -> bool:
    """Whether a text in triple quotes lacks the closing ones."""
    body = text.strip()
    return body.startswith('"""') and not (len(body) >= 6 and body.endswith('"""'))


def _read(session: PromptSession[str]) -> tuple[str, bool]:
    """Return the text, and whether it was in triple quotes: then it is no command."""
    from prompt_toolkit.formatted_text import FormattedText

    mark = [("bold fg:ansigreen", "> ")] if opt.has_colour(sys.stderr) else [("", "> ")]
    text = session.prompt(FormattedText(mark))
    body = text.strip()
    if len(body) >= 6 and body.startswith('"""') and body.endswith('"""'):
        return body[3:-3].strip("\n"), True
    return text, False

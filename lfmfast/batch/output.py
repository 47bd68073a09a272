"""The output of a batch: whole lines or nothing, in order if need be, and what is needed to go on after a kill.

Beside OUT lies OUT.progress until all is done. Its first line says what was asked for; others are answers that came before
those of earlier lines, so that an ordered output loses no work. What is done is read from the numbers in both.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from lfmfast.batch.reader import BatchFileError
from lfmfast.batch.result import number_of
from lfmfast.errors import BusyError, ParameterError

#: Windows keeps others from reading bytes that are locked, so it is one far behind the end.
_LOCKED = 1 << 40

__all__ = ["Output", "Ranges", "begun_with", "remove", "sidecar"]


class Ranges:
    """A set of numbers that is small while they are dense.

    >>> done = Ranges()
    >>> for n in (1, 2, 5, 4): done.add(n)
    >>> [n for n in range(7) if n in done], len(done)
    ([1, 2, 4, 5], 4)
    """

    def __init__(self) -> None:
        self._ends: list[int] = []  # first number of a range, the one behind its last, ...
        self._n = 0

    def add(self, number: int) -> None:
        if number in self:
            return
        self._n += 1
        i = bisect.bisect_left(self._ends, number)
        if self._ends[i : i + 2] == [number, number + 1]:  # between two ranges
            del self._ends[i : i + 2]
        elif i < len(self._ends) and self._ends[i] == number:
            self._ends[i] = number + 1
        elif i < len(self._ends) and self._ends[i] == number + 1:
            self._ends[i] = number
        else:
            self._ends[i:i] = [number, number + 1]

    def __contains__(self, number: int) -> bool:
        return bisect.bisect_right(self._ends, number) % 2 == 1

    def __len__(self) -> int:
        return self._n


def sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".progress")


def remove(path: Path) -> None:
    """Forget a batch, whatever is there of it."""
    for file in (sidecar(path), path):
        file.unlink(missing_ok=True)


def begun_with(path: Path) -> dict[str, Any] | None:
    """What an unfinished batch that writes to `path` was begun with; None: there is none."""
    try:
        with sidecar(path).open("rb") as file:
            header = json.loads(file.readline())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise BatchFileError(f"{sidecar(path)} is damaged: {error}") from error
    if not isinstance(header, dict):
        raise BatchFileError(f"{sidecar(path)} is damaged")
    return header


class Output:
    """Where results go.

    Parameters
    ----------
    path : str
        `-` for stdout, which can't be gone on with, and neither can a device or a pipe.
    header : mapping
        What was asked for, for JSON.
    ordered : bool
        Lines are written in the order of :meth:`expect`.

    Raises
    ------
    ParameterError
        The file is there and no unfinished batch's.
    BusyError
        Another process writes to it.
    BatchFileError
        It has lines that no batch wrote.
    """

    def __init__(self, path: str, header: Mapping[str, Any], *, ordered: bool = True) -> None:
        self.done = Ranges()
        self.n_failed = 0
        self._ordered = ordered
        self._expected: deque[int] = deque()
        self._ready: dict[int, bytes] = {}  # came before others that are to be written first
        self._n_ahead = 0  # lines of the sidecar
        self._ahead: IO[bytes] | None = None
        self._header = json.dumps(header).encode() + b"\n"
        self._path: Path | None = None
        if path == "-":
            self._file: IO[bytes] = sys.stdout.buffer
        elif Path(path).exists() and not Path(path).is_file():
            self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 (closed by close)
        else:
            self._path = Path(path)
            self._open(self._path)

    def _open(self, path: Path) -> None:
        was_begun = begun_with(path) is not None
        self._file = path.open("ab", buffering=0)
        try:
            _lock(self._file, path)
            if was_begun:
                self._recover(path)
            elif path.stat().st_size:
                raise ParameterError(f"{path} is there already, and not of an unfinished batch: --overwrite, or another -o")
            self._write_sidecar()
        except BaseException:
            self._file.close()
            raise

    def _recover(self, path: Path) -> None:
        whole = 0
        for n, line in enumerate(_whole_lines(path), 1):
            try:
                number, failed = number_of(line)
            except ValueError:
                raise BatchFileError(f"{path}: line {n} is no result of a batch") from None
            whole += len(line)
            self.done.add(number)
            self.n_failed += failed
        self._file.truncate(whole)
        for n, line in enumerate(_whole_lines(sidecar(path))):
            with contextlib.suppress(ValueError):
                if n and (number := number_of(line)[0]) not in self.done:
                    self._ready[number] = line
                    self.n_failed += number_of(line)[1]

    def _write_sidecar(self) -> None:
        """Anew, with what is ahead now; what was written to the output by then has to be there before."""
        assert self._path is not None
        if self._ahead is not None:
            self._ahead.close()
        os.fsync(self._file.fileno())
        path, part = sidecar(self._path), self._path.with_name(self._path.name + ".progress.new")
        with part.open("wb") as file:
            file.write(self._header + b"".join(self._ready.values()))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        self._ahead = path.open("ab", buffering=0)
        self._n_ahead = len(self._ready)

    @property
    def n_waiting(self) -> int:
        """Lines that are expected and not written."""
        return len(self._expected)

    @property
    def n_done(self) -> int:
        """Results that were there at the beginning."""
        return len(self.done) + len(self._ready)

    def expect(self, number: int) -> bool:
        """A line of the input that is to have a result; False: it has one."""
        if number in self.done:
            return False
        if self._ordered:
            self._expected.append(number)
        if number not in self._ready:
            return True
        if not self._ordered:
            _write(self._file, self._ready.pop(number))
        self._flush()
        return False

    def write(self, number: int, line: bytes) -> None:
        """A result."""
        if not self._ordered:
            _write(self._file, line)
            return
        self._ready[number] = line
        if self._expected[0] == number:
            self._flush()
        elif self._ahead is not None:
            _write(self._ahead, line)
            self._n_ahead += 1

    def _flush(self) -> None:
        lines = []
        while self._expected and self._expected[0] in self._ready:
            lines.append(self._ready.pop(self._expected.popleft()))
        if lines:
            _write(self._file, b"".join(lines))
            if self._n_ahead > 1000 + 2 * len(self._ready):
                self._write_sidecar()

    @property
    def can_go_on(self) -> bool:
        """Whether what is written can be gone on with later."""
        return self._path is not None

    def close(self) -> None:
        """Everything that was written is on the disk then."""
        if self._path is not None:
            os.fsync(self._file.fileno())
        if self._ahead is not None:
            self._ahead.close()
        if self._file is not sys.stdout.buffer:
            self._file.close()

    def finish(self) -> None:
        """Say, after :meth:`close`, that every line of the input has its result."""
        if self._path is not None:
            sidecar(self._path).unlink(missing_ok=True)


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def _write(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]
    file.flush()


def _lock(file: IO[bytes], path: Path) -> None:
    """Until it is closed; the system takes it from a process that is killed."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(_LOCKED)  # what is appended goes to the end all the same
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise BusyError(f"another process writes to {path}") from None

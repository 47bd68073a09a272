"""The records of a batch file, one by one: JSON lines, packed or not, or Parquet."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from lfmfast.errors import LfmfastError, ParameterError

__all__ = ["LINE_MAX", "Record", "Source", "open_source"]

#: The longest line, in bytes.
LINE_MAX = 64 << 20
#: Rows of Parquet that are read at a time.
ROWS = 256


class BatchFileError(LfmfastError, OSError):
    """A file that can't be read on, or that is not what it has to be."""


@dataclass(frozen=True, slots=True)
class Record:
    """A line of the file, or a row.

    Parameters
    ----------
    number : int
        Of the line or row, from 1.
    raw : bytes
        The line; empty for a row.
    size : int
        What was read of the file for it, in the unit of `Source.total`.
    values : dict, optional
        Of a row.
    error : str, optional
        Why the line can't be taken.
    """

    number: int
    raw: bytes
    size: int
    values: dict[str, Any] | None = None
    error: str | None = None

    @property
    def is_blank(self) -> bool:
        return self.values is None and self.error is None and not self.raw.strip()

    def read(self) -> dict[str, Any]:
        """The object in it.

        Raises
        ------
        ParameterError
            There is none.
        """
        if self.error is not None:
            raise ParameterError(self.error)
        if self.values is not None:
            return self.values
        try:
            value = json.loads(self.raw.decode("utf-8-sig" if self.number == 1 else "utf-8"), parse_constant=_no_number)
        except UnicodeDecodeError as error:
            raise ParameterError(f"not UTF-8 (byte 0x{self.raw[error.start]:02x} at {error.start})") from None
        except json.JSONDecodeError as error:
            raise ParameterError(f"not JSON: {error.msg} at character {error.pos}") from None
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ParameterError(f"not a JSON object, but {type(value).__name__}")
        return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


@dataclass
class Source:
    """A file that is read.

    Parameters
    ----------
    name : str
        For messages.
    records : iterator of Record
    total : int, optional
        Bytes of the file, or its rows, if that is known.
    is_table : bool
        Its records are rows of Parquet.
    """

    name: str
    records: Iterator[Record]
    total: int | None
    is_table: bool = False
    files: list[IO[bytes]] = field(default_factory=list)

    def close(self) -> None:
        for file in self.files:
            if file is not sys.stdin.buffer:
                file.close()


def open_source(path: str, columns: list[str] | None = None) -> Source:
    """Open a file by its name: .parquet, .gz, .zst, `-` for stdin, and JSON lines otherwise.

    Parameters
    ----------
    columns : list of str, optional
        Of a Parquet file, those that are wanted; None: `messages` or `prompt`. With them comes `custom_id`.

    Raises
    ------
    ParameterError
        What reads it is not installed, or a column is not there.
    OSError
    """
    if path == "-":
        return Source("stdin", _lines("stdin", sys.stdin.buffer, None), None, files=[sys.stdin.buffer])
    name = path.lower()
    if name.endswith(".parquet"):
        return _table(path, columns)
    file = Path(path).open("rb")  # noqa: SIM115 (closed with the source)
    total = Path(path).stat().st_size if Path(path).is_file() else None
    files: list[IO[bytes]] = [file]
    reader: BinaryIO = file
    if name.endswith(".gz"):
        reader = io.BufferedReader(gzip.GzipFile(fileobj=file))
    elif name.endswith((".zst", ".zstd")):
        reader = _unpacked(file)
    files.insert(0, reader)
    return Source(path, _lines(path, reader, file if total is not None else None), total, files=files)


def _unpacked(file: BinaryIO) -> BinaryIO:
    try:
        zstd: Any = importlib.import_module("compression.zstd")
        return zstd.ZstdFile(file)  # type: ignore[no-any-return]
    except ImportError:
        pass
    try:
        zstd = importlib.import_module("zstandard")
    except ImportError as error:
        raise ParameterError(f"{file.name} needs zstandard: pip install 'lfmfast[zstd]'") from error
    return io.BufferedReader(_Zstandard(file, zstd), 1 << 20)


class _Zstandard(io.RawIOBase):
    """What is packed in a file, by the package zstandard, whose own reader takes a file that was cut for a whole one."""

    def __init__(self, file: BinaryIO, zstandard: Any) -> None:
        self._file, self._zstandard = file, zstandard
        self._frame: Any = None
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(1 << 16)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(self._packed)
            self._packed = b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        n = min(len(buffer), len(self._ready))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n


def _lines(name: str, reader: BinaryIO, file: BinaryIO | None) -> Iterator[Record]:
    """`file` is what is below the reader, and tells how far that is."""
    number = before = 0
    while True:
        try:
            raw, error = reader.readline(LINE_MAX + 1), None
            if len(raw) > LINE_MAX and not raw.endswith(b"\n"):
                while (rest := reader.readline(LINE_MAX)) and not rest.endswith(b"\n"):
                    pass
                raw, error = b"", f"the line has more than {LINE_MAX:,} bytes"
        except (EOFError, zlib.error, gzip.BadGzipFile) as damage:
            raise BatchFileError(f"{name} is damaged or cut, behind line {number}: {damage}") from damage
        except OSError:
            raise
        except Exception as damage:  # zstandard's own
            raise BatchFileError(f"{name} is damaged or cut, behind line {number}: {damage}") from damage
        if not raw and error is None:
            return
        number += 1
        position = 0 if file is None else file.tell()
        yield Record(number, raw, position - before, error=error)
        before = position


def _table(path: str, columns: list[str] | None) -> Source:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ParameterError(f"{path} needs pyarrow: pip install 'lfmfast[parquet]'") from error
    file = Path(path).open("rb")  # noqa: SIM115 (closed with the source)
    try:
        table = parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
        known = table.schema_arrow.names
    except (ValueError, OSError) as damage:
        file.close()
        raise BatchFileError(f"{path} is no Parquet file: {damage}") from damage
    wanted = [name for name in ("messages", "prompt") if name in known] if columns is None else columns
    missing = [name for name in wanted if name not in known]
    if missing or not wanted:
        file.close()
        which = missing[0] if missing else "messages or prompt"
        raise ParameterError(f"{path} has no column {which}; it has {', '.join(known)}")
    if "custom_id" in known:
        wanted = [*wanted, "custom_id"]

    def records() -> Iterator[Record]:
        number = 0
        with closing(table):
            for batch in table.iter_batches(batch_size=ROWS, columns=wanted):
                for values in batch.to_pylist():
                    number += 1
                    yield Record(number, b"", 1, values)

    return Source(path, records(), table.metadata.num_rows, True, [file])

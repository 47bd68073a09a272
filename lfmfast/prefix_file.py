"""Files that hold what a model has read: tokens, their memory, and for a chat its messages.

A file is

===========  ======================================================================================
8 bytes      ``lfmfastP``
4 bytes      version, little endian, as all numbers
4 bytes      size of the header
header       JSON: tokens, the model's fingerprint, names and sizes of the sections, their SHA-256
32 bytes     SHA-256 of everything before
sections     one after another, to the end of the file
===========  ======================================================================================

A file is written beside its place and then moved there: whatever happens meanwhile, the old one or the new one is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lfmfast import __version__
from lfmfast.errors import StateError

__all__ = ["VERSION", "Fingerprint", "Saved", "read", "write"]

MAGIC = b"lfmfastP"
VERSION = 1
_START = struct.Struct("<8sII")
_MAX_HEADER = 64 << 20
_HEAD_BYTES, _SAMPLES, _SAMPLE_BYTES = 1 << 20, 64, 64 << 10


@dataclass(frozen=True)
class Fingerprint:
    """Tells a model's weights from others, without reading all of them.

    Attributes
    ----------
    name : str
        Of the file; not compared.
    size : int
        Bytes, of a split model of all parts.
    sha256 : str
        Of the first MiB and of 64 samples, 64 KiB each, spread evenly, of each part.
    """

    name: str
    size: int
    sha256: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Fingerprint:
        """Of a model file; of a split model, given its first part, of all parts."""
        first = Path(path)
        parts, split = [first], re.fullmatch(r"(.*)-00001-of-(\d{5})(\.gguf)", first.name)
        if split:
            parts = [first.with_name(f"{split[1]}-{i:05}-of-{split[2]}{split[3]}") for i in range(1, int(split[2]) + 1)]
        size, digest = 0, hashlib.sha256()
        for part in parts:
            with part.open("rb") as file:
                n = file.seek(0, os.SEEK_END)
                size += n
                digest.update(n.to_bytes(8, "little"))
                last = max(0, n - _SAMPLE_BYTES)
                file.seek(0)
                digest.update(file.read(_HEAD_BYTES))
                for i in range(_SAMPLES):
                    file.seek(last * i // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        return cls(first.name, size, digest.hexdigest())

    def __str__(self) -> str:
        return f"{self.name!r} ({self.size} bytes, {self.sha256[:12]})"


@dataclass
class Saved:
    """What a file holds.

    Attributes
    ----------
    prefix : dict
        For :meth:`lfmfast._engine.Engine.load`.
    model : Fingerprint
        Of the model that read it.
    chat : dict or None
        What a chat added.
    deterministic : str
        The kernels of a deterministic model that read it; empty: another one did.
    """

    prefix: dict[str, Any]
    model: Fingerprint
    chat: dict[str, Any] | None = None
    deterministic: str = ""


def write(path: str | os.PathLike[str], saved: Saved) -> None:
    """Write a file, or replace one.

    Raises
    ------
    OSError
        It can't be written; one that was there is as it was.
    """
    prefix = saved.prefix
    tokens = array("i", prefix["tokens"])
    if sys.byteorder == "big":
        tokens.byteswap()
    sections: list[tuple[str, bytes]] = [("tokens", tokens.tobytes())]
    sections += [(name, prefix[name]) for name in ("layout", "rows", "logits")]
    sections += [("point", data) for _, data in prefix["points"]]
    if saved.chat is not None:
        sections.append(("chat", json.dumps(saved.chat).encode()))
    digest = hashlib.sha256()
    for _, data in sections:
        digest.update(data)
    header = json.dumps({
        "lfmfast": __version__, "n_tokens": len(tokens), "model": asdict(saved.model), "byte_order": sys.byteorder,
        "points": [n for n, _ in prefix["points"]], "sections": [[name, len(data)] for name, data in sections],
        "sha256": digest.hexdigest(), "deterministic": saved.deterministic,
    }).encode()  # fmt: skip
    start = _START.pack(MAGIC, VERSION, len(header)) + header
    _replace(Path(os.path.realpath(path)), [start, hashlib.sha256(start).digest(), *(data for _, data in sections)])


def read(path: str | os.PathLike[str], model: Fingerprint | None = None) -> Saved:
    """Read a file.

    Parameters
    ----------
    model : Fingerprint, optional
        The model that it must have been made with.

    Raises
    ------
    StateError
        It is no such file, of another version, damaged, or of another model.
    OSError
        It can't be read.
    """
    path = os.fspath(path)

    def refuse(why: str) -> StateError:
        return StateError(f"{path!r} can't be used: {why}")

    with Path(path).open("rb") as file:
        start = file.read(_START.size)
        if start[: len(MAGIC)] != MAGIC:
            raise refuse("it is no file of lfmfast")
        if len(start) < _START.size:
            raise refuse("it is cut off in its first bytes")
        _, version, n_header = _START.unpack(start)
        if version != VERSION:
            raise refuse(f"it has format version {version}, and this lfmfast {__version__} knows version {VERSION}")
        n_file = os.fstat(file.fileno()).st_size
        if n_header > min(_MAX_HEADER, n_file):
            raise refuse(f"it is cut off or damaged: it should have {n_header} bytes of header, but has {n_file} in all")
        start += file.read(n_header)
        if hashlib.sha256(start).digest() != file.read(hashlib.sha256().digest_size):
            raise refuse("it is cut off or damaged: the checksum of its header is wrong")
        try:
            header = json.loads(start[_START.size :])
            made_with = Fingerprint(**header["model"])
            sizes: list[tuple[str, int]] = [(str(name), int(n)) for name, n in header["sections"]]
            if min(n for _, n in sizes) < 0:
                raise ValueError
        except (ValueError, TypeError, KeyError) as error:
            raise refuse(f"its header makes no sense: {error!r}") from None
        if model is not None and (made_with.size, made_with.sha256) != (model.size, model.sha256):
            raise refuse(f"it was made with the model {made_with}, and this one is {model}")
        n_expected = file.tell() + sum(n for _, n in sizes)
        if n_file != n_expected:
            raise refuse(f"it has {n_file} bytes instead of {n_expected}")
        return _sections(file, header, sizes, made_with, refuse)


def _sections(file: BinaryIO, header: dict[str, Any], sizes: list[tuple[str, int]], model: Fingerprint, refuse: Any) -> Saved:
    digest = hashlib.sha256()
    sections: dict[str, list[bytes]] = {}
    for name, n in sizes:
        data = file.read(n)
        digest.update(data)
        sections.setdefault(name, []).append(data)
    if digest.hexdigest() != header.get("sha256"):
        raise refuse("it is damaged: the checksum of its contents is wrong")
    try:
        if header["byte_order"] != sys.byteorder:
            raise ValueError(f"it is from a {header['byte_order']} endian machine")
        tokens = array("i", sections["tokens"][0])
        if sys.byteorder == "big":
            tokens.byteswap()
        prefix: dict[str, Any] = {name: sections[name][0] for name in ("layout", "rows", "logits")}
        prefix["tokens"] = tokens.tolist()
        prefix["points"] = list(zip(map(int, header["points"]), sections.get("point", []), strict=True))
        chat = json.loads(sections["chat"][0]) if "chat" in sections else None
        if chat is not None and not isinstance(chat, dict):
            raise TypeError("its chat is none")
    except (ValueError, TypeError, KeyError) as error:
        raise refuse(f"its contents make no sense: {error!r}") from None
    return Saved(prefix, model, chat, str(header.get("deterministic", "")))


# --- one file in place of another --------------------------------------------------------------------------------------


def _replace(path: Path, parts: Sequence[bytes]) -> None:
    temporary = path.with_name(f".lfmfast-{secrets.token_hex(8)}.tmp")
    try:
        if not _write_unnamed(temporary, parts):
            binary = getattr(os, "O_BINARY", 0)  # Windows
            _write(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | binary, 0o666), parts)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):  # that it is there after a power cut too
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write(fd: int, parts: Sequence[bytes]) -> None:
    with os.fdopen(fd, "wb", closefd=True) as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(fd)


def _write_unnamed(path: Path, parts: Sequence[bytes]) -> bool:
    """Writes a file that has no name before it is whole, so that a killed process leaves nothing; False: not possible here."""
    flag = getattr(os, "O_TMPFILE", 0)
    if not flag or not Path("/proc/self/fd").is_dir():
        return False
    try:
        fd = os.open(path.parent, os.O_WRONLY | flag, 0o666)
    except OSError:  # a file system that can't, or one that can't be written at all, which the other way will tell
        return False
    try:
        _write(os.dup(fd), parts)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:  # with a folder given, Python follows the link to the file
            os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=folder)
        except OSError:
            return False
        finally:
            os.close(folder)
        return True
    finally:
        os.close(fd)

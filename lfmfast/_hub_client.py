"""One repository on the Hub: list its files, and download them into huggingface_hub's cache layout.

huggingface_hub supplies the protocol (session, proxies, token, metadata, errors). Its download is not used: it starts again
from nothing in each process and gives up when a connection is reset.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from lfmfast import __version__
from lfmfast._progress import Bar, format_bytes, say
from lfmfast.errors import HubError

_log = logging.getLogger("lfmfast")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9A-Za-z][\w.-]*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")  # what the ETag of an LFS file is
_RETRIES = 5  # in a row that bring no new byte
_RETRY_WAIT_S = 1.0
_MOVE = "Free some, or set HF_HOME to a folder on another disk."


class ListingError(HubError):
    """The Hub did not say which files the repository has: the cache may help."""


class Repository:
    """A repository at one revision; `folder` is its place in the cache."""

    def __init__(self, folder: Path, repo: str, revision: str | None, token: str | bool | None, progress: bool | None) -> None:
        self.folder, self.repo, self.revision = folder, repo, revision or "main"
        self.token, self.progress = token, progress
        self.endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
        try:
            self.timeout = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 5)
        except ValueError as error:
            raise HubError(f"HF_HUB_ETAG_TIMEOUT must be a number of seconds: {error}") from None
        self._agent = {"library_name": "lfmfast", "library_version": __version__}
        self._hub: Any = None
        self._utils: Any = None

    def listing(self) -> tuple[str, list[str]]:
        """Return the commit and the files. The only request when all is cached; without a Hub it costs one timeout."""
        try:
            import huggingface_hub
            from huggingface_hub import utils
        except ImportError as error:
            why = f"downloading {self.repo} needs huggingface_hub, which is not installed"
            raise ListingError(f'{why}: pip install "lfmfast[hub]"') from error
        self._hub, self._utils = huggingface_hub, utils
        try:
            api = self._hub.HfApi(endpoint=self.endpoint, token=self.token, **self._agent)
            info = api.model_info(self.repo, revision=self.revision, timeout=self.timeout)
        except Exception as error:
            raise ListingError(self._explain(error)) from error
        if not _COMMIT.fullmatch(info.sha or ""):
            raise ListingError(f"{self.endpoint} does not speak the Hub's protocol: no commit for {self.repo}")
        names = [s.rfilename for s in info.siblings or ()]
        return info.sha, [n for n in names if not PurePosixPath(n).is_absolute() and ".." not in PurePosixPath(n).parts]

    def fetch(self, commit: str, files: list[str]) -> Path:
        """Download what is missing of `files` and return the path of the first."""
        snapshot = self.folder / "snapshots" / commit
        try:
            for file in files:
                if not (snapshot / file).is_file():
                    self._download(commit, file)
            if self.revision != commit:  # last, so that an offline run finds all shards or the commit before
                ref = self.folder / "refs" / self.revision
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(commit)
        except HubError:
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise HubError(f"no space left in {self.folder}. {_MOVE}") from error
            raise HubError(f"can't write to {self.folder}: {error.strerror or error}. {_MOVE}") from error
        return snapshot / files[0]

    def _download(self, commit: str, file: str) -> None:
        url = self._hub.hf_hub_url(self.repo, file, revision=commit, endpoint=self.endpoint)
        options = {"token": self.token, "timeout": self.timeout, "endpoint": self.endpoint, **self._agent}
        try:
            meta = self._hub.get_hf_file_metadata(url, **options)
        except Exception as error:
            raise HubError(self._explain(error)) from error
        if not meta.etag or not _ETAG.fullmatch(meta.etag):
            raise HubError(f"{self.endpoint} does not speak the Hub's protocol: ETag {meta.etag!r} for {file}")
        blob = self.folder / "blobs" / meta.etag
        blob.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(meta.etag, file):
            if not blob.is_file():
                self._transfer(url, file, blob, meta.size)
            _link(blob, self.folder / "snapshots" / commit / file)

    @contextlib.contextmanager
    def _locked(self, etag: str, file: str) -> Iterator[None]:
        from filelock import FileLock, Timeout  # huggingface_hub depends on it

        path = self.folder.parent / ".locks" / self.folder.name / f"{etag}.lock"  # the one that huggingface_hub takes
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"Another process is downloading {file}: waiting for it.", self.progress)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _transfer(self, url: str, file: str, blob: Path, size: int | None) -> None:
        """Fetch into a partial file that survives an interrupted run, check it, and move it into place."""
        with _Part(blob.with_name(f"{blob.name}.lfmfast-part")) as part:
            free = shutil.disk_usage(blob.parent).free
            if size is not None and size - part.size > free:
                need = format_bytes(size - part.size)
                raise HubError(f"no space for {file} in {blob.parent}: {need} needed, {format_bytes(free)} free. {_MOVE}")
            failures = 0
            with Bar(PurePosixPath(file).name, part.size, size, self.progress) as bar:
                while size is None or part.size < size:
                    before = part.size
                    reason = self._attempt(url, part, bar)
                    if reason is None and (size is None or part.size >= size):
                        break
                    failures = 1 if part.size > before else failures + 1
                    reason = reason or "the connection was closed early"
                    if failures > _RETRIES:
                        got = format_bytes(part.size)
                        raise HubError(f"the download of {file} broke off at {got}: {reason}. Run again to resume it.")
                    _log.info("download of %s broke off at byte %d (%s): resuming", file, part.size, reason)
                    time.sleep(_RETRY_WAIT_S * failures)
            damaged = size is not None and part.size != size
            if damaged or (_SHA256.fullmatch(blob.name) and part.digest.hexdigest() != blob.name):
                part.restart()
                raise HubError(f"the download of {file} is damaged (wrong size or SHA-256) and was deleted. Try again.")
        part.path.replace(blob)

    def _attempt(self, url: str, part: _Part, bar: Bar) -> str | None:
        """Append to `part` until the response ends; return why it ended early, if that is worth another try."""
        headers = self._utils.build_hf_headers(token=self.token, **self._agent)
        headers["Accept-Encoding"] = "identity"
        if part.size:
            headers["Range"] = f"bytes={part.size}-"
        try:
            session = self._utils.get_session()  # drops the token when a redirect leaves the host
            with session.stream("GET", url, headers=headers, timeout=30, follow_redirects=True) as response:
                self._utils.hf_raise_for_status(response)
                if part.size and response.status_code != 206:  # the server ignores ranges
                    part.restart()
                for chunk in response.iter_raw(1 << 17):
                    part.append(chunk)
                    bar.update(part.size)
        except Exception as error:
            status = _status(error)
            if status == 416:  # the partial file is longer than the file is now
                part.restart()
            elif status is not None and status not in (408, 429) and status < 500:
                raise HubError(self._explain(error)) from error
            elif status is None and isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError)):
                raise  # the disk
            return str(error) or type(error).__name__
        return None

    def _explain(self, error: Exception) -> str:
        status, where = _status(error), f"{self.repo} on {self.endpoint}"
        login = "set HF_TOKEN, or run `hf auth login`"
        if status is None:
            return f"can't reach {self.endpoint}: {error}. Check the connection and the proxy; HF_ENDPOINT sets a mirror."
        code = error.response.headers.get("X-Error-Code")  # type: ignore[attr-defined]
        if code == "GatedRepo":
            return f"{where} is gated ({status}): accept its terms at {self.endpoint}/{self.repo}, then {login}."
        if code == "RevisionNotFound":
            return f"{where} has no revision {self.revision!r} ({status})."
        if status == 401:
            return f"{where}: not authorised (401). It is private or does not exist, or the token is wrong: {login}."
        if status == 403:
            return f"{where}: access denied (403). The token lacks the right to read it: {login}."
        if status == 404:
            return f"{where}: not found (404). Check the name; if it is private, {login}."
        if status == 429:
            return f"{self.endpoint} refuses more requests for now (429). Wait, or {login} for a higher limit."
        return f"{self.endpoint} answered {status} for {self.repo}. Try again later."


class _Part:
    """A partial download and the SHA-256 of what it holds."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.digest = path, 0, hashlib.sha256()

    def __enter__(self) -> _Part:
        self._file = self.path.open("ab+")
        self._file.seek(0)
        while chunk := self._file.read(1 << 20):
            self.digest.update(chunk)
            self.size += len(chunk)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def append(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self.digest.update(chunk)
        self.size += len(chunk)

    def restart(self) -> None:
        self._file.truncate(0)
        self.size, self.digest = 0, hashlib.sha256()


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _link(blob: Path, pointer: Path) -> None:
    """Point to the blob; where symbolic links aren't allowed (Windows) move it, as huggingface_hub does."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    if pointer.is_symlink():
        pointer.unlink()  # it leads nowhere
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except FileExistsError:
        pass
    except OSError:
        blob.replace(pointer)

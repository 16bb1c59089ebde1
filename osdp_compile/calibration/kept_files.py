"""Kept files: the folder that runs share, what may be read from it, and how it is written.

The folder is ``$OSDP_CACHE_DIR``, else the user's cache folder for ``osdp_compile`` (Linux:
``$XDG_CACHE_HOME`` or ``~/.cache``; other systems: see platformdirs). With ``OSDP_CACHE_DIR=""``
nothing is read or written.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import platformdirs

log = logging.getLogger("osdp_compile")

#: Folders of the cache folder: plans, and records of compiled graphs.
PLANS, GRAPHS = "plans", "graphs"
_Kept = TypeVar("_Kept")


def cache_folder() -> Path | None:
    """The folder of kept files; None: the cache is off."""
    asked = os.environ.get("OSDP_CACHE_DIR")
    if asked is not None:
        return Path(asked) if asked else None
    return platformdirs.user_cache_path("osdp_compile", appauthor=False)


def read_own(path: Path) -> str:
    """The text of a file that only this user can have written.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read.
        ValueError: another user may have written it, or it is not text.
    """
    # Checks the opened file: another one may stand under its name a moment later.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is not a plain file")
        if hasattr(os, "geteuid"):  # not on Windows
            if about.st_uid != os.geteuid():
                raise ValueError("it belongs to another user")
            if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ValueError("other users may write it")
        return file.read().decode()


def find(path: Path, decode: Callable[[str], _Kept], what: str) -> _Kept | None:
    """What :func:`keep` wrote; None: nothing, or it is of no use and dropped.

    ``decode``: reads the text; it raises ``ValueError`` or ``KeyError`` for a useless one.
    ``what``: the file's name in the log.
    """
    try:
        checksum, _, body = read_own(path).partition("\n")
        body = body.rstrip("\n")
        if checksum != _checksum(body):
            raise ValueError("its checksum is another")
        return decode(body)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, OSError) as error:
        log.info("%s is of no use and dropped: %s", what, error)
        remove(path)
        return None


def keep(path: Path, body: str, most_bytes: int, what: str) -> None:
    """Write a file with a checksum; a failure only costs time at the next start.

    ``most_bytes``: of all files of its folder; the longest unused are removed.
    """
    try:
        write_own(path, f"{_checksum(body)}\n{body}\n")
        trim(path.parent, most_bytes)
    except OSError as error:
        log.info("%s is not kept: %s", what, error)


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def kept_files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The JSON files of a folder. Other jobs may remove some at the same time."""
    found = []
    for entry in os.scandir(folder):
        if entry.name.endswith(".json"):
            try:
                found.append((Path(entry.path), entry.stat()))
            except FileNotFoundError:
                continue
    return found


def trim(folder: Path, most_bytes: int) -> None:
    """Remove the longest unused JSON files of a folder above this size."""
    files = [(about.st_mtime, about.st_size, path) for path, about in kept_files(folder)]
    total_bytes = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total_bytes <= most_bytes:
            return
        remove(path)
        total_bytes -= size


def is_used(path: Path) -> None:
    """Mark a file as used now."""
    try:
        os.utime(path)
    except OSError as error:
        log.debug("%s stays as old as it is: %s", path, error)


def remove(path: Path) -> None:
    """Remove a file, if that is possible."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.info("%s cannot be removed: %s", path, error)


def write_own(path: Path, text: str) -> None:
    """Write a file that only this user may write, in one step.

    Another job may read or write the same file at the same time.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".tmp")  # for this user alone
    try:
        with open(handle, "w") as file:
            file.write(text)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise

"""Kept files: the folder that runs share, what may be read from it, and how it is written.

The folder is ``$OSDP_CACHE_DIR``, else the user's cache folder for ``osdp_compile`` (Linux:
``$XDG_CACHE_HOME`` or ``~/.cache``; other systems: see platformdirs). With ``OSDP_CACHE_DIR=""``
nothing is read or written.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import platformdirs


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

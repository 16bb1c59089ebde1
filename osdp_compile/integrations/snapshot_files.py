"""Snapshot files: texts that the pytest plugin stores beside a test, through syrupy.

Needs syrupy, an extra. Its options hold: ``--snapshot-update`` writes the files, and a file that no
test reads is reported.
"""

from __future__ import annotations

import os
from typing import Any

from syrupy.assertion import SnapshotAssertion
from syrupy.exceptions import SnapshotDoesNotExist
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode


class TextFile(SingleFileSnapshotExtension):
    """A text in a file of its own."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"

    def serialize(self, data: Any, **kwargs: Any) -> str:
        return str(data)


class JsonFile(TextFile):
    """A JSON text in a file of its own."""

    file_extension = "json"


class StoredText:
    """A named text of a test, in a file.

    ``snapshot``: the test's, with the extension for the file. ``updates``: the user asked to write
    files.
    """

    def __init__(self, snapshot: SnapshotAssertion, name: str) -> None:
        self._snapshot = snapshot
        self._name = name
        self.updates = snapshot.update_snapshots

    @property
    def path(self) -> str:
        """The file, relative to the current folder."""
        path = self._snapshot.extension.get_location(
            test_location=self._snapshot.test_location, index=self._name
        )
        return os.path.relpath(path)

    def read(self) -> str | None:
        """The stored text; None: none is stored."""
        try:
            return str(
                self._snapshot.extension.read_snapshot(
                    test_location=self._snapshot.test_location,
                    index=self._name,
                    session_id=str(id(self._snapshot.session)),
                )
            )
        except SnapshotDoesNotExist:
            return None

    def store(self, text: str) -> bool:
        """Compare a text with the file, which counts as used; write it if the user asked for it.

        Returns:
            Whether the file has the text.
        """
        return bool(self._snapshot(name=self._name) == text)

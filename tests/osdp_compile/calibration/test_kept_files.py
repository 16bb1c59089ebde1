"""Only what this user wrote is read; what is written is whole."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from osdp_compile.calibration.kept_files import read_own, write_own


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "made" / "here.json"
    write_own(path, "first")
    write_own(path, "second")
    assert read_own(path) == "second"
    assert [one.name for one in path.parent.iterdir()] == ["here.json"]


def test_a_file_that_others_may_write_is_refused(tmp_path):
    write_own(tmp_path / "file", "text")
    (tmp_path / "file").chmod(0o666)
    with pytest.raises(ValueError, match="other users may write"):
        read_own(tmp_path / "file")


def test_a_file_of_another_user_is_refused(tmp_path):
    write_own(tmp_path / "file", "text")
    with (
        mock.patch.object(os, "geteuid", lambda: os.getuid() + 1),
        pytest.raises(ValueError, match="another user"),
    ):
        read_own(tmp_path / "file")


def test_a_link_and_a_folder_are_refused(tmp_path):
    write_own(tmp_path / "file", "text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("link", "."):
        with pytest.raises((OSError, ValueError)):
            read_own(tmp_path / name)


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path):
    write_own(tmp_path / "file", "first")
    with (
        mock.patch.object(os, "replace", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        write_own(tmp_path / "file", "second")
    assert read_own(tmp_path / "file") == "first"
    assert len(list(tmp_path.iterdir())) == 1

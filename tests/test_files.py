"""Files written whole or not at all, and the user's folder."""

import os
from pathlib import Path

import pytest

from unisono.errors import CheckpointError, UsageError
from unisono.files import cache_folder, check_appendable, check_writable, naming_os_errors, write_atomically


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with write_atomically(path) as partial:
        partial.write_text("old")
        assert not path.exists()
    assert contents(tmp_path) == {"file": "old"}
    with pytest.raises(OSError, match="full"), write_atomically(path) as partial:
        partial.write_text("ne")
        raise OSError("full")
    assert contents(tmp_path) == {"file": "old"}


def test_a_file_that_can_be_written_is_not_made_by_that_question(tmp_path: Path) -> None:
    check_writable(tmp_path / "file")
    assert contents(tmp_path) == {}
    with pytest.raises(FileNotFoundError):
        check_writable(tmp_path / "nowhere" / "file")


def test_several_write_one_file_at_once_and_the_last_wins(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with write_atomically(path) as first, write_atomically(path) as second:
        first.write_text("of the first")
        second.write_text("of the second")
    assert contents(tmp_path) == {"file": "of the first"}  # its block ends last


def test_a_file_has_its_bytes_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[str, int]]()
    fsync = os.fsync

    def observed(descriptor: int) -> None:
        seen.extend((path.name, os.fstat(descriptor).st_size) for path in tmp_path.iterdir())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", observed)
    with write_atomically(tmp_path / "file") as partial:
        partial.write_text("whole")
    assert seen == [(partial.name, 5)]


def test_an_error_of_the_file_system_becomes_one_with_words_and_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught, naming_os_errors("cannot read it", CheckpointError, "; mount it"):
        (tmp_path / "none").read_bytes()
    assert str(caught.value) == "cannot read it: No such file or directory; mount it"
    with pytest.raises(UsageError, match=r"^cannot read it: no reason$"), naming_os_errors("cannot read it"):
        raise OSError("no reason")


def test_a_file_that_takes_no_lines_is_known_before_they_are_written(tmp_path: Path) -> None:
    check_appendable(tmp_path / "lines", "cannot write")
    assert (tmp_path / "lines").read_bytes() == b""
    with pytest.raises(UsageError, match=r"^cannot write the lines: Is a directory$"):
        check_appendable(tmp_path, "cannot write the lines")


def test_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder({"XDG_CACHE_HOME": "/big"}) == Path("/big/unisono")
    assert cache_folder({"XDG_CACHE_HOME": ""}) == cache_folder({}) == tmp_path / ".cache" / "unisono"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)  # a container's user without an entry
    with pytest.raises(UsageError, match="XDG_CACHE_HOME"):
        cache_folder({})

"""The file that is read leaves nothing behind, and says what it could not do."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.probe.disk import prepare_read
from unisono.probe.probes import DiskProbe


def test_a_file_is_read_and_nothing_is_left(tmp_path: Path) -> None:
    with prepare_read(DiskProbe(8 << 20), tmp_path, reads=True) as (call, _):
        (seconds,) = call()
        assert seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), prepare_read(DiskProbe(4 << 20), tmp_path, reads=True):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_of_a_node_read_nothing(tmp_path: Path) -> None:
    with prepare_read(DiskProbe(8 << 20), tmp_path / "nowhere", reads=False) as (call, _):
        assert call() == ()
    with pytest.raises(OSError, match="nowhere"), prepare_read(DiskProbe(8), tmp_path / "nowhere", reads=True):
        pass

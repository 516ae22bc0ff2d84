"""Persistent ranks run one command after another, and raise if they end or write nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.persistent_ranks import PersistentRanks
from tests.progress import process_tree

from unisono.schedules.ring import ring
from unisono.view.schedule import draw


def test_each_command_has_its_own_arguments_exit_code_folder_and_environment(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "one.toml").write_text("[trainig]")
    with PersistentRanks(2, tmp_path / "home") as ranks:
        drawn = ranks(("draw", "ring", "--ranks", "3"), tmp_path)
        assert (drawn.returncode, drawn.stdout, drawn.stderr) == (0, 2 * (draw(ring, 3, "ring") + "\n"), "")
        wrong = ranks(("train", "one.toml"), tmp_path)
        assert (wrong.returncode, wrong.stdout, wrong.stderr.count("unknown key trainig")) == (2, "", 2)
        elsewhere = ranks(("train", "one.toml"), tmp_path / "home")
        assert elsewhere.stderr.count("cannot read the recipe one.toml") == 2
        narrow = ranks(("--help",), tmp_path, COLUMNS="50").stdout
        assert max(map(len, narrow.splitlines())) <= 50
        assert max(map(len, ranks(("--help",), tmp_path, COLUMNS="90").stdout.splitlines())) > 50


@pytest.mark.parametrize(("number", "how"), [(signal.SIGKILL, "ended"), (signal.SIGSTOP, "written nothing for long")])
def test_ended_or_stopped_ranks_raise(tmp_path: Path, number: signal.Signals, how: str) -> None:
    with pytest.raises(AssertionError, match="not ended in order"), PersistentRanks(1, tmp_path, timeout=2) as ranks:
        ranks(("--version",), tmp_path)
        for process in process_tree(ranks.watched.process.pid):
            os.kill(process, number)
        with pytest.raises(AssertionError, match=f"unisono --version: the ranks have {how}"):
            ranks(("--version",), tmp_path)

"""Persistent ranks run one command after another, and raise if they end or write nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.persistent_ranks import PersistentRanks
from tests.progress import poll_until, process_tree

from unisono.schedules.ring import ring
from unisono.view.schedule import draw

ROOT = Path(__file__).parents[1]


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


@pytest.mark.parametrize(("signum", "how"), [(signal.SIGKILL, "ended"), (signal.SIGSTOP, "written nothing for long")])
def test_ended_or_stopped_ranks_raise(tmp_path: Path, signum: signal.Signals, how: str) -> None:
    with pytest.raises(AssertionError, match="not ended in order"), PersistentRanks(1, tmp_path, timeout=2) as ranks:
        ranks(("--version",), tmp_path)
        for process in process_tree(ranks.watched.process.pid):
            os.kill(process, signum)
        with pytest.raises(AssertionError, match=f"unisono --version: the ranks have {how}"):
            ranks(("--version",), tmp_path)


def test_ranks_end_with_the_process_that_asks_them(tmp_path: Path) -> None:
    start = f"ranks = PersistentRanks(1, Path({str(tmp_path)!r})); ranks(('--version',), Path('/'))"
    program = f"from pathlib import Path; from tests.persistent_ranks import PersistentRanks; {start}"
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}; print(flush=True); input()"], cwd=ROOT, stdin=-1, stdout=-1
    ) as asking:
        assert asking.stdout is not None
        asking.stdout.readline()
        started = set(process_tree(asking.pid)) - {asking.pid}
        assert started
        asking.kill()
    left = [Path("/proc", str(process)) for process in started]
    assert not any(poll_until(lambda: [path.exists() for path in left], lambda exist: not any(exist)))

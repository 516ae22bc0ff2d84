"""A command that writes may take its time; one that is silent is ended with all that it started, busy or not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.progress import NoProgressError, Watched, poll_until, process_tree, run


def alive(pid: str) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_output_counts_as_progress() -> None:
    done = run(["sh", "-c", "for i in 1 2 3 4 5 6; do echo $i; sleep 0.5; done; echo end >&2; exit 3"], timeout=2)
    assert (done.returncode, done.stdout.split(), done.stderr) == (3, list("123456"), "end\n")


def test_silence_ends_the_process_tree() -> None:
    with pytest.raises(NoProgressError, match=r"wrote nothing for 2 s\n\d+\n\d+\n") as caught:
        run(["sh", "-c", "setsid sleep 987 & echo $!; sleep 987 & echo $!; wait"], timeout=2)
    match = re.search(r"wrote nothing for 2 s\n(\d+)\n(\d+)\n", str(caught.value))
    assert match
    pids = list(match.groups())
    assert poll_until(lambda: [alive(pid) for pid in pids], lambda seen: not any(seen)) == [False, False]


def test_a_busy_loop_makes_no_progress() -> None:
    with pytest.raises(NoProgressError, match="wrote nothing"):
        run([sys.executable, "-c", "while True: pass"], timeout=1)


def test_process_that_keeps_the_output_open_is_ended() -> None:
    with pytest.raises(NoProgressError) as caught:
        run(["sh", "-c", "sleep 987 & echo $!"], timeout=1)
    pid = str(caught.value).split()[-1]
    assert not poll_until(lambda: alive(pid), lambda seen: not seen)


def test_until_waits_for_the_condition(tmp_path: Path) -> None:
    with Watched(["sh", "-c", "echo on its way; touch there; sleep 987"], cwd=tmp_path) as watched:
        watched.until((tmp_path / "there").exists)
        # The file is there before the shell has started what it runs next.
        assert poll_until(lambda: len(process_tree(watched.process.pid)), lambda seen: seen == 2) == 2
    assert watched.process.returncode == -9
    with (
        Watched(["sh", "-c", "echo no; exit 1"]) as watched,
        pytest.raises(AssertionError, match="ended by itself\nno"),
    ):
        watched.until(lambda: False)


def test_poll_until_waits_while_the_result_changes() -> None:
    numbers = iter(range(10**9))
    assert poll_until(lambda: next(numbers), lambda value: value == 30, timeout=1) == 30
    assert poll_until(lambda: "the same", lambda seen: seen == "another", timeout=0.05) == "the same"

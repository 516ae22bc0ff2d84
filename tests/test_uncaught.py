"""Uncaught exceptions: where they are reported, and which processes end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.progress import Run

from unisono import uncaught, witness


class Rank:
    """Messages of a rank, and the exit code with which it ended all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.words: list[str] = []
        self.codes: list[int] = []
        self.seen: list[str] = []
        monkeypatch.setattr(sys, "excepthook", lambda *args: self.seen.append(args[0].__name__))
        monkeypatch.setattr(threading, "excepthook", lambda args: self.seen.append(f"thread {args.exc_type.__name__}"))
        monkeypatch.setattr(witness, "report_abort", self.words.append)
        uncaught.install(1, 3, self.codes.append)
        uncaught.install(1, 3, self.codes.append)

    def raises(self, error: BaseException) -> None:
        sys.excepthook(type(error), error, None)

    def thread_raises(self, error: type[BaseException], name: str) -> None:
        def fail() -> None:
            raise error

        thread = threading.Thread(target=fail, name=name)
        thread.start()
        thread.join()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_the_main_thread_ends_all_after_the_earlier_hook(rank: Rank) -> None:
    rank.raises(ValueError("no"))
    rank.raises(KeyboardInterrupt())
    assert rank.codes == [1, 130]
    assert rank.seen == ["ValueError", "KeyboardInterrupt"]
    assert rank.words[0] == "rank 1 of 3: ValueError: no\n"


def test_after_a_death_that_a_rank_survives_its_new_number_is_named(rank: Rank) -> None:
    codes = list[int]()
    uncaught.install(0, 2, codes.append)
    rank.raises(ValueError("no"))
    assert (rank.words, rank.seen) == (["rank 0 of 2: ValueError: no\n"], ["ValueError"])
    assert (rank.codes, codes) == ([], [1])


def test_an_earlier_hook_that_fails_does_not_keep_ranks_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    monkeypatch.setattr(rank, "seen", None)
    rank.raises(ValueError("no"))
    assert rank.codes == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_exceptions_of_other_threads_are_printed(rank: Rank, capfd: pytest.CaptureFixture[str]) -> None:
    rank.thread_raises(ZeroDivisionError, "a logger's helper")
    rank.thread_raises(SystemExit, "another")
    assert rank.codes == []
    assert rank.seen == ["thread ZeroDivisionError", "thread SystemExit"]
    assert 'rank 1 of 3, thread "a logger\'s helper", which ends: ZeroDivisionError' in capfd.readouterr().err


def test_own_threads_end_all(rank: Rank) -> None:
    rank.thread_raises(ZeroDivisionError, "unisono network 0")
    assert rank.codes == [1]
    assert rank.seen == ["thread ZeroDivisionError"]


def test_a_forked_child_is_no_rank(rank: Rank) -> None:
    child = os.fork()
    if child == 0:
        rank.thread_raises(ValueError, "unisono network 0")
        if rank.seen == ["thread ValueError"] and not rank.codes:
            rank.raises(KeyboardInterrupt())
        os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130


def test_neither_a_helper_thread_nor_a_child_ends_the_job(mpiexec: Run) -> None:
    program = """
import os, sys, threading, unisono
world = unisono.init()
if world.rank == 1:
    helper = threading.Thread(target=lambda: 1 / 0, name="a logger's helper")
    helper.start()
    helper.join()
world.barrier()
sys.stdout.write(f"rank {world.rank} went on after the thread\\n")
sys.stdout.flush()
child = os.fork()
if child == 0:
    raise ValueError("in the child")
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 1
world.barrier()
sys.stdout.write(f"rank {world.rank} went on after the child\\n")
"""
    done = mpiexec(2, "-c", program)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} went on after the {what}" for rank in (0, 1) for what in ("child", "thread")
    ]
    assert 'rank 1 of 2, thread "a logger\'s helper", which ends: ZeroDivisionError' in done.stderr
    assert done.stderr.count("in the child") == 2, "both children write at once, so their lines may mix"


PROGRAM_RUN_BY_OTHERS = """
import runpy, sys
from unisono import uncaught
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
except BaseException as error:
    error = error.with_traceback(uncaught.frames_of_program(error, error.__traceback__.tb_next))
    sys.__excepthook__(type(error), error, error.__traceback__)
"""


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        ("def f():\n    raise EOFError('mine')\nf()", ["line 3, in <module>", "line 2, in f", "EOFError: mine"]),
        ("def f(:", ["line 1", "SyntaxError: invalid syntax"]),
        ("import json\njson.loads('{')", ["line 2, in <module>", "json/__init__.py", "JSONDecodeError"]),
    ],
)
def test_a_traceback_begins_with_the_program(tmp_path: Path, program: str, lines: list[str]) -> None:
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-c", PROGRAM_RUN_BY_OTHERS, "program.py"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stderr
    assert "runpy" not in shown
    places = [shown.index(line) for line in lines]
    assert places == sorted(places)


def test_an_error_outside_of_the_program_keeps_its_frames() -> None:
    try:
        uncaught.frames_of_program(None, 3)  # type: ignore[arg-type]
    except AttributeError as error:
        trace = error.__traceback__
        assert trace is not None
        assert uncaught.frames_of_program(error, trace.tb_next) is trace.tb_next
        assert uncaught.frames_of_program(error, trace) is trace

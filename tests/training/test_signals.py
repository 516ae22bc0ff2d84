"""Signals as requests: what each means, that a thread hears them, and what is told of long steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from unisono.training import signals as module
from unisono.training.signals import REPEAT_SECONDS, SignalHandlers, meaning


@pytest.mark.parametrize(
    ("signum", "since_term", "expected"),
    [
        (signal.SIGUSR1, None, "save"),
        (signal.SIGUSR1, 5.0, "save"),
        (signal.SIGTERM, None, "stop"),
        (signal.SIGTERM, 0.0, None),
        (signal.SIGTERM, REPEAT_SECONDS / 2, None),
        (signal.SIGTERM, REPEAT_SECONDS, "end"),
        (signal.SIGTERM, 100.0, "end"),
        (signal.SIGINT, None, None),
        (signal.SIGCHLD, 5.0, None),
    ],
)
def test_what_a_signal_means(signum: int, since_term: float | None, expected: str | None) -> None:
    assert meaning(signum, since_term) == expected


def until(true: Callable[[], object]) -> None:
    give_up = time.monotonic() + 30
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_signals_become_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPEAT_SECONDS", 0.0)
    before = [signal.getsignal(signum) for signum in (signal.SIGUSR1, signal.SIGTERM)]
    asked = list[str]()
    with SignalHandlers(asked.append, lambda: asked.append("end"), asked.append) as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: asked == ["save"])
        assert not signals.stop
        signals.pending_since = None
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: asked == ["save", "stop"])
        assert signals.stop
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: asked == ["save", "stop", "end"])
    assert [signal.getsignal(signum) for signum in (signal.SIGUSR1, signal.SIGTERM)] == before
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]


def test_a_long_step_is_reported_once_and_a_finished_request_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_STEP_SECONDS", 0.05)
    asked, reported = list[str](), list[str]()
    with SignalHandlers(asked.append, lambda: None, reported.append) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: reported)
        time.sleep(0.2)
        assert len(reported) == 1
        assert reported[0].startswith(
            "SIGTERM was received 0 s ago, and no checkpoint is written yet: it is at the end of the step, or"
        )
    monkeypatch.setattr(module, "SLOW_STEP_SECONDS", 1000.0)
    with SignalHandlers(asked.append, lambda: None, reported.append) as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: len(asked) == 2)
        monkeypatch.setattr(module, "SLOW_STEP_SECONDS", 0.0)
        signals.pending_since = None
    assert len(reported) == 1


def test_the_main_thread_need_not_come_back_from_what_it_computes() -> None:
    """Python's own handlers would wait for that: here for a mutex that is never opened, within C."""
    program = """
import ctypes, os
from unisono.training.signals import SignalHandlers
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with SignalHandlers(lambda asks: None, lambda: os._exit(143), print):
    print("begun", flush=True)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        time.sleep(REPEAT_SECONDS + 0.2)
        process.terminate()
        assert process.wait(30) == 143


def test_off_the_main_thread_nothing_is_changed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    handlers = list[object]()

    def inside() -> None:
        with SignalHandlers(lambda asks: None, lambda: None, print):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_a_signal_that_comes_after_all_is_saved_changes_nothing() -> None:
    """A batch system signals ranks one after another: the others may have ended the run by then."""
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("it is no request any more"))
    try:
        with SignalHandlers(lambda _: None, lambda: None, lambda _: None) as handlers:
            handlers.saved = True
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)

from __future__ import annotations

import threading
import time

import pytest

from unisono.engine import OperationSpan, observed


def test_a_block_is_reported_with_its_thread_and_its_times() -> None:
    spans = list[OperationSpan]()

    def work() -> None:
        with observed(spans.append, "whole", "loading"), observed(spans.append, "part", "decoding"):
            pass

    before = time.perf_counter()
    thread = threading.Thread(target=work, name="decoding_3")
    thread.start()
    thread.join()
    part, whole = spans
    assert [(one.name, one.kind, one.thread, one.about) for one in spans] == [
        ("part", "decoding", "decoding_3", None),
        ("whole", "loading", "decoding_3", None),
    ]
    assert before <= whole.begin <= part.begin <= part.end <= whole.end <= time.perf_counter()


def test_a_block_that_fails_is_not_reported() -> None:
    spans = list[OperationSpan]()
    with pytest.raises(ValueError, match="of its own"), observed(spans.append, "work", "loading"):
        raise ValueError("an error of its own")
    assert not spans


def test_without_an_observer_no_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.engine.spans.time", None)
    with observed(None, "work", "loading"):
        pass
    with pytest.raises(AttributeError), observed(print, "work", "loading"):
        pass

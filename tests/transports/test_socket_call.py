"""Calls through sockets that compiled code records, beside the record that Python makes of the others."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unisono.call import call_of
from unisono.collectives.states import CALLS_KEPT, Calls
from unisono.errors import StallError
from unisono.transports.compiled import compiled
from unisono.transports.sockets import Sockets
from unisono.transports.steps import Row, RowKind

pytestmark = pytest.mark.skipif(compiled is None, reason="this installation has no compiled code")

CALL = call_of("a collective")


class Scene:
    """Rank 0 of two: its calls send rank 1 an empty message, whose token is read, and then need Python."""

    def __init__(self) -> None:
        self.own, self.peer = socket.socketpair()
        self.own.setblocking(False)
        self.calls, self.group = Calls("world", [0, 1]), SimpleNamespace(label="", broken=False)
        self.during = list[tuple[bool, int, str]]()
        self.others = list[tuple[int, int]]()
        self.error: Exception | None = None
        sockets = Sockets([None, self.own])
        rows = [Row(RowKind.SEND, 0, 0, 0, 1), Row(RowKind.ROUND), Row(RowKind.OTHER)]
        self.messenger = compiled.make_messenger(sockets._connections, np.array(rows, np.int64), 1, self.handle)
        self.start: Any = compiled.make_socket_call(self.messenger, self.start_other, self.group, self.calls, *CALL)

    def handle(self, _: int, __: int) -> None:
        call_number = self.calls.number
        self.during.append((self.calls.busy, call_number, self.calls.description(call_number)))
        if self.error is not None:
            raise self.error

    def start_other(self, source: int, target: int) -> None:
        self.others.append((source, target))

    def token(self) -> int:
        """Return the token of the next message that rank 1 receives."""
        return int.from_bytes(self.peer.recv(8), "little")

    def close(self) -> None:
        self.own.close()
        self.peer.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_a_plain_call_is_recorded_while_it_lasts(scene: Scene) -> None:
    for call_number in range(1, CALLS_KEPT + 3):
        scene.start(0, 0)
        assert scene.token() == CALL.digest + call_number
        assert scene.during == [(True, call_number, CALL.description)]
        assert (scene.calls.busy, scene.calls.number) == (False, call_number)
        scene.during.clear()
    assert not scene.others and not scene.group.broken


def test_calls_by_python_and_by_compiled_code_count_together(scene: Scene) -> None:
    with scene.calls.enter("another"):
        pass
    scene.start(0, 0)
    assert [scene.calls.description(place) for place in (1, 2)] == ["another", CALL.description]
    assert scene.token() == CALL.digest + 2


@pytest.mark.parametrize("reason", ["label", "failure", "call"])
def test_python_carries_out_what_is_no_plain_call(scene: Scene, reason: str) -> None:
    if reason == "label":
        scene.group.label = " of a layer"
    elif reason == "failure":
        scene.calls.fail(StallError, "ended")
    else:
        scene.calls.begin("an outer call", False)
    before = scene.calls.number
    scene.start(3, 5)
    assert scene.others == [(3, 5)]
    assert not scene.during and scene.calls.number == before


def test_an_error_ends_the_call_and_breaks_the_group(scene: Scene) -> None:
    scene.error = StallError("ended")
    with pytest.raises(StallError, match="ended"):
        scene.start(0, 0)
    assert scene.group.broken and not scene.calls.busy


def test_other_objects_are_no_messengers(scene: Scene) -> None:
    with pytest.raises(TypeError, match="make_messenger"):
        compiled.make_socket_call(print, scene.start_other, scene.group, scene.calls, *CALL)


def test_a_call_in_a_circle_is_collected(scene: Scene) -> None:
    class Owner:
        def start_other(self, source: int, target: int) -> None:
            raise AssertionError((source, target))

    owner: Any = Owner()
    owner.start = compiled.make_socket_call(scene.messenger, owner.start_other, scene.group, scene.calls, *CALL)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None

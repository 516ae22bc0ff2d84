"""Codings of exchanges: both ends know the same numbers, bit for bit."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
import torch

from unisono.asynchronous.exchange import Coding


class QueueLink:
    """One end of a pair of queues."""

    def __init__(self, sends: SimpleQueue[torch.Tensor], receives: SimpleQueue[torch.Tensor]) -> None:
        self._sends, self._receives = sends, receives
        self.sent_bytes = 0

    def swap(self, mine: torch.Tensor, came: torch.Tensor) -> None:
        self.sent_bytes += mine.numel() * mine.itemsize
        self._sends.put(mine.clone())
        came.copy_(self._receives.get(timeout=20))

    def send(self, mine: torch.Tensor) -> None:
        self._sends.put(mine.clone())

    def receive(self, came: torch.Tensor) -> None:
        came.copy_(self._receives.get(timeout=20))


def pair() -> tuple[QueueLink, QueueLink]:
    up: SimpleQueue[torch.Tensor] = SimpleQueue()
    down: SimpleQueue[torch.Tensor] = SimpleQueue()
    return QueueLink(up, down), QueueLink(down, up)


def swapped(worker: Coding, server: Coding, x: torch.Tensor, c: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Return x and c as the worker knows them, then as the server does, and the bytes that the worker sent."""
    here, there = pair()
    received: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: received.extend(server.swap(1, c, there)))
    thread.start()
    mine, its = worker.swap(1, x, here)
    thread.join()
    return [mine, its, received[1], received[0]], here.sent_bytes


def test_plain_numbers_are_exact() -> None:
    x, c = torch.randn(7), torch.randn(7)
    (mine, its, x_there, c_there), sent = swapped(Coding(), Coding(), x, c)
    assert torch.equal(mine, x) and torch.equal(x_there, x)
    assert torch.equal(its, c) and torch.equal(c_there, c)
    assert sent == 7 * 4


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_both_ends_know_the_same_and_the_reference_follows_the_centre(wire: str) -> None:
    torch.manual_seed(0)
    start = torch.randn(100)
    worker = Coding(wire, True, {1: start.clone()})
    server = Coding(wire, False, {1: start.clone()})
    x, c = start + 0.01 * torch.randn(100), start + 0.01 * torch.randn(100)
    errors = []
    for _ in range(4):
        (mine, its, x_there, c_there), sent = swapped(worker, server, x, c)
        assert torch.equal(mine, x_there) and torch.equal(its, c_there)
        assert torch.equal(worker.references[1], server.references[1]) and torch.equal(worker.references[1], its)
        assert sent == 100 * 2
        errors.append(float((its - c).abs().max()))
    assert errors[0] < 1e-3  # a rounded change; a rounded weight would be off by up to 4e-3
    assert errors[-1] < 1e-6  # what one exchange loses, the next one sends


def test_a_dtype_without_that_wire_is_sent_as_it_is() -> None:
    x, c = torch.randn(5).bfloat16(), torch.randn(5).bfloat16()
    codings = [Coding("bfloat16", is_worker, {1: torch.zeros(5).bfloat16()}) for is_worker in (True, False)]
    (mine, its, x_there, _), _ = swapped(*codings, x, c)
    assert torch.equal(mine, x) and torch.equal(x_there, x) and torch.equal(its, c)

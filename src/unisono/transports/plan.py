"""Plan of a collective: what determines how it is carried out, as data; and what a plan becomes.

    plan ── prepare ──▶ prepared ── addresses ──▶ play ──▶ carried out, again and again

Ranks with equal plans do the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.call import Call
from unisono.mpi import MPI
from unisono.transports.arithmetic import Arithmetic, Array, arithmetic_of, mover_of
from unisono.transports.exact import BLOCK, ExactArithmetic
from unisono.wires import EXACT, wire_of
from unisono.wires.wire import Wire


class Plan(NamedTuple):
    """Collective of one payload: its schedule, its transport, and the call that ranks compare."""

    collective: str
    algorithm: str
    """Name of a schedule, or "library"."""
    transport: str
    """"library"; "windows" or "cma" (the ranks of one node); "messages"; "mixed": mailboxes within nodes, messages
    between; or "sockets" of the group, between nodes."""
    length: int
    """Number of elements of the whole payload."""
    dtype: torch.dtype
    """Dtype of the payload; if nothing is reduced, one that replaces it."""
    wire: str | None
    op: str | None
    """Name of the reduction; None if nothing is reduced."""
    root: int
    call: Call
    """Description of the call, which ranks compare."""

    @property
    def arithmetic(self) -> Arithmetic:
        """Arithmetic by which the payload is viewed and reduced."""
        if self.wire == EXACT:
            return ExactArithmetic(self.dtype)
        return mover_of(self.dtype) if self.op is None else arithmetic_of(self.dtype, self.op)

    @property
    def reduction(self) -> str:
        """Name of the reduction among those that are compiled."""
        return EXACT if self.wire == EXACT else self.op or "sum"

    @property
    def grain(self) -> int:
        """Elements that are reduced together: a payload is cut between them."""
        return BLOCK if self.wire == EXACT else 1

    @property
    def encoding(self) -> Wire | None:
        """Encoding of the payload between nodes; None if it is sent unencoded."""
        return wire_of(self.wire, self.dtype)

    @property
    def nbytes(self) -> int:
        """Size of the whole payload in bytes."""
        return self.length * self.dtype.itemsize


Play = Callable[[], None]
"""Function that carries a collective out, on memory that the caller keeps alive."""

Prepared = Callable[[int, int], Play]
"""Function (source address, target address) that returns the play of a collective on the memory there."""


class PlayAnywhere(partial[None]):
    """Play of a function of two addresses, source and target, which carries the collective out at any others, too."""


def started(start: Callable[[int, int], None]) -> Prepared:
    """Return the prepared collective of a function of two addresses that carries it out."""
    return lambda source, target: PlayAnywhere(start, source, target)


_move = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.pythonapi)
)
"""`ctypes.memmove`, which would let other threads run Python meanwhile, for milliseconds."""


def on_copies(prepared: Prepared, nbytes: int) -> Callable[[int, int], None]:
    """Return a function of two addresses that carries a short collective out on memory of its own, which it copies in
    and out."""
    memory = ctypes.create_string_buffer(nbytes)
    play = prepared(ctypes.addressof(memory), ctypes.addressof(memory))

    def start(source: int, target: int) -> None:
        _move(memory, source, nbytes)
        play()
        _move(target, memory, nbytes)

    return start


def bytes_at(address: int, nbytes: int) -> Array:
    """Return the bytes at an address as an array; the caller keeps the memory alive."""
    memory: Any = MPI.memory.fromaddress(address, nbytes)
    return np.frombuffer(memory, np.uint8)

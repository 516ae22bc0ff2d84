"""Collectives of memory on a device, which a CUDA-aware MPI library moves as it is; the device computes the sums.

Any schedule is played on it, by the player of messages (`transports/player.py`):

    SEND, RECEIVE   the payload's own memory
    ADD             into a landing buffer on the device, which sums in the order of the ranks, in float32 or wider

`auto` takes `direct`: 2 rounds, 2n(p-1)/p bytes sent by each rank, half as many with a wire of 16 bits
(`docs/devices.md`).

The library knows no streams: the host waits for the device before each round, and for the messages before each sum.

    the device's stream   g ───── gradients ─│          │─ sum of chunk r ─│
    messages                                 │─ round 0 ─│                  │─ round 1 ─│

A library that was not built for GPUs would read a device address as a host address and crash, so it is asked first. One
that was may still fail or be slow, so a first sum is compared and timed (`device_transports.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch

from unisono.call import call_of
from unisono.collectives.checks import Checks, check_chunk
from unisono.collectives.group import Group
from unisono.collectives.payload import flat_of, memory_of, put_back
from unisono.collectives.prepare import AUTO, PlanRequest, plan_of
from unisono.device import is_on_host, module_of
from unisono.errors import TensorError
from unisono.mpi import MPI
from unisono.network.choice import LIBRARY
from unisono.schedules.pieces import bounds, cut_program
from unisono.schedules.schedule import Action
from unisono.transports.arithmetic import HALF_DTYPES, TORCH_OPS, Float32Arithmetic
from unisono.transports.messages import tag_of, wait_until
from unisono.transports.player import TICKET_SPREAD, Completion, Move, Rounds, play

WIRE_DTYPES = {None: None, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes in which numbers travel, by wire; None for the tensor's own."""

MIN_DIRECT_BYTES = 4 << 20
"""Smallest tensor that is summed on the device, in bytes: a message of a device's memory takes hundreds of us."""

ASA = "direct"
"""Schedule of Theano-MPI's ASA."""

PIECE_BYTES = 32 << 20
"""Largest chunk of a piece, in bytes: landing memory is that of the pieces in flight."""

IN_FLIGHT = 2
"""Pieces of a payload that are under way at once."""


def mpi_reports_support(kind: str) -> bool:
    """Return True if the MPI library reports support for memory of a kind of device, such as CUDA (an extension of
    MPICH and Open MPI)."""
    query: Callable[[], int] | None = getattr(ctypes.CDLL(MPI.__file__), f"MPIX_Query_{kind}_support", None)
    return query is not None and bool(query())


def allreduce_direct(
    group: Group, tensor: torch.Tensor, op: str, wire: str | None = None, algorithm: str = AUTO
) -> None:
    """Reduce `tensor` over all ranks by `op`, in place, with a schedule."""
    flat = flat_of(tensor)
    coded = flat if (dtype := WIRE_DTYPES[wire]) is None or not flat.is_floating_point() else flat.to(dtype)
    _play(group, "allreduce", coded, op, ASA if algorithm == AUTO else algorithm)
    if coded.data_ptr() != tensor.data_ptr():
        put_back(tensor, coded)
        _settle(tensor)


def reduce_scatter_direct(group: Group, tensor: torch.Tensor, part: torch.Tensor, op: str) -> None:
    """Reduce `tensor` over all ranks by `op`; `part` of rank r receives the r-th of its equal parts.

    Raises TensorError where `part` shares memory with `tensor` in any other place than that part.
    """
    _check_part(group, "reduce_scatter", part, tensor)
    partial_sums = flat_of(tensor).clone()
    _play(group, "reduce_scatter", partial_sums, op)
    part.copy_(_own_chunk(group, partial_sums).view(part.shape))
    _settle(part)


def all_gather_direct(group: Group, part: torch.Tensor, out: torch.Tensor) -> None:
    """Gather every rank's `part` into `out`, side by side.

    Raises TensorError where `part` shares memory with `out` in any other place than its own.
    """
    _check_part(group, "all_gather", part, out)
    flat = flat_of(out)
    chunk = _own_chunk(group, flat)
    if chunk.data_ptr() != part.data_ptr():
        chunk.copy_(flat_of(part))
    _play(group, "all_gather", flat)


def broadcast_direct(group: Group, tensor: torch.Tensor, root: int) -> None:
    """Copy the root's `tensor` to all ranks, in place."""
    _play(group, "broadcast", flat_of(tensor), None, "tree", root)


def _check_part(group: Group, collective: str, part: torch.Tensor, full: torch.Tensor) -> None:
    with Checks(group, collective):
        if part.dtype != full.dtype or part.numel() * group.size != full.numel():
            raise TensorError(
                f"rank {group.rank}: {part.numel()} x {part.dtype} is not one of {group.size} equal parts of "
                f"{full.numel()} x {full.dtype}"
            )
        check_chunk(group, collective, part, full, group.rank * part.numel())


def _own_chunk(group: Group, flat: torch.Tensor) -> torch.Tensor:
    return flat[slice(*bounds(len(flat), group.size, group.rank))]


def _play(
    group: Group, collective: str, payload: torch.Tensor, op: str | None = None, algorithm: str = ASA, root: int = 0
) -> None:
    """Play a schedule of a collective on flat memory of a device; with `op` None it is only moved."""
    asked = PlanRequest(collective, algorithm, payload.dtype, payload.nbytes, None, op, root)
    with Checks(group, collective):
        plan = plan_of(asked, group.plans.choose(collective, algorithm, payload.nbytes))  # sockets reach no device
    program = group.plans.program(group.plans.schedule(plan))
    parts = collective in ("reduce_scatter", "all_gather")
    pieces = cut_program(program, len(payload), PIECE_BYTES // payload.itemsize, parts)
    call = call_of(f"{plan.call.description}, of a device")
    with group.enter_call(call) as fingerprint:
        group.check_same_call(call)
        transport = DeviceTransport(group.messages, payload, fingerprint)
        arithmetic = DeviceArithmetic(payload.dtype, op or "sum")
        wait = partial(wait_until, check_interrupt=group.check)
        try:
            play(program, pieces, Rounds(group.rank, payload, arithmetic, [transport] * group.size, wait), IN_FLIGHT)
        except BaseException:  # whatever it is, messages of the payload are under way
            group.broken = True
            group.keep_alive(transport)
            raise
    _settle(payload)  # another stream may read it next


class DeviceArithmetic(Float32Arithmetic):
    """Arithmetic of a device's tensors: in float32, or in a wider dtype of their own."""

    def _reduce_in_float32(self, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        wide = torch.float32 if self.dtype in HALF_DTYPES else self.dtype
        into.copy_(reduce(self._combine, (source.to(wide) for source in sources)))


class DeviceTransport:
    """Transport for the moves of one call, on a communicator that nothing else uses.

    `payload` is flat memory of a device. `fingerprint` is a number that is equal on ranks in the same call.
    """

    copies = False

    def __init__(self, comm: MPI.Intracomm, payload: torch.Tensor, fingerprint: int) -> None:
        self._comm, self._payload, self._tag = comm, payload, tag_of(comm, fingerprint)
        self._requests: list[MPI.Request] = []
        self._posted: list[tuple[int, Move, torch.Tensor]] = []  # ticket, move and memory of each request

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Post the messages of a round, once the device has computed what is sent, and read what it sums."""
        _settle(self._payload)
        tag = self._tag + ticket % TICKET_SPREAD
        for move in sorted(moves, key=lambda move: move.action is Action.SEND):  # receives first
            memory = self._payload[move.region]
            memory = torch.empty_like(memory) if move.action is Action.ADD else memory
            post = self._comm.Isend if move.action is Action.SEND else self._comm.Irecv
            self._requests.append(post([memory_of(memory), MPI.BYTE], move.peer, tag))
            self._posted.append((ticket, move, memory))

    def completed(self) -> list[Completion]:
        """Test all requests once; return the completed moves."""
        indices = sorted(MPI.Request.Testsome(self._requests) or ())
        done = [self._posted[index] for index in indices]
        for index in reversed(indices):
            del self._requests[index], self._posted[index]
        return [
            Completion(ticket, move.position, memory if move.action is Action.ADD else None)
            for ticket, move, memory in done
        ]

    def release(self, ticket: int, position: int) -> None:
        """Do nothing: landing memory is of one message."""


def _settle(tensor: torch.Tensor) -> None:
    """Wait until this thread's stream has computed its tensors, since the MPI library knows no streams."""
    if not is_on_host(tensor):
        module_of(tensor.device).current_stream(tensor.device).synchronize()


def is_direct(group: Group, tensor: torch.Tensor, op: str, wire: str | None, algorithm: str = AUTO) -> bool:
    """Return True for a sum that `allreduce_direct` knows, of a tensor that is long enough, where MPI reaches it."""
    dtype = tensor.dtype
    known = op in TORCH_OPS and wire in WIRE_DTYPES and dtype is not torch.bool and not dtype.is_complex
    known = known and algorithm != LIBRARY and tensor.nbytes >= MIN_DIRECT_BYTES
    return known and group.transports_of_devices[tensor.device.type].moves

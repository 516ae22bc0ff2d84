"""State that the collectives of one group of ranks share: communicators, shared memory, and the plans made so far.

one node        signals, slots and windows      made at the first call
several nodes   messages; mailboxes within nodes of several ranks, and sockets, made at first use
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from unisono.call import BARRIER, WORDS_BYTES, Call, call_of, decode_words, difference, encode_words, labelled
from unisono.collectives.payload import name_of
from unisono.collectives.prepare import Plans
from unisono.collectives.ready import MAX_READY, Ready
from unisono.collectives.socket_calls import (
    MAX_SHORT_BYTES,
    SocketCalls,
    goes_by_sockets,
    open_socket_calls,
    takes_segments,
)
from unisono.collectives.states import Calls
from unisono.collectives.trials import Trials
from unisono.collectives.watch import Watch
from unisono.errors import MismatchError, StallError, UsageError
from unisono.launch import TIMEOUT
from unisono.mpi import MPI
from unisono.network.choice import Choice, ScheduleTable
from unisono.network.pace import piece_bytes_of
from unisono.placement import Placement, one_rank_per_node
from unisono.transports.cross_memory import CrossMemory, open_cross_memory
from unisono.transports.mailboxes import Mailboxes, make_mailboxes
from unisono.transports.messages import Delivery, Parcel, wait
from unisono.transports.node_memory import NodeMemory, SharedMemory, make_node_memory
from unisono.transports.plan import Plan, Prepared
from unisono.wires import EXACT

Made = TypeVar("Made")


class Group:
    """A group of ranks. All of them call every method that moves data, in the same order."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        placement: Placement,
        table: ScheduleTable,
        ranks: Sequence[int] | None = None,
        dup: Group | None = None,
        watch: Watch | None = None,
        name: str = "world",
        timeout: float = TIMEOUT,
    ) -> None:
        """`ranks` are the ranks' numbers in messages; `dup` is a group of the same ranks whose windows are used too.

        `calls.fail` ends every wait, but those in collectives of the MPI library that are no short sums. The group can
        then only be abandoned (`abandon`).

        `watch` is the watch of the job, in which this group is registered as `name`. Without one, the group makes its
        own, which ends waits after `timeout` seconds.
        """
        self.rank, self.size, self.comm = comm.rank, comm.size, comm
        self.ranks = ranks or range(comm.size)
        self.placement, self.table, self.one_node = placement, table, placement.one_node
        self._dup = dup
        self._owns_watch = watch is None and comm.size > 1
        self.watch = Watch(comm, self.node_ranks, timeout) if self._owns_watch else watch
        if self.watch is None or self.size == 1:
            self.calls = Calls(name, [0])
        else:
            self.calls = Calls(name, self.watch.ranks_of(comm))
            self.watch.add(self.calls)
        self.broken = False
        """True once a wait was ended, or ranks of several nodes differed: no collective call may follow."""
        self._pending = False
        self.transports_of_devices: dict[str, Any] = {} if dup is None else dup.transports_of_devices
        """Transports of sums of each kind of device that was tried (`device_transports.py`)."""
        self.backends: dict[str, Any] = {}
        """PyTorch's own backends of this node's ranks, by kind of device."""
        self.label = ""
        """Text that is compared in addition to the description of each call."""
        self.messages = comm.Dup()
        """Communicator for the messages of schedules, which then never match others."""
        self._control = comm.Dup()
        self.calls.channels = comm, self.messages, self._control
        for channel in self.calls.channels:
            channel.Set_errhandler(MPI.ERRORS_RETURN)  # raise exceptions, also if the program has set another handler
        self._compared = np.empty((2, 2), np.int64)
        """A call's digest and its negative on this rank, and their maxima over the ranks."""
        self._memory: NodeMemory | None = None
        self._memory_made = not self.one_node or self.size == 1
        self._trials = Trials(self)
        self.plans = Plans(self)
        self._socket_calls: list[SocketCalls | None] = []  # empty until they were asked for, as those below
        self._mailboxes: list[Mailboxes | None] = []
        self._cross_memory: list[CrossMemory | None] = []
        self.prepared: dict[Plan, Prepared] = {}
        self.ready = Ready(MAX_READY)
        """Plays of collectives that were carried out, by all that determines them."""
        self._users = weakref.WeakSet([self])  # groups that find this group's memory
        while dup is not None:  # whose memory is found through all dups between
            dup._users.add(self)
            dup = dup._dup

    def shared_memory(self, call: Call) -> NodeMemory | None:
        """Return the memory shared by the ranks of the one node, which compares the call; all make it together in the
        first call. None for one rank and for several nodes, and where it is too little: then all data goes by messages,
        and each rank counts as a node of its own."""
        if self._memory_made:
            assert self._memory is not None or not self.one_node or self.size == 1, "the group was freed"
            return self._memory
        self._memory = self._make_together(call, lambda: make_node_memory(self.comm, self.ranks, self.check))
        self._memory_made = True
        if self._memory is None:
            self.placement, self.one_node = one_rank_per_node(self.size), False
            self.plans, self._socket_calls = Plans(self), [None]  # a node's ranks do not connect
        else:
            self._memory.signals.label_calls(self.label)
            self.calls.signals = self._memory.signals
        return self._memory

    def plan(self, *arguments: Any, **named: Any) -> Plan:
        """Return the plan of a collective (`Plans.plan`). In the first call, errors come before a wait for others."""
        if not self._memory_made:
            self.shared_memory(self.plans.plan(*arguments, **named).call)
        return self.plans.plan(*arguments, **named)

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Add `label` to each call of the block, after the label that the group has."""
        outer = self.label
        self.label_calls(outer + label)
        try:
            yield
        finally:
            self.label_calls(outer)

    def label_calls(self, label: str) -> None:
        """Compare `label` too in each later call, as a part of it: it distinguishes otherwise equal calls."""
        self.label = label
        if self._memory is not None:
            self._memory.signals.label_calls(label)

    def find_shared(self, address: int, nbytes: int) -> tuple[str, SharedMemory] | None:
        """Return the location, in words, and the shared memory of the bytes at `address`; None if it is not shared."""
        if self._memory is not None and (shared := self._memory.find(address, nbytes)) is not None:
            return f"window {shared.index} from byte {address - shared.start}", shared
        in_dup = None if self._dup is None else self._dup.find_shared(address, nbytes)
        return None if in_dup is None else (f"the dup's {in_dup[0]}", in_dup[1])

    def choose(self, plan: Plan, named: bool) -> Choice:
        """Return the best choice for a collective like `plan`, which has no wire or is an exact sum, by measurement;
        where the algorithm is `named`, or an exact sum's, the best transport. All ranks call it together."""
        exact = plan.wire == EXACT
        keeps = named or exact
        if self.one_node:
            return Choice(plan.algorithm, plan.transport) if keeps else self._trials.choose(plan)
        rows = (plan.collective, "across nodes") in self.table.measured
        # `direct`, of exact sums, has more bytes for the uplinks of supernodes than a ring
        kept = exact and plan.nbytes > MAX_SHORT_BYTES and (rows or bool(self.placement.supernodes))
        tuned = rows or self.table.network.measured
        free = not kept and (exact or not named) and goes_by_sockets(plan, self.placement, tuned)
        segments = not kept and takes_segments(plan, self.placement)
        if not (free or segments) or (calls := self.socket_calls(plan.call)) is None:
            return Choice(plan.algorithm, plan.transport)
        return Choice(plan.algorithm if keeps or segments else calls.schedule_for(plan), "sockets")

    def socket_calls(self, call: Call) -> SocketCalls | None:
        """Return the collectives through sockets, which all ranks of several nodes make together once; None on all
        where the library's are as fast, or a rank cannot connect."""
        if not self._socket_calls:
            self._socket_calls.append(self._make_together(call, lambda: open_socket_calls(self)))
        return self._socket_calls[0]

    def mailboxes(self, call: Call) -> Mailboxes | None:
        """Return the mailboxes of this node, which all ranks of all nodes make together in the first call; None on all
        ranks if any rank lacks memory for them."""
        if not self._mailboxes:
            node = self.placement.node_of(self.rank)
            self._mailboxes.append(self._make_together(call, lambda: make_mailboxes(self.comm, node)))
        return self._mailboxes[0]

    def cross_memory(self, call: Call) -> CrossMemory | None:
        """Return access to the memory of the ranks of the one node, which all make together in the first call; None on
        all ranks if the kernel, or UNISONO_CMA=off on a rank, forbids it."""
        if not self._cross_memory:
            memory = self.shared_memory(call)
            assert memory is not None, "the ranks share a node"
            self.barrier(call)  # compares the calls; the library's barrier, which follows, does not
            self._cross_memory.append(self._make_together(call, lambda: open_cross_memory(self.comm, memory.signals)))
        return self._cross_memory[0]

    def reads_other_processes(self) -> bool:
        """Return True if the ranks share a node and may read each other's memory. All call it together."""
        call = call_of("reads_other_processes()")
        return self.shared_memory(call) is not None and self.cross_memory(call) is not None

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Ranks of this rank's node."""
        return self.placement.nodes[self.placement.node_of(self.rank)]

    def _make_together(self, call: Call, make: Callable[[], Made]) -> Made:
        """Return the result of `make`, a collective allocation by the library, whose own wait cannot be ended: all
        ranks enter the call first, in a wait that can be."""
        with self.calls.enter(call.description):
            self.wait_for(self._control.Ibarrier())
        with self._in_step(), self.calls.enter(call.description, in_library=True):
            return make()

    def check(self) -> None:
        """Raise if a wait must end, as `calls` has failed. Called regularly in all waits."""
        self.broken = self.broken or self.calls.failure is not None
        self.calls.check()

    def keep_alive(self, *pending: object) -> None:
        """Keep buffers of pending messages alive with a communicator, because no rank waits for these messages now."""
        self._pending = True
        self.messages.Set_attr(MPI.Comm.Create_keyval(), pending)

    def interrupt(self, *tensors: torch.Tensor) -> None:
        """End the group, as an exception has ended a call of this rank alone: it is out of step with the others.

        Keeps tensors alive for pending messages and late ranks. A mismatch that all found in a barrier leaves neither.
        """
        error = sys.exception()
        if not isinstance(error, (MismatchError, UsageError, MPI.Exception)):
            self.broken = True
            name, rank = type(error).__name__, self.ranks[self.rank]
            self.calls.fail(StallError, f"{name} has ended a call of rank {rank} before its end: start all ranks again")
        together = isinstance(error, MismatchError) and not self.broken
        if tensors and (self._pending or (any(self._cross_memory) and not together)):
            self.keep_alive(*tensors)

    @contextmanager
    def _in_step(self, *pending: object) -> Iterator[None]:
        try:
            yield
        except BaseException:  # whatever it is, the library may still use what is pending
            if pending:
                self.keep_alive(*pending)
            self.interrupt()
            raise

    @contextmanager
    def enter_call(self, call: Call) -> Iterator[int]:
        """Enter a collective call, which on one node all ranks compare first; across nodes, the watch observes it.

        Yields its fingerprint, equal on all ranks in the same call. A MismatchError is reported to all ranks.
        """
        if self.size == 1:
            yield 0
            return
        memory, description = self.shared_memory(call), call.description + self.label
        outer = self.calls.begin(description, in_library=False) if memory is None else None
        try:
            if memory is not None:
                memory.signals.barrier(call)
            yield self.calls.fingerprint(description) if memory is None else 0
        except BaseException as error:  # whatever it is
            self.interrupt()
            if outer is not None and self.watch is not None and isinstance(error, MismatchError):
                self.broken = True
                self.watch.report_mismatch(self.calls, str(error))
            raise
        finally:
            if outer is not None:
                self.calls.end(outer)

    @contextmanager
    def enter_library_call(self, call: Call) -> Iterator[None]:
        """Enter a call that the MPI library carries out, once all ranks are known to be in it."""
        with self.enter_call(call):
            self.check_same_call(call)
            with self.calls.enter(call.description + self.label, in_library=True):
                yield

    def barrier(self, call: Call = BARRIER) -> None:
        """Wait until all ranks have entered the call `call`."""
        memory, sockets = self._memory, self._socket_calls[0] if self._socket_calls and call is BARRIER else None
        if memory is None and sockets is None:
            with self.enter_call(call):
                self.check_same_call(call)
            return
        try:
            if memory is not None:
                memory.signals.barrier(call)
            elif sockets is not None:
                sockets.plain_barrier(0, 0)
        except BaseException:  # whatever it is
            self.interrupt()
            raise

    def check_same_call(self, call: Call) -> None:
        """Check across nodes that all ranks are in the same call, before the MPI library carries it out.

        On one node `enter_call` has checked it. Costs one exchange of 16 bytes, or a barrier by sockets. Raises
        MismatchError on every rank.
        """
        if self.one_node or self.size == 1:
            return
        if self._socket_calls and self._socket_calls[0] is not None:
            self._socket_calls[0].barrier(call)
            return
        digest = labelled(call, self.label).digest
        digests, maxima = self._compared
        digests[:] = digest, -digest
        self.wait_for(self.comm.Iallreduce(digests, maxima, MPI.MAX), digests, maxima)
        if digests.tobytes() != maxima.tobytes():
            self.raise_mismatch(call)

    def raise_mismatch(self, call: Call) -> None:
        """Raise MismatchError with two different calls, once all ranks know that they differ."""
        sent = np.frombuffer(encode_words(labelled(call, self.label)), np.uint8)
        said = np.empty((self.size, WORDS_BYTES), np.uint8)
        self.wait_for(self._control.Iallgather(sent, said), sent, said)  # what did not match may still be under way
        calls = [decode_words(row.tobytes()) for row in said]
        peer = next(rank for rank, description in enumerate(calls) if description != calls[self.rank])
        raise MismatchError(difference(self.ranks[self.rank], calls[self.rank], self.ranks[peer], calls[peer]))

    def wait_for(self, request: MPI.Request, *buffers: object) -> None:
        """Wait for an operation of the library on these buffers."""
        with self._in_step(request, *buffers):
            wait(request, self.check)

    def deliver(self, sends: Iterable[Parcel], receives: Iterable[Parcel], call: Call, fingerprint: int) -> None:
        """Send and receive parcels of any sizes as messages, in the call `call`; `enter_call` yields `fingerprint`."""
        piece = piece_bytes_of(self.table.network)
        delivery = Delivery(self.messages, self.ranks, fingerprint, piece, self.check, call.description)
        with self._in_step(delivery):
            delivery.transfer(sends, receives)

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat, zeroed tensor: in shared memory if all ranks share a node, else in the rank's own memory."""
        call = call_of(f"empty({length} x {name_of(dtype)})")
        if (memory := self.shared_memory(call)) is None:
            return torch.zeros(length, dtype=dtype, device="cpu")
        with self.enter_library_call(call):
            for group in self._users:
                group.ready.clear()  # what was ordinary memory at an address may be shared now
            return memory.empty(length, dtype)

    def free(self) -> None:
        """Free communicators and shared memory; called by all ranks together. A broken group is abandoned instead."""
        if self.broken or self.calls.failure is not None:
            self.abandon()
            return
        if self.watch is not None:
            self.watch.remove(self.calls)
        self.ready.clear()
        self.prepared.clear()
        for mailboxes in filter(None, self._mailboxes):
            mailboxes.free()
        self._mailboxes.clear()
        self._cross_memory.clear()
        while self.backends:
            self.backends.popitem()[1].free()
        for calls in filter(None, self._socket_calls):
            calls.sockets.close()
        self._socket_calls.clear()
        if self._memory is not None:
            self._memory.free()
            self._memory = None
        if self._owns_watch and self.watch is not None:
            self.watch.free()
        self.messages.Free()
        self._control.Free()

    def abandon(self) -> None:
        """Leave without the other ranks: memory and communicators stay allocated, but nothing runs here any more."""
        self.broken = True
        for backend in self.backends.values():
            backend.abort()
        for calls in filter(None, self._socket_calls):
            calls.sockets.end()  # waits of this rank and of others find out
        if self._owns_watch and self.watch is not None:
            self.watch.stop()
        elif self.calls.failure is None and self.watch is not None:
            self.watch.remove(self.calls)

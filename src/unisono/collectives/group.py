"""State that the collectives of one group of ranks share: communicators, shared memory, and the plans made so far.

one node        signals, slots and windows      made at the first call
several nodes   messages; mailboxes within the nodes that have several ranks, made at first use
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from unisono.call import WORDS_BYTES, Call, call, decode_words, encode_words
from unisono.choosing.pace import piece_of
from unisono.choosing.table import Table
from unisono.collectives.calls import Calls
from unisono.collectives.payload import name_of
from unisono.collectives.plans import Plan, Plans
from unisono.collectives.states import difference
from unisono.collectives.watch import Watch
from unisono.errors import MismatchError
from unisono.mpi import MPI
from unisono.placement import Placement, apart
from unisono.timeouts import TIMEOUT
from unisono.transports.delivery import Delivery, Parcel
from unisono.transports.fused import Start
from unisono.transports.mailboxes import Mailboxes, make_mailboxes
from unisono.transports.messages import wait
from unisono.transports.node_memory import NodeMemory, make_node_memory
from unisono.transports.shared_memory import SharedMemory

Made = TypeVar("Made")


class Group:
    """A group of ranks. All of them call every method that moves data, in the same order."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        placement: Placement,
        table: Table,
        ranks: Sequence[int] | None = None,
        interrupted: Callable[[], None] | None = None,
        dup: Group | None = None,
        watch: Watch | None = None,
        name: str = "world",
        timeout: float = TIMEOUT,
    ) -> None:
        """`ranks` are the ranks' numbers in messages; `dup` is a group of the same ranks whose windows are used too.

        `interrupted` is called regularly in every wait, in the thread that waits. It may raise to end the wait; the
        group can then only be abandoned (`abandon`).

        `watch` is the watch of the job, in which this group is registered as `name`. Without one, the group makes its
        own, which ends waits after `timeout` seconds.
        """
        self.rank, self.size, self.comm = comm.rank, comm.size, comm
        self.ranks = ranks or range(comm.size)
        self.placement, self.table, self.one_node = placement, table, placement.one_node
        self.interrupted, self._dup = interrupted, dup
        self._by_memory = self.one_node
        self._owns_watch = watch is None and comm.size > 1
        self.watch: Watch | None = watch
        if self._owns_watch:
            self.watch = Watch(comm, self.node_ranks, timeout)
        self.calls: Calls = self._new_calls(name)
        self.broken = False
        """True once a wait was ended, or ranks of several nodes differed: no collective call may follow."""
        self._pending = False
        self.label = ""
        """Text that is compared in addition to the description of each call."""
        self.messages = comm.Dup()
        """Communicator for the messages of schedules, which then never match others."""
        self._talk = comm.Dup()
        for channel in (comm, self.messages, self._talk):
            channel.Set_errhandler(MPI.ERRORS_RETURN)  # exceptions here, whatever was set
        self._memory: NodeMemory | None = None
        self._settled = not self._by_memory or self.size == 1
        self._use(Plans(self.rank, placement, table))
        self._mailboxes: list[Mailboxes | None] = []  # empty until they were asked for
        self.prepared: dict[Plan, Start] = {}
        """Prepared collectives by plan."""
        self.ready: dict[tuple[int, str, str | None, str], tuple[torch.dtype, Start]] = {}
        """Prepared allreduces by length, algorithm, wire and op, each for one dtype."""

    def _new_calls(self, name: str) -> Calls:
        ends = self.interrupted is None
        if self.watch is None or self.size == 1:
            return Calls(name, [0], ends)
        calls = Calls(name, self.watch.ranks_of(self.comm), ends)
        self.watch.add(calls)
        return calls

    def memory_for(self, what: Call) -> NodeMemory:
        """Return the memory shared by the ranks of the one node; all make it together in the first call, `what`."""
        self._settle(what)
        assert self._memory is not None, "messages carry what is not compared by memory"
        return self._memory

    def compares_by_memory(self, what: Call) -> bool:
        """Return True if shared memory, made in the first call, compares the call `what`; else the watch does."""
        self._settle(what)
        return self._by_memory

    def _settle(self, what: Call) -> None:
        """Make the shared memory of one node in the first call of all ranks. Without room, all data goes by messages.

        Each rank then counts as a node of its own.
        """
        if self._settled:
            return
        self._settled = True
        self._memory = self._make_together(what, lambda: make_node_memory(self.comm, self.ranks, self.check))
        if self._memory is None:
            self.placement, self.one_node, self._by_memory = apart(self.size), False, False
            self._plans = Plans(self.rank, self.placement, self.table)
        else:
            self._memory.signals.label_calls(self.label)
            self.calls.signals = self._memory.signals
        self._use(self._plans)

    def _use(self, plans: Plans) -> None:
        self._plans = plans
        self.plan: Callable[..., Plan] = plans.plan if self._settled else self._plan_first
        self.program, self.schedule = plans.program, plans.schedule

    def _plan_first(self, *asked: Any, **named: Any) -> Plan:
        """Return the plan of the first call. Planning errors are raised before this rank waits for others."""
        self._settle(self._plans.plan(*asked, **named).what)
        return self._plans.plan(*asked, **named)

    def label_calls(self, words: str) -> None:
        """Compare `words` too in each later call, as a part of it: they distinguish calls that are otherwise alike."""
        self.label = words
        if self._memory is not None:
            self._memory.signals.label_calls(words)

    def _labelled(self, what: Call) -> Call:
        return call(what.words + self.label) if self.label else what

    def find_shared(self, address: int, nbytes: int) -> tuple[str, SharedMemory] | None:
        """Return the place, in words, and the shared memory of the bytes at `address`; None if it is not shared."""
        found = None if self._memory is None else self._memory.find(address, nbytes)
        if found is not None:
            return f"window {found.number} from byte {address - found.start}", found
        in_dup = None if self._dup is None else self._dup.find_shared(address, nbytes)
        return None if in_dup is None else (f"the dup's {in_dup[0]}", in_dup[1])

    def mailboxes(self, what: Call) -> Mailboxes | None:
        """Return the mailboxes of this node. All ranks of all nodes make them together in the first call, `what`.

        None on all ranks if any rank has no room for them.
        """
        if not self._mailboxes:
            node = self.placement.node_of(self.rank)
            self._mailboxes.append(self._make_together(what, lambda: make_mailboxes(self.comm, node)))
        return self._mailboxes[0]

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Ranks of this rank's node."""
        return self.placement.nodes[self.placement.node_of(self.rank)]

    def _make_together(self, what: Call, make: Callable[[], Made]) -> Made:
        """Return the result of `make`, a collective allocation by the library, whose own wait cannot be ended.

        All ranks enter the call `what` first, in a wait that can be.
        """
        with self.calls.over(what.words):
            self.finish(self._talk.Ibarrier())
        with self.calls.over(what.words, in_library=True):
            return make()

    def check(self) -> None:
        """Raise if a wait must end: ranks made different calls, or `interrupted` raises. Called regularly in waits."""
        try:
            self.calls.check()
            if self.interrupted is not None:
                self.interrupted()
        except BaseException:
            self.broken = True
            raise

    def keep(self, *pending: object) -> None:
        """Keep buffers of pending messages alive with a communicator, because nobody waits for these messages now."""
        self._pending = True
        self.messages.Set_attr(MPI.Comm.Create_keyval(), pending)

    def keep_with_pending(self, *tensors: torch.Tensor) -> None:
        """Keep tensors alive that may have pending messages, because a call on them was ended."""
        if self._pending:
            self.keep(*tensors)

    @contextmanager
    def call(self, what: Call) -> Iterator[int]:
        """Enter a collective call. On one node, all ranks compare it first; across nodes, the watch observes it.

        Yields a number that is equal on all ranks in the same call. A MismatchError is reported to all ranks.
        """
        if self.size == 1:
            yield 0
            return
        self._settle(what)
        if self._by_memory:
            self.memory_for(what).signals.meet(what)
            yield 0
            return
        try:
            with self.calls.over(what.words + self.label) as number:
                yield number
        except MismatchError as error:
            self.broken = True
            if self.watch is not None:
                self.watch.tell_all(self.calls, str(error))
            raise

    @contextmanager
    def library_call(self, what: Call) -> Iterator[None]:
        """Enter a call that the MPI library carries out, once all ranks are known to be in it."""
        with self.call(what):
            self.agree(what)
            with self.calls.over(what.words + self.label, in_library=True):
                yield

    def meet(self, what: Call) -> None:
        """Wait until all ranks have entered the call `what`."""
        with self.call(what):
            self.agree(what)

    def agree(self, what: Call) -> None:
        """Check across nodes that all ranks are in the same call, before the MPI library carries it out.

        On one node `call` has checked it. Costs one exchange of 16 bytes. Raises MismatchError on every rank.
        """
        if self._by_memory or self.size == 1:
            return
        number = self._labelled(what).number
        mine = np.array([number, -number], np.int64)
        most = np.empty_like(mine)
        self.finish(self.comm.Iallreduce(mine, most, MPI.MAX), mine, most)
        if (most != mine).any():
            self.disagree(what)

    def disagree(self, what: Call) -> None:
        """Raise MismatchError with two different calls, once all ranks know that they differ."""
        mine = np.frombuffer(encode_words(self._labelled(what)), np.uint8)
        said = np.empty((self.size, WORDS_BYTES), np.uint8)
        self.finish(self._talk.Iallgather(mine, said), mine, said)  # what did not match may still be under way
        calls = [decode_words(row.tobytes()) for row in said]
        other, words = next((rank, words) for rank, words in enumerate(calls) if words != calls[self.rank])
        raise MismatchError(difference(self.ranks[self.rank], calls[self.rank], self.ranks[other], words))

    def finish(self, request: MPI.Request, *buffers: object) -> None:
        """Wait for an operation of the library on these buffers."""
        try:
            wait(request, self.check)
        except BaseException:
            self.keep(request, *buffers)
            raise

    def start(self, prepared: Start, source: torch.Tensor, target: torch.Tensor) -> None:
        """Carry out a prepared collective on contiguous tensors."""
        try:
            prepared(source.data_ptr(), target.data_ptr())
        except BaseException:
            self.keep_with_pending(source, target)
            raise

    def deliver(self, sends: Iterable[Parcel], receives: Iterable[Parcel], what: Call, number: int) -> None:
        """Send and receive parcels of any sizes as messages, in the call `what`. `number` was yielded by `call`."""
        piece = piece_of(self.table.network)
        delivery = Delivery(self.messages, self.ranks, number, piece, self.check, what.words)
        try:
            delivery.carry(sends, receives)
        except BaseException:
            self.keep(delivery)
            raise

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat, zeroed tensor: in shared memory if all ranks share a node, else in the rank's own memory."""
        if not self.one_node or self.size == 1:
            return torch.zeros(length, dtype=dtype)
        what = call(f"empty({length} x {name_of(dtype)})")
        self._settle(what)
        if self._memory is None:
            return torch.zeros(length, dtype=dtype)
        self._memory.signals.meet(what)
        return self._memory.empty(length, dtype)

    def free(self) -> None:
        """Free communicators and shared memory; called by all ranks together. A broken group is abandoned instead."""
        if self.broken or self.calls.failure is not None:
            self.abandon()
            return
        self._forget_calls()
        self.ready.clear()
        self.prepared.clear()
        for mailboxes in filter(None, self._mailboxes):
            mailboxes.free()
        self._mailboxes.clear()
        if self._memory is not None:
            self._memory.free()
            self._memory = None
        self._free_watch()
        self.messages.Free()
        self._talk.Free()

    def abandon(self) -> None:
        """Leave without the other ranks: memory and communicators stay allocated, but nothing runs here any more."""
        self.broken = True
        if self._owns_watch and self.watch is not None:
            self.watch.stop()
        elif self.calls.failure is None:
            self._forget_calls()

    def _forget_calls(self) -> None:
        if self.watch is not None:
            self.watch.remove(self.calls)

    def _free_watch(self) -> None:
        if self._owns_watch and self.watch is not None:
            self.watch.free()

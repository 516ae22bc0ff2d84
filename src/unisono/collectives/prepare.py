"""Plans, data that say how each collective of a group is carried out, and their preparation: all work that does not
need the payload is done once.

library     the MPI library carries the whole collective out            `library.py`
windows     the ranks of one node: a fused form, on memory that all see
cma         the ranks of one node: each reads and writes the memory of the others
messages    any schedule, as MPI messages
mixed       any schedule: within nodes through mailboxes in shared memory, between them as messages
sockets     any schedule across nodes: compiled, through sockets of the group   `socket_calls.py`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from unisono.call import call_of
from unisono.collectives.library import by_library
from unisono.collectives.payload import move_dtype_of, name_of
from unisono.errors import UsageError
from unisono.mpi import MPI
from unisono.network.choice import LIBRARY, Choice
from unisono.network.pace import Pace, pace_of
from unisono.schedules import SCHEDULES, algorithm_of
from unisono.schedules.numbering import renumber
from unisono.schedules.pieces import bounds, cut_program
from unisono.schedules.schedule import Action, Algorithm, Program, cuts_alike
from unisono.transports.cross_memory import prepare_cross
from unisono.transports.fused import FUSED
from unisono.transports.mailboxes import (
    MAX_MESSAGES_PER_PEER,
    Mailboxes,
    MailboxTransport,
    Seats,
    plan_seats,
    sent_within,
)
from unisono.transports.messages import MessageTransport, Parcel, wait_until
from unisono.transports.plan import Plan, Prepared, bytes_at, started
from unisono.transports.player import TICKET_SPREAD, Rounds, Transport, play
from unisono.wires import EXACT, wire_of

if TYPE_CHECKING:
    from unisono.collectives.group import Group

AUTO = "auto"

MAX_PLANS, MAX_PREPARED = 4096, 256
"""Largest numbers of plans and of prepared collectives that a group keeps."""


class PlanRequest(NamedTuple):
    """Collective that is requested, and its payload."""

    collective: str
    algorithm: str
    dtype: torch.dtype
    nbytes: int
    wire: str | None
    op: str | None
    root: int


def plan_of(asked: PlanRequest, choice: Choice) -> Plan:
    """Return the plan of a collective that was chosen. Raises TensorError for what cannot be reduced, or moved."""
    collective, _, dtype, nbytes, wire, op, root = asked
    parts = [f"{nbytes // dtype.itemsize} x {name_of(dtype)}"]
    parts += [f"root {root}"] if collective in ("broadcast", "reduce") else []
    apart = choice.transport in ("cma", "sockets")  # a rank by other means is in another call
    parts += [f"{choice.algorithm} by {choice.transport}" if apart else choice.algorithm]
    parts += [f"op {op}"] if op not in ("sum", None) else []
    parts += [f"wire {wire}"] if wire is not None else []
    call = call_of(f"{collective}({', '.join(parts)})")
    if op is None and wire_of(wire, dtype) is None:
        dtype = torch.uint8 if collective == "all_to_all" else move_dtype_of(dtype)
    plan = Plan(collective, *choice, nbytes // dtype.itemsize, dtype, wire, op, root, call)
    _ = plan.arithmetic  # raises for what cannot be reduced
    return plan


class Plans:
    """Cache of the plans, schedules and programs of one rank of a group."""

    def __init__(self, group: Group) -> None:
        self._group, self._placement = group, group.placement
        self._kept = lru_cache(MAX_PLANS)(self._make)
        self.program: Callable[[Algorithm], Program] = cache(lambda algorithm: algorithm(group.rank, group.size))
        self._schedules: dict[tuple[str, str, int], Algorithm] = {}

    def schedule(self, plan: Plan) -> Algorithm:
        """Return the schedule that a plan names. For a root other than 0, ranks are rotated."""
        key = plan.collective, plan.algorithm, plan.root
        if key not in self._schedules:
            algorithm, ranks = algorithm_of(plan.algorithm, plan.collective, self._placement), self._placement.ranks
            self._schedules[key] = renumber(algorithm, [(index + plan.root) % ranks for index in range(ranks)])
        return self._schedules[key]

    def plan(
        self,
        collective: str,
        algorithm: str,
        tensor: torch.Tensor,
        wire: str | None = None,
        op: str | None = "sum",
        root: int = 0,
    ) -> Plan:
        """Return the plan of a collective on a payload like `tensor`. With `op` None it is only moved.

        Raises TensorError for a dtype, an op or a wire that is not supported, UsageError for an unknown name.
        """
        return self._kept(PlanRequest(collective, algorithm, tensor.dtype, tensor.nbytes, wire, op, root))

    def _make(self, asked: PlanRequest) -> Plan:
        collective, algorithm, dtype, nbytes, wire, *_ = asked
        narrow = wire_of(wire, dtype)
        sent = nbytes if narrow is None else narrow.nbytes(nbytes // dtype.itemsize)
        choice = self.choose(collective, algorithm, sent, encoded=narrow is not None)
        if self._group.size > 1 and wire in (None, EXACT):
            return plan_of(asked, self._group.choose(plan_of(asked, choice), algorithm != AUTO))
        blocks = narrow is not None and not narrow.elementwise and choice.algorithm != LIBRARY
        if blocks and not cuts_alike(algorithm_of(choice.algorithm, collective, self._placement), self._placement):
            if algorithm != AUTO:
                raise UsageError(
                    f"{collective} by {algorithm!r} with the wire {wire!r}: that wire encodes blocks of numbers, and "
                    "this schedule cuts the payload differently in each round; use 'direct' or 'ring'"
                )
            choice = self.choose(collective, "direct", nbytes)
        return plan_of(asked, choice)

    def choose(self, collective: str, algorithm: str, nbytes: int, encoded: bool = False) -> Choice:
        """Return the algorithm and the transport of a collective for a payload of `nbytes` encoded bytes."""
        if algorithm == AUTO:
            algorithm, transport = self._group.table.choose(collective, self._placement, nbytes, encoded)
        else:
            transport = "windows" if self._placement.one_node else "messages"
        if algorithm == LIBRARY:
            return Choice(LIBRARY, LIBRARY)
        base, _, _ = algorithm.partition("/")
        algorithm_of(algorithm, collective, self._placement)  # raises where there is none
        if self._placement.one_node:  # where `hierarchical` is `direct`, in a lane for each rank
            return Choice("direct" if base == "hierarchical" else algorithm, transport)
        several = self._placement.ranks > len(self._placement.nodes)
        return Choice(algorithm, "mixed" if SCHEDULES[base].by_node and several else transport)


def prepare(group: Group, plan: Plan) -> Prepared:
    """Return a function of two addresses that returns a function that carries the plan out there.

    The memory is contiguous, of the plan's dtype, and kept alive by the caller until the call returns. All ranks of the
    group prepare a plan together the first time; the function is kept for later calls.
    """
    prepared = group.prepared.get(plan)
    if prepared is None:
        if len(group.prepared) == MAX_PREPARED:
            group.prepared.clear()
        prepared = group.prepared[plan] = BY_TRANSPORT[plan.transport](group, plan)
    return prepared


def by_windows(group: Group, plan: Plan) -> Prepared:
    """Prepare a collective within one node in its fused form; schedules that have none go by messages."""
    fused = FUSED.get((plan.collective, plan.algorithm))
    memory = group.shared_memory(plan.call)
    return by_messages(group, plan) if fused is None or memory is None else fused(memory, plan, group.find_shared)


def by_cross_memory(group: Group, plan: Plan) -> Prepared:
    """Prepare a collective on the memory of the node's processes; where the kernel forbids it, through windows."""
    cross = group.cross_memory(plan.call)
    otherwise = by_library(group, plan) if plan.collective == "broadcast" else by_windows(group, plan)
    return otherwise if cross is None else prepare_cross(cross, plan, otherwise)


def by_messages(group: Group, plan: Plan) -> Prepared:
    """Prepare a schedule that is played by messages; a mixed one within nodes through mailboxes, if memory suffices."""
    schedule = group.plans.schedule(plan)
    program = group.plans.program(schedule)
    if plan.collective == "all_to_all":
        return _parcels(group, plan, program)
    if plan.transport == "mixed" and (mailboxes := group.mailboxes(plan.call)) is not None:
        pace = _pace(group, plan, program, by_node=True)
        if (seats := seats_of(group, plan, schedule, mailboxes.pool, pace)) is not None:
            pace = pace._replace(chunk_length=seats.chunk_length, in_flight=seats.in_flight)
            return _played(group, plan, program, pace, (mailboxes, seats))
    return _played(group, plan, program, _pace(group, plan, program))


def by_sockets(group: Group, plan: Plan) -> Prepared:
    """Prepare a schedule across nodes; plans of this transport are made where the group has sockets."""
    calls = group.socket_calls(plan.call)
    assert calls is not None, "chosen where there are sockets"
    return calls.prepare(plan)


def seats_of(group: Group, plan: Plan, schedule: Algorithm, pool: int, pace: Pace) -> Seats | None:
    """Return the use of mailboxes by a schedule, from the programs of the largest node: the same on all ranks."""
    node_ranks = max(group.placement.nodes, key=len)
    programs = [schedule(rank, group.size) for rank in node_ranks[:2]]
    sent = [sent_within(program, node_ranks) for program in programs]
    span, messages = (max(numbers) for numbers in zip(*sent, strict=True))
    if messages > MAX_MESSAGES_PER_PEER:
        return None
    return plan_seats(pool, len(programs[0].lanes), span, plan.dtype.itemsize, pace.chunk_length, pace.in_flight)


def _pace(group: Group, plan: Plan, program: Program, by_node: bool = False) -> Pace:
    wire_itemsize = plan.encoding.nbytes(1 << 16) / (1 << 16) if plan.encoding is not None else None
    return pace_of(program, group.size, plan.length, plan.dtype.itemsize, group.table.network, wire_itemsize, by_node)


def _played(
    group: Group, plan: Plan, program: Program, pace: Pace, within: tuple[Mailboxes, Seats] | None = None
) -> Prepared:
    """Prepare to play a program by messages, and `within` nodes through mailboxes.

    The wire is that of all messages; in a program that distinguishes nodes, of those between nodes, as for `verify`.
    """
    by_chunk = plan.collective in ("reduce_scatter", "all_gather")
    pieces = cut_program(program, plan.length, pace.chunk_length, by_chunk)
    arithmetic, itemsize, node_ranks = plan.arithmetic, plan.dtype.itemsize, group.node_ranks
    is_near = [rank in node_ranks for rank in range(group.size)]
    wire_between_nodes = plan.encoding is not None and program.landing_remote is not None and len(node_ranks) > 1

    def play_at(address: int, fingerprint: int, *kept: object) -> None:
        memory = MPI.memory.fromaddress(address, plan.nbytes)
        messages = MessageTransport(group.messages, memory, arithmetic, plan.encoding, fingerprint)
        near: Transport = messages
        if within is not None:
            near = MailboxTransport(within[0], node_ranks, within[1], memory, arithmetic, fingerprint)
        elif wire_between_nodes:
            near = MessageTransport(group.messages, memory, arithmetic, None, fingerprint)
        by_peer: list[Transport] = [near if on_node else messages for on_node in is_near]
        wait = partial(wait_until, check_interrupt=group.check, max_sleep_seconds=pace.max_sleep_seconds)
        rounds = Rounds(group.rank, arithmetic.view(memory), arithmetic, by_peer, wait)
        try:
            play(program, pieces, rounds, pace.in_flight, TICKET_SPREAD if within is None else within[1].tickets)
        except BaseException:  # whatever it is, others may still read this rank's mailbox
            group.broken = True
            group.keep_alive(messages, *kept)
            raise

    begin, end = (itemsize * bound for bound in bounds(plan.length, group.size, group.rank))
    loses = is_overwritten(plan, group.rank)

    def start(source: int, target: int) -> None:
        with group.enter_call(plan.call) as fingerprint:
            if plan.collective in ("broadcast", "reduce"):
                group.check_same_call(plan.call)  # no rank waits for both ends of a tree, so would detect nothing
            if not loses:
                play_at(target, fingerprint)
                return
            scratch = np.array(bytes_at(source, plan.nbytes))  # partial sums overwrite all but the own chunk
            play_at(scratch.ctypes.data, fingerprint, scratch)
            if plan.collective == "reduce_scatter":
                bytes_at(target, end - begin)[:] = scratch[begin:end]

    return started(start)


def is_overwritten(plan: Plan, rank: int) -> bool:
    """Return True where partial sums overwrite what the call leaves as it is: on all ranks but the root of a reduce."""
    return plan.collective == "reduce_scatter" or (plan.collective == "reduce" and rank != plan.root)


def _parcels(group: Group, plan: Plan, program: Program) -> Prepared:
    """Prepare an all_to_all, which has separate memory for sent chunks, received ones, and those on their way."""
    shape = group.size, plan.nbytes // group.size
    handed_on = np.empty((program.chunks - 2 * group.size, shape[1]), np.uint8)

    def start(source: int, target: int) -> None:
        outgoing, incoming = (bytes_at(address, plan.nbytes).reshape(shape) for address in (source, target))
        incoming[group.rank] = outgoing[group.rank]
        chunks = [*outgoing, *incoming, *handed_on]
        with group.enter_call(plan.call) as fingerprint:
            for transfers in (transfers for lane in program.lanes for transfers in lane):
                parcels: dict[Action, list[Parcel]] = {Action.SEND: [], Action.RECEIVE: []}
                for action, peer, chunk, _ in transfers:
                    parcels[action].append(Parcel(peer, chunks[chunk]))
                group.deliver(parcels[Action.SEND], parcels[Action.RECEIVE], plan.call, fingerprint)

    return started(start)


BY_TRANSPORT: Mapping[str, Callable[[Group, Plan], Prepared]] = {
    "library": by_library,
    "windows": by_windows,
    "cma": by_cross_memory,
    "messages": by_messages,
    "mixed": by_messages,
    "sockets": by_sockets,
}
"""Functions that prepare plans, by transport."""

"""Exchange: every rank gives each other rank a tensor of any size (all-to-all with sizes that differ).

4 ranks; ab is what rank a has for rank b, of whatever length:

              sends          receives             lengths, for example
    rank 0    00 01 02 03    00 10 20 30          rank 0 sends 5 elements to rank 2: its sends[2] has 5,
    rank 1    10 11 12 13    01 11 21 31          and rank 2's receives[0] has 5
    rank 2    20 21 22 23    02 12 22 32
    rank 3    30 31 32 33    03 13 23 33

Rounds: 1. Bytes sent by each rank: what it has for the others, once. On one node they go through shared memory
(`transports/passing.py`), between nodes as messages in pieces (`transports/delivery.py`); rank r begins with rank r+1,
so that no rank is everyone's first.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from unisono.call import Call, call
from unisono.collectives.checks import Checks, check_memory, check_parts
from unisono.collectives.group import Group
from unisono.collectives.payload import bytes_of, content_of, name_of, room_for, settle
from unisono.errors import MismatchError
from unisono.transports.delivery import Parcel, sizes_differ


def exchange(group: Group, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
    """Send sends[d] to rank d, and fill receives[s] with what rank s sends: one dtype, any shape and stride.

    What a rank keeps, sends[r] and receives[r], may be the same memory. Raises TensorError unless there is a tensor of
    one dtype for each rank, both ways, and where others share memory; MismatchError when a rank sends another length
    than the other expects: naming both, on every rank.
    """
    dtype = receives[0].dtype if receives else torch.uint8
    with Checks(group, "exchange"):
        check_parts(group, sends, dtype, "exchange")
        check_parts(group, receives, dtype, "exchange")
        check_memory(group, "exchange", receives, sends, own=[(group.rank, group.rank)])
    goes = {rank: content_of(part) for rank, part in enumerate(sends)}
    rooms = [room_for(part) for part in receives]
    carry(group, goes, dict(enumerate(rooms)), call(f"exchange({name_of(dtype)})"))
    settle(receives, rooms)


def carry(
    group: Group,
    sends: Mapping[int, torch.Tensor],
    receives: Mapping[int, torch.Tensor],
    what: Call,
    rooted: bool = False,
) -> None:
    """Send plain tensors to some ranks, and fill others from some. A rank sends exactly to those who receive from it.

    Where they are `rooted`, not all ranks hear from each other, and a difference might go unnoticed: they agree first.
    """
    goes = {rank: bytes_of(part) for rank, part in sends.items()}
    comes = {rank: bytes_of(part) for rank, part in receives.items()}
    own, nothing = group.rank, np.empty(0, np.uint8)
    if group.size > 1 and group.compares_by_memory(what):
        ranks = range(group.size)
        outgoing, incoming = ([parts.get(rank, nothing) for rank in ranks] for parts in (goes, comes))
        group.memory_for(what).passing.exchange(outgoing, incoming, what)
        return
    with group.call(what) as number:
        if rooted:
            group.agree(what)
        held, wanted = goes.pop(own, nothing), comes.pop(own, nothing)
        if len(held) != len(wanted):
            raise MismatchError(sizes_differ(what.words, group.ranks[own], group.ranks[own], len(held), len(wanted)))
        wanted[:] = held
        group.deliver(itertools.starmap(Parcel, goes.items()), itertools.starmap(Parcel, comes.items()), what, number)

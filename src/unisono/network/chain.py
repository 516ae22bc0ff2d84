"""Chains of waits between ranks in one piece: each round waits for the rounds of its partners.

    rank 3   ── round 0 ──┐
    rank 2   ── round 0 ──┴─ round 1 ──┐          tree, 4 ranks: the last round ends after 4 rounds, one after another,
    rank 0   ── round 0 ───────────────┴─ round 1 ──          though no rank but 2 has as many

Of very many ranks, only those on the way of some results are looked at: `with_sources`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from unisono.network.links import Amount, Network
from unisono.network.price import latency, link_seconds, loads
from unisono.placement import Placement
from unisono.schedules.schedule import Action, Algorithm, Program, Transfer

MAX_CHAINED_TRANSFERS = 200_000
"""Largest number of transfers of all ranks on these chains: a second of work."""


def with_sources(ends: Iterable[int], algorithm: Algorithm, ranks: int) -> Mapping[int, Program]:
    """Return the programs of some ranks and of those from which their results come: in each lane the sender of the last
    chunks that a rank receives, the one from which that rank received its own, and so on.

    In a tree these are all ranks on the way from the root. Returns no program if there were too many transfers.

        tree, 8 ranks, results of ranks 3 and 7         3 ◀─ 2 ◀─ 0        7 ◀─ 6 ◀─ 4 ◀─ 0
    """
    found: dict[int, Program] = {}
    left, lanes = MAX_CHAINED_TRANSFERS, len(algorithm(0, ranks).lanes)
    waiting = deque((rank, lane) for rank in dict.fromkeys(ends) for lane in range(lanes))
    seen = set(waiting)
    while waiting and left > 0:
        rank, lane = waiting.popleft()
        if rank not in found:
            found[rank] = algorithm(rank, ranks)
            left -= count_transfers(found[rank])
        received = (t.peer for transfers in reversed(found[rank].lanes[lane]) for t in transfers if _replaces(t))
        source = next(received, rank), lane
        if source not in seen:
            seen.add(source)
            waiting.append(source)
    return found if left > 0 else {}


def count_transfers(program: Program) -> int:
    """Return the number of transfers of all rounds."""
    return sum(len(transfers) for lane in program.lanes for transfers in lane)


def _replaces(transfer: Transfer) -> bool:
    return transfer.action is Action.RECEIVE


def slowed(network: Network, times: float) -> Network:
    """Return the network as a node with a slower link sees it."""
    return replace(network, beta=network.beta * times) if times > 1 else network


def chain_seconds(
    programs: Mapping[int, Program],
    placement: Placement,
    network: Network,
    chunk: Amount,
    crossing: Amount,
    slow: Mapping[int, float],
) -> Amount:
    """Return the end of the last round of one piece, if a round starts once it and its partners' rounds have begun.

    It then lasts as long as the slowest of them takes alone; `slow` has the factors of nodes with slower links. A round
    that never begins is left to `verify`.
    """
    rounds: list[_Round] = []
    sent: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    received: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank, program in programs.items():
        links = slowed(network, slow.get(placement.node_of(rank), 1))
        for lane, (lane_rounds, lane_loads) in enumerate(
            zip(program.lanes, loads(program, rank, placement), strict=True)
        ):
            for number, (transfers, load) in enumerate(zip(lane_rounds, lane_loads, strict=True), 1):
                for action, peer, _, _ in transfers:
                    ends = sent[rank, peer, lane] if action is Action.SEND else received[peer, rank, lane]
                    ends.append(len(rounds))
                passing = latency(load, network) + link_seconds(load, load, links, crossing, chunk)
                own = load.added * network.gamma * chunk + load.messages * network.overhead
                rounds.append(_Round(passing, own, number == 1, number == len(lane_rounds)))
    partners: list[list[int]] = [[] for _ in rounds]
    for between, senders in sent.items():
        for one, other in zip(senders, received[between], strict=False):
            partners[one].append(other)
            partners[other].append(one)
    return _last_end(rounds, partners)


class _Round(NamedTuple):
    passing: Amount
    """Seconds for its messages alone."""
    summing: Amount
    first: bool
    """True for the first round of its lane."""
    last: bool


def _last_end(rounds: Sequence[_Round], partners: Sequence[Sequence[int]]) -> Amount:
    latest: Amount = 0
    began: dict[int, Amount] = {number: 0 for number, one in enumerate(rounds) if one.first}
    awaiting = [1 + len(others) for others in partners]
    just_begun = deque(began)
    while just_begun:
        starting = just_begun.popleft()
        for number in (starting, *partners[starting]):
            awaiting[number] -= 1
            if awaiting[number]:
                continue
            involved = (number, *partners[number])
            end = max(began[one] for one in involved) + max(rounds[one].passing for one in involved)
            end += rounds[number].summing
            latest = max(latest, end)
            if not rounds[number].last:
                began[number + 1] = end
                just_begun.append(number + 1)
    return latest

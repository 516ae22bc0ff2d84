"""Messages that flow over links, in groups: those that began together, with the same bytes on equal routes.

    rank 0 ══ node 0 ─┐                ┌─ node 256 ══ rank 256       256 messages of one size between two supernodes:
    rank 1 ══ node 1 ─┤═ uplink 0 ═══ uplink 1 ═┤ node 257 ══ rank 257       a group, whose members have equal rates,
      ...             └─               └─ ...                                 and so arrive together

A message is in a group while no other message uses the links of its two nodes: then only supernodes' uplinks tell
members apart from others. As soon as another one does, it flows alone. So a round of 40,960 ranks is shared out among
hundreds of groups, and the result is that of each message by itself.

Between two ranks one message flows at a time, as on one connection: others wait in a queue.

Links are shared as evenly as possible (max-min fairness, by progressive filling):

    link 0  ├ flow a ┤├ flow b ┤              a and b get half of link 0 each,
    link 1  ├ flow b ┤├────────── flow c ─┤   and c what b leaves of link 1

No flow can get a higher rate without taking it from a flow whose rate is not higher. Flows with equal routes have equal
rates, so a group of them is filled at once: it takes its number of shares.
Source: Bertsekas and Gallager, Data Networks, 1992, section 6.5.2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.network.traffic import Numbers, Routes, Seconds, Traffic

SHARE_TOLERANCE = 1e-12
"""Relative difference below which shares are equal: sums of the same numbers in another order."""


def fair_rates(
    routes: NDArray[np.int64],
    capacities: NDArray[np.float64],
    counts: NDArray[np.int64],
    limits: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the bytes per second of each flow of a group. `routes` has a row of links per group, `counts` its flows.

    `limits` has the largest rate of each flow, whatever others do; it is finite, or a link of the row has a limit. A
    link is full if it limits all its users. All such links are filled at once, so there are few passes.
    """
    if routes.size < len(capacities):  # few groups use few of many links
        used, numbers = np.unique(routes, return_inverse=True)
        routes, capacities = numbers.reshape(routes.shape), capacities[used]
    rates = np.empty(len(routes))
    waiting = np.arange(len(routes))
    left, width = capacities.copy(), routes.shape[1]
    while len(waiting):
        route, many, limit = routes[waiting], counts[waiting], limits[waiting]
        users = np.bincount(route.ravel(), np.repeat(many, width), minlength=len(left))
        share = np.divide(left, users, out=np.full(len(left), np.inf), where=users > 0)
        offered = np.minimum(share[route].min(axis=1), limit)
        if offered.min() >= offered.max() * (1 - SHARE_TOLERANCE):
            rates[waiting] = offered
            break
        least_offered = np.full(len(left), np.inf)
        np.minimum.at(least_offered, route.ravel(), np.repeat(offered, width))
        full = (least_offered >= share * (1 - SHARE_TOLERANCE)) & (users > 0)
        limited = full[route].any(axis=1) | (limit <= offered)
        rates[waiting[limited]] = offered[limited]
        taken = np.repeat(offered[limited] * many[limited], width)
        left = np.maximum(left - np.bincount(route[limited].ravel(), taken, minlength=len(left)), 0)
        waiting = waiting[~limited]
    return rates


class GroupedFlows:
    """Messages that flow, and those that wait for their connection. Numbers of piece k: those of piece 0, plus k times
    all."""

    def __init__(self, every: Traffic, routes: Routes) -> None:
        self.nbytes, self.routes, self.messages = every.nbytes, routes, len(every.nbytes)
        self.busy = np.zeros(routes.pairs, bool)  # for each pair of ranks, whether a message flows
        self.place = np.empty(routes.pairs, np.int64)
        self.users = np.zeros(len(routes.capacities), np.int64)  # of each link of a node
        self.queue = self.flowing = self.group = np.empty(0, np.int64)
        self.left, self.rates, self.limits = np.empty(0), np.empty(0), np.empty(0)  # of each group
        self.counts = np.empty(0, np.int64)
        self.shared = np.empty((0, routes.links.shape[1]), np.int64)

    def ends(self, now: float) -> Seconds:
        """Return the seconds at which each group arrives, if rates stay as they are."""
        return now + self.left / self.rates

    def start(self, messages: Numbers) -> None:
        """Queue messages, start the first one of each idle pair of ranks, and recompute the shares of links."""
        queue = np.concatenate([self.queue, messages])
        pair = self.routes.pair[queue % self.messages]
        order = np.arange(len(queue))
        self.place[pair[::-1]] = order[::-1]  # of equal pairs, the first one stays
        first = (self.place[pair] == order) & ~self.busy[pair]
        self.busy[pair[first]] = True
        self.queue = queue[~first]
        self._join(queue[first])
        self.rates = fair_rates(self.shared, self.routes.capacities, self.counts, self.limits)

    def flow(self, seconds: float, ended: NDArray[np.bool_]) -> Numbers:
        """Let bytes flow; return the messages that have arrived, those of the groups that `ended`."""
        self.left = self.left - self.rates * seconds
        if not ended.any():
            return self.flowing[:0]
        done = ended[self.group]
        arrived, self.flowing, self.group = self.flowing[done], self.flowing[~done], self.group[~done]
        of_piece = arrived % self.messages
        self.busy[self.routes.pair[of_piece]] = False
        np.subtract.at(self.users, self.routes.links[of_piece, :2].ravel(), 1)
        self._drop(ended)
        return arrived

    def _join(self, starting: Numbers) -> None:
        """Add messages to those that flow: in groups of their own, or alone where they share a node's link."""
        of_piece = starting % self.messages
        nodes = self.routes.links[of_piece, :2]
        np.add.at(self.users, nodes.ravel(), 1)
        alone = (self.users[nodes] == 1).all(axis=1)
        if not alone.all():
            self._separate()
        key = np.where(alone, self._kinds(of_piece), -1 - np.arange(len(starting)))
        _, index, group, counts = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        self.flowing = np.concatenate([self.flowing, starting])
        self.group = np.concatenate([self.group, len(self.left) + group])
        self._add_groups(of_piece[index], self.nbytes[of_piece[index]], counts, alone[index])

    def _separate(self) -> None:
        """Take the messages whose nodes' links are now used by others too out of their groups."""
        of_piece = self.flowing % self.messages
        contested = (self.users[self.routes.links[of_piece, :2]] > 1).any(axis=1)
        which = np.flatnonzero(contested & np.isfinite(self.limits[self.group]))
        old = self.group[which]
        np.subtract.at(self.counts, old, 1)
        self.group[which] = len(self.left) + np.arange(len(which))
        self._add_groups(of_piece[which], self.left[old], np.ones(len(which), np.int64), np.zeros(len(which), bool))
        self._drop(self.counts == 0)

    def _add_groups(self, messages: Numbers, left: Seconds, counts: Numbers, grouped: NDArray[np.bool_]) -> None:
        """Add groups, each given by one of its messages. A message alone has all its links, a group its uplinks."""
        routes = self.routes
        self.left = np.concatenate([self.left, left])
        self.counts = np.concatenate([self.counts, counts])
        links = routes.links[messages]
        links[grouped, :2] = routes.unlimited
        self.shared = np.concatenate([self.shared, links])
        limits = routes.capacities[routes.links[messages, :2]].min(axis=1, initial=np.inf)
        self.limits = np.concatenate([self.limits, np.where(grouped, limits, np.inf)])

    def _kinds(self, messages: Numbers) -> Numbers:
        """Return a number for each message, equal where bytes, uplinks and the limit of the nodes' links are."""
        kind: Numbers = self.routes.kind[messages]
        nbytes = self.nbytes[messages]
        if len(nbytes) and nbytes.min() < nbytes.max():
            sizes, size = np.unique(nbytes, return_inverse=True)
            kind = kind * len(sizes) + size
        return kind

    def _drop(self, gone: NDArray[np.bool_]) -> None:
        kept = ~gone
        self.group = (np.cumsum(kept) - 1)[self.group]
        self.left, self.counts, self.limits = self.left[kept], self.counts[kept], self.limits[kept]
        self.shared = self.shared[kept]
        self.rates = self.rates[kept[: len(self.rates)]]

"""Messages that flow over links. Between two ranks one flows at a time, as on one connection: others wait in a queue.

Links are shared as evenly as possible (max-min fairness, by progressive filling):

    link 0  ├ flow a ┤├ flow b ┤              a and b get half of link 0 each,
    link 1  ├ flow b ┤├────────── flow c ─┤   and c what b leaves of link 1

No flow can get a higher rate without taking it from a flow whose rate is not higher.
Source: Bertsekas and Gallager, Data Networks, 1992, section 6.5.2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.network.traffic import Numbers, Routes, Seconds, Traffic

SHARE_TOLERANCE = 1e-12
"""Relative difference below which shares are equal: sums of the same numbers in another order."""


def fair_rates(routes: Numbers, capacities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the bytes per second of each flow; `routes` has a row of links per flow, one at least with a limit.

    A link is full if it limits all its users. All such links are filled at once, so there are few passes.
    """
    if routes.size < len(capacities):  # few flows use few of many links
        used, numbers = np.unique(routes, return_inverse=True)
        routes, capacities = numbers.reshape(routes.shape), capacities[used]
    rates = np.empty(len(routes))
    waiting = np.arange(len(routes))
    left, width = capacities.copy(), routes.shape[1]
    while len(waiting):
        route = routes[waiting]
        users = np.bincount(route.ravel(), minlength=len(left))
        share = np.divide(left, users, out=np.full(len(left), np.inf), where=users > 0)
        offered = share[route].min(axis=1)
        if offered.min() >= offered.max() * (1 - SHARE_TOLERANCE):
            rates[waiting] = offered
            break
        least_offered = np.full(len(left), np.inf)
        np.minimum.at(least_offered, route.ravel(), np.repeat(offered, width))
        full = (least_offered >= share * (1 - SHARE_TOLERANCE)) & (users > 0)
        limited = full[route].any(axis=1)
        rates[waiting[limited]] = offered[limited]
        taken = np.repeat(offered[limited], width)
        left = np.maximum(left - np.bincount(route[limited].ravel(), taken, minlength=len(left)), 0)
        waiting = waiting[~limited]
    return rates


class Flows:
    """Messages that flow, and those that wait for their connection. Numbers of piece k: those of piece 0, plus k times
    all."""

    def __init__(self, every: Traffic, routes: Routes) -> None:
        self.nbytes, self.routes, self.messages = every.nbytes, routes, len(every.nbytes)
        self.busy = np.zeros(routes.pairs, bool)  # for each pair of ranks, whether a message flows
        self.place = np.empty(routes.pairs, np.int64)
        self.queue = self.flowing = np.empty(0, np.int64)
        self.left, self.rates = np.empty(0), np.empty(0)  # of each message that flows

    def ends(self, now: float) -> Seconds:
        """Return the seconds at which each message arrives, if rates stay as they are."""
        return now + self.left / self.rates

    def start(self, messages: Numbers) -> None:
        """Queue messages, start the first one of each idle pair of ranks, and recompute the shares of links."""
        queue = np.concatenate([self.queue, messages])
        pair = self.routes.pair[queue % self.messages]
        order = np.arange(len(queue))
        self.place[pair[::-1]] = order[::-1]  # of equal pairs, the first one stays
        first = (self.place[pair] == order) & ~self.busy[pair]
        self.busy[pair[first]] = True
        starting, self.queue = queue[first], queue[~first]
        self.flowing = np.concatenate([self.flowing, starting])
        self.left = np.concatenate([self.left, self.nbytes[starting % self.messages]])
        self.rates = fair_rates(self.routes.links[self.flowing % self.messages], self.routes.capacities)

    def flow(self, seconds: float, ended: NDArray[np.bool_]) -> Numbers:
        """Let bytes flow; return the messages that have arrived, those that `ended`."""
        arrived = self.flowing[ended]
        self.busy[self.routes.pair[arrived % self.messages]] = False
        self.left = (self.left - self.rates * seconds)[~ended]
        self.flowing, self.rates = self.flowing[~ended], self.rates[~ended]
        return arrived

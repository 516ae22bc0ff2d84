"""Sharing of links by flows, as evenly as possible (max-min fairness, by progressive filling).

    link 0  ├ flow a ┤├ flow b ┤              a and b get half of link 0 each,
    link 1  ├ flow b ┤├────────── flow c ─┤   and c what b leaves of link 1

No flow can get a higher rate without taking it from a flow whose rate is not higher. Flows with equal routes have equal
rates, so a group of them is filled at once: it takes its number of shares.
Source: Bertsekas and Gallager, Data Networks, 1992, section 6.5.2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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

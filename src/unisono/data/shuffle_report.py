"""Quality of a shuffle against its traffic, for ranks that need not exist.

shuffle                       what samples do            same rank   uplinks of 2 supernodes, n bytes
"epoch"                       move each epoch            1 / p       n / 2 an epoch
"every:k"                     stay for k epochs          near 1      n / 2k
"every:k,parts:2"             move in their half         2 / p       n / 2k
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from unisono.data.order import epoch_order
from unisono.data.pack.index import Index
from unisono.data.quality import mixing, order_from_last, quality
from unisono.data.shuffle_options import ShuffleOptions
from unisono.data.storage.groups import form_groups
from unisono.data.storage.ownership import Owners, check_groups, initial_owners, owners_in_epoch
from unisono.data.storage.traffic import ShuffleTraffic, shuffle_traffic
from unisono.placement import Placement

COMPARED_EPOCHS = 12
"""Number of epochs after the first that are compared: a multiple of the usual intervals."""

ROWS = (
    "neighbours that stayed neighbours",
    "distance moved",
    "samples that a rank sees again",
    "samples that a rank has seen in all",
    "MB that leave ranks",
    "MB that leave nodes",
    "MB through uplinks",
)
"""Values of a report, in words."""


class ShuffleReport(NamedTuple):
    """Quality and traffic of a shuffle from each epoch to the next, the means of `COMPARED_EPOCHS`."""

    neighbours: float
    distance: float
    same_rank: float
    seen: float
    """Share of all samples that a rank has seen in all epochs."""
    ranks: float
    """Megabytes that leave a rank in an epoch, over all ranks."""
    nodes: float
    uplinks: float


def shuffle_report(
    index: Index, batch: int, seed: int, shuffle: ShuffleOptions, placement: Placement, groups: int = 1
) -> ShuffleReport:
    """Return the report of a pack's shuffle. Raises PackError for groups that cannot be formed."""
    samples, epochs = len(index), range(1, COMPARED_EPOCHS + 1)
    moved = [quality(order_from_last(samples, batch, seed, epoch, shuffle), index.label) for epoch in epochs]
    mixed = mixing(samples, batch, seed, COMPARED_EPOCHS + 1, shuffle, placement.ranks)
    traffic = np.array(epochs_traffic(index, batch, seed, COMPARED_EPOCHS + 1, shuffle, placement, groups)[1:])
    distances = [float(np.mean([getattr(one, name) for one in moved])) for name in ("neighbours", "distance")]
    ranks, nodes, uplinks = (traffic.mean(axis=0) / 1e6).tolist()
    return ShuffleReport(distances[0], distances[1], mixed.same_rank, mixed.seen, ranks, nodes, uplinks)


def epochs_traffic(
    index: Index, batch: int, seed: int, epochs: int, shuffle: ShuffleOptions, placement: Placement, groups: int
) -> list[ShuffleTraffic]:
    """Return the traffic of each epoch's shuffle; the first one begins with the stretches that ranks read."""
    members = check_groups(len(index), placement.ranks, groups)
    formed = form_groups(placement, groups)
    owners: Owners = initial_owners(len(index), members)
    found = list[ShuffleTraffic]()
    for epoch in range(epochs):
        order = epoch_order(len(index), batch, seed, epoch, shuffle)
        after = owners_in_epoch(order, batch, np.array(formed.member_of_rank))
        found.append(shuffle_traffic(owners, after, index.length, formed, placement))
        owners = after
    return found

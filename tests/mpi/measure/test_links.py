"""Links are measured by the sockets that collectives go through, and by messages of MPI where they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from unisono.measure import links
from unisono.measure.links import measure_links
from unisono.placement import one_rank_per_node
from unisono.transports import sockets
from unisono.transports.arithmetic import Arithmetic
from unisono.transports.barriers import is_compiled
from unisono.transports.sockets import Sockets
from unisono.transports.steps import Row
from unisono.world import World


@pytest.mark.parametrize("by", ["on", "off"])
def test_links_between_nodes(world: World, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    exchanged, player_of = list[int](), Sockets.player_of

    def watched(
        self: Sockets,
        rows: list[Row],
        arithmetic: Arithmetic,
        late: Callable[[], None],
        mismatch: Callable[[int], None],
    ) -> Callable[[int, int, int], None]:
        exchanged.append(sum(row.amount for row in rows if row.kind in sockets.MESSAGES))
        return player_of(self, rows, arithmetic, late, mismatch)

    monkeypatch.setenv(sockets.VARIABLE, by)
    monkeypatch.setattr(Sockets, "player_of", watched)
    monkeypatch.setattr(links, "MIN_EXCHANGE_SECONDS", 0.0)
    apart = World(world.comm.Dup(), one_rank_per_node(world.size), world.table)
    measured = measure_links(apart)
    assert apart.all_gather_object(measured) == [measured] * apart.size
    assert measured.network.gamma > 0
    assert (measured.network.alpha > 0) == (world.size > 1)
    assert measured.network.beta > 0
    paired = {node for pair, _ in measured.speeds for node in pair}
    assert paired == set(range(world.size)) if world.size > 1 else not paired
    by_sockets = by == "on" and world.size > 1 and is_compiled()
    assert (max(exchanged, default=0) >= 2 * (64 << 10)) == by_sockets
    apart.free()

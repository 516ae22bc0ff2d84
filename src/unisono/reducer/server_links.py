"""Links of a worker to the servers of an asynchronous rule."""

from __future__ import annotations

from unisono.asynchronous.link import MpiLink
from unisono.reducer.model_collectives import ModelCollectives
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.step.program import RankGroup
from unisono.timeouts import TIMEOUT
from unisono.world import World


class ServerLinks:
    """Links to all servers, on a communicator of their own. Made by all ranks together, those of servers too."""

    def __init__(self, rule: BaseAsynchronousRule, world: World, collectives: ModelCollectives) -> None:
        self.comm = collectives.call(lambda one: one.dup()).comm
        """Communicator of workers and servers."""
        self.seats = rule.seats(world.size)
        self.timeout = TIMEOUT if world.watch is None else world.watch.timeout
        first = self.seats.workers if rule.server == "rank" else 0
        self.links = [
            MpiLink(self.comm, first + server, worker=True, timeout=self.timeout)
            for server in range(self.seats.servers)
        ]
        """Links by the numbers of the servers."""

    def first_living(self) -> int:
        """Return the first worker that is not known to have died; needs an MPI library that tells."""
        failed = self.comm.Get_failed()
        dead = set(failed.Translate_ranks(None, self.comm.group)) if failed.size else set()
        failed.Free()
        return next(worker for worker in range(self.seats.workers) if worker not in dead)

    def __call__(self, pair: RankGroup) -> MpiLink:
        """Return the link to the server of a pair."""
        return self.links[pair.number]

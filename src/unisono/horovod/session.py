"""Session of Horovod's functions, which have no world argument: one for each process, from `init()` to `shutdown()`."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

from unisono.engine import weakly
from unisono.errors import UnisonoError, UsageError
from unisono.initialize import init as make_world
from unisono.world import World

if TYPE_CHECKING:
    from unisono.horovod.optimizer import GradientExchange

Result = TypeVar("Result")


class Session:
    """World of all ranks, and the thread that carries out the collectives that a program calls itself."""

    def __init__(self) -> None:
        self.world = make_world()
        self.collectives = self.world.dup()
        """World of the thread: its calls are separate from those of the gradients."""
        self.node_world = self.world.node_world()
        self._exchanges: list[weakref.ref[GradientExchange]] = []
        self._thread = ThreadPoolExecutor(1, "horovod collectives")
        self._failed: list[BaseException] = []
        """Errors of collectives that nobody has seen yet."""
        self._at_exit = weakly(self.report)
        atexit.register(self._at_exit)

    @property
    def exchanges(self) -> list[GradientExchange]:
        """Gradients of the distributed optimizers that are in use, in the order in which these were made."""
        return [living for reference in self._exchanges if (living := reference()) is not None and not living.closed]

    def make_way(self, parameters: frozenset[int]) -> None:
        """End the averages of an earlier optimizer of the same parameters. Raises UsageError if it has some of them."""
        for exchange in self.exchanges:
            if shared := exchange.parameters & parameters:
                if exchange.parameters != parameters:
                    raise UsageError(
                        f"{len(shared)} parameters have another DistributedOptimizer: give each parameter to one"
                    )
                exchange.close()

    def enter(self, exchange: GradientExchange) -> None:
        """Register the gradients of a new optimizer."""
        self._exchanges.append(weakref.ref(exchange))

    def submit(self, collective: Callable[[World], Result], name: str | None = None) -> Future[Result]:
        """Carry out `collective` after those that were submitted before it.

        All ranks give the same name, or none; it says what they compare. Raises the error of an earlier collective that
        nobody has waited for.
        """
        self.raise_failed()

        def carry_out() -> Result:
            try:
                with torch.no_grad(), self.collectives.labelled(f" {name}" if name else ""):
                    return collective(self.collectives)
            except BaseException as error:  # whatever it is, a later call raises it if nobody waits for this one
                self._failed.append(error)
                raise

        return self._thread.submit(carry_out)

    def wait(self, handle: Future[Result]) -> Result:
        """Return the result of a collective, or raise its error."""
        try:
            return handle.result()
        except BaseException as error:  # of any class, as it was noted
            self._failed = [noted for noted in self._failed if noted is not error]
            raise

    def raise_failed(self) -> None:
        """Raise the first error that nobody has seen."""
        if self._failed:
            first = self._failed[0]
            self._failed.clear()
            raise first

    def close(self) -> None:
        """Finish the collectives that were submitted, and free the world. Called by all ranks."""
        atexit.unregister(self._at_exit)
        self._thread.shutdown()
        for exchange in self.exchanges:
            exchange.close()
        self.collectives.free()
        self.world.free()
        self.raise_failed()

    def report(self) -> None:
        """Abort at the end of the program where a collective has failed and nobody has seen its error."""
        try:
            self.raise_failed()
        except UnisonoError as error:
            rank = f"rank {self.world.rank} of {self.world.size}"
            message = f"unisono: {rank}: a collective of unisono.horovod failed: {error}"
            print(message, file=sys.stderr, flush=True)
            self.world.abort(1, message)


_SESSIONS: list[Session] = []
"""Session that is open, if any."""


def init() -> None:
    """Open the session: the ranks that `unisono run`, `mpiexec` or `srun` started. A second call does nothing."""
    if not _SESSIONS:
        _SESSIONS.append(Session())


def shutdown() -> None:
    """Close the session, on all ranks. Not needed at the end of a program."""
    if _SESSIONS:
        _SESSIONS.pop().close()


def is_initialized() -> bool:
    """Return True from `init()` to `shutdown()`."""
    return bool(_SESSIONS)


def session() -> Session:
    """Return the open session. Raises UsageError before `init()` and after `shutdown()`."""
    if not _SESSIONS:
        raise UsageError("Horovod's functions need hvd.init() first")
    return _SESSIONS[0]


def rank() -> int:
    """Return this process's rank."""
    return session().world.rank


def size() -> int:
    """Return the number of ranks."""
    return session().world.size


def local_rank() -> int:
    """Return this process's rank among those of its node."""
    return session().node_world.rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return session().node_world.size


def cross_rank() -> int:
    """Return the number of this node."""
    return session().world.node


def cross_size() -> int:
    """Return the number of nodes."""
    return session().world.nodes


def is_homogeneous() -> bool:
    """Return True where all nodes have as many ranks."""
    return len({len(ranks) for ranks in session().world.placement.nodes}) == 1


def mpi_built() -> bool:
    """Return True: ranks communicate by MPI, which is started with MPI_THREAD_MULTIPLE."""
    return True


mpi_enabled = mpi_threads_supported = mpi_built


def gloo_built() -> bool:
    """Return False: neither gloo nor the library of an accelerator is used; collectives work on CPU tensors."""
    return False


gloo_enabled = ccl_built = cuda_built = ddl_built = rocm_built = gloo_built


def nccl_built() -> int:
    """Return 0: NCCL is not used."""
    return 0

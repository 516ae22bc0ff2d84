"""Dependency chaining: all is offloaded, and a dummy variable keeps the exchanges in order (MXNET-MPI section 4.3).

    pushes    pack 0    pack 1    pack 2                                all of them first
    pulls     exchange 0 ─turn▶ exchange 1 ─turn▶ exchange 2            each mutates the communicator: one by one
                 └▶ unpack 0        └▶ unpack 1        └▶ unpack 2      beside the next exchange

The main thread waits for nothing. Packing, exchange and unpacking are operations of their own, so each begins as soon
as it can. The exchanges have the order of the pulls, the same on all ranks, whatever is ready first.
"""

from unisono.engine.embeddings.task import Embedding, Task, buffer, communicator, gradient


def push(key: int, _: int) -> tuple[Task, ...]:
    """Pack on another thread."""
    return (Task("pack", "update", read=(gradient(key),), mutate=(buffer(key),)),)


def pull(key: int, _: int) -> tuple[Task, ...]:
    """Exchange when it is this one's turn, and unpack, on other threads."""
    return (
        Task("exchange", "communication", mutate=(buffer(key), communicator(0))),
        Task("unpack", "update", read=(buffer(key),), mutate=(gradient(key),)),
    )


chain = Embedding(push, pull)

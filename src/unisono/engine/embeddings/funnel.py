"""Funnel: the main thread exchanges each gradient as it comes (MXNET-MPI section 4.1).

    other threads   g3    g2 pack 3   g1 pack 2   pack 1     ...          compute, pack and unpack go on meanwhile
    main thread     waits ─────────▶ [exchange 3][exchange 2][exchange 1]   one at a time, in the order of the pushes

The order of the main thread's program is the order of the exchanges, the same on all ranks. Any MPI library will do, as
no other thread calls it. But while the main thread waits for a gradient, one that is there already waits as well.
"""

from unisono.engine.embeddings.task import MAIN, Embedding, Task, buffer, communicator, gradient


def push(key: int, _: int) -> tuple[Task, ...]:
    """Pack on another thread; wait for that, and exchange."""
    return (
        Task("pack", "update", read=(gradient(key),), mutate=(buffer(key),)),
        Task("exchange", MAIN, mutate=(buffer(key), communicator(0))),
    )


def pull(key: int, _: int) -> tuple[Task, ...]:
    """Unpack on another thread."""
    return (Task("unpack", "update", read=(buffer(key),), mutate=(gradient(key),)),)


funnel = Embedding(push, pull)

"""Concurrent communicators: keys are hashed to K of them, and one exchange may go on on each (MXNET-MPI section 4.2).

    communicator 0   [exchange 0]   │          [exchange 2]  │           K = 2: at most two at once
    communicator 1       [exchange 1]│     [exchange 3]      │
    main thread                      │ barrier               │ barrier   before key 2, before key 4

Exchanges of one communicator come in the order of the pushes; on different ones no order is needed, so a long exchange
holds nobody up but its own. The barrier bounds how far the ranks drift apart, and costs what it takes to meet.
"""

from unisono.engine.embeddings.task import MAIN, Embedding, Task, buffer, communicator, gradient


def push(key: int, outstanding: int) -> tuple[Task, ...]:
    """After `outstanding` keys wait for all that is under way; pack and exchange on other threads."""
    every = tuple(communicator(number) for number in range(outstanding))
    barrier = (Task("barrier", MAIN, mutate=every),) if key and key % outstanding == 0 else ()
    mine = key % outstanding
    return (
        *barrier,
        Task("pack", "update", read=(gradient(key),), mutate=(buffer(key),)),
        Task("exchange", "communication", mutate=(buffer(key), communicator(mine)), communicator=mine),
    )


def pull(key: int, _: int) -> tuple[Task, ...]:
    """Unpack on another thread."""
    return (Task("unpack", "update", read=(buffer(key),), mutate=(gradient(key),)),)


concurrent = Embedding(push, pull, several=True)

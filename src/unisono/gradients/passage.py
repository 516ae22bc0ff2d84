"""One backward pass: which gradients are there, and which buckets are full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

import torch

from unisono.errors import UsageError
from unisono.gradients.control import Agreed, Word
from unisono.gradients.layout import Bucket


class Passage:
    """What has come of the gradients of one backward pass. Buckets are known by their place in the order of exchange.

    They leave in that order, whatever fills first: the same on all ranks.
    """

    def __init__(self, buckets: Sequence[Bucket], parameters: int, word: Word) -> None:
        self.word = word
        """What this rank tells the others."""
        self.agreed: Agreed | None = None
        """What all have told; None until it is known."""
        self.weight = 1.0
        """What the gradients are multiplied by before they are summed; known when all ranks have told their samples."""
        self.void = False
        """Whether nothing may come of it any more: it has failed."""
        self.buffers = False
        """Whether rank 0's buffers are on their way, or have come and nobody has taken them."""
        self.lock = Lock()
        """Held by whoever makes it void, and by whoever sets gradients unless it is."""
        self.counted = False
        """Whether this rank has begun to tell its word."""
        self.ended = False
        """Whether the backward pass has."""
        self.fresh: dict[int, torch.Tensor | None] = {}
        """The gradient of each parameter that is there; None where there is none."""
        self.order: list[int] = []
        """The parameters as their gradients came."""
        self._open = [len(bucket.parameters) for bucket in buckets]
        self._of: list[list[int]] = [[] for _ in range(parameters)]
        for place, bucket in enumerate(buckets):
            for number in bucket.parameters:
                self._of[number].append(place)
        self._parts = [len(places) for places in self._of]
        self.next = 0
        """The bucket that leaves next."""

    def add(self, number: int, gradient: torch.Tensor | None) -> None:
        """A parameter's gradient is there. A second one (of another part of the backward pass) is added to the first.

        Raises UsageError when the first has left already.
        """
        if number in self.fresh:
            before = self.fresh[number]
            if any(place < self.next for place in self._of[number]):
                raise UsageError(
                    f"parameter {number} has got a gradient twice in one backward pass, and the first was on its way: "
                    "activation checkpointing needs use_reentrant=False"
                )
            self.fresh[number] = gradient if before is None or gradient is None else before + gradient
            return
        self.fresh[number] = gradient
        self.order.append(number)
        for place in self._of[number]:
            self._open[place] -= 1

    def packed(self, bucket: Bucket) -> None:
        """A bucket's gradients are in their places: let go of those of which no part is missing."""
        for number in bucket.parameters:
            self._parts[number] -= 1
            if not self._parts[number]:
                self.fresh[number] = None

    def full(self, after: bool) -> bool:
        """Whether the next bucket may leave; `after` says that none does before the backward pass has ended."""
        return self.next < len(self._open) and not self._open[self.next] and (self.ended or not after)

    def settle(self, agreed: Agreed) -> None:
        """All ranks have told their words."""
        self.weight = agreed.weight_of(self.word)
        if agreed.error() is not None:
            self.drop()
        self.agreed = agreed

    def drop(self) -> None:
        """Let nothing come of it: what is under way sets no gradient from here on."""
        with self.lock:
            self.void = True


class End:
    """What autograd calls at the end of a backward pass. It forgets one whose pass has failed: then `failed` is called,
    before the program hears of the failure."""

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended, self._failed, self._called = ended, failed, False

    def __call__(self) -> None:
        self._ended()
        self._called = True

    def __del__(self) -> None:
        if not self._called:
            self._failed()

"""Audit of a run with virtual ranks while it goes on: hashes of each step, shares that a second rank computes again.

    rank 0   shares 0 1         computes 3 again            hash of 0, 1 and 3 ┐
    rank 1   shares 2 3         computes 5 again            hash of 2, 3 and 5 ┼─ one small allreduce ─ same on all
    rank 2   shares 4 5         computes 0 again            hash of 4, 5 and 0 ┘

found                            compared                                              names
a weight that has changed        hashes of all ranks' weights, before and after        the rank without majority
a wrong gradient of a share      that of a second rank, from the same samples          owner or second: a third decides
a wrong message of the sum       checksums of integers sent and received: linear       the rank that has received it

`fraction` is that of all shares: each rank computes as many again, those of one other rank, and which follows from the
seed and the step. A share's random numbers and buffers are its own (`reducer/virtual_ranks.py`). The checksum of
integers x[i] is the sum of c[i] x[i] modulo 2**64, with odd c[i]: that of a sum is the sum of the ranks' own, and a
changed bit changes it. It does not depend on buckets or shards, as c[i] is that of an element of a parameter.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch

from unisono.data.loading import Batch
from unisono.data.order import Numbers
from unisono.errors import AuditError
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.control import names_of
from unisono.schedules.pieces import bounds
from unisono.step.rule import RankState
from unisono.training.chain import DIGEST_BYTES, StepHashes
from unisono.training.trainer import Trainer
from unisono.transports.exact import ExactSums, Gradients, Terms

MODULUS = 1 << 64

TILE = 1 << 14
"""Elements whose factors are drawn; those of later ones are products with a factor of the tile."""

FACTORS = np.random.default_rng(TILE).integers(0, 1 << 62, TILE) * 2 + 1


class Recheck(NamedTuple):
    """Share that is computed again, by `checker`."""

    share: int
    owner: int
    checker: int


def choose_rechecks(seed: int, step: int, fraction: float, shares: int, ranks: int) -> list[Recheck]:
    """Return the shares that are computed again in a step: the same on all ranks, each of which has as many.

    >>> choose_rechecks(0, 7, 1, 2, 2)
    [Recheck(share=0, owner=0, checker=1), Recheck(share=1, owner=1, checker=0)]
    """
    rng = np.random.default_rng((seed, step))
    chance, distance = rng.random(), int(rng.integers(1, ranks)) if ranks > 1 else 0
    found = list[Recheck]()
    for owner in range(ranks):
        first, last = bounds(shares, ranks, owner)
        count = min(last - first, int(fraction * (last - first) + chance))
        mine = rng.permutation(last - first)[:count] if count else ()
        found += [Recheck(first + int(one), owner, (owner + distance) % ranks) for one in sorted(mine)]
    return found


def digest_of(tensors: Iterable[torch.Tensor | None]) -> str:
    """Return the hash of tensors' bytes."""
    found = blake2b(digest_size=DIGEST_BYTES)
    for one in tensors:
        if one is not None:
            found.update(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        found.update(b"|")
    return found.hexdigest()


def checksum(integers: torch.Tensor, number: int, start: int) -> int:
    """Return the checksum of integers from place `start` of parameter `number` on, modulo 2**64."""
    values, at, total = integers.numpy(), 0, 0
    while at < len(values):
        tile, inside = divmod(start + at, TILE)
        part = values[at : at + TILE - inside].astype(np.int64)
        total += int(part @ FACTORS[inside : inside + len(part)]) * (2 * (number << 32 | tile) + 1)
        at += len(part)
    return total


@dataclass
class RankHashes:
    """Hashes of a step on one rank."""

    before: str = ""
    """Weights before a step of which shares are computed again."""
    changed: bool = False
    """True where those are not the weights that the rank itself had after the step before."""
    after: str = ""
    samples: dict[int, str] = field(default_factory=dict)
    gradients: dict[int, str] = field(default_factory=dict)
    """Gradients of the rank's own shares."""
    again: dict[int, str] = field(default_factory=dict)
    """Gradients of another rank's shares."""
    sent: Sequence[int] = ()
    """Checksums of the integers that the rank has sent, of each rank's chunk of the buckets."""
    received: Sequence[int] = ()
    """Those of their sums."""
    exponents: int = 0


class HashedSums(ExactSums):
    """Exact sums whose terms, integers and results are hashed on their way."""

    def __init__(self, shares: int, memory: BucketMemory, rank: int, ranks: int) -> None:
        super().__init__(shares, memory.sums, memory.pieces, memory.in_order)
        self._memory, self._rank, self._ranks, self._lock = memory, rank, ranks, Lock()
        self.begin(None, False)

    def begin(self, shares: Sequence[int] | None, checks: bool) -> None:
        """Begin a step of this rank's `shares`, in the order of their passes; None: nothing is hashed. With `checks`
        all that is sent and received is."""
        self._shares, self._checks = shares, checks
        self._digests: dict[int, dict[int, str]] = {share: {} for share in shares or ()}
        self._sent, self._received = dict[int, list[int]](), dict[int, list[int]]()
        self._exponents, self._left = dict[int, int](), Counter[int]()

    def pack(self, key: int, terms: Terms) -> None:
        super().pack(key, terms)
        numbers = [number for number, _, _ in self._memory.pieces(key)] if self._shares else []
        with self._lock:
            if not self._left:  # the first bucket of the step, whose layout is known by now
                self._left.update(piece[0] for each in self._memory.keys for piece in self._memory.pieces(each))
            self._left.subtract(numbers)
            whole = [number for number in numbers if not self._left[number]]
        for number in whole:  # all parts are packed: a bit that was flipped before is in the sum, and is seen here
            for share, (_, gradients) in zip(self._shares or (), terms, strict=True):
                self._digests[share][number] = self._digest(number, gradients[number])
        if self._checks:
            self._sent[key] = self._checksums(key, 0, len(self.integers(key)), range(self._ranks))
            self._exponents[key] = checksum(self.maxima(key), key, 0)

    def decode(self, key: int, start: int, stop: int) -> None:
        if self._shares is not None:
            chunks = range(self._ranks) if self._checks else [self._rank]
            self._received[key] = self._checksums(key, start, stop, chunks)
        super().decode(key, start, stop)

    def digest_of_share(self, gradients: Gradients) -> str:
        """Return the hash of a share's gradients."""
        return joined({number: self._digest(number, one) for number, one in gradients.items()})

    def end(self, hashes: RankHashes) -> None:
        """Enter the hashes of the step."""
        hashes.gradients = {share: joined(digests) for share, digests in self._digests.items()}
        hashes.sent, hashes.received = (total(one.values()) for one in (self._sent, self._received))
        hashes.exponents = sum(self._exponents.values())

    def _digest(self, number: int, gradient: torch.Tensor | None) -> str:
        return digest_of([None if gradient is None else self._memory.in_order(gradient, number)])

    def _checksums(self, key: int, start: int, stop: int, chunks: Iterable[int]) -> list[int]:
        """Return the checksums of the chunks in elements [start, stop) of a bucket: each rank's shard is one."""
        integers, found = self.integers(key), [0] * self._ranks
        for chunk in chunks:
            first, last = bounds(len(integers), self._ranks, chunk)
            for number, here, part in self._memory.pieces(key):
                begin, end = max(first, start, here.start), min(last, stop, here.stop)
                if begin < end:
                    found[chunk] += checksum(integers[begin:end], number, part.start + begin - here.start)
        return found


def joined(digests: Mapping[int, str]) -> str:
    """Return the hash of a share's gradients, from those of each parameter."""
    return blake2b("".join(one for _, one in sorted(digests.items())).encode(), digest_size=DIGEST_BYTES).hexdigest()


def total(several: Iterable[Sequence[int]]) -> list[int]:
    """Return the sums of checksums, element by element.

    >>> total([[1, 2], [3, MODULUS - 1]])
    [4, 1]
    """
    return [sum(column) % MODULUS for column in zip(*several, strict=True)]


class Audit:
    """Audit of the steps of a trainer with virtual ranks, on one rank. All ranks construct and use it together."""

    def __init__(
        self, trainer: Trainer, seed: int, fraction: float, record: Callable[[StepHashes], None] | None = None
    ) -> None:
        """Compute a fraction of all shares again. `record` is called on rank 0 with the hashes of each step; without it
        only steps with such shares are hashed."""
        programs, memory = trainer.reducer.programs, trainer.reducer.memory
        assert programs.virtual is not None, "recipes without virtual ranks have no audit"
        self._trainer, self._world, self._virtual = trainer, trainer.world, programs.virtual
        self._seed, self._fraction, self._record = seed, fraction, record
        self._shards = trainer.reducer.traits.state is RankState.SHARDED
        self._sums = HashedSums(self._virtual.count, memory, self._world.rank, self._world.size)
        programs.exact = self._sums
        self._last = -1, ""  # the last step that was hashed, and the weights that it left
        self.compared = 0
        """Number of shares that were computed again so far, on all ranks."""

    def weights(self) -> str:
        """Return the hash of this rank's weights and floating-point buffers, once the last step has ended."""
        self._trainer.wait()
        self._trainer.reducer.runner.wait_for_buffers()
        return digest_of(tensor for tensor in self._state() if tensor.is_floating_point() or tensor.is_complex())

    def step(
        self, step: int, seed: int, numbers: Numbers, inputs: torch.Tensor, labels: torch.Tensor
    ) -> float | torch.Tensor:
        """Train as `Trainer.step`, on a batch of the samples `numbers`; this is step number `step`.

        Raises AuditError on all ranks where one has computed or received other bits than it should.
        """
        world, whole, size, own = self._world, len(numbers), self._virtual.count, self._virtual.own
        cuts = [whole * share // size for share in range(size + 1)]
        rechecks = choose_rechecks(self._seed, step, self._fraction, size, world.size) if self._fraction else []
        chosen = [one for one in rechecks if cuts[one.share] < cuts[one.share + 1]]
        if not chosen and self._record is None:
            return self._trainer.step(inputs, labels, whole, seed)
        samples = {
            share: (inputs[rows], labels[rows])
            for share in own
            if (rows := slice(cuts[share] - cuts[own.start], cuts[share + 1] - cuts[own.start])).start < rows.stop
        }
        mine, before = RankHashes(), list[torch.Tensor]()
        if chosen:
            mine.before = self.weights()
            mine.changed = self._last[0] == step - 1 and self._last[1] != mine.before
            before = [tensor.detach().clone() for tensor in self._state()]
            for share, given in self._hand_over(chosen, samples):
                mine.again[share] = self._recompute(share, given, seed)
        if self._record is not None:
            for share, given in samples.items():
                keys = torch.from_numpy(np.ascontiguousarray(numbers[cuts[share] : cuts[share + 1]]))
                mine.samples[share] = digest_of([keys, *given])
        self._sums.begin([*samples][::-1], bool(chosen))
        try:
            loss = self._trainer.step(inputs, labels, whole, seed)
            mine.after = self.weights()
            self._sums.end(mine)
        finally:
            self._sums.begin(None, False)
        self._last = step, mine.after
        ranks = world.all_gather_object(mine)
        for finding in self._findings(ranks, chosen, lambda one: self._vote(one, ranks, before, samples, seed)):
            raise AuditError(f"step {step}, {self._in_words(*finding)}")
        self.compared += len(chosen)
        if self._record is not None and world.rank == 0:
            self._record(self._hashes(step, ranks))
        return loss

    def _state(self) -> list[torch.Tensor]:
        return [*self._trainer.model.parameters(), *self._trainer.model.buffers()]

    # Shares that are computed again

    def _hand_over(self, chosen: Sequence[Recheck], samples: Mapping[int, Batch]) -> list[tuple[int, Batch]]:
        """Send the samples of own shares to the rank that computes them again; return what comes from another rank."""
        world = self._world
        mine = [(one.share, _copied(samples[one.share])) for one in chosen if one.owner == world.rank]
        distance = chosen[0].checker - chosen[0].owner
        to, source = (world.rank + distance) % world.size, (world.rank - distance) % world.size
        found: list[tuple[int, Batch]] = world.comm.sendrecv(mine, to, source=source)
        return found

    def _recompute(self, share: int, given: Batch, seed: int) -> str:
        """Return the hash of the gradients of a share, by the weights as they are."""
        return self._sums.digest_of_share(self._trainer.recompute(share, *given, seed))

    def _vote(
        self,
        recheck: Recheck,
        ranks: Sequence[RankHashes],
        before: Sequence[torch.Tensor],
        samples: Mapping[int, Batch],
        seed: int,
    ) -> tuple[list[int], list[int]]:
        """Return the ranks whose gradient of a share is wrong, and those that agree on another: a third rank computes
        it, or where there is none both again. Weights are then those from before the step. Collective."""
        world, (share, owner, checker) = self._world, recheck
        with torch.no_grad():
            for tensor, old in zip(self._state(), before, strict=True):
                tensor.copy_(old)
        given = world.call_on_root(lambda: _copied(samples[share]), root=owner)
        judges = [rank for rank in range(world.size) if rank not in (owner, checker)][:1] or sorted({owner, checker})
        votes = world.all_gather_object(self._recompute(share, given, seed) if world.rank in judges else "")
        for judge in judges:  # of two ranks, one that computes the other's first result now was wrong
            if votes[judge] == ranks[checker].again[share] and judge != checker:
                return [owner], sorted({checker, judge} - {owner})
            if votes[judge] == ranks[owner].gradients[share] and judge != owner:
                return [checker], sorted({owner, judge} - {checker})
        return sorted({owner, checker}), []

    # Judgement

    def _findings(
        self,
        ranks: Sequence[RankHashes],
        chosen: Sequence[Recheck],
        vote: Callable[[Recheck], tuple[list[int], list[int]]],
    ) -> Iterator[tuple[list[int], str, int | None]]:
        """Yield ranks, what is wrong with them, and in which share: the same on all ranks."""
        others = "differ from those of the other ranks"
        if changed := [rank for rank, one in enumerate(ranks) if one.changed]:
            yield changed, "the weights have changed in memory since the step before", None
        if wrong := minority([one.before for one in ranks]):
            yield wrong, f"the weights before the step {others}", None
        for one in chosen:
            if ranks[one.owner].gradients[one.share] != ranks[one.checker].again[one.share]:
                wrong, agree = vote(one)
                by = f"the one that {names_of(agree)} computed" if agree else "each other"
                yield wrong, f"gradients from the same samples and weights differ from {by}", one.share
        if wrong := minority([one.exponents for one in ranks]):
            yield wrong, f"the exponents of the sum {others}", None
        for sent in [total(one.sent for one in ranks)] if chosen else ():
            own = [slice(rank, rank + 1) if self._shards else slice(None) for rank in range(len(ranks))]
            if wrong := [rank for rank, at in enumerate(own) if ranks[rank].received[at] != sent[at]]:
                yield wrong, "the received sum of gradients differs from the sum of what the ranks have sent", None
        if wrong := minority([one.after for one in ranks]):
            yield wrong, f"the weights after the step {others}", None

    def _in_words(self, ranks: Sequence[int], what: str, share: int | None) -> str:
        """Return a finding in words, with the remedy. Collective."""
        hosts = self._world.all_gather_object(socket.gethostname())
        on = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
        remedy = f"processor, memory or network of {on} are at fault: go on without, by unisono train --resume RUN"
        if len(ranks) > 1 and 2 * len(ranks) >= self._world.size:
            remedy = "no majority says who is wrong: go on with 3 ranks or more, by unisono train --resume RUN"
        return f"{'' if share is None else f'share {share}, '}{names_of(ranks)}: {what}; {remedy}"

    def _hashes(self, step: int, ranks: Sequence[RankHashes]) -> StepHashes:
        """Return the hashes of all ranks as a line of a chain; an empty share has none."""
        of_ranks = [one.samples for one in ranks], [one.gradients for one in ranks]
        joint = [{share: one for found in several for share, one in found.items()} for several in of_ranks]
        samples, gradients = ([found.get(share, "") for share in range(self._virtual.count)] for found in joint)
        own = sum(one.received[rank] for rank, one in enumerate(ranks)) % MODULUS  # each rank's own chunk
        return StepHashes(step, samples, gradients, f"{own:016x}", ranks[0].after)


def minority(values: Sequence[Hashable]) -> list[int]:
    """Return the ranks whose value is not that of most: all ranks where no value has a majority.

    >>> minority([7, 7, 5]), minority([7, 5]), minority([7, 7])
    ([2], [0, 1], [])
    """
    most, count = Counter(values).most_common(1)[0]
    return [rank for rank, value in enumerate(values) if value != most or 2 * count <= len(values)]


def _copied(given: Batch) -> Batch:
    """Return copies of tensors that are sent: of a part the whole would be."""
    return given[0].clone(), given[1].clone()

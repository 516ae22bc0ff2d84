"""Audit of a run with virtual ranks while it goes on: hashes of each step, shares that a second rank computes again.

    rank 0   shares 0 1         computes 3 again            hash of 0, 1 and 3 ┐
    rank 1   shares 2 3         computes 5 again            hash of 2, 3 and 5 ┼─ one small allreduce ─ same on all
    rank 2   shares 4 5         computes 0 again            hash of 4, 5 and 0 ┘

found                            compared                                              names
a weight that has changed        checksums of all ranks' weights, before and after     the rank without majority
a wrong gradient of a share      that of a second rank, from the same samples          owner or second: a third decides
a wrong message of the sum       checksums of integers sent and received: linear       the rank that has received it

`fraction` is that of all shares: each rank computes as many again, those of one other rank, and which follows from the
seed and the step. A share's random numbers and buffers are its own (`reducer/virtual_ranks.py`). Gradients, weights and
sums have the checksum of `transports/exact.py`, which does not depend on buckets or shards, and takes a tenth of a
nanosecond for a number: so a step that is checked costs little more than the shares. What a chain shows to others,
samples and weights, has a cryptographic hash as well.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

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
from unisono.transports.exact import MODULUS, ExactSums, Gradients, Terms, checksum

STEPS_DRAWN = 1 << 10
"""Steps whose random numbers are drawn at once."""


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
    chance, rechecks = _chances(seed, step // STEPS_DRAWN)[step % STEPS_DRAWN], list[Recheck]()
    if int(fraction * -(-shares // ranks) + chance) == 0:
        return rechecks
    rng = np.random.default_rng((seed, step))
    distance = int(rng.integers(1, ranks)) if ranks > 1 else 0
    for owner in range(ranks):
        first, last = bounds(shares, ranks, owner)
        count = min(last - first, int(fraction * (last - first) + chance))
        chosen = rng.permutation(last - first)[:count] if count else ()
        rechecks += [Recheck(first + int(offset), owner, (owner + distance) % ranks) for offset in sorted(chosen)]
    return rechecks


@lru_cache(maxsize=1)
def _chances(seed: int, part: int) -> list[float]:
    """Return a random number of each step in a part of a run: a generator takes longer to make than to draw from."""
    chances: list[float] = np.random.default_rng((seed, part, STEPS_DRAWN)).random(STEPS_DRAWN).tolist()
    return chances


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    hasher = blake2b(digest_size=DIGEST_BYTES)
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        hasher.update(b"|")
    return hasher.hexdigest()


@dataclass
class RankHashes:
    """Hashes of a step on one rank. Those that are integers are checksums."""

    before: int = 0
    """Weights before a step of which shares are computed again."""
    changed: bool = False
    """True where those are not the weights that the rank itself had after the step before."""
    after: int = 0
    samples: dict[int, str] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    """Gradients of the rank's own shares: of those that are computed again, or for a chain of all."""
    again: dict[int, int] = field(default_factory=dict)
    """Gradients of another rank's shares."""
    sent: Sequence[int] = ()
    """Integers that the rank has sent: of the buckets, or of each rank's shard of them."""
    received: int = 0
    """Sum of the integers in the rank's buckets, or in its shard."""
    exponents: int = 0


class HashedSums(ExactSums):
    """Exact sums whose terms, integers and results are hashed on their way."""

    def __init__(self, shares: int, memory: BucketMemory, shards: int) -> None:
        """Hash sums of which each rank receives all, or one of several `shards`."""
        super().__init__(shares, memory.sums, memory.pieces, memory.in_order)
        self._memory, self._shards = memory, shards
        self.begin(None)

    def begin(self, shares: Sequence[int] | None, hashed: Collection[int] = (), for_chain: bool = False) -> None:
        """Begin a step with gradients of this rank's `shares`, in the order of their passes, of which some are
        `hashed`; what is sent and received is, too: `for_chain`, so that it does not depend on buckets. None: nothing
        is."""
        self._shares, self._hashed, self._for_chain = shares, hashed, for_chain
        self._packed, self._received = dict[int, tuple[dict[int, int], list[int], int]](), dict[int, int]()

    def pack(self, key: int, terms: Terms) -> None:
        super().pack(key, terms)  # first: a bit that was flipped before is in the sum, and is seen here
        if self._shares is None:
            return
        gradients = {
            share: sum(
                checksum(words(flat[part]), parameter, part.start * flat.itemsize // 4)
                for parameter, _, part in self._memory.pieces(key)
                if (gradient := gradients[parameter]) is not None
                for flat in [self._memory.in_order(gradient, parameter)]
            )
            for share, (_, gradients) in zip(self._shares, terms, strict=True)
            if share in self._hashed
        }
        length = len(self.integers(key))
        sent = [self._checksum_of_sums(key, *bounds(length, self._shards, shard)) for shard in range(self._shards)]
        self._packed[key] = gradients, sent, checksum(self.maxima(key), key, 0)

    def decode(self, key: int, start: int, stop: int) -> None:
        if self._shares is not None:
            self._received[key] = self._checksum_of_sums(key, start, stop)
        super().decode(key, start, stop)

    def checksum_of_share(self, gradients: Gradients) -> int:
        made = ((parameter, gradient) for parameter, gradient in gradients.items() if gradient is not None)
        flats = ((parameter, words(self._memory.in_order(gradient, parameter))) for parameter, gradient in made)
        return sum(checksum(flat, parameter, 0) for parameter, flat in flats) % MODULUS

    def end(self, hashes: RankHashes) -> None:
        gradients, sent, exponents = zip(*self._packed.values(), strict=True)
        hashes.gradients = {share: sum(of[share] for of in gradients) % MODULUS for share in self._hashed}
        hashes.sent, hashes.exponents = total(sent), sum(exponents)
        hashes.received = sum(self._received.values()) % MODULUS

    def _checksum_of_sums(self, key: int, start: int, stop: int) -> int:
        """Return the checksum of the integers in elements [start, stop) of a bucket."""
        integers, summed = self.integers(key), 0
        if not self._for_chain:
            return checksum(integers[start:stop], key, start)
        for parameter, here, part in self._memory.pieces(key):
            begin, end = max(start, here.start), min(stop, here.stop)
            if begin < end:
                summed += checksum(integers[begin:end], parameter, part.start + begin - here.start)
        return summed


def total(several: Iterable[Sequence[int]]) -> list[int]:
    """Return the sums of checksums, element by element.

    >>> total([[1, 2], [3, MODULUS - 1]])
    [4, 1]
    """
    return [sum(column) % MODULUS for column in zip(*several, strict=True)]


def words(flat: torch.Tensor) -> torch.Tensor:
    """Return the memory of numbers, or a copy of a device's, as integers of 4 bytes; as bytes, of smaller numbers."""
    return flat.cpu().resolve_neg().view(torch.int8 if flat.itemsize < 4 else torch.int32)


def _packed(given: Batch) -> list[Any]:
    """Return copies of tensors in a form that is sent: pickled tensors take longer than their messages."""
    copies = [tensor.cpu().clone() for tensor in given]  # of a part not the whole, without gaps
    flat = [copy.as_strided((copy.numel(),), (1,)).view(torch.uint8).numpy() for copy in copies]
    return [(copy.dtype, copy.shape, copy.stride(), content) for copy, content in zip(copies, flat, strict=True)]


def _unpacked(packed: list[Any]) -> Batch:
    """Return the tensors, in the same order of memory, and as aligned as any other."""
    flat = ((torch.from_numpy(content).view(dtype).clone(), *place) for dtype, *place, content in packed)
    inputs, labels = (tensor.as_strided(shape, stride) for tensor, shape, stride in flat)
    return inputs, labels


@dataclass
class AuditedStep:
    """Step that is checked or recorded, on one rank."""

    number: int
    seed: int
    rechecks: Sequence[Recheck]
    samples: Mapping[int, Batch]
    """Those of each of the rank's shares that has any."""
    before: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Copy of the weights and buffers before a step of which shares are computed again."""


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
        self._parameters = [*trainer.model.parameters()]  # once: a model takes long to list them
        self._seed, self._fraction, self._record = seed, fraction, record
        self._shards = self._world.size if trainer.reducer.traits.state is RankState.SHARDED else 1
        programs.exact = self._sums = HashedSums(self._virtual.count, memory, self._shards)
        self._last = -1, 0  # the last step that was hashed, and the checksum of the weights that it left
        self.compared = 0
        """Number of shares that were computed again so far, on all ranks."""

    def weights(self) -> str:
        """Return the hash of this rank's weights and floating-point buffers, once the last step has ended."""
        return digest_of(self._state())

    def step(
        self, step: int, seed: int, numbers: Numbers, inputs: torch.Tensor, labels: torch.Tensor
    ) -> float | torch.Tensor:
        """Train as `Trainer.step`, on a batch of the samples `numbers`, in step number `step`. Raises AuditError on all
        ranks where one has computed or received other bits than it should."""
        batch_size = len(numbers)
        cuts = [batch_size * share // self._virtual.count for share in range(self._virtual.count + 1)]
        chosen = choose_rechecks(self._seed, step, self._fraction, self._virtual.count, self._world.size)
        rechecks = [recheck for recheck in chosen if cuts[recheck.share] < cuts[recheck.share + 1]]
        if not rechecks and self._record is None:
            return self._trainer.step(inputs, labels, batch_size, seed)
        begin = cuts[self._virtual.shares.start]
        rows = {share: slice(cuts[share] - begin, cuts[share + 1] - begin) for share in self._virtual.shares}
        samples = {share: (inputs[piece], labels[piece]) for share, piece in rows.items() if piece.start < piece.stop}
        audited, hashes = AuditedStep(step, seed, rechecks, samples), RankHashes()
        if rechecks:
            self._recheck(audited, hashes)
        if self._record is not None:
            for share, given in samples.items():
                keys = torch.from_numpy(np.ascontiguousarray(numbers[cuts[share] : cuts[share + 1]]))
                hashes.samples[share] = digest_of([keys, *given])
        shares = [*samples]
        hashed = shares if self._record else {recheck.share for recheck in rechecks}.intersection(shares)
        self._sums.begin(shares[::-1], hashed, self._record is not None)
        try:
            loss = self._trainer.step(inputs, labels, batch_size, seed)
            hashes.after = self._copied()[1]
            self._sums.end(hashes)
        finally:
            self._sums.begin(None)
        self._last = step, hashes.after
        ranks = self._world.all_gather_object(hashes)
        self._judge(audited, ranks)
        self.compared += len(rechecks)
        if self._record is not None and self._world.rank == 0:
            self._record(self._line(step, ranks))
        return loss

    def _state(self) -> list[torch.Tensor]:
        """Return the weights and floating-point buffers, once the last step has ended."""
        self._trainer.wait()
        self._trainer.reducer.runner.wait_for_buffers()
        tensors = *self._parameters, *self._trainer.model.buffers()
        return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]

    def _copied(self) -> tuple[torch.Tensor, int]:
        """Return a copy of them, in one memory, and its checksum."""
        with torch.no_grad():
            copy = torch.cat([tensor.reshape(-1) for tensor in self._state()])
        return copy, checksum(words(copy), 0, 0)

    def _recheck(self, audited: AuditedStep, hashes: RankHashes) -> None:
        """Hash the weights, and compute shares of another rank, whose samples it sends, as this one does to a third."""
        audited.before, hashes.before = self._copied()
        hashes.changed = self._last[0] == audited.number - 1 and self._last[1] != hashes.before
        world, rank, first = self._world, self._world.rank, audited.rechecks[0]
        given = [(share, _packed(audited.samples[share])) for share, owner, _ in audited.rechecks if owner == rank]
        distance = first.checker - first.owner
        to, source = (rank + distance) % world.size, (rank - distance) % world.size
        for share, content in world.comm.sendrecv(given, to, source=source):
            hashes.again[share] = self._recompute(share, content, audited.seed)

    def _recompute(self, share: int, content: list[Any], seed: int) -> int:
        """Return the checksum of the gradients of a share, by the weights as they are."""
        return self._sums.checksum_of_share(self._trainer.recompute(share, *_unpacked(content), seed))

    def _judge(self, audited: AuditedStep, ranks: Sequence[RankHashes]) -> None:
        """Raise AuditError on all ranks for what they find first in their hashes. Collective."""
        for wrong, what, share in self._findings(audited, ranks):
            hosts = self._world.all_gather_object(socket.gethostname())
            on = ", ".join(dict.fromkeys(hosts[rank] for rank in wrong))
            remedy = f"processor, memory or network of {on} are at fault: go on without, by unisono train --resume RUN"
            if len(wrong) > 1 and 2 * len(wrong) >= self._world.size:
                remedy = "no majority says who is wrong: go on with 3 ranks or more, by unisono train --resume RUN"
            which = "" if share is None else f"share {share}, "
            raise AuditError(f"step {audited.number}, {which}{names_of(wrong)}: {what}; {remedy}")

    def _findings(
        self, audited: AuditedStep, ranks: Sequence[RankHashes]
    ) -> Iterator[tuple[list[int], str, int | None]]:
        """Yield ranks, what is wrong with them, and in which share: the same on all ranks."""
        others = "differ from those of the other ranks"
        if changed := [rank for rank, hashes in enumerate(ranks) if hashes.changed]:
            yield changed, "the weights have changed in memory since the step before", None
        if wrong := minority([hashes.before for hashes in ranks]):
            yield wrong, f"the weights before the step {others}", None
        for recheck in audited.rechecks:
            if ranks[recheck.owner].gradients[recheck.share] != ranks[recheck.checker].again[recheck.share]:
                wrong, agree = self._vote(audited, recheck, ranks)
                by = f"the one that {names_of(agree)} computed" if agree else "each other"
                yield wrong, f"gradients from the same samples and weights differ from {by}", recheck.share
        if wrong := minority([hashes.exponents for hashes in ranks]):
            yield wrong, f"the exponents of the sum {others}", None
        sent = total(hashes.sent for hashes in ranks)
        if wrong := [rank for rank, hashes in enumerate(ranks) if hashes.received != sent[rank % self._shards]]:
            yield wrong, "the received sum of gradients differs from the sum of what the ranks have sent", None
        if wrong := minority([hashes.after for hashes in ranks]):
            yield wrong, f"the weights after the step {others}", None

    def _vote(self, audited: AuditedStep, recheck: Recheck, ranks: Sequence[RankHashes]) -> tuple[list[int], list[int]]:
        """Return the ranks whose gradient of a share is wrong, and those that agree on another: a third rank computes
        it, or where there is none both again. Weights are then those from before the step. Collective."""
        world, (share, owner, checker) = self._world, recheck
        state = self._state()
        with torch.no_grad():
            before = audited.before.split_with_sizes([tensor.numel() for tensor in state])
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old.view_as(tensor))
        given = world.call_on_root(lambda: _packed(audited.samples[share]), root=owner)
        judges = [rank for rank in range(world.size) if rank not in (owner, checker)][:1] or sorted({owner, checker})
        votes = world.all_gather_object(self._recompute(share, given, audited.seed) if world.rank in judges else None)
        for judge in judges:  # of two ranks, one that computes the other's first result now was wrong
            if votes[judge] == ranks[checker].again[share] and judge != checker:
                return [owner], sorted({checker, judge} - {owner})
            if votes[judge] == ranks[owner].gradients[share] and judge != owner:
                return [checker], sorted({owner, judge} - {checker})
        return sorted({owner, checker}), []

    def _line(self, step: int, ranks: Sequence[RankHashes]) -> StepHashes:
        """Return the hashes of all ranks and of this one's weights as a line of a chain; an empty share has none."""
        samples, gradients = [""] * self._virtual.count, [""] * self._virtual.count
        for hashes in ranks:
            for share, digest in hashes.samples.items():
                samples[share], gradients[share] = digest, f"{hashes.gradients[share]:016x}"
        received = sum(hashes.received for hashes in ranks[: self._shards]) % MODULUS
        return StepHashes(step, samples, gradients, f"{received:016x}", self.weights())


def minority(values: Sequence[Hashable]) -> list[int]:
    """Return the ranks whose value is not that of most: all ranks where no value has a majority.

    >>> minority([7, 7, 5]), minority([7, 5]), minority([7, 7])
    ([2], [0, 1], [])
    """
    most, count = Counter(values).most_common(1)[0]
    return [rank for rank, value in enumerate(values) if value != most or 2 * count <= len(values)]

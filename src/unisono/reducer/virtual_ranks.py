"""Virtual ranks: V fixed shares of each batch, whose gradients are summed exactly. So weights have the same bits for
any number of ranks, which compute the shares one after another (`docs/exact_sums.md`).

    V = 8 on 3 ranks        share    samples of a batch of 64        order on rank 1: the lowest share last
    rank 0   shares 0 1       4      32 to 39, seed of share 4       forward, backward, its gradients are kept
    rank 1   shares 2 3 4     3      24 to 31, seed of share 3       forward, backward, its gradients are kept
    rank 2   shares 5 6 7     2      16 to 23, seed of share 2       forward, backward, whose program sums all of them

Before each share the buffers (running means) are those from before the step. Those of share 0 stay, which rank 0 has
computed last and sends to all ranks; without samples in it, those from before the step.

A rank keeps the gradients of its shares until a bucket's exponents are agreed: V / p times the memory of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from unisono.device import random_numbers_kept, seed_random_numbers
from unisono.errors import UsageError
from unisono.processor import HOST
from unisono.reducer.accumulation import Accumulation
from unisono.reducer.control import StepControl
from unisono.schedules.pieces import bounds
from unisono.transports.exact import Gradients

BufferCopies = Sequence[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]]
"""Buffers of a model, each with its module, its name there and a copy: a layer may assign another one."""

NONDETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")


@dataclass(eq=False)
class VirtualRanks:
    """Shares of `count` that one rank of `ranks` computes in each step, and their gradients until they are summed."""

    count: int
    rank: int
    ranks: int
    accumulation: Accumulation
    control: StepControl
    parameters: Sequence[torch.Tensor]
    kept: list[tuple[float, Gradients]] = field(default_factory=list)
    """Samples and gradients of the shares of this step that have samples, but the last."""
    samples: float = 0.0
    """Samples of the share whose pass runs."""
    batches: int = 0
    """Number of batches that have begun."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters; the host where there are none."""
        return self.parameters[0].device if self.parameters else torch.device(HOST)

    @property
    def shares(self) -> range:
        """Shares of this rank."""
        return range(*bounds(self.count, self.ranks, self.rank))

    def own_samples(self, whole: int) -> range:
        """Return the numbers of this rank's samples in a batch of `whole` samples of all ranks."""
        return range(whole * self.shares.start // self.count, whole * self.shares.stop // self.count)

    def passes(
        self,
        model: torch.nn.Module,
        tensors: tuple[torch.Tensor, ...],
        whole: int | None,
        seed: int | None,
        synchronize: Callable[[], None],
        changes: Callable[[], int] = lambda: 0,
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield each share of this rank's `tensors`, which are its part of `whole` samples; None: all shares are equal.

        A backward pass follows each. The last one sums all of them; where that share is empty `synchronize` does so.
        `seed` is that of this step's random numbers, by default the number of sums before. A batch that is left out,
        by an exception or `break` on all ranks, leaves no trace in the buffers. Raises UsageError for samples that do
        not fit, on all ranks where a share of one had no backward pass, and where `changes`, the number of changes of
        weights by the program, grows between shares.
        """
        seed = self.control.averages if seed is None else seed
        self.batches = batch = self.batches + 1
        cuts = self._cuts(tensors, whole)
        lacks_first = whole is not None and whole < self.count  # share 0 is empty
        buffers, averages = copies_of_buffers(model), self.control.averages
        self.kept, before, skipped = [], changes(), False
        try:
            with random_numbers_kept(self.device), _deterministic():
                for share, (first, last) in reversed([*zip(self.shares, cuts, strict=True)]):
                    self._begin_share(seed, share, buffers)
                    self.samples, sums = float(last - first), share == self.shares.start
                    self.accumulation.averages = sums
                    if sums:
                        self.control.samples = float(cuts[-1][1] - cuts[0][0])
                    if first < last and not skipped:
                        yield tuple(tensor[first:last].clone() for tensor in tensors)  # as aligned as in any other run
                    if sums and self.control.averages == averages:
                        if first < last or skipped:
                            self.control.request("skip")
                        synchronize()
                    if first < last and not sums:  # without a pass, `.grad` may be what the last step's update reads
                        self.kept.append((self.samples, self._take_gradients()))
                        skipped = skipped or not any(each is not None for each in self.kept[-1][1].values())
                    if not sums:
                        self._check_unchanged(changes() - before)
                if lacks_first:
                    restore_buffers(buffers)
        except BaseException:
            summed = self.control.averages > averages and not self.control.failed  # the program may leave the loop then
            if not summed and self.batches == batch:  # a generator that the program has kept ends late
                restore_buffers(buffers)
            raise
        finally:
            self.accumulation.averages, self.kept = True, []

    def recompute(
        self,
        model: torch.nn.Module,
        tensors: tuple[torch.Tensor, ...],
        share: int,
        seed: int,
        run: Callable[..., object],
    ) -> Gradients:
        """Return the gradients of a share of any rank, whose pass on its `tensors` `run` makes. Nothing of it stays."""
        buffers = copies_of_buffers(model)
        try:
            with self.accumulation.no_sync(), random_numbers_kept(self.device), _deterministic():
                self._begin_share(seed, share)
                run(*tensors)
            return self._take_gradients()
        finally:
            restore_buffers(buffers)

    def _cuts(self, tensors: tuple[torch.Tensor, ...], whole: int | None) -> list[tuple[int, int]]:
        """Return the first row of each share in this rank's tensors, and the one after its last."""
        length, shares = len(tensors[0]), len(self.shares)
        if len(lengths := {len(tensor) for tensor in tensors}) > 1:
            raise UsageError(
                f"rank {self.rank}: tensors of {' and '.join(map(str, sorted(lengths)))} samples: give the rows of "
                "unisono.own_samples of each"
            )
        if whole is None and length % shares:
            raise UsageError(
                f"rank {self.rank}: {length} samples for {shares} virtual ranks, which have equally many: give a "
                "multiple, or whole=..., the samples of all ranks"
            )
        total = length // shares * self.count if whole is None else whole
        begin = self.own_samples(total)
        if len(begin) != length:
            raise UsageError(
                f"rank {self.rank}: {length} samples, but its virtual ranks have samples {begin.start} to "
                f"{begin.stop - 1} of {total}: give those of unisono.own_samples"
            )
        return list(pairwise(total * share // self.count - begin.start for share in (*self.shares, self.shares.stop)))

    def _check_unchanged(self, changes: int) -> None:
        """Raise UsageError where there were changes of weights since the batch has begun."""
        if changes:
            raise UsageError(
                f"rank {self.rank}: weights were changed in place between two shares of a batch: call optimizer.step() "
                "behind the loop over unisono.shares"
            )

    def _begin_share(self, seed: int, share: int, buffers: BufferCopies = ()) -> None:
        """Begin a share with its own random numbers, and with the buffers from before the step."""
        restore_buffers(buffers)
        seed_random_numbers(self.device, seed_of_share(seed, share))

    def _take_gradients(self) -> Gradients:
        """Return the gradients of the pass that has ended, and leave none in the parameters."""
        gradients = {index: parameter.grad for index, parameter in enumerate(self.parameters)}
        for parameter in self.parameters:
            parameter.grad = None
        self.accumulation.accumulated = False
        return gradients


def seed_of_share(seed: int, share: int) -> int:
    """Return the seed of the random numbers of a share, in a step with a seed."""
    return int(np.random.SeedSequence((seed, share)).generate_state(1, np.uint64)[0] >> 1)


def copies_of_buffers(model: torch.nn.Module) -> BufferCopies:
    named = ((module, *item) for module in model.modules() for item in module._buffers.items())
    return [(module, name, buffer, buffer.clone()) for module, name, buffer in named if buffer is not None]


def restore_buffers(buffers: BufferCopies) -> None:
    with torch.no_grad():
        for module, name, buffer, before in buffers:
            if module._buffers[name] is not buffer:
                module._buffers[name] = buffer
            buffer.copy_(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Let PyTorch refuse operators whose bits differ from call to call."""
    filling: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills, filling.fill_uninitialized_memory = filling.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        filling.fill_uninitialized_memory = fills


@contextmanager
def name_nondeterministic() -> Iterator[None]:
    """Raise PyTorch's error about such an operator as UsageError, which names it."""
    try:
        yield
    except RuntimeError as error:
        if (match := NONDETERMINISTIC.search(str(error))) is None:
            raise
        raise UsageError(
            f"virtual ranks promise the same bits in each run, and {match[1]} is not deterministic: replace it in the "
            "model, or train without virtual_ranks"
        ) from error

"""Loader of a pack's batches for a training loop of your own, on any number of ranks.

    loader = Loader("packs/cifar10", world, batch=128, size=32)
    for epoch in range(loader.epoch, 10):
        loader.set_epoch(epoch)
        for inputs, labels in loader:          this rank's share of each batch
            ...

10 samples, batches of 4, stopped after the second step of epoch 0 on 2 ranks, resumed on 1 (`order.py`):

    epoch 0    7 2 | 0 5                 rank 0
               9 4 | 1 8                 rank 1
    state      {"epoch": 0, "step": 2, ...}
    resumed              3 6             rank 0: the rest of the epoch, each sample once
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from unisono.data.batch_dataset import BatchDataset
from unisono.data.loading import Batch
from unisono.data.order import steps_of
from unisono.data.requirements import check_installed
from unisono.data.shuffle_options import parse_shuffle
from unisono.errors import UsageError
from unisono.world import World

DEFAULTS = {"shuffle": "epoch"}
"""Settings that states of older releases do not have."""

AT_LEAST_ONE = ("groups", "buffer_megabytes", "windows", "threads")
"""Arguments that must be 1 at least; other numbers may be 0."""


class Loader:
    """Batches of a pack, which all ranks iterate together; each step is `batch` samples over all ranks."""

    def __init__(
        self,
        pack: str | Path,
        world: World,
        batch: int,
        *,
        seed: int = 0,
        storage: str = "partitioned",
        groups: int = 1,
        shuffle: str = "epoch",
        buffer_megabytes: int = 1024,
        cache_megabytes: int = 0,
        size: int = 0,
        augment: str = "none",
        windows: int = 8,
        context: int = 15,
        threads: int = 1,
    ) -> None:
        """Read the pack, which has train/ and test/, into memory, or look at what is streamed. Collective.

        Arguments are the keys of `[data]` in a recipe; `seed` is that of the order and of random changes. Raises
        PackError on every rank if the pack cannot be read, does not fit, or does not take these options; UsageError
        if some ranks would have no samples or a number is out of range, RecipeError for another `shuffle`.
        """
        check_installed()
        from unisono.data.kinds.kind import TransformOptions  # noqa: PLC0415  of the extra `data`
        from unisono.data.packed_feed import FeedOptions, PackedFeed  # noqa: PLC0415
        from unisono.data.storage.storage import StorageOptions  # noqa: PLC0415

        if batch < world.size:
            raise UsageError(
                f"{world.size} ranks share batches of {batch} samples, so some would have none; start at most {batch} "
                "ranks, or raise batch"
            )
        check_numbers(
            seed=seed,
            groups=groups,
            buffer_megabytes=buffer_megabytes,
            cache_megabytes=cache_megabytes,
            size=size,
            windows=windows,
            context=context,
            threads=threads,
        )
        if groups > 1 and storage != "partitioned":
            raise UsageError(f'groups = {groups}, but storage = "{storage}": only "partitioned" takes groups; omit it')
        place = StorageOptions(storage, groups, buffer_megabytes << 20, cache_megabytes << 20)
        interval, transform = parse_shuffle(shuffle), TransformOptions(size, augment, windows, context)
        self._feed = PackedFeed(FeedOptions(Path(pack), place, transform, threads, shuffle=interval), world, seed)
        self._ranks, self._seed, self._shuffle = world.size, seed, interval
        self._running: Generator[Batch] | None = None
        self.batch = batch
        """Samples of a step, over all ranks."""
        self.epoch, self.step = 0, 0
        """Epoch, and steps of it that have been handed out."""
        self.samples, self.test_samples = self._feed.samples, self._feed.test_samples
        """Samples of the training set and of the test set, over all ranks."""
        self.classes, self.channels = self._feed.classes, self._feed.channels
        """Classes, and input channels of the network."""
        self.notes = self._feed.notes
        """Lines on the storage and the shuffle: a choice ("auto"), and samples that cross switches."""

    def __len__(self) -> int:
        """Return the number of steps of an epoch. The last may be short; the share of some ranks may then be empty."""
        return steps_of(self.samples, self.batch)

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's inputs and labels of the epoch's steps, from `step` on. Collective.

        A batch's memory is reused after the next batch. After the last step, the next epoch begins. Raises UsageError
        if the loader was meanwhile iterated again, or moved to another step.
        """
        self._stop()
        if self.step >= len(self):  # the loop before counted its batches, and never asked for one more
            self._move(self.epoch + 1, 0)
        running = self._running = self._feed.epoch(self.epoch, self.batch, self.step)
        for batch in running:
            self.step += 1
            yield batch
            if self._running is not running:
                raise UsageError("the loader was iterated anew or moved in this loop; one loop at a time")
        self.epoch, self.step, self._running = self.epoch + 1, 0, None

    def dataset(self, names: tuple[str, str] | None = None) -> BatchDataset:
        """Return an IterableDataset of copied, full batches, for the loops of other libraries.

        With `names`, a batch is a dict of inputs and labels under these names. Raises UsageError if the number of ranks
        does not divide the batch.
        """
        return BatchDataset(self, self._ranks, names)

    def test_batches(self) -> Iterator[Batch]:
        """Yield this rank's share of the test set, without random changes."""
        return self._feed.test_batches(self.batch)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch; the current one continues at its step, as after `load_state_dict`.

        Raises UsageError for a negative number.
        """
        check_numbers(epoch=epoch)
        if epoch != self.epoch:
            self._move(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on all ranks. The batch that was handed out last counts as used."""
        return {"epoch": self.epoch, "step": self.step, **self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the position of `state`, which may be that of another number of ranks.

        Raises UsageError if it is of other data, another batch, seed or shuffle: samples would be left out; or if it is
        no state of a loader.
        """
        if missing := [name for name in ("epoch", "step") if name not in state]:
            raise UsageError(f"the state has no {missing[0]}, but {', '.join(state) or 'nothing'}: give a state_dict()")
        for name, own in self._settings().items():
            if state.get(name, DEFAULTS.get(name)) != own:
                raise UsageError(
                    f"the state has {name} = {state.get(name)!r}, but this loader {own!r}; make the loader as it was, "
                    f"or set_epoch({state['epoch'] + 1}) without the state"
                )
        if not 0 <= state["step"] <= len(self):
            raise UsageError(f"the state has step = {state['step']}, but an epoch {len(self)} steps")
        done = state["step"] == len(self)
        self._move(state["epoch"] + done, 0 if done else state["step"])

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        self._stop()
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # the other ranks may never come to free the memory together
            self._feed.stop_threads()

    def _settings(self) -> dict[str, Any]:
        shuffle = str(self._shuffle)
        return {"batch": self.batch, "seed": self._seed, "shuffle": shuffle, "data": self._feed.fingerprint}

    def _move(self, epoch: int, step: int) -> None:
        self._stop()
        self.epoch, self.step = epoch, step

    def _stop(self) -> None:
        """Stop the batches that are being prepared: a shuffle would move the samples that they read."""
        if self._running is not None:
            self._running.close()
            self._running = None


def check_numbers(**given: int) -> None:
    """Raise UsageError for arguments that are too small."""
    for name, value in given.items():
        if value < (least := int(name in AT_LEAST_ONE)):
            raise UsageError(f"{name} = {value}; it is {least} at least")

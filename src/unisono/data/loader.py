"""Loader of a pack's batches for a training loop of your own, on any number of ranks (`docs/data.md` shows one).

10 samples, batches of 4, stopped after the second step of epoch 0 on 2 ranks, resumed on 1 (`order.py`):

    epoch 0    7 2 | 0 5                 rank 0
               9 4 | 1 8                 rank 1
    state      {"epoch": 0, "step": 2, ...}
    resumed              3 6             rank 0: the rest of the epoch, each sample once

`Loader.dataset` is for the loops of other libraries: an IterableDataset with a length and a state.

    Loader          0 1 2 3 │ 4 5 6 7 │ 8 9     memory of a batch is reused; the last step may be short
    BatchDataset    0 1 2 3 │ 4 5 6 7           each batch has its own memory; only full batches

`docs/how_to/feed_a_framework.md` has the reasons. Bytes copied: those of each batch, once. With `device`, batches
arrive there, in memory of their own (`loading.py`), and are not copied again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch.utils.data import IterableDataset, get_worker_info

from unisono.data.feed import is_same_data, packed_feed
from unisono.data.loading import Batch, Running, device_of_rank, to_device
from unisono.data.options import DataOptions
from unisono.data.order import parse_shuffle, steps_of
from unisono.device import is_on_host
from unisono.errors import UsageError
from unisono.processor import HOST
from unisono.tables import parse
from unisono.world import World


class Loader(Running):
    """Batches of a pack, which all ranks iterate together; each step is `batch` samples over all ranks."""

    def __init__(
        self,
        pack: str | Path,
        world: World,
        batch: int,
        *,
        seed: int = 0,
        device: torch.device | str = HOST,
        virtual_ranks: int = 0,
        **data: Any,
    ) -> None:
        """Read the pack, which has train/ and test/, into memory, or look at what is streamed. Collective.

        `data` has the keys of `[data]` in a recipe, the attributes of `DataOptions`: storage, size, augment and others;
        one thread decodes unless `threads` says otherwise. `seed` is that of the order and of random changes. Batches
        arrive on `device`: one of PyTorch's, or a name as in a recipe ("auto": an accelerator for each rank of a node).
        With the `virtual_ranks` of `unisono.parallel`, each rank has the samples of its shares.
        Raises PackError on every rank if the pack cannot be read, does not fit, or does not take these options;
        UsageError if some ranks would have no samples or no device, or a key or value is none of `[data]`, RecipeError
        for another `shuffle`.
        """
        virtual_ranks, batch = check_number("virtual_ranks", virtual_ranks), check_number("batch", batch, 1)
        if batch < max(world.size, virtual_ranks):
            named = f"{virtual_ranks} virtual" if virtual_ranks else f"{world.size}"
            raise UsageError(
                f"{named} ranks share batches of {batch} samples, so some would have none; start at most {batch} "
                "ranks, or raise batch"
            )
        if 0 < virtual_ranks < world.size:
            raise UsageError(
                f"virtual_ranks = {virtual_ranks}, but {world.size} ranks, so some would have no samples: start at "
                f"most {virtual_ranks} ranks, or raise it"
            )
        options = parse(DataOptions, {"threads": 1, **data, "pack": str(pack)}, "Loader", UsageError)
        seed = check_number("seed", seed, most=(1 << 64) - 1)
        check_number("threads", options.threads, 1)
        self.device = device_of_rank(device, world) if isinstance(device, str) else device
        """Device that batches arrive on."""
        self._feed = packed_feed(options, world, seed, device=self.device)
        self._feed.share_among(virtual_ranks)
        self._ranks = virtual_ranks or world.size
        self._settings = {
            "batch": batch,
            "seed": seed,
            "shuffle": str(parse_shuffle(options.shuffle)),
            "data": self._feed.fingerprint,
        }
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

        A batch's memory is reused after the next batch, but not on a device. After the last step, the next epoch
        begins. Raises UsageError if the loader was meanwhile iterated again, moved to another step, or closed.
        """
        self._check_open()
        self._stop()
        if self.step >= len(self):  # the loop before counted its batches, and never asked for one more
            self._move(self.epoch + 1, 0)
        running = self._running = to_device(self._feed.epoch(self.epoch, self.batch, self.step), self.device)
        for batch in running:
            self.step += 1
            yield batch
            self._check_open()
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
        self._check_open()
        return to_device(self._feed.test_batches(self.batch), self.device)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch; the current one continues at its step, as after `load_state_dict`.

        Raises UsageError for anything but a whole number from 0 on.
        """
        epoch = check_number("epoch", epoch)
        if epoch != self.epoch:
            self._move(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on all ranks. The batch that was handed out last counts as used."""
        return {"epoch": self.epoch, "step": self.step, **self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the position of `state`, which may be that of another number of ranks.

        Raises UsageError if it is of other data, another batch, seed or shuffle: samples would be left out; or if it is
        no state of a loader.
        """
        if missing := [name for name in ("epoch", "step") if name not in state]:
            raise UsageError(f"the state has no {missing[0]}, but {', '.join(state) or 'nothing'}: give a state_dict()")
        epoch, step = (check_number(f"the state's {name}", state[name]) for name in ("epoch", "step"))
        for name, setting in self._settings.items():
            given = state.get(name)
            if given != setting and not (name == "data" and is_same_data(str(given), str(setting))):
                raise UsageError(
                    f"the state has {name} = {given!r}, but this loader {setting!r}; make the loader as it was, "
                    f"or set_epoch({epoch + 1}) without the state"
                )
        if step > len(self):
            raise UsageError(f"the state has step = {step}, but an epoch {len(self)} steps")
        self._move(*((epoch + 1, 0) if step == len(self) else (epoch, step)))

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        self._closed = True
        self._stop()
        self._feed.close()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)
        self._closed = True
        self._feed.stop_threads()  # after an error the other ranks may never come to free the memory together

    def _move(self, epoch: int, step: int) -> None:
        self._stop()
        self.epoch, self.step = epoch, step


def check_number(name: str, value: SupportsIndex, least: int = 0, most: int | None = None) -> int:
    """Return a whole number, of any library, as an int. Raises UsageError for others, too small or too large ones."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} = {value!r}; it is a whole number, {least} at least") from None
    if number < least:
        raise UsageError(f"{name} = {number}; it is {least} at least")
    if most is not None and number > most:
        raise UsageError(f"{name} = {number}; it is {most} at most")
    return number


class BatchDataset(IterableDataset[Any]):
    """This rank's batches of a loader, which other libraries iterate; made by `Loader.dataset`."""

    def __init__(self, loader: Loader, ranks: int, names: tuple[str, str] | None = None) -> None:
        """Take the batches of `loader`, as (inputs, labels) or with `names` as a dict. Raises UsageError if the shares
        of `ranks` ranks would differ, or no batch is full."""
        if loader.batch % ranks:
            raise UsageError(
                f"{ranks} ranks share batches of {loader.batch} samples unevenly, but a dataset's batches are averaged "
                f"with equal weight; take a multiple of {ranks}, or iterate the loader and call unisono.add_samples"
            )
        if loader.batch > loader.samples:
            raise UsageError(
                f"batches of {loader.batch} samples from {loader.samples} leave no whole step; lower the batch"
            )
        self._loader, self._names = loader, names

    def __len__(self) -> int:
        """Return the number of full batches of an epoch."""
        return self._loader.samples // self._loader.batch

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the epoch from the loader's step on; the next epoch follows. Collective.

        Raises UsageError in a worker process of a DataLoader: a fork of a rank has no MPI.
        """
        if get_worker_info() is not None:
            raise UsageError(
                "a worker process of a DataLoader cannot read a pack in the memory of MPI ranks; set num_workers=0, "
                "and decode with Loader(..., threads=...)"
            )
        self._leave_ended_epoch()
        for inputs, labels in self._loader:
            if is_on_host(inputs):  # labels of texts lie in the memory of their inputs
                inputs, labels = inputs.clone(), labels.clone()  # noqa: PLW2901
            yield (inputs, labels) if self._names is None else dict(zip(self._names, (inputs, labels), strict=True))
            if self._loader.step >= len(self):
                break
        self._leave_ended_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch; the current one continues at its step."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader, alike on all ranks: the batch that was handed out last counts as used."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the position of `state`. Raises UsageError as `Loader.load_state_dict`."""
        self._loader.load_state_dict(state)
        self._leave_ended_epoch()

    def _leave_ended_epoch(self) -> None:
        """Begin the next epoch where no whole step is left: loops may count batches, and never ask for one more."""
        if self._loader.step >= len(self):
            self.set_epoch(self._loader.epoch + 1)

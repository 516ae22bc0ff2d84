"""Batches of a loader for the loops of other libraries: an IterableDataset with a length and a state.

    Loader          0 1 2 3 │ 4 5 6 7 │ 8 9     memory of a batch is reused; the last step may be short
    BatchDataset    0 1 2 3 │ 4 5 6 7           each batch has its own memory; only full batches

Such loops read batches ahead, collect several before a step (accumulation), and average ranks with equal weight: so
batches are copied, and all ranks have equally many samples in each. Bytes copied: those of each batch, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from unisono.errors import UsageError

if TYPE_CHECKING:
    from unisono.data.loader import Loader


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
            yield self._form(inputs.clone(), labels.clone())  # labels of texts lie in the memory of their inputs
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

    def _form(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        return (inputs, labels) if self._names is None else dict(zip(self._names, (inputs, labels), strict=True))

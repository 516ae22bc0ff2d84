"""Options of data: the table `[data]` of a recipe. Loaders, storages and transforms take it as it is.

Needs neither PyTorch nor MPI: recipes are checked without them.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.data.kinds import all_augments
from unisono.data.storage import AUTO, PARTITIONED, STORAGES
from unisono.errors import UsageError
from unisono.tables import choice, number

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class DataOptions:
    """The data set, and its form in memory and in batches."""

    name: str = "digits"
    """Data set that comes with Unisono; not used where `pack` is given."""
    pack: str = ""
    """Folder of a packed data set, with train/ and test/; empty: the data set `name`."""
    storage: str = choice(PARTITIONED, *STORAGES, AUTO)
    """Place of samples: "partitioned", a share in each rank; "replicated", a copy in each node, shared by its ranks;
    "streamed", read from the pack's files during training; "files", from the files that it was made from; "auto",
    chosen by the memory there is."""
    files: str = ""
    """Folder of the files that the pack was made from, as `unisono pack` took it; used if `storage` is "files"."""
    groups: int = number(1, at_least=1)
    """Copies of the pack over all ranks, one in each group of ranks; must be 1 unless `storage` is "partitioned"."""
    shuffle: str = "epoch"
    """Interval and scope of the shuffle: "epoch"; "every:N", every N epochs; "once"; the last two perhaps with
    ",parts:P": in between, samples stay in one of P parts of each batch."""
    buffer_megabytes: float = number(1024, at_least=1)
    """Size of the shuffle buffer over all ranks, if `storage` is "streamed". Two of them are in memory."""
    cache_megabytes: float = number(0, at_least=0)
    """Part of a pack that each node keeps in memory, if `storage` is "streamed"; the rest is read in each epoch."""
    size: int = number(0, at_least=0)
    """Height and width, in pixels, of the images that the network gets; 0: as raw images are."""
    windows: int = number(8, at_least=1)
    """Windows of an audio recording that the network gets, evenly spaced."""
    context: int = number(15, at_least=0)
    """Frames of 10 ms before the middle of each window, and as many after it."""
    augment: str = choice("none", *all_augments())
    """Random changes in training. Images: none, mirror, shift, scale, crop. Audio: none, shift, mask."""
    mean: str = choice("channel", "channel", "image")
    """Mean that is subtracted from images: "channel", that of each channel; "image", the training set's mean image."""
    threads: int = number(0, at_least=0, at_most=1024)
    """Threads that decode samples, in each rank; 0: the rank's fair share of the cores, at most 8."""

    def __post_init__(self) -> None:
        if self.groups > 1 and self.storage != PARTITIONED:
            raise UsageError(
                f'groups = {self.groups}, but storage = "{self.storage}": only "{PARTITIONED}" takes groups; leave '
                "groups away"
            )

    @property
    def buffer(self) -> int:
        """Bytes of the shuffle buffer over all ranks."""
        return int(self.buffer_megabytes * MEGABYTE)

    @property
    def cache(self) -> int:
        """Bytes of the cache of each node."""
        return int(self.cache_megabytes * MEGABYTE)

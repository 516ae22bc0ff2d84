"""Kinds of samples: image files, recordings, raw images, text. Each has a row here, and a file; images have
two more, for what needs Pillow and PyTorch.

    file ──encode──▶ bytes in a pack ── storage, shuffle ──▶ bytes ──transform──▶ network input
                            └──pixels──▶ mean and std of the pack's channels

Packs, storage, the shuffle and loading take samples of all kinds as bytes. The facts of a kind are known without
PyTorch and without the packages of the extra `data`, since recipes are checked without them: a function imports what it
needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from unisono.errors import PackError
from unisono.registry import Registry

if TYPE_CHECKING:
    import torch

    from unisono.data.options import DataOptions
    from unisono.data.order import CounterRNG
    from unisono.data.pack.index import Index
    from unisono.data.pack.packing import PackOptions

IMAGE, RAW, AUDIO, TEXT = "image", "raw", "audio", "text"
"""Names of kinds, for data sets whose format has only one."""

KINDS = Registry(
    "kind of sample",
    {
        IMAGE: "unisono.data.kinds.image:ImageKind",
        AUDIO: "unisono.data.kinds.audio:AudioKind",
        RAW: "unisono.data.kinds.image:RawKind",
        TEXT: "unisono.data.kinds.text:TextKind",
    },
)
"""Kinds of samples by name. Each is a class that inherits from `SampleKind`."""


@cache
def find_kind(name: str) -> SampleKind:
    """Return the kind of that name. Raises PackError, listing the names, for an unknown one."""
    kind: SampleKind = KINDS.load(name, PackError)()
    return kind


def kind_of_content(sample: bytes) -> str:
    """Return the name of the kind as whose files this one begins; IMAGE if there is none."""
    return next((name for name in KINDS if find_kind(name).is_signed(sample)), IMAGE)


def all_augments() -> tuple[str, ...]:
    """Return the augmentations of all kinds, each once."""
    return tuple(dict.fromkeys(augment for name in KINDS for augment in find_kind(name).augments))


Bytes = NDArray[np.uint8]


class SampleTransform(Protocol):
    """Transform from the bytes of samples to network inputs, used by one thread."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a converted sample in memory; the last dimension is the number of channels of the network."""

    def into(self, out: torch.Tensor, file: memoryview, random: CounterRNG | None) -> None:
        """Convert one sample into `out`, of that shape; without `random`, as in validation, and always if the kind has
        no augmentation. Raises DecodeError."""

    def batch(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a view of samples side by side, (samples, *shape), in the layout that the network takes."""


class SampleKind(ABC):
    """Kind of sample, without state."""

    plural: ClassVar[str]
    """Word for several samples, in messages."""
    column: ClassVar[str]
    """Column of a stripe that has the samples."""
    endings: ClassVar[tuple[str, ...]] = ()
    """Endings of file names, in lower case: ".jpg"; none for samples that are no files."""
    file_kind: ClassVar[str] = ""
    """Kind of the files that show such a sample, for predictions of files, if it is another kind."""
    class_in_name: ClassVar[bool] = False
    """True if files side by side in one folder can be a data set: their names begin with their class, `class_...`."""
    augments: ClassVar[tuple[str, ...]] = ("none",)
    """Augmentations, by which a recipe names them."""
    class_words: ClassVar[str] = "classes"
    """Word for the classes of its labels, in messages."""
    labels_are_tokens: ClassVar[bool] = False
    """True if inputs and labels are the tokens of a text, int64: runs are then measured by perplexity."""
    class_remedy: ClassVar[str] = "pack samples of the same classes"
    """Remedy where two packs have other classes, in messages."""

    def is_signed(self, sample: bytes) -> bool:  # noqa: ARG002  a default
        """Return True if a file begins as each of this kind does; False where files of this kind differ in that."""
        return False

    def encode(self, sample: bytes, options: PackOptions) -> bytes:  # noqa: ARG002  a default
        """Return the bytes to pack of a sample that is not empty. Raises DecodeError if it is broken or truncated."""
        return sample

    def is_packed_unchanged(self, sample: bytes, short_side: int = 0) -> bool:  # noqa: ARG002  a default
        """Return True if `encode` keeps a file that is whole, with this `short_side` in pixels, 0: whatever its size.
        Raises DecodeError for no such file.

        It takes much less time than `encode`.
        """
        return True

    @abstractmethod
    def transform(self, index: Index, options: DataOptions) -> Callable[[], SampleTransform]:
        """Return the function that makes the transform of a thread. Raises PackError if `options` do not fit."""

    def pixels(self, sample: Bytes, shape: tuple[int, ...] | None) -> Bytes | None:  # noqa: ARG002  a default
        """Return the values of a packed sample, (height, width, channels), for mean and std; None: none are measured.

        `shape` is that of the pack.
        """
        return None

    def labels_per_sample(self, shape: tuple[int, ...] | None) -> int:  # noqa: ARG002  a default
        """Return the labels that a sample has: 1, its class; `shape` is that of the pack."""
        return 1

    def bytes_per_label(self, classes: tuple[str, ...]) -> int | None:  # noqa: ARG002  a default
        """Return the bytes of text that each label stands for; None where they differ, and for classes."""
        return None

    def labels(self, memory: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # noqa: ARG002  a default
        """Return the labels of a batch, int64, given its converted samples and their labels in the pack's index."""
        return labels

    def is_grey(self, sample: Bytes) -> bool:  # noqa: ARG002  a default
        """Return True if a packed sample has one channel by its header; asked only if all measured ones have one."""
        return True


def make_transform(index: Index, options: DataOptions) -> Callable[[], SampleTransform]:
    """Return the function that makes the transform of a thread. Raises PackError if `options` does not fit the pack."""
    kind = find_kind(index.about.kind)
    if options.augment not in kind.augments:
        raise PackError(
            f"data.augment = {options.augment!r}, but {index.folder} holds {kind.plural}; the augmentations of these "
            f"are {', '.join(kind.augments)}"
        )
    return kind.transform(index, options)

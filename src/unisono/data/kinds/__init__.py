"""Kinds of samples: image files, recordings, raw images, text. Each kind has one file, and one row here.

A kind has the bytes that are packed (`encode`), the values that are measured (`pixels`), and the way from bytes to
network inputs (`transform`). Packs, storage, the shuffle and loading take samples of all kinds as bytes.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from unisono.errors import PackError
from unisono.registry import Registry

if TYPE_CHECKING:
    from unisono.data.kinds.kind import SampleKind

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
    found: SampleKind = KINDS.load(name, PackError)()
    return found


def current_name(name: str) -> str:
    """Return the current name of a kind that a pack names, perhaps a pack of an older release."""
    return next((each for each in KINDS if find_kind(each).old_name == name), name)


def kind_of_content(sample: bytes) -> str:
    """Return the name of the kind with whose signature a file begins; IMAGE if there is none."""
    signatures = {name: find_kind(name).signature for name in KINDS}
    return next((name for name, begin in signatures.items() if begin and sample.startswith(begin)), IMAGE)


def all_augments() -> tuple[str, ...]:
    """Return the augmentations of all kinds, each once."""
    return tuple(dict.fromkeys(augment for name in KINDS for augment in find_kind(name).augments))

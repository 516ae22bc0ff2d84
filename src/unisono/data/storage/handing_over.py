"""Samples that outlive their processes in the memory of their host: ranks of an elastic run that begin take them over.

    /dev/shm/unisono-run-KEY/samples-PACK-00002-5f0c2a91      | header | numbers | blocks |      of rank 2

    ranks 0 1 on host a, 2 3 on host b
    rank 3 dies       all four begin with what was left, on the same hosts; nothing is read
    host b is gone    0 1 begin with what 0 1 have left; what 2 3 had is read from the stripes
    host b is back    0 1 begin with all; the shuffle of the epoch sends 2 3 what they will see

The header has the rows and blocks of the file, the row and block at which samples begin, and the row at which they end:
0 while they move, so that samples which were being moved when a rank died are read anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unisono.data.pack.index import Index
from unisono.data.pack.stripe import EncodedSamples, joined, views
from unisono.data.storage.sample_store import HEADER_BYTES, blocks_of, map_file
from unisono.files import check_own
from unisono.launch import MEMORY_VARIABLE
from unisono.world import World

TAKEN_AT_ONCE = 1024
"""Samples that are joined to be copied."""


def names_of(index: Index, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the beginning of the paths of a pack's samples that ranks leave; None where no others come after them."""
    folder = environment.get(MEMORY_VARIABLE)
    pack = hashlib.sha256(f"{index.folder.absolute()} {index.fingerprint}".encode()).hexdigest()[:16]
    return Path(folder, f"samples-{pack}") if folder else None


def left_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of this host's memory that are free once samples are taken over."""
    folder = environment.get(MEMORY_VARIABLE)
    return sum(path.stat().st_size for path in Path(folder).glob("samples-*")) if folder else 0


class LeftFile:
    """Samples that a process has left in a file."""

    def __init__(self, path: Path, lengths: NDArray[np.int32], block: int) -> None:
        """Map a file of samples of a pack with these lengths, in blocks of `block` bytes."""
        memory = map_file(path)
        rows, blocks, first, begin, last = memory[:HEADER_BYTES].view(np.int64)[:5].tolist()
        self.numbers = memory[HEADER_BYTES:][: 4 * rows].view(np.int32)[first:last]
        """Numbers of the samples, row by row."""
        self._memory, self._sizes = memory[len(memory) - (blocks - begin) * block :], lengths[self.numbers]
        taken = blocks_of(self._sizes, block).astype(np.int64) * block
        self._begins = taken.cumsum() - taken

    def stretches(self, rows: NDArray[np.integer]) -> Iterator[EncodedSamples]:
        """Yield the samples in these rows."""
        for first in range(0, len(rows), TAKEN_AT_ONCE):
            chosen = rows[first : first + TAKEN_AT_ONCE]
            yield joined(views(self._memory, self._begins[chosen], self._sizes[chosen]))


class LeftSamples:
    """Samples of a pack that were left on all hosts. Made by all ranks of a world together."""

    def __init__(self, world: World, names: Path | None, lengths: NDArray[np.int32], block: int) -> None:
        """Look for files whose paths begin with `names`, in a folder of this user's; None: there are none."""
        paths = list[Path]()
        if names is not None:
            world.call_on_all(lambda: check_own(names.parent))
            paths = sorted(path for path in names.parent.glob(f"{names.name}-*") if path.stat().st_size)
        self._paths, self._samples = paths, len(lengths)
        self._files = {path.name: LeftFile(path, lengths, block) for path in paths}
        first = [world.placement.nodes[world.placement.node_of(rank)][0] for rank in range(world.size)]  # of its node
        numbers = {name: file.numbers for name, file in self._files.items() if first[world.rank] == world.rank}
        everyone = [numbers] * world.size if names is None else world.all_gather_object(numbers)
        self._seen = [everyone[rank] for rank in first]
        """Numbers of the samples that each rank finds on its host, by file."""

    def owners(self, ranks: Sequence[int]) -> NDArray[np.int32]:
        """Return which of these ranks, which share the pack, takes each sample from its host; -1 for none.

        As many ranks as have left samples take what their predecessors have left, where they are on their hosts.
        """
        owners = np.full(self._samples, -1, np.int32)
        names = sorted({name for rank in ranks for name in self._seen[rank]})
        for place, name in enumerate(names):
            members = [member for member, rank in enumerate(ranks) if name in self._seen[rank]]
            if len(names) == len(ranks) and place in members:
                members = [place]
            numbers = self._seen[ranks[members[0]]][name]
            numbers = numbers[owners[numbers] < 0]
            for member, part in zip(members, np.array_split(numbers, len(members)), strict=True):
                owners[part] = member
        return owners

    def take(self, wanted: NDArray[np.bool_]) -> tuple[NDArray[np.int32], Iterator[EncodedSamples]]:
        """Return the numbers of the samples that are wanted and were left on this host, and these samples."""
        left, files = wanted.copy(), list[tuple[LeftFile, NDArray[np.integer]]]()
        for file in self._files.values():
            files.append((file, np.flatnonzero(left[file.numbers])))
            left[file.numbers] = False
        numbers = [np.empty(0, np.int32), *(file.numbers[chosen] for file, chosen in files)]
        return np.concatenate(numbers), (stretch for file, chosen in files for stretch in file.stretches(chosen))

    def remove(self) -> None:
        """Remove the files of this host; all its ranks have taken what they want."""
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._files.clear()

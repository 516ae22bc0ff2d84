"""Loading of samples in a planned run: seconds in which a node reads and decodes those of a step, and their memory.

Loading is beside the training of the step before (equations: `docs/planning.md`). Worked example: 4 nodes of 8 cores,
256 samples a step of 100 KB and 100,000 pixels, so 64 on each node; 8 threads that decode 40 Mpixel/s each, a disk of
200 MB/s, a step of 15 ms alone. Decoding takes 6.4 Mpixel / 320 Mpixel/s = 20 ms, reading 32 ms. From disk a step takes
32 ms, from memory 20 ms. If the cores compute as well, for 12 of the 15 ms, they need 12 + 20 = 32 ms for both.
**Assumed:** computing and decoding lose nothing by taking turns, and reading and decoding overlap.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.plan.machines import MachineFacts

MAX_DECODING_THREADS = 8
"""Largest number of decoding threads of a rank, unless a recipe gives more."""


class SampleFacts(NamedTuple):
    """Samples of a data set, as they are stored and loaded."""

    nbytes: float = 0.0
    """Bytes of an encoded sample; 0: not known."""
    pixels: float = 0.0
    """Pixels that are decoded of a sample; 0: none."""
    threads: int = MAX_DECODING_THREADS
    """Decoding threads of a rank, at most."""
    from_disk: bool = False
    """True where each step reads its samples from disk; False: they are in memory."""
    copies: int = 1
    """Copies of the samples in memory, over all ranks; 0: one in each node."""
    cached: float = 0.0
    """Share of the samples, 0 to 1, that a node keeps in memory where the others are read from disk."""
    buffers: float = 0.0
    """Bytes of the buffers, over all ranks, of samples that are read from disk."""


class Loading(NamedTuple):
    """Seconds in which a node loads the samples of a step."""

    reading: float = 0.0
    decoding: float = 0.0
    in_turn: float = 0.0
    """Seconds that decoding takes from the cores that compute; 0 where accelerators do."""


def loading_of(machine: MachineFacts, facts: SampleFacts, samples: float, ranks_per_node: int) -> Loading:
    """Return the seconds to load `samples` samples on a node; 0 without their rates (`unknown_rates`)."""
    disk, rate, cores = machine.disk.bandwidth, machine.decoding.pixels, machine.node.cores
    reading = samples * facts.nbytes * (1 - facts.cached) / disk if facts.from_disk and disk else 0.0
    if not (facts.pixels and rate and cores):
        return Loading(reading)
    core_seconds = samples * facts.pixels / rate
    threads = min(cores, ranks_per_node * facts.threads)
    return Loading(reading, core_seconds / threads, 0.0 if machine.node.accelerators else core_seconds / cores)


def least_step(computing: float, update: float, loading: Loading) -> float:
    """Return the seconds that a step takes at least with this loading: it waits for the cores, and for its batch,
    which is read and decoded at once, beside the step before."""
    return max(computing + update + loading.in_turn, loading.reading, loading.decoding)


def held_bytes(facts: SampleFacts, samples: int | None, nodes: int, ranks: int) -> float:
    """Return the bytes of encoded samples in the memory of a rank; 0 for an unknown number of samples.

    >>> held_bytes(SampleFacts(nbytes=1e5), 1_000_000, nodes=4, ranks=8)
    12500000000.0
    """
    stored = (samples or 0) * facts.nbytes
    if facts.from_disk:
        return (min(facts.buffers, stored) + facts.cached * stored * nodes) / ranks
    return stored * (facts.copies or nodes) / ranks


def unknown_rates(machine: MachineFacts, facts: SampleFacts) -> list[str]:
    """Return a line for each part of loading that takes no time in a plan because a value is missing."""
    if not facts.pixels and not facts.nbytes:
        return [
            "loading and decoding take no time here: --set samples.pixels=N, and samples.bytes=N with "
            "data.storage=streamed"
        ]
    lacks = {"node.cores": machine.node.cores, "decoding.pixels": machine.decoding.pixels} if facts.pixels else {}
    lacks |= {"disk.bandwidth": machine.disk.bandwidth} if facts.from_disk else {}
    lines = [
        f"{'reading' if key.startswith('disk') else 'decoding'} takes no time here: the machine file has no {key}"
        for key, value in lacks.items()
        if not value
    ]
    if facts.from_disk and not facts.nbytes:
        lines.append("reading takes no time here: --set samples.bytes=N")
    return lines

"""Choice of a way for each pass of each convolution: all are timed at first use, the best is kept (swCaffe 6.1).

    layer, pass                first time: each way that fits          from then on
    64-64 3x3, forward         library 41 ms, product -, ... 23 ms     winograd 4x4
    64-64 3x3, weight          library 52 ms, ...                      library

Timings go into a file. A later run uses and extends its entries from the same processor name, thread count and PyTorch
version. Layers of few operations are not tried: call overhead and noise would decide. Once a plan is settled, nothing
is tried any more, so that a run continues as it began: a layer with another number of samples (the last batch, a test)
takes the way of the nearest measured number.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.compute.geometry import Geometry, Pass
from unisono.compute.ways.table import OWN, WAYS
from unisono.errors import TableError, UsageError

SMALL = 100_000_000
"""Operations up to which a pass uses the library's way, untried."""

TRIED = 12_000_000_000
"""Operations of a trial: about a tenth of a second on a few cores."""

CLEARLY = 0.95
"""Share of the library's time that another way must stay below."""

ATTEMPTS = 2
"""Attempts that count, after a first one, which allocates memory, fills caches and makes the library's plans."""

HOPELESS_FIRST, HOPELESS = 10.0, 2.0
"""Multiples of the best time so far beyond which a way is not tried again: for its first attempt; for later ones."""

FORMAT = 3

Times = dict[str, float]
"""Seconds by name of a way."""

Clock = Callable[[], float]


def best_of(times: Mapping[str, float]) -> str:
    """Return the way to take: the fastest, if it is clearly faster than the library's own.

    >>> best_of({"library, channels last": 1.0, "product": 0.97, "unfolded": 2.0})
    'library, channels last'
    """
    fastest = min(times, key=lambda name: times[name])
    return fastest if OWN not in times or times[fastest] < CLEARLY * times[OWN] else OWN


def merge(plans: Iterable[Mapping[str, Times]]) -> dict[str, Times]:
    """Return the timings of several ranks as one: for each way that all have tried, the slowest rank's time."""
    merged: dict[str, Times] = {}
    for plan in plans:
        for key, times in plan.items():
            known = merged.get(key, times)
            merged[key] = {name: max(times[name], known[name]) for name in known if name in times}
    return merged


def key_of(geometry: Geometry, which: Pass) -> str:
    """Return the key of a layer's pass in the plan."""
    return f"{geometry.name} {which.value}"


@dataclass
class ConvolutionPlan:
    """Timings measured so far, and the ways chosen from them."""

    measured: dict[str, Times] = field(default_factory=dict)
    clock: Clock = time.perf_counter
    settled: bool = False
    _chosen: dict[tuple[Geometry, Pass], str] = field(default_factory=dict, repr=False)

    def compute(self, which: Pass, geometry: Geometry, first: Tensor, second: Tensor) -> Tensor:
        """Return a pass of a layer, computed by its best way; see `Way` for the tensors."""
        name = self._chosen.get((geometry, which))
        if name is None:
            key = key_of(geometry, which)
            if geometry.operations > SMALL and key not in self.measured and not self.settled:
                self.measured[key] = self._try(which, geometry, first, second)
            name = self._chosen[geometry, which] = self.way(which, geometry)
        return WAYS[name].compute(which, geometry, first, second)

    def way(self, which: Pass, geometry: Geometry) -> str:
        """Return the name of the way for a pass, by the timings known now."""
        if geometry.operations <= SMALL:
            return OWN
        times = self.measured.get(key_of(geometry, which)) or self._nearest(which, geometry)
        return best_of(times) if times else OWN

    def settle(self, measured: Mapping[str, Times]) -> None:
        """Use these timings from now on, and try nothing more."""
        self.measured = {key: dict(times) for key, times in measured.items()}
        self.settled = True
        self._chosen.clear()

    def _nearest(self, which: Pass, geometry: Geometry) -> Times:
        """Return the timings of the same layer with the nearest number of samples; empty where there are none."""
        layer = key_of(geometry, which).partition("x")[2]
        alike = {
            int(key.split("x")[0]): times for key, times in self.measured.items() if key.partition("x")[2] == layer
        }
        return alike[min(alike, key=lambda number: abs(number - geometry.samples))] if alike else {}

    def _try(self, which: Pass, geometry: Geometry, first: Tensor, second: Tensor) -> Times:
        """Time every way that fits, on as many samples as a trial of TRIED operations needs."""
        times: Times = {}
        samples = -(-TRIED * geometry.samples // geometry.operations)
        if samples < geometry.samples:
            geometry = replace(geometry, samples=samples)
            first, second = first[:samples], second[:samples] if which is Pass.WEIGHT else second
        for name, way in WAYS.items():
            if not way.fits(geometry):
                continue
            for attempt in range(1 + ATTEMPTS):
                _await(first)
                begun = self.clock()
                way.compute(which, geometry, first, second)
                _await(first)
                seconds = self.clock() - begun
                best = min(times.values(), default=seconds)
                if attempt:
                    times[name] = min(seconds, times.get(name, seconds))
                if seconds > (HOPELESS if attempt else HOPELESS_FIRST) * best:
                    break
        return times


def _await(tensor: Tensor) -> None:
    """Wait until the tensor's device has finished: calls on a GPU return before their work is done."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def machine(processor: str) -> dict[str, Any]:
    """Return the properties that times depend on: a plan measured with others is not used."""
    return {
        "format": FORMAT,
        "processor": processor,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ways": list(WAYS),
    }


def read_plan(path: Path, here: Mapping[str, Any]) -> dict[str, Times]:
    """Return the timings in a file for a machine like `here`; empty where there are none, or no such file.

    Raises TableError where the file is not a plan.
    """
    try:
        return {
            key: {name: float(seconds) for name, seconds in times.items() if name in WAYS}
            for plan in _plans(path)
            if plan["machine"] == dict(here)
            for key, times in plan["measured"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableError(f"{path} is no plan of convolutions ({error!r}); remove it, and it is made anew") from error


def write_plan(path: Path, here: Mapping[str, Any], measured: Mapping[str, Times]) -> None:
    """Add timings to a file, atomically; its entries for other layers and machines stay.

    Of two runs that write at the same moment the last wins: the other's timings are measured again later.
    """
    known = {**read_plan(path, here), **measured}
    others = [plan for plan in _plans(path) if plan["machine"] != dict(here)]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps([*others, {"machine": dict(here), "measured": known}], indent=1) + "\n"
    with _aside(path) as aside:
        aside.write_text(content)
        aside.replace(path)


def check_plan(path: Path) -> None:
    """Raise UsageError when a plan could not be written to `path`, so that this is known before measuring."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with _aside(path) as aside:
            aside.touch()
    except OSError as error:
        raise UsageError(f"cannot write the plan {path}: {error.strerror}") from error


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` that no other process on any machine uses; remove it at the end."""
    aside = path.parent / f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp"
    try:
        yield aside
    finally:
        aside.unlink(missing_ok=True)


def _plans(path: Path) -> list[dict[str, Any]]:
    """Return the timings in a file, one entry for each machine."""
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    return found

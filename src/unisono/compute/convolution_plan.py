"""Choice of an algorithm for each pass of each convolution: all are timed at first use, the best is kept (swCaffe 6.1).

    layer, pass                first call: each algorithm that fits    later calls
    64-64 3x3, forward         library 41 ms, product -, ... 23 ms     winograd 4x4
    64-64 3x3, grad_weight     library 52 ms, ...                      library

Timings are stored in a file. A later run uses and extends its entries from the same processor name, thread count and
PyTorch version. Layers with few operations are not timed: call overhead and noise would decide. A frozen plan times
nothing, so a run continues as it began: a layer with another number of samples (the last batch, a test) uses the
algorithm of the nearest measured number.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.compute.algorithms import ALGORITHMS, DEFAULT
from unisono.compute.geometry import Geometry, Pass
from unisono.device import module_of
from unisono.errors import TableError
from unisono.files import check_writable, naming_os_errors, write_atomically
from unisono.processor import processor
from unisono.world import World

MIN_AUTOTUNED_OPERATIONS = 100_000_000
"""Operations of a pass up to which the library's algorithm is used without timing."""

AUTOTUNE_CALL_OPERATIONS = 12_000_000_000
"""Operations of one timed call: about a tenth of a second on a few cores."""

MAX_TIME_RATIO = 0.95
"""Ratio to the library's time that another algorithm must stay below."""

AUTOTUNE_REPETITIONS = 2
"""Timed calls, after an untimed one, which allocates memory, fills caches and creates the library's plans."""

GIVE_UP_RATIO_FIRST, GIVE_UP_RATIO = 10.0, 2.0
"""Multiples of the best time so far beyond which an algorithm is given up: in its first call; in later ones."""

FORMAT = 4

RENAMED = {
    '"format": 3': f'"format": {FORMAT}',
    '"ways"': '"algorithms"',
    ' input gradient"': ' grad_input"',
    ' weight gradient"': ' grad_weight"',
}
"""Words of files of format 3, and today's."""

Times = dict[str, float]
"""Seconds by name of an algorithm."""


def best_of(times: Mapping[str, float]) -> str:
    """Return the algorithm to use: the fastest, if it is clearly faster than the library's own.

    >>> best_of({"library, channels last": 1.0, "product": 0.97, "unfolded": 2.0})
    'library, channels last'
    """
    fastest = min(times, key=lambda name: times[name])
    return fastest if DEFAULT not in times or times[fastest] < MAX_TIME_RATIO * times[DEFAULT] else DEFAULT


def merge(plans: Iterable[Mapping[str, Times]]) -> dict[str, Times]:
    """Return the timings of several ranks as one: for each algorithm that all have timed, the slowest rank's time."""
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
    """Timings measured so far, and the algorithms chosen from them."""

    measured: dict[str, Times] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter
    frozen: bool = False
    _chosen: dict[tuple[Geometry, Pass], str] = field(default_factory=dict, repr=False)
    """Names of algorithms, as far as they were looked up."""

    def compute(self, which: Pass, geometry: Geometry, first: Tensor, second: Tensor) -> Tensor:
        """Return a pass of a layer, computed by its best algorithm; see `ConvolutionAlgorithm` for the tensors."""
        name = self._chosen.get((geometry, which))
        if name is None:
            key = key_of(geometry, which)
            if geometry.operations > MIN_AUTOTUNED_OPERATIONS and key not in self.measured and not self.frozen:
                self.measured[key] = self._autotune(which, geometry, first, second)
            name = self._chosen[geometry, which] = self.algorithm(which, geometry)
        return ALGORITHMS[name].compute(which, geometry, first, second)

    def algorithm(self, which: Pass, geometry: Geometry) -> str:
        """Return the name of the algorithm for a pass, by the timings known now."""
        if geometry.operations <= MIN_AUTOTUNED_OPERATIONS:
            return DEFAULT
        times = self.measured.get(key_of(geometry, which)) or self._nearest(which, geometry)
        return best_of(times) if times else DEFAULT

    def freeze(self, measured: Mapping[str, Times]) -> None:
        """Use these timings from now on, and time nothing more."""
        self.measured = {key: dict(times) for key, times in measured.items()}
        self.frozen = True
        self._chosen.clear()

    def _nearest(self, which: Pass, geometry: Geometry) -> Times:
        """Return the timings of the same layer with the nearest number of samples; empty where there are none."""
        layer = key_of(geometry, which).partition("x")[2]
        same_layer = {
            int(key.split("x")[0]): times for key, times in self.measured.items() if key.partition("x")[2] == layer
        }
        return same_layer[min(same_layer, key=lambda samples: abs(samples - geometry.samples))] if same_layer else {}

    def _autotune(self, which: Pass, geometry: Geometry, first: Tensor, second: Tensor) -> Times:
        """Time every algorithm that fits, on as many samples as AUTOTUNE_CALL_OPERATIONS need."""
        times: Times = {}
        samples = -(-AUTOTUNE_CALL_OPERATIONS * geometry.samples // geometry.operations)
        if samples < geometry.samples:
            geometry = replace(geometry, samples=samples)
            first, second = first[:samples], second[:samples] if which is Pass.GRAD_WEIGHT else second
        synchronize = partial(module_of(first.device).synchronize, first.device)  # a call may return before its end
        for name, algorithm in ALGORITHMS.items():
            if not algorithm.fits(geometry):
                continue
            for repetition in range(1 + AUTOTUNE_REPETITIONS):
                synchronize()
                begun = self.clock()
                algorithm.compute(which, geometry, first, second)
                synchronize()
                seconds = self.clock() - begun
                best = min(times.values(), default=seconds)
                if repetition:
                    times[name] = min(seconds, times.get(name, seconds))
                if seconds > (GIVE_UP_RATIO if repetition else GIVE_UP_RATIO_FIRST) * best:
                    break
        return times


def machine(processor: str) -> dict[str, Any]:
    """Return the properties that times depend on: a plan measured with others is not used."""
    return {
        "format": FORMAT,
        "processor": processor,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "algorithms": list(ALGORITHMS),
    }


def read_plan(path: Path, here: Mapping[str, Any]) -> dict[str, Times]:
    """Return the timings in a file for a machine like `here`; empty where there are none, or no such file.

    Raises TableError where the file is not a plan.
    """
    try:
        return {
            key: {name: float(seconds) for name, seconds in times.items() if name in ALGORITHMS}
            for plan in _plans(path)
            if plan["machine"] == dict(here)
            for key, times in plan["measured"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableError(f"{path} is not a convolution plan ({error!r}); delete the file to measure again") from error


def write_plan(path: Path, here: Mapping[str, Any], measured: Mapping[str, Times]) -> None:
    """Add timings to a file, atomically; its entries for other layers and machines stay.

    Of two runs that write at the same moment the last wins: the other's timings are measured again later.
    """
    known = {**read_plan(path, here), **measured}
    others = [plan for plan in _plans(path) if plan["machine"] != dict(here)]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps([*others, {"machine": dict(here), "measured": known}], indent=1) + "\n"
    with write_atomically(path) as temporary:
        temporary.write_text(content)


def check_plan(path: Path) -> None:
    """Raise UsageError when a plan could not be written to `path`, so that this is known before measuring."""
    with naming_os_errors(f"cannot write the plan {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        check_writable(path)


def load_plan(shared: str, own: Path | None, world: World) -> ConvolutionPlan:
    """Return a plan with the convolution timings known so far; missing ones are measured later.

    A resumed run uses only its `own` file if that has timings, so that it computes as it began; otherwise the file
    that several runs share is read ("": none). Raises UsageError where that could not be written. Collective.
    """

    def read() -> dict[str, Times]:
        here = machine(processor().name)
        before = {} if own is None else read_plan(own, here)
        if not shared:
            return before
        check_plan(Path(shared))
        return before or read_plan(Path(shared), here)

    return ConvolutionPlan(world.call_on_root(read))


def save_plan(shared: str, own: Path, plan: ConvolutionPlan, world: World) -> None:
    """Write the measured timings into a run's own file, and add them to the shared one. Collective."""

    def write() -> None:
        here = machine(processor().name)
        for path in (own, *([Path(shared)] if shared else [])):
            with naming_os_errors(f"cannot write {path}"):
                write_plan(path, here, plan.measured)

    if plan.measured:
        world.call_on_root(write)


def _plans(path: Path) -> list[dict[str, Any]]:
    """Return the timings in a file, one entry for each machine, in today's FORMAT."""
    text = path.read_text() if path.is_file() else "[]"
    for old, new in RENAMED.items():
        text = text.replace(old, new)
    plans: list[dict[str, Any]] = json.loads(text)
    return plans

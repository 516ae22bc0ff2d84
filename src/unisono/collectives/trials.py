"""Choice by measurement: the first call of a collective, dtype, op and size class on a node tries the candidates.

    first call    barrier │ 5 times: candidate 1, candidate 2, ...   on other memory, at most 20 calls
                  the slowest rank's time of each: one maximum over the ranks; all take the least of those
                  that were faster than the built-in choice each time
    later calls   the choice, kept in a file of this machine that later runs read; not if one was faster, but
                  not each time: other programs have disturbed it

A payload in shared memory needs no trial: it is reduced in place. Every candidate gives the same bits as the built-in
choice, so that choices never change a result. The library is one where it must: nothing is reduced, or not in floating
point, or there are two ranks, whose sum has one order.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unisono.call import call_of, call_to_choose
from unisono.collectives.payload import name_of
from unisono.collectives.prepare import AUTO, PlanRequest, plan_of, prepare
from unisono.errors import UsageError
from unisono.files import cache_folder, locked, write_atomically
from unisono.mpi import MPI
from unisono.network.choice import LIBRARY, Choice
from unisono.processor import processor

if TYPE_CHECKING:
    from unisono.collectives.group import Group
    from unisono.transports.plan import Plan

VARIABLE = "UNISONO_TUNE"
"""Environment variable: "off", on one rank at least, keeps the built-in choices."""

MIN_TRIED_BYTES = 32 << 10
"""Smallest payload in bytes with several candidates: below, shared memory is the best on every machine measured."""

MAX_TRIED_BYTES = 16 << 20
"""Largest payload in bytes that is tried; larger ones take its choice."""

MAX_ITEM_BYTES = 16
"""Bytes of the largest element."""

ROUNDS = 5
"""Calls of each candidate in its trial, of which the first is not counted."""

MIN_GAIN = 0.9
"""Part of the time of the built-in choice that another one has to stay below, each time."""

Times = np.ndarray[Any, np.dtype[np.float64]]


def candidates(collective: str, ranks: int, op: str | None, floating: bool) -> list[Choice]:
    """Return the candidates for a collective of a node's ranks: all give the same bits.

    >>> [choice.transport for choice in candidates("allreduce", 4, "sum", True)]
    ['windows', 'cma']
    """
    algorithm = "tree" if collective == "broadcast" else "direct"
    choices = [Choice(algorithm, "windows"), Choice(algorithm, "cma")]
    ordered = floating and op in ("sum", "product") and ranks > 2
    return choices if ordered else [*choices, Choice(LIBRARY, LIBRARY)]


def size_class(nbytes: int) -> int:
    """Return the power of two that stands for payloads of `nbytes` bytes: the next one, at most MAX_TRIED_BYTES."""
    return min(MAX_TRIED_BYTES, 1 << (nbytes - 1).bit_length())


class Trials:
    """Trials of the collectives of one group, whose ranks share a node, and the choices made so far."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._choices: dict[tuple[str, str, str | None, int], Choice] = {}
        self._off = False  # as the ranks agree in the first trial

    def choose(self, plan: Plan) -> Choice:
        """Return the best choice for a collective like `plan`. All ranks call it together."""
        guess, group = Choice(plan.algorithm, plan.transport), self._group
        tuned = (plan.collective, "one node") in group.table.measured
        if plan.nbytes < MIN_TRIED_BYTES or tuned or self._off:
            return guess
        key = plan.collective, name_of(plan.dtype), plan.op, size_class(plan.nbytes)
        if key not in self._choices:
            memory = group.shared_memory(plan.call)
            self._choices[key] = guess if memory is None else self._measure(plan, key, guess, memory.signals.compiled)
        return self._choices[key]

    def _measure(self, plan: Plan, key: tuple[str, str, str | None, int], guess: Choice, compiled: bool) -> Choice:
        group = self._group
        nbytes = key[-1] - key[-1] % (MAX_ITEM_BYTES * group.size)  # as many elements for each rank
        group.barrier(call_to_choose(plan.call))
        self._off = bool(_maximum(group, np.array([os.environ.get(VARIABLE) == "off"], np.int64))[0])
        if self._off:
            return guess
        floating, reads = plan.dtype.is_floating_point, group.cross_memory(plan.call) is not None
        choices = candidates(plan.collective, group.size, plan.op, floating)
        choices = [choice for choice in choices if reads or choice.transport != "cma"]
        path, entry = choices_file(group.size, reads, compiled), " ".join(map(str, key))
        kept = read_choices(path).get(entry) if group.rank == 0 else None
        index = next((index for index, choice in enumerate(choices) if [*choice] == kept), -1)  # -1 on other ranks
        if (known := int(_maximum(group, np.array([index]))[0])) >= 0:
            return choices[known]
        seconds = _seconds(group, plan, choices, nbytes)
        best, clear = fastest(seconds, choices.index(guess) if guess in choices else None)
        if group.rank == 0 and clear:
            keep_choice(path, entry, kept, [*choices[best]])
        return choices[best]


def fastest(seconds: Times, usual: int | None) -> tuple[int, bool]:
    """Return the column of the fastest candidate, and whether the measurements are clear.

    `seconds` has a row for each time and a column for each candidate; `usual` is the built-in choice's, None if it is
    no candidate.

    >>> fastest(np.array([[3.0, 2.0], [9.0, 2.0]]), 0)
    (1, True)
    >>> fastest(np.array([[3.0, 2.0], [9.0, 8.5]]), 0)  # other programs were there: nothing to keep
    (0, False)
    """
    shortest = seconds.min(axis=0)
    if usual is None:
        return int(shortest.argmin()), True
    limit = MIN_GAIN * seconds[:, [usual]]
    always = (seconds < limit).all(axis=0)
    if always.any():
        return int(np.where(always, shortest, np.inf).argmin()), True
    return usual, bool(shortest.min() >= limit.min())


def _seconds(group: Group, plan: Plan, choices: list[Choice], nbytes: int) -> Times:
    """Return the seconds of each candidate, a column, each time but the first, a row, on the slowest rank."""
    sides = [torch.empty(nbytes, dtype=torch.uint8, device="cpu").zero_() for _ in range(2)]
    source, target = sides[0].data_ptr(), sides[1].data_ptr()
    if plan.collective in ("allreduce", "broadcast"):
        target = source
    elif plan.collective == "all_gather":
        source = target + group.rank * (nbytes // group.size)
    asked = PlanRequest(plan.collective, AUTO, plan.dtype, nbytes, plan.wire, plan.op, plan.root)
    plans = [plan_of(asked, choice) for choice in choices]
    starts = [prepare(group, candidate)(source, target) for candidate in plans]
    taken, payload = np.empty((ROUNDS, len(choices))), sides[plan.collective == "all_gather"]
    ready = call_of("choice of an algorithm")
    try:
        for round_index in range(ROUNDS):
            for index, start in enumerate(starts):  # by turns: a disturbance affects all
                payload.zero_()  # as a program writes it: else each part stays in the cache of the rank that summed it
                group.barrier(ready)
                begun = time.perf_counter()
                start()
                taken[round_index, index] = time.perf_counter() - begun
    except BaseException:  # whatever has ended the wait
        group.interrupt(*sides)
        raise
    for candidate in plans:
        group.prepared.pop(candidate, None)
    return _maximum(group, taken[1:].copy())


def _maximum(group: Group, numbers: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the maxima of numbers over all ranks."""
    maxima = np.empty_like(numbers)
    group.wait_for(group.comm.Iallreduce(numbers, maxima, MPI.MAX), numbers, maxima)
    return maxima


def choices_file(ranks: int, reads: bool, compiled: bool) -> Path:
    """Return the file of the choices of this machine, MPI library and number of ranks; of its own for ranks that may
    read each other's memory (`reads`), and where compiled code plays steps."""
    try:
        folder = cache_folder(os.environ)
    except UsageError:  # a user without a home, as in some containers: nothing is kept
        folder = Path(os.devnull)
    facts = processor().name, os.cpu_count(), MPI.Get_library_version(), torch.__version__, ranks, reads, compiled
    name = hashlib.blake2b(repr(facts).encode(), digest_size=6).hexdigest()
    return folder / f"choices-{socket.gethostname()}-{name}.json"


def read_choices(path: Path) -> Mapping[str, list[str]]:
    """Return the choices of a file; none where it cannot be read: they are measured again."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def keep_choice(path: Path, entry: str, before: list[str] | None, choice: list[str]) -> list[str]:
    """Write a choice into the file, and return it; or the one that others, who measured at the same time, have written.

    `before`: what the file had before the measurement. Without a place to write, later runs measure again.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):
            choices = read_choices(path)
            if entry in choices and choices[entry] != before:
                return choices[entry]
            with write_atomically(path) as partial:
                partial.write_text(json.dumps({**choices, entry: choice}, indent=1) + "\n")
    return choice

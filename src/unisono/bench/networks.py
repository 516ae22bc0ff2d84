"""Training steps of the papers' networks: images/s and memory, ours compared with stock PyTorch (swCaffe's table 3).

Each contender (`contender.py`) is a separate process; they run their steps in turn, while the others wait.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

from unisono.bench.contender import CONTENDERS, OURS, WITH_KEPT_MEMORY
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.errors import UsageError
from unisono.launch import MALLOC_ENVIRONMENT
from unisono.view.words import markdown_table

WARMUP_STEPS = 5
"""First steps, which are not counted: algorithms are timed, and memory grows until freed blocks fit new requests."""


class ContenderProcess:
    """A contender's process."""

    def __init__(self, name: str, contender: str, batch: int, measured: Mapping[str, Mapping[str, float]]) -> None:
        command = [sys.executable, "-m", "unisono.bench.contender", name, contender, str(batch)]
        plain = {key: value for key, value in os.environ.items() if key not in MALLOC_ENVIRONMENT}
        environment = {**plain, **MALLOC_ENVIRONMENT} if contender in WITH_KEPT_MEMORY else plain
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._name = f"{contender} of {name}"
        self._send(json.dumps(measured))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with self._process:
            self._process.kill()

    def step(self) -> dict[str, float]:
        """Request a step. Return its `seconds`, and `peak_bytes` of the process's memory."""
        self._send("")
        return self._receive()

    def plan(self) -> dict[str, Any]:
        """End the process. Return the timings of algorithms that it has measured."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._receive()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `_receive` reports it
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UsageError(
                f"{self._name} ended with exit code {self._process.wait()}, see above; try a smaller --batch"
            )
        found: dict[str, Any] = json.loads(line)
        return found


def measure_networks(
    names: Sequence[str], batch: int, steps: int, plan: ConvolutionPlan, log: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the seconds of `steps` steps and the peak memory of a step, for each network and contender.

    The WARMUP_STEPS first steps are not counted. Timings of algorithms are added to `plan`.
    """
    found = []
    for name in names:
        seconds = {contender: list[float]() for contender in CONTENDERS}
        peak = dict.fromkeys(CONTENDERS, 0)
        with ExitStack() as stack:
            started = {
                contender: stack.enter_context(ContenderProcess(name, contender, batch, plan.measured))
                for contender in CONTENDERS
            }
            for number in range(1 - WARMUP_STEPS, 1 + steps):
                for contender, one in started.items():
                    log(f"{name}: step {max(0, number)} of {steps}, {contender}")
                    result = one.step()
                    if number > 0:
                        seconds[contender].append(result["seconds"])
                        peak[contender] = max(peak[contender], int(result["peak_bytes"]))
            plan.measured.update(started[OURS].plan())
        found.append({"network": name, "batch": batch, "seconds": seconds, "peak_bytes": peak})
    return found


def as_markdown(found: Sequence[dict[str, Any]]) -> str:
    """Return a table: images/s of each contender, median and range, ratios of ours to the others, and memory."""
    peers = CONTENDERS[:-1]
    beside, memory = [f"ours / {peer}" for peer in peers], [f"memory: {name}" for name in CONTENDERS]
    head = ["network", "batch", *CONTENDERS, *beside, *memory]
    rows = []
    for row in found:
        batch, seconds = row["batch"], row["seconds"]
        middle = {name: statistics.median(seconds[name]) for name in CONTENDERS}
        rates = [
            f"{batch / middle[name]:.2f} ({batch / max(seconds[name]):.2f}-{batch / min(seconds[name]):.2f})"
            for name in CONTENDERS
        ]
        ratios = [f"{middle[peer] / middle[OURS]:.2f}" for peer in peers]
        taken = [f"{row['peak_bytes'][name] / 1e9:.2f} GB" for name in CONTENDERS]
        rows.append([row["network"], str(batch), *rates, *ratios, *taken])
    return "\n".join(markdown_table(head, rows))

"""A rank that plays random programs one after another, each in worlds of its own, or one program to a planted end.

Started by programs.py:  player.py FOLDER PLACE FIRST COUNT   or   player.py FOLDER END SEED
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from program import Call, Program, carry_out, random_program

import unisono
from unisono.errors import UnisonoError
from unisono.mpi import MPI
from unisono.placement import place
from unisono.world import World

Say = Callable[..., None]


def timeout_of(function: Callable[..., object]) -> dict[str, Any]:
    """The time-out as an argument, for what knows one."""
    known = "timeout" in inspect.signature(function).parameters
    return {"timeout": float(os.environ["FAULTS_TIMEOUT"])} if known else {}


def worlds_of(base: World, where: str) -> dict[str, World]:
    """Fresh worlds, made by all ranks together."""
    if where == "across":
        apart = place([rank % 2 for rank in range(base.size)])
        whole = World(base.comm.Dup(), apart, base.table, **timeout_of(World.__init__))
    else:
        whole = base.split(0)
    part = whole.split(base.rank // 2 if base.size == 4 else 0)
    return {"whole": whole, "part": part, "dup": whole.dup()}


def play(program: Program, worlds: dict[str, World], base: World, say: Say) -> str:
    """Make this rank's calls until one raises or gives wrong numbers; say which."""
    index = -1
    try:
        for index, call in enumerate(program.of(base.rank)):
            say(seed=program.seed, call=index)
            if not carry_out(call, worlds[call.world], base.rank, base.size):
                return say_end(say, program, "wrong", index, str(call))
    except UnisonoError as error:
        return say_end(say, program, "raised", index, f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - whatever else is raised is what is looked for
        return say_end(say, program, "crashed", index, f"{type(error).__name__}: {error}")
    return say_end(say, program, "right", index, "")


def say_end(say: Say, program: Program, outcome: str, index: int, detail: str) -> str:
    """Tell what came of a program on this rank."""
    say(seed=program.seed, outcome=outcome, call=index, words=detail)
    return outcome


def come_together(comm: MPI.Intracomm) -> None:
    """Wait for all ranks, however long they take, without using the processor."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


def play_all(base: World, where: str, seeds: range, say: Say) -> None:
    """Play the programs of these seeds. Worlds in which any rank has erred are not touched again."""
    agreement, kept = base.comm.Dup(), []
    for seed in seeds:
        worlds = worlds_of(base, where)
        come_together(agreement)
        outcome = play(random_program(seed, base.size), worlds, base, say)
        come_together(agreement)
        if set(agreement.allgather(outcome)) == {"right"}:
            worlds["part"].free()
            worlds["whole"].free()
        else:
            kept.append(worlds)
    come_together(agreement)
    os._exit(0)  # what the broken worlds hold would be waited for


def end_early(base: World, end: str, seed: int, folder: Path) -> None:
    """Play a program as all should, but for one rank that ends as planted; the last call waits for it at the latest."""
    program = random_program(seed, base.size)
    worlds = worlds_of(base, "node")
    for index, call in enumerate((*program.calls, Call(0, "whole", "barrier"))):
        if index == program.place and base.rank == program.rank:
            (folder / "planted").write_text(f"{base.rank} {call.name}")
            if end == "end":
                return
            if end == "exception":
                raise RuntimeError(f"planted before {call}")
            os.kill(os.getpid(), signal.SIGSTOP if end == "stop" else signal.SIGKILL)
        assert carry_out(call, worlds[call.world], base.rank, base.size), f"wrong numbers: {call}"


def main(folder: str, what: str, *numbers: str) -> None:
    """One launch."""
    MPI.COMM_WORLD.Barrier()  # a rank that starts late is not what is measured
    base = unisono.init(**timeout_of(unisono.init))
    first, *count = map(int, numbers)
    if what not in ("node", "across"):
        end_early(base, what, first, Path(folder))
        return
    with (Path(folder) / f"{base.rank}.jsonl").open("w", buffering=1) as file:
        play_all(base, what, range(first, first + count[0]), lambda **line: file.write(json.dumps(line) + "\n"))


if __name__ == "__main__":
    main(*sys.argv[1:])

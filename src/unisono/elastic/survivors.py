"""Survivors of a dead rank: under Open MPI's ULFM (Bland et al. 2013) they play the next generation in their processes.

    generation 1   ranks 0 1 2 3    rank 2 dies: the library tells the watches of the others, which end all waits
                   ranks 0 1 . 3    the error leaves the program; they shrink the communicator
    generation 2   ranks 0 1 2      the same command begins again in these processes, from the state that is kept

Nothing is started or imported anew. Where they cannot go on, the error ends all ranks, and the supervisor starts the
next generation, as with any other library.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import sys
import time
from pathlib import Path

from unisono import initialize, launch, uncaught, witness
from unisono.asynchronous.link import process_failed
from unisono.binding import CoreShare, bind
from unisono.collectives.watch import SURVIVING
from unisono.elastic.generations import ElasticRun
from unisono.elastic.standby import FOLDER_VARIABLE, GENERATION_VARIABLE
from unisono.mpi import MPI
from unisono.training.run_directory import RECIPE, recipe_of

TELL_SECONDS = 2.0
"""Seconds after an error in which the library may still hear of a death."""


def play() -> None:
    """Play a generation in this process, and those that follow as long as it survives them."""
    begun_again, cores = False, tuple(os.sched_getaffinity(0))
    while True:
        try:
            runpy.run_module("unisono", run_name="__main__")
        except SystemExit as end:
            if not begun_again:
                raise
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            os._exit(code)  # MPI_Finalize may wait for the dead
        except Exception as error:
            if not (came_from_death(error) and begin_again()):
                raise
        begun_again = True
        gc.collect()  # what the generation before held
        bind(CoreShare(cores, 1, bound=True))  # also to the cores of the dead


def came_from_death(error: BaseException) -> bool:
    """Return True where an error came from the death of another rank, which this one may survive."""
    torch, watches = sys.modules.get("torch.distributed"), list(SURVIVING)
    if not watches or (torch is not None and torch.is_initialized()):  # its groups could not be made again
        return False
    until = time.monotonic() + TELL_SECONDS
    while not (process_failed(error) or any(watch.look_for_dead() for watch in watches)):
        if time.monotonic() > until:
            return False
        try:
            initialize.job().Iprobe()  # the library hears of deaths in its calls
        except MPI.Exception as other:
            error = other
    for watch in watches:
        watch.end_worlds()
        watch.stop()
    return True


def begin_again() -> bool:
    """Agree with the other survivors on the next generation. Return False where it cannot be played here.

    No wait of the generation before is left in this process.
    """
    comm: MPI.Intracomm = initialize.job().Shrink()  # type: ignore[assignment]  # one of a job's is one, too
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    least, *arguments = json.loads(os.environ[launch.SURVIVORS_VARIABLE])
    generation, home = int(os.environ[GENERATION_VARIABLE]) + 1, Path(os.environ[FOLDER_VARIABLE])
    recipe = recipe_of(home, []) if (home / RECIPE).exists() else None
    run = ElasticRun(home, recipe=recipe, command_key=os.environ[launch.MEMORY_VARIABLE].rpartition("-")[2])
    step = max(comm.allgather(run.kept()))
    if step < 0 or comm.size < least or run.refusal(comm.size):
        return False
    if comm.rank == 0:  # the supervisor reads it
        message = f"goes on from step {step} with the {comm.size} ranks that are left (generation {generation})"
        print(f"unisono: {message}", file=sys.stderr, flush=True)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    for names, value in (
        (launch.SIZE_VARIABLES, comm.size),
        (launch.RANK_VARIABLES, comm.rank),
        (launch.LOCAL_SIZE_VARIABLES, node.size),
        (launch.LOCAL_RANK_VARIABLES, node.rank),
    ):
        os.environ[names[1]] = str(value)  # as Open MPI's launcher has set them
    node.Free()
    os.environ[GENERATION_VARIABLE] = str(generation)
    witness.notify(initialize.job().rank)  # that of the generation before watches this rank no more
    os.environ.pop(witness.WITNESS_VARIABLE, None)
    atexit.unregister(witness.notify)
    if (job := sys.modules.get("unisono.torch_backend.mpi_job")) is not None:
        job.mpi_job.cache_clear()
    initialize.go_on_with(comm)
    uncaught.install(comm.rank, comm.size, comm.Abort)
    sys.argv[1:] = arguments
    return True

"""Start of the world of all ranks: checks of the launch, placement, threads, the witness, and MPI's start-up files."""

from __future__ import annotations

import atexit
import os
import socket
from contextlib import suppress
from pathlib import Path

import torch

from unisono import uncaught, witness
from unisono.binding import shares_of
from unisono.errors import LaunchError, TableError
from unisono.launch import MEMORY_VARIABLE, available_cores, describe_mismatch, ranks_started, timeout_of
from unisono.mpi import MPI, start
from unisono.network.choice import ScheduleTable, read_table
from unisono.placement import place
from unisono.startup import name_of, started_at
from unisono.world import World


def init(table: Path | None = None, timeout: float | None = None) -> World:
    """Return the world of all ranks that `mpiexec` or `srun` started; without them, a world of one rank.

    `table` is a file written by `unisono tune`, by which "auto" chooses schedules (`network/default.toml` has the
    format); the default is the file that UNISONO_TABLE names. `timeout` is the number of seconds after which a rank
    that waits for others raises StallError; the default is UNISONO_TIMEOUT, else 600.

    From here on, an uncaught exception in the main thread of any rank prints its traceback with the rank and ends all
    ranks (`uncaught.py`). PyTorch gets one thread for each core of the rank's fair share, from 8 cores on one less
    (`binding.py`), unless OMP_NUM_THREADS sets another number.

    Raises LaunchError if the MPI library is not the one that started the ranks, or lacks MPI_THREAD_MULTIPLE, and
    UsageError for a timeout that is not a number of seconds above 0.
    """
    start()
    world = job()
    started = ranks_started(os.environ)
    if started is not None and started != world.size:
        raise LaunchError(describe_mismatch(os.environ, started, world.size, MPI.Get_library_version()))
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise LaunchError("MPI was started without MPI_THREAD_MULTIPLE; let unisono.init() start it")
    if world.size > 1:
        uncaught.install(world.rank, world.size, world.Abort)
    seconds = timeout_of(timeout)
    comm = world.Dup()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leader, on_node = node.bcast(comm.rank, 0), node.rank
    shares = shares_of(node.allgather(available_cores()), alone=comm.size == 1)
    _unlink_startup_files(node)
    _call_witness(node, comm)  # after it, `startup.py` cleans up no more
    node.Free()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(shares[on_node].threads)
    named = table or os.environ.get("UNISONO_TABLE")
    choices = _read_on_root(comm, Path(named) if named else None)
    sites = comm.allgather((leader, choices.supernodes.get(socket.gethostname())))
    leaders, supernodes = zip(*sites, strict=True)
    placement = place(leaders, supernodes if None not in supernodes else ())
    return World(comm, placement, choices, timeout=seconds)


_left: list[MPI.Intracomm] = []


def job() -> MPI.Intracomm:
    """Return the communicator of all ranks, or of those that are left after a death."""
    return _left[-1] if _left else MPI.COMM_WORLD


def go_on_with(comm: MPI.Intracomm) -> None:
    """Make worlds of the ranks of `comm` from here on: those that are left after a death."""
    _left.append(comm)


def _read_on_root(comm: MPI.Intracomm, path: Path | None) -> ScheduleTable:
    """Return the table as rank 0 reads it: all ranks must make the same choices."""
    outcome: ScheduleTable | TableError | None
    try:
        outcome = read_table(path) if comm.rank == 0 else None
    except TableError as error:
        outcome = error
    outcome = comm.bcast(outcome, 0)
    if isinstance(outcome, TableError):
        raise outcome
    assert outcome is not None
    return outcome


def _call_witness(node: MPI.Comm, comm: MPI.Comm) -> None:
    """Start a witness for this node, which names the rank that dies without an error message."""
    if comm.size == 1 or witness.has_witness():
        return
    seats = node.gather((comm.rank, os.getpid()), 0)
    address = ""
    if seats:
        ranks, processes = zip(*seats, strict=True)
        wait = MEMORY_VARIABLE not in os.environ  # else others go on in any case
        address = witness.start(ranks, processes, comm.size, wait)
    witness.set_address(node.bcast(address, 0))
    atexit.register(witness.notify, comm.rank)


def _unlink_startup_files(node: MPI.Comm) -> None:
    """Unlink MPI's own start-up memory, which all ranks of the node have mapped, and hydra's description of the node's
    hardware, which they have read.

    MPICH and hydra do so only at a regular end, so every killed or aborted job would leave files behind. Hydra's is
    known by its name, its owner and its age: no older than hydra.
    """
    node.Barrier()
    if node.rank:
        return
    maps, hydra = Path("/proc/self/maps"), os.getppid()
    lines = maps.read_text().splitlines() if maps.exists() else []
    for name in {line.split()[-1] for line in lines if "/dev/shm/mpich_shm_" in line}:
        if not name.endswith("(deleted)"):
            Path(name).unlink(missing_ok=True)
    began = started_at(hydra)  # 0 where it has ended
    if name_of(hydra) != "hydra_pmi_proxy" or not began:
        return
    for path in Path("/tmp").glob("hydra_hwloc_xmlfile_*"):
        with suppress(FileNotFoundError):
            about = path.stat()
            if about.st_uid == os.geteuid() and about.st_mtime >= began - 1:
                path.unlink()

"""Ranks of a command: started by it, or joined where a launcher has started them; what rank 0 prints and writes.

unisono train, no launcher ── launch ──▶ mpiexec -n 4 unisono train ──▶ 4 x unisono train, each a rank: `join`

A rank ends in order: MPI is finalized first, while the witness still watches.

    Python's own order    notify the witness ─ MPI_Finalize: a rank that dies here is not reported
    here                  MPI_Finalize ─ notify the witness
"""

from __future__ import annotations

import atexit
import io
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from typer import Exit, Option

from unisono import witness
from unisono.errors import LaunchError, UsageError
from unisono.files import naming_os_errors, write_atomically
from unisono.launch import (
    ON_THIS_MACHINE,
    RANK_VARIABLES,
    SURVIVAL,
    available_cores,
    cores,
    find_mpiexec,
    is_open_mpi,
    keep_memory,
    launch_command,
    launch_environment,
    rank_started,
    ranks_started,
    timeout_of,
)
from unisono.startup import Startup
from unisono.training.signals import STOPPED
from unisono.witness import LISTENER_VARIABLE, Listener

if TYPE_CHECKING:
    from unisono.world import World

Result = TypeVar("Result")

RanksOption = Annotated[
    int | None, Option("--ranks", help="Number of ranks to start on this machine; ignored under mpiexec or srun.")
]


class StartSign:
    """Seconds since the ranks were started, in a terminal's last line; elsewhere nothing.

    The cursor stays at the beginning of that line, so what a rank prints replaces it.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._begun = ranks, time.monotonic()
        self._shown, self._active = -1, sys.stdout.isatty()

    def show(self) -> None:
        seconds = int(time.monotonic() - self._begun)
        if self._active and seconds != self._shown:
            self._shown = seconds
            print(f"starting {self._ranks} rank{'s' * (self._ranks > 1)}: {seconds} s", end="\r", flush=True)

    def close(self) -> None:
        """Erase the sign, for good."""
        if self._shown >= 0:
            print("\x1b[K", end="", flush=True)  # the control code that erases what follows in the line
        self._shown, self._active = -1, False


class OptionalOutput(io.FileIO):
    """Output that a run can do without: what cannot be written, as nobody reads it or the disk is full, is lost."""

    def write(self, data: Any, /) -> int:
        """Write bytes; return how many were written or lost."""
        with suppress(OSError):
            return super().write(data)
        return memoryview(data).nbytes

    @classmethod
    def install(cls) -> None:
        """Make this process's standard output optional; one that something else has replaced stays."""
        out = sys.stdout
        if isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:
            out.flush()
            file = io.BufferedWriter(cls(out.fileno(), "w", closefd=False))
            sys.stdout = io.TextIOWrapper(file, out.encoding, out.errors, line_buffering=out.line_buffering)


RELAY_SECONDS = 1.0
"""Seconds in which the last output of ranks that have ended arrives."""


def _relay(source: int) -> None:
    while chunk := os.read(source, 1 << 16):
        sys.stdout.buffer.write(chunk)
        sys.stdout.flush()


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that request the end of a run."""

PASSED_ON = {signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1}
"""Signals to this process, and those that are sent to the ranks in their place."""

INTERRUPT_GRACE_SECONDS = 3.0
"""Seconds that mpiexec has to end after Ctrl-C in a terminal, before SIGINT is sent to it."""


def count_ranks(ranks: int | None, default: int) -> int:
    """Return the number of ranks: as a launcher has started them, as given, or `default`. Raises LaunchError."""
    started = ranks_started(os.environ)
    check_ranks(ranks)
    if started is not None and ranks is not None and started != ranks:
        raise LaunchError(f"--ranks {ranks}, but the launcher has started {started}; omit --ranks")
    return started or ranks or default


def check_ranks(ranks: int | None) -> None:
    """Raise LaunchError for a number of ranks below 1."""
    if ranks is not None and ranks < 1:
        raise LaunchError(f"--ranks {ranks}: the number of ranks must be at least 1")


def refuse_launcher(message: str) -> None:
    """Raise UsageError, which one rank reports, where a launcher has started this process."""
    if ranks_started(os.environ) is not None:
        if rank_started(os.environ):
            raise SystemExit(2)
        raise UsageError(message)


def start_ranks(ranks: int | None) -> None:
    """Start this command on ranks of this machine, one per core unless given, and exit with its code.

    Do nothing in a rank that was started.
    """
    check_ranks(ranks)
    if ranks_started(os.environ) is None:
        raise Exit(launch(ranks or max(2, cores())))


def start_several(ranks: int, timeout: float | None) -> None:
    """Start this command on `ranks` ranks, and exit with its code; a single one is this process.

    Do nothing in a rank that was started.
    """
    if ranks_started(os.environ) is None:
        if ranks > 1:
            raise Exit(launch(ranks, timeout))
        keep_memory()


def launch(
    ranks: int, timeout: float | None = None, survives: Callable[[], bool] | None = None, relays: bool = False
) -> int:
    """Run this command line on `ranks` ranks. Return the exit code. Signals sent to this process alone are passed on.

    `survives` returns True where the others are to go on after a rank has died; it is asked if the launcher can do that
    (Open MPI's). With `relays`, output goes through this process, where it may be optional; a terminal gets it at once.

    `timeout`, in seconds as `launch.timeout_of` reads it, limits the wait for a rank that is stopped during the start.
    """
    available_cores()  # an error in its variable is reported before there are ranks
    mpiexec, limit = find_mpiexec(), timeout_of(timeout)
    options = SURVIVAL if survives and is_open_mpi(mpiexec) and survives() else ()
    command = launch_command(mpiexec, ranks, sys.argv[1:], options)
    environment = {**ON_THIS_MACHINE, **launch_environment(os.environ, sys.stdout.isatty())}
    output = subprocess.PIPE if relays and sys.stdout is not None and not sys.stdout.isatty() else None
    received: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    startup: Startup | None = None

    def pass_on(signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGUSR1 and (startup is None or startup.active):
            return  # there is nothing to save, and a rank that imports would be ended by it
        received.append(signum)
        for process in started:
            process.send_signal(PASSED_ON[signal.Signals(signum)])

    for signum in PASSED_ON:
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # as by nohup
            signal.signal(signum, pass_on)
    with (
        closing(Listener()) as listener,
        subprocess.Popen(command, stdout=output, env=environment | {LISTENER_VARIABLE: listener.address}) as process,
    ):
        started.append(process)
        relay = threading.Thread(target=_relay, args=[process.stdout.fileno()], daemon=True) if process.stdout else None
        if relay:
            relay.start()
        for early in received:
            process.send_signal(PASSED_ON[signal.Signals(early)])
        startup = Startup(process.pid, ranks, limit)
        with closing(StartSign(ranks)) as sign:
            code = _wait(process, received, startup, sign)
        if relay:
            relay.join(RELAY_SECONDS)  # a process that was left behind may hold the other end
        code = startup.finish(any(signum in STOP_SIGNALS for signum in received), code, listener, bool(options))
    return exit_code(code, received)


def _wait(process: subprocess.Popen[bytes], received: list[int], startup: Startup, sign: StartSign) -> int:
    """Wait for mpiexec to end. It gets a terminal's Ctrl-C as well; a SIGINT sent only to this process is passed on."""
    until = math.inf
    while True:
        try:
            if not startup.active:
                sign.close()
                return process.wait(None if until == math.inf else max(0.0, until - time.monotonic()))
            sign.show()
            startup.poll()
            if (code := process.poll()) is not None:
                return code
        except KeyboardInterrupt:
            received.append(signal.SIGINT)
            until = time.monotonic() + INTERRUPT_GRACE_SECONDS
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() >= until:
            process.send_signal(signal.SIGINT)
            until = math.inf


def exit_code(code: int, received: Sequence[int]) -> int:
    """Return the exit code, given mpiexec's `code` and the signals that this process received.

    0 and 2 come from the ranks: they had finished before, or something failed, such as a checkpoint. Otherwise the code
    is that of the signal that ended them, however mpiexec reports it.
    """
    ending = [signum for signum in received if signum in STOP_SIGNALS]
    if ending and code not in (0, 2):
        return 128 + ending[0]
    return code if code >= 0 else 128 - code


def join(what: str, alone: bool = False) -> World:
    """Return the world of the ranks that a launcher has started; one rank reports bad input. `what` is the command.

    Raises UsageError for a single rank, unless the command can do with it `alone`.
    """
    world = init_ranks()
    with world.agree_on_errors():
        if world.size == 1 and not alone:
            raise UsageError(f"a single rank cannot communicate; start several: mpiexec -n 4 unisono {what}")
    return world


def init_ranks(timeout: float | None = None) -> World:
    """Return the world of the ranks that a launcher has started. Raises UsageError on rank 0, and ends the others."""
    from unisono.initialize import init
    from unisono.mpi import MPI

    try:
        return init(timeout=timeout)
    except UsageError as error:
        if MPI.COMM_WORLD.rank:
            raise SystemExit(2) from error
        raise


def printer(world: World) -> Callable[[str], None]:
    """Return a function that prints a line on rank 0."""
    return partial(print, flush=True) if world.rank == 0 else lambda _: None


def write_text(world: World, path: Path, text: str) -> None:
    """Write a whole file, on rank 0. Raises UsageError, on all ranks, where that fails."""

    def action() -> None:
        with write_atomically(path) as temporary:
            temporary.write_text(text, encoding="utf-8")

    write(world, path, action)


def write(world: World, path: Path, action: Callable[[], Result]) -> Result:
    """Write something into `path`, on rank 0. Return its result. Raises UsageError, on all ranks, where that fails."""
    with world.agree_on_errors():
        return world.call_on_root(partial(write_alone, path, action))


def write_alone(path: Path, action: Callable[[], Result]) -> Result:
    """Write something into `path`, in this process. Return its result. Raises UsageError where that fails."""
    with naming_os_errors(f"cannot write {path}"):
        return action()


def make_folder(path: Path) -> None:
    """Make a folder in this process, unless it is there. Raises UsageError where that fails."""
    write_alone(path, partial(path.mkdir, parents=True, exist_ok=True))


INTERRUPTED = 130
"""Exit code after SIGINT, as Typer returns it."""


class Shutdown:
    """Exit of this process, if it is one of several ranks.

    Create it before anything else registers with atexit. If MPI is initialized already, the process belongs to another
    program, which ends it.
    """

    def __init__(self) -> None:
        self._size = ranks_started(os.environ) or 1
        self._code: int | None = None
        mpi = sys.modules.get("unisono.mpi")
        self._active = self._size > 1 and (mpi is None or not mpi.MPI.Is_initialized())
        if self._active:
            atexit.register(self._finish)  # registered first, called last

    def exit(self, code: int) -> None:
        """Exit with a code. All ranks call it together."""
        interrupted = "was interrupted (SIGINT)", INTERRUPTED  # MPI_Finalize would wait for the others forever
        if self._size > 1 and code == INTERRUPTED:
            self._abort(*interrupted)
        if self._active:
            self._code = code
            atexit.unregister(witness.notify)
            terminated = "got SIGTERM during its exit, after everything was saved", STOPPED
            signal.signal(signal.SIGINT, lambda *_: self._abort(*interrupted))
            stopped = code == STOPPED  # all have saved for it: batch systems signal ranks one after another
            signal.signal(signal.SIGTERM, signal.SIG_IGN if stopped else lambda *_: self._abort(*terminated))
        sys.exit(code)

    def _abort(self, what: str, code: int) -> None:
        """End all ranks, and say what has happened to this one."""
        rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "?")
        witness.report_abort(f"unisono: rank {rank} of {self._size} {what}: all ranks end\n")
        mpi = sys.modules.get("unisono.mpi")
        if mpi is not None and mpi.MPI.Is_initialized() and not mpi.MPI.Is_finalized():
            mpi.MPI.COMM_WORLD.Abort(code)
        os._exit(code)

    def _finish(self) -> None:
        """Finalize MPI, after the exit handlers that were registered later than this object."""
        mpi = sys.modules.get("unisono.mpi")
        if self._code is None or mpi is None or not mpi.MPI.Is_initialized() or mpi.MPI.Is_finalized():
            return  # an uncaught exception, or a command without ranks: Python's own order
        rank = mpi.MPI.COMM_WORLD.rank
        mpi.MPI.Finalize()
        witness.notify(rank)

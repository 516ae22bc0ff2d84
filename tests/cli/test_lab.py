"""The command `unisono lab`: real clusters on this machine, removed completely."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.progress import Run, poll_until
from tests.usage_errors import assert_one_line_error

from unisono.errors import LabError
from unisono.lab.cluster import check_machine

MEET = """
import json, os
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
mine = (MPI.Get_processor_name(), node.allgather(world.rank), os.environ["COLOUR"], os.getcwd())
everybody = world.gather(mine)
if world.rank == 0:
    with open("met.json", "w") as file:
        json.dump(everybody, file)
"""

SEND = """
import time
from mpi4py import MPI
world = MPI.COMM_WORLD
payload = bytearray(1_000_000)
world.Barrier()
begin = time.perf_counter()
if world.rank == 0:
    world.Send(payload, 1)
    world.Recv(bytearray(1), 1)
    print(time.perf_counter() - begin)
else:
    world.Recv(payload, 0)
    world.Send(bytearray(1), 0)
"""

STAY = """
import os, time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    os.write(1, b"here\\n")
time.sleep(98765)
"""


@pytest.fixture
def machine() -> None:
    """A machine on which labs can be built."""
    try:
        check_machine()
    except LabError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("machine")
def test_all_hosts_run_and_the_ranks_of_one_share_memory(unisono: Run, tmp_path: Path) -> None:
    size = ("--supernodes", "2", "--hosts", "2", "--ranks-per-host", "2")
    done = unisono("lab", *size, "--rate", "200mbit", "--", sys.executable, "-c", MEET, COLOUR="green")
    assert done.returncode == 0, done.stderr
    met = json.loads((tmp_path / "met.json").read_text())
    assert met == [[f"h{r // 2}", [r // 2 * 2, r // 2 * 2 + 1], "green", str(tmp_path)] for r in range(8)]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("narrow", ["--supernodes 2 --hosts 1 --oversubscribe 2", "--hosts 2 --slow-host 1:2"])
def test_nothing_is_faster_than_its_link(unisono: Run, narrow: str) -> None:
    done = unisono("lab", *narrow.split(), "--rate", "80mbit", "--", sys.executable, "-c", SEND)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.97 * 8 / 40, "a megabyte has passed faster than 40 Mbit/s"


@pytest.mark.usefixtures("machine")
def test_the_exit_code_is_the_commands(unisono: Run) -> None:
    assert unisono("lab", "--hosts", "1", "--rate", "1gbit", "--", "sh", "-c", "exit 7").returncode == 7
    done = unisono("lab", "--hosts", "2", "--rate", "1gbit", "--", "echo", "it's", "a  b")
    assert (done.returncode, done.stdout) == (0, "it's a  b\n" * 2)


ORPHAN = """
(sleep 0 & echo $! > number)
for _ in $(seq 100); do
    [ -d /proc/$(cat number) ] || exit 0
    sleep 0.1
done
exit 1
"""


@pytest.mark.usefixtures("machine")
def test_what_a_program_leaves_behind_is_reaped(unisono: Run) -> None:
    assert unisono("lab", "--hosts", "1", "--rate", "1gbit", "--", "sh", "-c", ORPHAN).returncode == 0


@pytest.fixture
def alone() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command where /tmp, /dev/shm and the network are nobody else's."""
    if Path(sys.prefix).is_relative_to("/tmp"):
        pytest.skip("this Python is in /tmp, which the test covers")
    cover = 'mount -t tmpfs test /tmp && mount -t tmpfs test /dev/shm && exec "$@"'
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        full = ("unshare", "--mount", "--net", "--", "sh", "-c", cover, "sh", *command)
        started.append(subprocess.Popen(full, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd="/"))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def processes(word: str) -> list[str]:
    """The processes with `word` on their command line."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended since
            continue
        lines += [text] if word in text else []
    return lines


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_nothing_is_left(alone: Callable[..., subprocess.Popen[str]], signum: int, code: int) -> None:
    lab = ("lab", "--supernodes", "2", "--hosts", "2", "--rate", "200mbit")
    process = alone(sys.executable, "-m", "unisono", *lab, "--", sys.executable, "-c", STAY)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    kinds = ("mnt", "net")
    places = [os.open(f"/proc/{process.pid}/ns/{kind}", os.O_RDONLY) for kind in kinds]
    assert processes("sleep(98765)")
    process.send_signal(signum)
    assert process.wait() == code
    if signum == signal.SIGKILL:  # nobody was left to wait for the kernel
        poll_until(lambda: processes("sleep(98765)"), lambda seen: not seen)
    assert not processes("sleep(98765)")
    options = [f"--{kind.replace('mnt', 'mount')}=/proc/self/fd/{d}" for kind, d in zip(kinds, places, strict=True)]
    look = ("nsenter", *options, "--", "sh", "-c", "ls -A /tmp /dev/shm; ip -o link; ls /run/netns; mount")
    seen = subprocess.run(look, capture_output=True, text=True, check=False, pass_fds=places).stdout
    for place in places:
        os.close(place)
    assert seen.startswith("/dev/shm:\n\n/tmp:\n1: lo: "), seen
    assert "\n2: " not in seen
    assert "lab on " not in seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts", "2", "--rate", "200"], "--rate 200: write a rate like 200mbit, in kbit, mbit or gbit"),
        (["--hosts", "0", "--rate", "200mbit"], "--hosts 0: a lab has 1 to 254"),
        (["--hosts", "two", "--rate", "200mbit"], "'--hosts'"),
        (["--hosts", "2", "--rate", "1gbit", "--oversubscribe", "-1"], "--oversubscribe -1: give 0.01 to 1000"),
        (["--rate", "1gbit"], "Missing option '--hosts'"),
    ],
)
def test_bad_input(in_process: Run, options: list[str], message: str) -> None:
    assert_one_line_error(in_process("lab", *options, "--", "true"), message)


def test_no_command(in_process: Run) -> None:
    assert_one_line_error(in_process("lab", "--hosts", "2", "--rate", "1gbit"), "Missing argument 'command'")


@pytest.mark.usefixtures("machine")
def test_no_such_mpiexec(unisono: Run) -> None:
    done = unisono("lab", "--hosts", "2", "--rate", "1gbit", "--mpiexec", "/nowhere", "--", "true")
    assert_one_line_error(done, "--mpiexec /nowhere: there is no such program")

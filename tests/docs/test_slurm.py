"""The page about clusters, run word for word under Slurm, on two nodes that this machine emulates."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.docs.test_commands import commands
from tests.progress import poll_until, run

pytestmark = pytest.mark.launches

PAGE = commands.ROOT / "docs" / "tutorials" / "a_cluster.md"

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")

PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"))

CONFIGURATION = """
ClusterName=emulated
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=n1,n2 Default=YES State=UP
"""
"""Two nodes of one core each, on this host. Slurm's default for MPI, none, stays."""


def missing() -> str:
    """Return why Slurm cannot be started here; empty if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"{', '.join(absent)} are not installed (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("", 0))
        return [int(listener.getsockname()[1]) for listener in sockets]


def processes_of(configuration: Path) -> list[int]:
    """Return the processes that have this configuration of Slurm in their environment."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"SLURM_CONF={configuration}\0".encode() in path.read_bytes():
                processes.append(int(path.parent.name))
    return processes


@pytest.fixture
def slurm() -> Iterator[Mapping[str, str]]:
    """Environment of commands under Slurm, whose daemons run meanwhile."""
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        configuration, key = folder / "slurm.conf", folder / "munge.key"
        host = socket.gethostname().partition(".")[0]
        configuration.write_text(CONFIGURATION.format(host=host, folder=folder, ports=free_ports(3)))
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "seed", "log")]
        daemons = [
            ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "n1"],
            ["slurmd", "-D", "-N", "n2"],
        ]
        environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(configuration), "OMP_NUM_THREADS": "1"}
        started = []
        with (folder / "log").open("w") as log:
            try:
                for daemon in daemons:
                    started.append(subprocess.Popen(daemon, env=environment, stdout=log, stderr=log))
                    if daemon[0] == "munged":
                        assert poll_until((folder / "munge.socket").exists, bool), (folder / "log").read_text()
                states = poll_until(lambda: said(environment, folder, "sinfo -h -o %T"), lambda text: text == "idle\n")
                assert states == "idle\n", (folder / "log").read_text()
                yield environment
            finally:
                for process in processes_of(configuration):
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                for daemon in started:
                    daemon.wait()


def said(environment: Mapping[str, str], folder: Path, script: str) -> str:
    """Return what commands print, in a folder."""
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=commands.LIMIT_SECONDS,
    )
    return done.stdout


def masked(text: str) -> str:
    """Return a text without what differs from run to run: numbers of steps, and how many ranks a signal has reached."""
    return re.sub(r"step \d+|to (rank \d+|\d+ ranks)", "#", text)


def test_the_page_under_slurm(slurm: Mapping[str, str], tmp_path: Path) -> None:
    """Its checks, its job, a stop by SIGTERM, and a resumption by the same script."""
    page = PAGE.read_text(encoding="utf-8")
    for step in commands.steps_of(page):
        if isinstance(step, commands.Program):
            (tmp_path / step.name).write_text(step.text, encoding="utf-8")
        elif step.text.startswith("srun"):
            done = run(["bash", "-ec", step.text], cwd=tmp_path, env=slurm)
            assert done.returncode == 0, done.stdout + done.stderr
            if "check.py" in step.text:
                lines = [f"rank {rank} of 2: {socket.gethostname()}, node {rank} of 2, 1 threads" for rank in (0, 1)]
                assert done.stdout.splitlines() == lines
    (shown,) = [body for kind, _, body, _ in commands.FENCE.findall(page) if kind == "console" and "sbatch" in body]
    answers, metrics = "", tmp_path / "runs" / "digits" / "metrics.jsonl"
    for line in re.findall(r"^\$ (.*)$", shown, re.MULTILINE):
        if line.startswith("scancel"):  # in the second epoch
            assert poll_until(lambda: metrics.exists() and metrics.stat().st_size, bool), job_logs(tmp_path)
        answers += f"$ {line}\n" + said(slurm, tmp_path, line)
        if line.startswith("scancel"):
            poll_until(lambda: said(slurm, tmp_path, "squeue -h"), lambda text: not text)
    assert masked(answers) == masked(shown), job_logs(tmp_path)
    assert len(metrics.read_text().splitlines()) == 15, job_logs(tmp_path)

    default = run(["srun", "-n", "2", "unisono", "train", "digits"], cwd=tmp_path, env=slurm)
    assert default.returncode == 2
    assert "under Slurm, use srun --mpi=pmi2, or first export SLURM_MPI_TYPE=pmi2" in default.stderr


def job_logs(folder: Path) -> str:
    """Return the logs of all jobs."""
    return "\n".join(file.read_text() for file in sorted(folder.glob("slurm-*.out")))

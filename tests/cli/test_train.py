"""The command `unisono train`: real runs on real ranks, and one clear line for bad input."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import handlers_restored
from tests.progress import Run, Watched, poll_until, run
from tests.training.trace_format import check_trace
from tests.usage_errors import assert_one_line_error

from unisono.cli import ranks
from unisono.cli.ranks import OptionalOutput, count_ranks, exit_code
from unisono.errors import LaunchError
from unisono.launch import MALLOC_ENVIRONMENT, launch_environment
from unisono.training.checkpoint.files import load_newest
from unisono.training.checkpoint.layout import checkpoint_names
from unisono.training.signals import REPEAT_SECONDS
from unisono.training.trainer import KINDS

SHORT_RUN = ("--set", "training.epochs=3")
LEAN = tuple(
    part
    for change in ("compute.convolutions=library", "rule.overlap=chain", "exchange.bucket_megabytes=1")
    for part in ("--set", change)
)
"""Nothing is autotuned: two runs have the same bits."""


def weights(run: Path) -> dict[str, bytes]:
    """The files of the newest checkpoint."""
    newest = max(path for path in (run / "checkpoints").iterdir() if path.suffix != ".torn")
    return {path.name: path.read_bytes() for path in newest.iterdir()}


Ended = tuple[subprocess.CompletedProcess[str], Path]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A short run, made once, and its folder `mine`, which nobody is to change."""
    folder = tmp_path_factory.mktemp("ended")
    recipe = Path(__file__).parents[2] / "src" / "unisono" / "recipes" / "digits.toml"
    command = [sys.executable, "-m", "unisono", "train", str(recipe), *SHORT_RUN, "--run", "mine"]
    environment = launch_environment(os.environ, terminal=False)
    done = run(command, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done, folder / "mine"


def test_a_run_from_beginning_to_end(ended: Ended) -> None:
    done, run = ended
    lines = done.stdout.splitlines()
    assert lines[0] == "digits: training on 2 ranks of this machine"
    assert lines[1] == "digits: 2 ranks on 1 node, 1437 samples, into mine"
    assert lines[2].startswith("cores: ")
    assert re.match(r"products in (float32|bfloat16), \d+ threads? a rank, \S", lines[3])
    assert [line.split("  ")[0] for line in lines if line.startswith("epoch")] == [
        "epoch 1/3",
        "epoch 2/3",
        "epoch 3/3",
    ]
    last = lines.index(next(line for line in lines if line.startswith("epoch 3/3")))
    (tuned,) = [line for line in lines[4:last] if not line.startswith("epoch")]
    assert re.fullmatch(
        r"the first \d+ steps tuned how gradients are averaged: overlap \w+ \(more: mine/log.txt\)(; .+)?", tuned
    )
    overlapped = "communicating, overlapped", "updating, overlapped"
    for word in ("samples per second", "loading", "computing", "waiting", *overlapped):
        assert any(word in line for line in lines)
    assert lines[-1].startswith("test accuracy: ")
    assert lines[-1].endswith("%")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [23, 46, 69]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert [line["learning_rate"] for line in metrics] == [0.1] * 3
    assert metrics[0]["test_accuracy"] < metrics[0]["test_top5"] <= 1
    assert any("test accuracy, top-5" in line for line in lines)
    elapsed = [line["elapsed"] for line in metrics]
    assert 0 < elapsed[0] < elapsed[1] < elapsed[2]
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "log.txt",
        "measurement.json",
        "metrics.jsonl",
        "prediction.json",
        "recipe.toml",
        "steps",
    ]
    for epoch in (1, 2, 3):
        with np.load(run / f"steps/epoch-000{epoch}.npz") as steps:
            assert steps["kinds"].tolist() == list(KINDS)
            assert steps["seconds"].shape == (2, 23, len(KINDS))
            assert (steps["seconds"][..., steps["kinds"] == "computing"] > 0).all()


def test_a_run_goes_on_where_nobody_reads_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unisono", "train", "digits", "--set", "training.epochs=1", "--run", "mine"]
    environment = launch_environment(os.environ, terminal=False)
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"digits: training on 2 ranks of this machine\n"
        process.stdout.close()
    assert process.returncode == 0
    assert "\ntest accuracy: " in (tmp_path / "mine" / "log.txt").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's file that is always full")
def test_output_onto_a_full_disk_is_lost() -> None:
    with OptionalOutput("/dev/full", "w") as file:
        assert file.write(b"four") == 4


def test_the_reasons_for_an_overlap_are_in_the_log_file(ended: Ended) -> None:
    done, run = ended
    logged, shown = (run / "log.txt").read_text().splitlines(), done.stdout.splitlines()
    (chosen,) = [place for place, line in enumerate(logged) if line.startswith("overlap ")]
    assert re.match(
        r"overlap \w+(?: \(\d+ at once\))?, buckets of at most [\d.]+ MiB(?: \([\d.]+ at both ends\))?: "
        r"[\d.]+ ms a step \(predicted ",
        logged[chosen],
    )
    doubted = "trials decide nothing" in logged[chosen + 1]  # on a machine with other work
    assert logged[chosen + 1 + doubted].startswith("the others as predicted: ")
    assert [line for line in logged if line in shown] == [line for line in shown[1:] if line[0] not in "┌│├└"]


def test_a_run_is_in_the_ledger_and_can_be_checked(ended: Ended, in_process: Run) -> None:
    done, run = ended
    (sealed,) = [line for line in (run / "log.txt").read_text().splitlines() if line.startswith("prediction sealed")]
    assert sealed.endswith("in mine/prediction.json")
    assert "\nmeasured " in done.stdout
    table = in_process("foresight", str(run.parent / "ledger.jsonl"))
    assert table.returncode == 0, table.stderr
    assert "mine/prediction.json" in table.stdout
    checked = in_process("plan", "--check", str(run))
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.startswith("digits: small_convnet, bsp, 64 samples a step, 2 ranks on 1 node; sealed after ")


def test_a_killed_run_has_its_seal_and_no_measurement(recipe: str, tmp_path: Path, in_process: Run) -> None:
    (tmp_path / "ours.toml").write_text('name = "ours"\n[node]\nflops = 1e9\n[link]\nbandwidth = 1e9\n')
    command = [sys.executable, "-m", "unisono", "train", recipe, "--ranks", "1", "--machine=ours.toml", "--run=mine"]
    environment = launch_environment(os.environ, terminal=False)
    with Watched([*command, "--set=training.epochs=10000"], cwd=tmp_path, env=environment) as watched:
        poll_until((tmp_path / "mine/metrics.jsonl").exists, bool)
        watched.kill()
    seal = json.loads((tmp_path / "mine/prediction.json").read_text())
    assert (seal["sealed"], seal["run"]["machine"], seal["run"]["ranks"]) == ("before the first step", "ours", 1)
    assert seal["run"]["steps"] == 230_000
    assert not (tmp_path / "ledger.jsonl").exists()
    assert_one_line_error(in_process("plan", "--check=mine"), "mine has no measurement: the run has not ended")


def test_machines_ledgers_and_timelines_are_checked_before_the_run(in_process: Run, on_ranks: Run, recipe: str) -> None:
    assert_one_line_error(in_process("train", recipe, "--machine=nowhere"), "no machine nowhere: there are ")
    done = on_ranks("train", recipe, "--ledger=none/ledger.jsonl")
    assert_one_line_error(done, "cannot append to the ledger none/ledger.jsonl: No such file or directory")
    done = on_ranks("train", recipe, "--timeline=none/trace.json")
    assert_one_line_error(done, "cannot write the timeline none/trace.json: No such file or directory")
    done = on_ranks("train", recipe, UNISONO_MACHINE="nowhere")
    assert done.returncode == 2
    assert "no machine nowhere" in done.stderr


def test_given_settings_are_not_searched(on_ranks: Run, recipe: str) -> None:
    given = ("--set", "rule.overlap=funnel", "--set", "exchange.bucket_megabytes=0.1")
    done = on_ranks("train", recipe, "--set", "training.epochs=1", "--set", "optimizer.clip=1", *given)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stdout.splitlines() if line.startswith(("overlap", "the others"))]


def test_a_timeline_shows_every_thread_of_every_rank(on_ranks: Run, recipe: str, tmp_path: Path) -> None:
    done = on_ranks("train", recipe, "--set", "training.epochs=1", "--timeline", "trace.json")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "trace.json").read_text())
    check_trace(document)
    events = document["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    starts = set[str]()
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank]
        spans = [event for event in mine if event["ph"] == "X" and event["cat"] != "predicted"]
        main = next(event["tid"] for event in mine if event["name"] == "thread_name")
        assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
        for name in ("forward", "backward"):
            assert len([span for span in spans if (span["name"], span["tid"]) == (name, main)]) == 23
        arrows = defaultdict[str, list[dict[str, Any]]](list)
        for event in mine:
            if event["ph"] in ("s", "t", "f"):
                arrows[event["id"]].append(event)
        sums = [span["name"] for span in spans if span["name"].startswith(("agree ", "allreduce "))]
        assert sums.count("agree 0") == sums.count("allreduce 1") == 23
        assert len(arrows) == len(sums) - 23, "one for each bucket, none for the control message"
        assert "".join(event["ph"] for event in arrows[f"{rank}.0"]) == "stf"
        for arrow in arrows.values():
            for event, what in zip(arrow, ("backward", "allreduce", "update"), strict=False):
                assert any(
                    (span["name"].partition(" ")[0], span["tid"]) == (what, event["tid"])
                    and span["ts"] <= event["ts"] <= span["ts"] + span["dur"] + 1e-3
                    for span in spans
                )
        assert not starts & arrows.keys()
        starts |= arrows.keys()


def test_one_rank_needs_no_mpiexec_and_keeps_memory(command: Run, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import os\nfrom torch.nn import *\n"
        "def told(classes, channels):\n"
        "    print('memory:', os.environ.get('GLIBC_TUNABLES'))\n"
        "    return Sequential(Flatten(), Linear(64, classes))\n"
    )
    own = ("--set", "model.name=nets:told", "--set", f"model.folder={tmp_path}")
    done = command("train", recipe, *SHORT_RUN, "--ranks", "1", "--set", "training.epochs=1", *own)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("digits: 1 rank on 1 node,") == 1
    assert f"memory: {MALLOC_ENVIRONMENT['GLIBC_TUNABLES']}" in done.stdout


def test_inside_mpiexec_it_is_a_rank(on_ranks: Run, recipe: str) -> None:
    done = on_ranks("train", recipe, "--set", "training.epochs=1", "--set", "ranks=3")
    assert done.returncode == 0, done.stderr
    assert "digits: 2 ranks on 1 node" in done.stdout
    assert done.stdout.count("test accuracy: ") == 1
    done = on_ranks("train", recipe, "--ranks", "3")
    assert done.returncode == 2
    assert "--ranks 3, but the launcher has started 2" in done.stderr


SLOW = """
import time
from pathlib import Path
from unisono.models.convnet import Convnet, small_convnet

class Slow(Convnet):
    def __init__(self, classes, channels):
        super().__init__(*small_convnet(classes, channels).children())

    def forward(self, inputs):
        if Path("is_killed").exists() and any(Path("killed/checkpoints").glob("step-*")):
            time.sleep(0.1)
        return super().forward(inputs)
"""
"""Network that is slow once it has a checkpoint, in a run that is to be killed then: it does not end before."""


def test_killed_and_resumed_ends_with_the_same_bits(on_ranks: Run, recipe: str, tmp_path: Path) -> None:
    """With what was found by trying kept; `benchmarks/faults` kills more runs, at more moments."""
    (tmp_path / "nets.py").write_text(SLOW)
    rate = ("--set", "optimizer.policy=cosine", "--set", "optimizer.warm_epochs=1.5")
    epochs = ("--set", "training.epochs=6", "--set", "training.checkpoint_every=5")
    options = (*epochs, *rate, "--set", "model.name=nets:Slow", "--set", f"model.folder={tmp_path}")
    assert on_ranks("train", recipe, *options, "--run", "whole").returncode == 0
    (tmp_path / "is_killed").touch()
    command = [sys.executable, "-m", "unisono", "train", recipe, *options, "--run", "killed"]
    environment = launch_environment(os.environ, terminal=False)
    with Watched(command, cwd=tmp_path, env=environment) as watched:
        watched.until(lambda: list(tmp_path.glob("killed/checkpoints/step-*")))
        time.sleep(random.Random(0).uniform(0, 0.6))
        assert watched.process.poll() is None, "the run ended by itself"
        os.killpg(watched.process.pid, signal.SIGKILL)
        assert watched.finish().returncode == -signal.SIGKILL  # once the launcher's helpers have killed the ranks
    (tmp_path / "is_killed").unlink()
    done = on_ranks("train", recipe, "--resume", "killed")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"the run's own recipe is used; {recipe} differs from it in .*training\.epochs", done.stdout)
    step = int(re.search(r"resumes after step (\d+)", done.stdout).group(1))
    assert 0 < step < 138
    uninterrupted, resumed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert uninterrupted[name] == resumed[name]
    seen = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "killed")
    ]
    for key in ("step", "learning_rate", "test_accuracy"):
        assert [line[key] for line in seen[0]] == [line[key] for line in seen[1]]
    assert [line["step"] for line in seen[0]] == [23, 46, 69, 92, 115, 138]


@contextmanager
def long_run(folder: Path, recipe: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run that would take hours, after its first epoch."""
    command = [sys.executable, "-m", "unisono", "train", recipe, "--set", "training.epochs=10000", *LEAN, *options]
    command.append(f"--run={folder}")
    environment = launch_environment(os.environ, terminal=False)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder.parent, env=environment, start_new_session=True, **pipes) as process:
        try:
            wait_for(process, (folder / "metrics.jsonl").is_file)
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(process: subprocess.Popen[str], true: Callable[[], object]) -> None:
    while not true():
        time.sleep(0.05)
        assert process.poll() is None, "the run ended by itself"


def ranks_of(folder: Path) -> list[int]:
    """The processes of the ranks."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            if f"--run={folder}".encode() in arguments and b"PMI_RANK=" in (process / "environ").read_bytes():
                pids.append(int(process.name))
    return pids


def steps_kept(folder: Path) -> list[int]:
    return [int(name[5:]) for name in checkpoint_names(folder / "checkpoints")]


@pytest.mark.usefixtures("nothing_ignored")
@pytest.mark.parametrize("target", ["launcher", "ranks"])
def test_sigusr1_saves_and_sigterm_saves_and_ends(on_ranks: Run, recipe: str, tmp_path: Path, target: str) -> None:
    """And the run goes on bit for bit as if nothing had been. SIGUSR1 may come to all, SIGTERM to one rank.

    SIGHUP to the command is SIGTERM to the ranks.
    """
    folder, last_signal = tmp_path / "mine", signal.SIGHUP if target == "launcher" else signal.SIGTERM
    with long_run(folder, recipe) as process:
        ranks = ranks_of(folder)
        assert len(ranks) == 2
        assert len(running(folder)) > 3, "the command, the launcher, and two ranks"

        def send(signum: int) -> None:
            if target == "launcher" or signum == signal.SIGUSR1:
                os.kill(process.pid, signum)
            if target == "ranks":
                for rank in ranks if signum == signal.SIGUSR1 else ranks[-1:]:
                    os.kill(rank, signum)

        send(signal.SIGUSR1)
        wait_for(process, lambda: any(step % 23 for step in steps_kept(folder)))
        if target == "launcher":
            assert_one_line_error(on_ranks("train", "--resume", "mine"), "mine is in use by process ")
            assert not (folder / "recipe.toml").read_text().count("epochs = 3")
        send(last_signal)
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + last_signal, errors
    assert poll_until(lambda: running(folder), lambda seen: not seen) == []
    saved = [line for line in out.splitlines() if line.startswith("saved step ")]
    assert re.fullmatch(r"saved step \d+ on SIGUSR1 to (rank \d|2 ranks)", saved[0])
    last = re.fullmatch(
        rf"saved step (\d+) on SIGTERM to (?:rank \d|2 ranks); resume with: unisono train --resume {folder}", saved[-1]
    )
    assert last, saved
    step = int(last.group(1))
    assert step == max(steps_kept(folder))
    names = {path.name for path in folder.iterdir()} - {"prediction.json"}  # the search may not have ended
    assert names == {"checkpoints", "log.txt", "metrics.jsonl", "recipe.toml", "steps"}
    if target == "launcher":
        return
    epochs = ("--set", f"training.epochs={step // 23 + 1}")
    done = on_ranks("train", "--resume", "mine", *epochs)
    assert done.returncode == 0, done.stderr
    assert f"resumes after step {step}" in done.stdout
    assert on_ranks("train", recipe, *epochs, *LEAN, "--run", "whole").returncode == 0
    uninterrupted, resumed = weights(tmp_path / "whole"), weights(folder)
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert uninterrupted[name] == resumed[name]


def test_a_second_sigterm_ends_at_once_and_a_long_step_is_reported(on_ranks: Run, tmp_path: Path) -> None:
    """Within a step that does not end, on one rank, and with no mpiexec."""
    (tmp_path / "nets.py").write_text("""
import signal, time
from pathlib import Path
from torch import nn
import unisono.training.signals as signals
class Slow(nn.Sequential):
    def forward(self, inputs):
        if Path("slow").exists():
            signals.SLOW_STEP_SECONDS = 0.2
            Path("slow").unlink()
            time.sleep(600)
        return super().forward(inputs)
def slow(classes, channels): return Slow(nn.Flatten(), nn.Linear(64, classes))
""")
    text = (
        (Path(__file__).parents[2] / "src/unisono/recipes/digits.toml")
        .read_text()
        .replace('"small_convnet"', '"nets:slow"')
    )
    (tmp_path / "mine.toml").write_text(text)
    folder = tmp_path / "mine"
    with long_run(folder, "mine.toml", "--ranks=1") as process:
        (tmp_path / "slow").touch()
        wait_for(process, lambda: not (tmp_path / "slow").exists())
        process.terminate()
        assert process.stderr is not None
        reported = process.stderr.readline()
        assert reported.startswith("unisono: rank 0: SIGTERM was received 0 s ago, and no checkpoint is written yet")
        time.sleep(REPEAT_SECONDS + 0.2)
        process.terminate()
        assert "a second SIGTERM: ended at once, after step" in process.stderr.read()
        assert process.wait(60) == 143
    epochs = max(steps_kept(folder)) // 23
    done = on_ranks("train", "--resume", "mine", "--set", f"training.epochs={epochs}")
    assert done.returncode == 0, done.stderr


def test_checkpoints_by_the_clock(on_ranks: Run, recipe: str, tmp_path: Path) -> None:
    """After each step here, where every one takes longer than that."""
    minutes = ("--set", "training.checkpoint_minutes=1e-6", "--set", "training.epochs=1")
    done = on_ranks("train", recipe, *minutes, *LEAN, "--run", "mine")
    assert done.returncode == 0, done.stderr
    assert steps_kept(tmp_path / "mine") == [21, 22, 23]
    assert "saved step" not in done.stdout


OWN_STATE = """
from torch import nn
class Net(nn.Sequential):
    extra = None
    def get_extra_state(self): return self.extra
    def set_extra_state(self, state): assert state == self.extra
def kept(classes, channels):
    one, other = nn.Linear(64, 64), nn.Linear(64, 64)
    other.weight = one.weight
    net = Net(nn.Flatten(), one, nn.ReLU(), other, nn.Linear(64, classes))
    net.extra = {"version": (3, 1)}
    return net
def pickled(classes, channels):
    net = kept(classes, channels)
    net.extra = object()
    return net
"""


def test_tied_weights_and_extra_state_resume(on_ranks: Run, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(OWN_STATE)
    own = ("--set", "model.name=nets:kept", "--set", f"model.folder={tmp_path}", *LEAN)
    done = on_ranks("train", recipe, "--set", "training.epochs=1", *own, "--run", "mine")
    assert done.returncode == 0, done.stderr
    done = on_ranks("train", "--resume", "mine", "--set", "training.epochs=2")
    assert done.returncode == 0, done.stderr
    assert "resumes after step 23" in done.stdout


def test_a_model_that_cannot_be_checkpointed_is_refused_before_it_begins(
    on_ranks: Run, recipe: str, tmp_path: Path
) -> None:
    (tmp_path / "nets.py").write_text(OWN_STATE)
    own = ("--set", "model.name=nets:pickled", "--set", f"model.folder={tmp_path}", *LEAN)
    assert_one_line_error(on_ranks("train", recipe, *own, "--run", "mine"), "'_extra_state' is of type builtins.object")
    assert not (tmp_path / "mine").exists()


def running(run: Path) -> list[str]:
    """The command lines of all processes that have to do with a run."""
    command_lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            command_lines.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in command_lines if str(run) in line]


def test_a_damaged_checkpoint_is_reported_and_an_older_one_used(on_ranks: Run, ended: Ended, tmp_path: Path) -> None:
    shutil.copytree(ended[1], tmp_path / "mine")
    expected = weights(tmp_path / "mine")
    incomplete = tmp_path / "mine/checkpoints/step-000000069/weights.safetensors"
    incomplete.write_bytes(incomplete.read_bytes()[:-100])
    done = on_ranks("train", "--resume", "mine")
    assert done.returncode == 0, done.stderr
    assert (
        "step-000000069 is damaged: weights.safetensors does not match its checksum; "
        "it is now step-000000069.torn, and the previous one is used" in done.stdout
    )
    assert "resumes after step 46" in done.stdout
    assert (tmp_path / "mine/checkpoints/step-000000069.torn/weights.safetensors").is_file()
    assert weights(tmp_path / "mine")["weights.safetensors"] == expected["weights.safetensors"]
    for checkpoint in (tmp_path / "mine/checkpoints").iterdir():
        (checkpoint / "manifest.json").unlink()
    assert_one_line_error(
        on_ranks("train", "--resume", "mine"),
        "no checkpoint in mine/checkpoints is complete: step-000000069 is damaged",
    )


def test_a_finished_run_says_so_and_can_be_extended(
    command: Run, in_process: Run, on_ranks: Run, ended: Ended, tmp_path: Path
) -> None:
    shutil.copytree(ended[1], tmp_path / "mine")
    files = sorted(path.name for path in (tmp_path / "mine").iterdir())
    line = "mine is finished, with 3 epochs; to train longer, add --set training.epochs=N, with N above 3"
    alone = in_process("train", "--resume", "mine")
    assert (alone.returncode, alone.stdout) == (0, f"{line}\n"), "without ranks"
    again = on_ranks("train", "cifar10", "--resume", "mine")
    assert again.returncode == 0, again.stderr
    other, beginning, said = again.stdout.splitlines()
    assert other.startswith("the run's own recipe is used; cifar10 differs from it in name, ")
    assert (beginning, said) == ("digits: resuming mine on 2 ranks", line)
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == files
    options = ("--set", "training.epochs=4", "--set", "optimizer.learning_rate=1e-30", "--ranks", "1", *LEAN)
    before = load_newest(tmp_path / "mine/checkpoints")[0]
    longer = command("train", "--resume", "mine", "--timeline", "longer.json", *options)
    assert longer.returncode == 0, longer.stderr
    assert json.loads((tmp_path / "longer.json").read_text())["traceEvents"]
    after = load_newest(tmp_path / "mine/checkpoints")[0]
    assert (before.step, after.step) == (69, 92)
    assert all(torch.equal(after.weights[name], value) for name, value in before.weights.items()), "it has a new rate"
    assert "ranks = 1" in (tmp_path / "mine/recipe.toml").read_text()


def test_a_user_defined_network_beside_the_recipe(on_ranks: Run, recipe: str, tmp_path: Path) -> None:
    """On two ranks, and again where the run goes on."""
    (tmp_path / "recipes").mkdir()
    own = Path(recipe).read_text().replace('"small_convnet"', '"nets:wide"')
    (tmp_path / "recipes/mine.toml").write_text(own)
    program = """
import os
from torch.nn import *
if os.environ.get("PMI_RANK") == "1": print("nets is imported", flush=True)
def wide(classes, channels): return Sequential(Flatten(), Linear(64, classes))
"""
    (tmp_path / "recipes/nets.py").write_text(program)
    done = on_ranks("train", "recipes/mine.toml", "--set", "training.epochs=1", *LEAN, "--run", "mine")
    assert done.returncode == 0, done.stderr
    done = on_ranks("train", "--resume", "mine", "--set", "training.epochs=2")
    assert done.returncode == 0, done.stderr
    _, first, second = done.stdout.splitlines()[:3]
    where = (
        f"module nets, from {tmp_path}/recipes/nets.py (model.name = 'nets:wide', model.folder = '{tmp_path}/recipes')"
    )
    assert first == f"the run imports user code: {where}"
    assert second == "nets is imported"
    kept = load_newest(tmp_path / "mine/checkpoints")[0]
    assert {name: tuple(weight.shape) for name, weight in kept.weights.items()} == {
        "1.weight": (10, 64),
        "1.bias": (10,),
    }
    done = on_ranks("train", "--resume", "mine", "--set", "training.epochs=3", "--set", "optimizer.name=lars")
    assert done.returncode == 2
    assert done.stderr.startswith("unisono: optimizer.name = 'lars', but the run has the state of 'sgd'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "training.epoch=3"], "unknown key training.epoch; did you mean training.epochs?"),
        (["--set", "data.name=digit"], "data.name = 'digit'; there are digits"),
        (["--set", "model.name=vgg"], "model.name = 'vgg'; there are small_convnet"),
        (["--set", "model.name=nowhere:wide"], "model.name = 'nowhere:wide': there is no module nowhere in"),
        (["--set", "exchange.algorithm=rong"], "no schedule 'rong'; there are"),
        (["--ranks", "0"], "--ranks 0: the number of ranks must be at least 1"),
        (["--ranks", "two"], "'--ranks'"),
        (["--ranks", "65"], "65 ranks share batches of 64 samples"),
        (["--ranks", "3000", "--set", "training.batch=3000"], "training.batch = 3000, but digits has 1437 samples"),
        (["--set", "training.batch=2000"], "training.batch = 2000, but digits has 1437 samples to train on"),
        (["--resume", "nowhere"], "nowhere holds no run"),
        (["--rank", "2"], "No such option: --rank (Possible options: --"),
        (["--set", "rule.overlap=tunnel"], "it is one of auto, chain, phases, concurrent, funnel, none"),
        (["--set", "exchange.bucket_megabytes=inf"], "bucket_megabytes = inf is out of range"),
    ],
)
def test_bad_input_starts_no_rank(in_process: Run, recipe: str, options: list[str], message: str) -> None:
    assert_one_line_error(in_process("train", recipe, *options), message)


def test_a_folder_that_holds_a_run_starts_no_rank(in_process: Run, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.toml").touch()
    assert_one_line_error(
        in_process("train", recipe, "-n", "2", "--run", "mine"),
        "mine holds a run already; resume it with --resume mine",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "model.name=cd_dnn"], "model.name = 'cd_dnn' does not take samples of 1 x 8 x 8, as the data has"),
        (["--set", "model.name=torch:tensr"], "has no function tensr; did you mean torch:tensor?"),
        (["--run", "/proc/nowhere"], "cannot create the run's folder /proc/nowhere"),
    ],
)
def test_bad_input_that_ranks_find(on_ranks: Run, recipe: str, options: list[str], message: str) -> None:
    assert_one_line_error(on_ranks("train", recipe, *options), message)


def test_no_recipe(in_process: Run, tmp_path: Path) -> None:
    assert_one_line_error(in_process("train"), "RECIPE.toml, or --resume RUN; recipes by name: cifar10, ")
    assert_one_line_error(in_process("train", "none.toml"), "cannot read the recipe none.toml")
    (tmp_path / "bad.toml").write_text("[trainig]\nepochs = 3\n")
    assert_one_line_error(in_process("train", "bad.toml"), "unknown key trainig; did you mean training?")


def test_without_a_checkpoint_a_run_begins_again(on_ranks: Run, recipe: str, ended: Ended, tmp_path: Path) -> None:
    """As one that was killed before its first; but not where metrics say that there were some."""
    shutil.copytree(ended[1], tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine/checkpoints")
    assert_one_line_error(
        on_ranks("train", "--resume", "mine"), "no checkpoint in mine/checkpoints, but metrics of 3 epochs: is its disk"
    )
    metrics = tmp_path / "mine/metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    (tmp_path / "mine/checkpoints").symlink_to("/nowhere/mounted")
    assert_one_line_error(
        on_ranks("train", "--resume", "mine"), "a link to /nowhere/mounted: No such file or directory"
    )
    (tmp_path / "mine/checkpoints").unlink()
    done = on_ranks("train", "--resume", "mine", *LEAN)
    assert done.returncode == 0, done.stderr
    assert "mine has no checkpoint yet: the run begins again" in done.stdout
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [23, 46, 69]


@pytest.mark.parametrize(
    ("code", "received", "expected"),
    [
        (0, [], 0),
        (3, [], 3),
        (-9, [], 137),
        (0, [signal.SIGUSR1], 0),
        (143, [], 143),  # a rank was told, not this command
        (15, [signal.SIGTERM], 143),
        (143, [signal.SIGUSR1, signal.SIGTERM], 143),
        (0, [signal.SIGTERM], 0),  # the last epoch was done
        (2, [signal.SIGTERM], 2),  # the disk was full
        (143, [signal.SIGHUP], 129),
        (130, [signal.SIGINT], 130),
        (-2, [signal.SIGINT], 130),
    ],
)
def test_exit_codes(code: int, received: list[int], expected: int) -> None:
    assert exit_code(code, received) == expected


def test_sigusr1_ends_no_ranks_that_start(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = ["sh", "-c", "kill -USR1 $PPID; sleep 0.5; exit 3"]
    monkeypatch.setattr(ranks, "launch_command", lambda *_: starting)
    monkeypatch.setattr(ranks, "PASSED_ON", {signal.SIGUSR1: signal.SIGUSR1})
    with handlers_restored():
        assert ranks.launch(2) == 3


def test_the_number_of_ranks_is_the_launchers_or_as_given_or_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [count_ranks(given, 2) for given in (None, 3)] == [2, 3]
    with pytest.raises(LaunchError, match="at least 1"):
        count_ranks(0, 2)
    monkeypatch.setenv("PMI_SIZE", "4")
    assert [count_ranks(given, 2) for given in (None, 4)] == [4, 4]
    with pytest.raises(LaunchError, match="the launcher has started 4; omit --ranks"):
        count_ranks(3, 2)


def test_no_mpiexec_names_the_extra(recipe: str, tmp_path: Path) -> None:
    pretend = f"import sys; sys.prefix = {str(tmp_path)!r}; sys.argv = ['unisono', 'train', {recipe!r}]"
    code = f"{pretend}; from unisono.cli import main; main()"
    done = run([sys.executable, "-c", code], env={**os.environ, "PATH": str(tmp_path)})
    assert_one_line_error(done, "pip install '.[mpich]'")

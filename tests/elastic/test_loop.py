"""A loop of a user's own goes on after a death, with the bits of one that nothing disturbs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import handlers_restored
from tests.data.conftest import known
from tests.progress import Run
from torch import nn
from torch.optim import SGD

import unisono
from unisono.data.kinds import RAW
from unisono.elastic import Loop, loop
from unisono.elastic.standby import FOLDER_VARIABLE
from unisono.errors import CheckpointError, UsageError
from unisono.launch import MEMORY_VARIABLE
from unisono.plan.layer_plan import COLUMN, Split
from unisono.reducer.made_on import made_on
from unisono.rules import BSP, LocalSGD
from unisono.tensor_parallel.layers import become, parts_of
from unisono.training import memory_copies, signals
from unisono.training.checkpoint.files import load_newest, save
from unisono.training.checkpoint.layout import (
    CHECKPOINTS_KEPT,
    DAMAGED_SUFFIX,
    Checkpoint,
    checkpoint_name,
    checkpoint_names,
    step_of,
)
from unisono.training.memory_copies import THREAD
from unisono.training.run_directory import ALIVE

GUIDE = Path(__file__).parents[2] / "docs" / "how_to" / "keep_a_run_alive.md"
PROGRAM, READING = (Path(__file__).with_name(name) for name in ("summing.py", "reading.py"))


def alone() -> Any:
    """World of one rank, as far as a loop needs it."""
    world = SimpleNamespace(rank=0, size=1, placement=SimpleNamespace(nodes=((0,),), node_of=lambda _: 0))
    world.all_gather_object, world.call_on_root = lambda value: [value], lambda action, _root=0: action()
    world.allreduce, world.broadcast = lambda tensor, op: tensor, lambda tensor, root=0: tensor
    return world


def wait_for_copies() -> None:
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `unisono run --elastic` tells its ranks."""
    monkeypatch.setenv(MEMORY_VARIABLE, str(tmp_path / "memory"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))


@pytest.mark.usefixtures("memory")
def test_a_loop_that_is_resumed_begins_with_the_checkpoint(tmp_path: Path) -> None:
    before, now = nn.Linear(3, 2), nn.Linear(3, 2)
    save(tmp_path / "checkpoints", Checkpoint(7, {"model": before.state_dict()}, {}, {}))
    steps = Loop(alone(), model=now).steps(9)
    assert next(steps) == 7
    steps.close()  # type: ignore[attr-defined]  # a generator
    assert torch.equal(now.weight, before.weight)


@pytest.mark.usefixtures("memory")
def test_a_loop_without_any_copy_in_memory_begins_with_what_it_has_written_to_the_disk(tmp_path: Path) -> None:
    """Every ten minutes, counted from the last checkpoint, of whatever generation."""
    before, now, checkpoints = nn.Linear(3, 2), nn.Linear(3, 2), tmp_path / "checkpoints"
    assert list(Loop(alone(), model=before).steps(2)) == [0, 1]
    wait_for_copies()
    assert checkpoint_names(checkpoints) == []
    os.utime(checkpoints, (0, 0))  # as if it had been made long ago
    assert list(Loop(alone(), model=before).steps(3)) in ([1, 2], [2])
    wait_for_copies()
    (name,) = checkpoint_names(checkpoints)
    shutil.rmtree(os.environ[MEMORY_VARIABLE])
    steps = Loop(alone(), model=now).steps(9)
    assert next(steps) == step_of(name)
    steps.close()  # type: ignore[attr-defined]
    assert torch.equal(now.weight, before.weight)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(("torn", "begin"), [((), 9), ((9,), 8), ((8, 9), 5)])
def test_a_newer_checkpoint_that_is_whole_is_taken_in_the_place_of_a_copy_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], torn: tuple[int, ...], begin: int
) -> None:
    """Damaged ones are told and renamed, and what a rank that was killed has half written is removed."""
    checkpoints, memory = tmp_path / "checkpoints", Path(os.environ[MEMORY_VARIABLE])
    memory.mkdir(0o700)
    for step, folder in ((3, checkpoints), (5, memory), (8, checkpoints), (9, checkpoints)):
        save(folder, Checkpoint(step, {"model": nn.Linear(3, 2).state_dict()}, {}, {}))
    for step in torn:
        (checkpoints / checkpoint_name(step) / "weights.safetensors").write_bytes(b"torn")
    (left := checkpoints / ".step-000000007.tmp").mkdir()
    steps = Loop(alone(), model=nn.Linear(3, 2)).steps(10)
    assert next(steps) == begin
    steps.close()  # type: ignore[attr-defined]
    assert [step_of(name) for name in checkpoint_names(checkpoints)] == [step for step in (3, 8, 9) if step not in torn]
    assert not left.exists()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(torn) == len([*checkpoints.glob(f"*{DAMAGED_SUFFIX}")])
    for line, step in zip(said, reversed(torn), strict=True):
        assert re.match(rf"unisono: rank 0: .*{checkpoint_name(step)}.*; it is now .*{DAMAGED_SUFFIX}, ", line)


@pytest.mark.usefixtures("memory")
def test_no_step_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, made, waited = threading.Event(), threading.Event(), list[bool]()

    def slow(folder: Path, *what: Any) -> Path:
        if folder == tmp_path / "checkpoints":
            begun.set()
            waited.append(made.wait(10))
        return save(folder, *what)

    monkeypatch.setattr(memory_copies, "save", slow)
    monkeypatch.setattr(memory_copies, "MAX_SHARE", 1e9)  # a copy after each step
    after = 0
    for step in Loop(alone(), model=nn.Linear(3, 2)).steps(10_000):
        if step == 1:  # behind the first copy, for which the next step waits
            os.utime(tmp_path / "checkpoints", (0, 0))
        after += begun.is_set()
        if after == 5:
            made.set()
            break
    wait_for_copies()
    assert waited == [True]


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(("minutes", "kept"), [(1e-9, CHECKPOINTS_KEPT), (0, 0)])
def test_the_disk_has_the_newest_checkpoints_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, kept: int
) -> None:
    monkeypatch.setattr(memory_copies, "MAX_SHARE", 1e9)  # a copy after each step
    (checkpoints := tmp_path / "checkpoints").mkdir()
    os.utime(checkpoints, (0, 0))
    for _ in Loop(alone(), checkpoint_minutes=minutes, model=nn.Linear(3, 2)).steps(2 * CHECKPOINTS_KEPT):
        wait_for_copies()
    wait_for_copies()
    steps = range(2 * CHECKPOINTS_KEPT + 1 - kept, 2 * CHECKPOINTS_KEPT + 1)
    assert [step_of(name) for name in checkpoint_names(checkpoints)] == [*steps]


@pytest.mark.usefixtures("memory")
def test_a_disk_that_takes_no_checkpoint_is_one_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for step in Loop(alone(), model=nn.Linear(3, 2)).steps(3):
        if step == 0:
            (tmp_path / "checkpoints").write_text("in the way")
        wait_for_copies()
    said = capfd.readouterr().err
    assert said.startswith("unisono: rank 0: copies in memory go on, but the disk takes no checkpoint: ")
    assert said.count("\n") == 1


@pytest.mark.usefixtures("memory")
def test_a_host_without_memory_writes_to_the_disk_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(os.environ[MEMORY_VARIABLE]).write_text("in the way")
    assert list(Loop(alone(), checkpoint_minutes=1e-9, model=nn.Linear(3, 2)).steps(2)) == [0, 1]
    wait_for_copies()
    assert checkpoint_names(tmp_path / "checkpoints")
    assert "no copy in memory here any more" in capfd.readouterr().err


@pytest.mark.usefixtures("memory")
def test_the_program_of_the_guide_ends_well_where_no_step_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a death behind the last step."""
    (program,) = re.findall(r'```python title="train.py"\n(.*?)```', GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    model = nn.Linear(6, 1)
    states = {"model": model.state_dict(), "optimizer": torch.optim.SGD(model.parameters(), 0.1).state_dict()}
    save(tmp_path / "checkpoints", Checkpoint(20, states, {}, {}))
    monkeypatch.setattr(unisono, "init", alone)
    monkeypatch.setattr(unisono, "parallel", lambda model, *_, **__: model)
    exec(program, {})
    assert capsys.readouterr().out == "20 steps are made\n"


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("virtual", [None, SimpleNamespace(count=4)])
@pytest.mark.parametrize(
    ("changed", "value", "message"),
    [("program", "train.py (0)", r"and the generation before with train\.py \(0\)"), ("made_on", "Xeon", "with Xeon")],
)
def test_a_generation_with_another_program_or_processor_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    virtual: SimpleNamespace | None,
    changed: str,
    value: str,
    message: str,
) -> None:
    reducer = SimpleNamespace(control=SimpleNamespace(averages=0), programs=SimpleNamespace(virtual=virtual))
    reducer.traits = BSP().traits
    reducer.accumulation = SimpleNamespace(accumulated=False)
    monkeypatch.setattr(loop, "reducer_of", lambda model: reducer)
    assert list(Loop(alone(), model=nn.Linear(3, 2)).steps(1)) == [0]
    assert capsys.readouterr().err == ""
    kept, _ = load_newest(memory := Path(os.environ[MEMORY_VARIABLE]))
    save(memory, replace(kept, progress={**kept.progress, changed: value}))
    if virtual is None:
        assert list(Loop(alone(), model=nn.Linear(3, 2)).steps(2)) == [1]
        assert re.fullmatch(rf"unisono: rank 0: rank 0 computes with .*{message}\n", capsys.readouterr().err)
        return
    with pytest.raises(UsageError, match=rf"virtual_ranks = 4 promises .*{message}; use one kind of"):
        list(Loop(alone(), model=nn.Linear(3, 2)).steps(2))


@pytest.mark.usefixtures("memory")
def test_a_run_that_is_resumed_may_have_another_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 2)
    progress = {"made_on": made_on(), "program": "train.py (0)"}
    save(tmp_path / "checkpoints", Checkpoint(1, {"model": model.state_dict()}, {}, progress))
    assert list(Loop(alone(), model=model).steps(2)) == [1]
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("memory")
def test_other_objects_than_those_that_were_kept_are_named(tmp_path: Path) -> None:
    model, optimizer = nn.Linear(3, 2), SGD([nn.Parameter(torch.ones(1))], 0.1)
    save(tmp_path / "checkpoints", Checkpoint(1, {"model": model.state_dict()}, {}, {}))
    with pytest.raises(UsageError, match="the state that was kept and this Loop differ in optimizer: keep the same"):
        next(Loop(alone(), model=model, optimizer=optimizer).steps(2))


@pytest.mark.usefixtures("memory")
def test_no_state_is_kept_between_passes_that_accumulate_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulation, kept = SimpleNamespace(accumulated=False), list[int]()
    accumulating = {"accumulation": accumulation, "programs": SimpleNamespace(virtual=None)}
    reducer = SimpleNamespace(control=SimpleNamespace(averages=0), **accumulating)
    monkeypatch.setattr(Loop, "_reducers", lambda _: {"model": reducer})

    def write(copies: memory_copies.MemoryCopies, make: Any, _: bool) -> None:
        kept.append(make().step)
        copies.seconds = 1.0  # more than MAX_HELD steps go by before all ask again

    monkeypatch.setattr(memory_copies.MemoryCopies, "write", write)
    with handlers_restored(), pytest.raises(SystemExit):
        for step in Loop(alone(), model=nn.Linear(3, 2)).steps(10**6):
            accumulation.accumulated = step % 200 != 199
            if step == 4000:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
    assert len(kept) > 1
    assert {step % 200 for step in kept} == {0}


@pytest.mark.parametrize("elastic", [False, True])
def test_steps_are_counted_once(request: pytest.FixtureRequest, elastic: bool) -> None:
    """The state that was kept would be loaded anew."""
    if elastic:
        request.getfixturevalue("memory")
    loop = Loop(alone(), model=nn.Linear(3, 2))
    assert list(loop.steps(3)) == [0, 1, 2]
    with pytest.raises(UsageError, match=r"loop\.steps\(epochs \* steps\)"):
        next(loop.steps(3))


@pytest.mark.usefixtures("memory")
def test_sigterm_ends_the_steps_after_a_copy_and_a_second_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "REPEAT_SECONDS", 0.0)
    world, ended, before = alone(), threading.Event(), signal.getsignal(signal.SIGTERM)
    world.abort = lambda code, _: ended.set()
    with handlers_restored(), pytest.raises(SystemExit) as end:
        for step in Loop(world, model=nn.Linear(3, 2)).steps(3):
            if step == 2:  # the last one, too
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
                assert not ended.is_set()
                os.kill(os.getpid(), signal.SIGTERM)
                assert ended.wait(10)
    assert end.value.code == 143
    assert max(map(step_of, checkpoint_names(Path(os.environ[MEMORY_VARIABLE])))) == 3
    signal.signal(signal.SIGTERM, before)
    assert list(Loop(world, model=nn.Linear(3, 2)).steps(4)) == [3]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("memory")
def test_sigterm_waits_for_no_copy_that_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a large state are minutes apart."""
    monkeypatch.setattr(memory_copies, "MAX_SHARE", 1e-9)
    monkeypatch.setattr(loop, "ASK_SECONDS", 0.0)
    steps, done = Loop(alone(), model=nn.Linear(3, 2)).steps(1000), 0
    with handlers_restored(), pytest.raises(SystemExit):
        for done in steps:
            if done == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
    assert done < 900
    assert max(map(step_of, checkpoint_names(Path(os.environ[MEMORY_VARIABLE])))) == done + 1


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("minutes", [0, 10])
def test_the_last_copy_goes_to_the_disk_where_memory_takes_none(tmp_path: Path, minutes: int) -> None:
    Path(os.environ[MEMORY_VARIABLE]).write_text("in the way")
    with handlers_restored(), pytest.raises(SystemExit):
        for step in Loop(alone(), checkpoint_minutes=minutes, model=nn.Linear(3, 2)).steps(3):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
    assert checkpoint_names(tmp_path / "checkpoints") == [checkpoint_name(3)]


@pytest.mark.usefixtures("memory")
def test_a_rule_by_which_weights_of_ranks_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's weights alone would be kept: also where the model is made parallel, or anew, behind the loop."""
    model = nn.Sequential(nn.Linear(3, 2))
    behind = Loop(alone(), model=model).steps(3)
    with handlers_restored():
        next(behind)
        reducer = SimpleNamespace(traits=LocalSGD().traits)
        monkeypatch.setattr(loop, "reducer_of", lambda part: reducer if part is model else None)
        message = "rank 0: a Loop keeps one rank's state, but by its rule ranks have different weights: .* BSP or"
        with pytest.raises(UsageError, match=message):
            Loop(alone(), model=model)
        with pytest.raises(UsageError, match="--elastic"):
            next(behind)


@pytest.mark.usefixtures("memory")
def test_split_layers_are_refused() -> None:
    """Each rank would load the part of rank 0."""
    layer, split = nn.Linear(3, 2), Split(COLUMN, 2)
    become(layer, split, SimpleNamespace(world=None), parts_of(layer, split, 0))
    with pytest.raises(UsageError, match="rank 0: a Loop keeps one rank's state, but layers of model are split over"):
        Loop(alone(), model=nn.Sequential(layer))


@pytest.mark.usefixtures("memory")
def test_a_state_that_cannot_be_kept_is_refused_before_the_first_step() -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 8])
    with pytest.raises(CheckpointError, match=r"the state of scheduler .* 'milestones' is of type coll"):
        Loop(alone(), optimizer=optimizer, scheduler=scheduler)  # type: ignore[arg-type]


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("touched", [True, False])
def test_a_run_folder_that_takes_no_file_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], touched: bool
) -> None:
    """Copies in memory go on, whether the thread that writes them is refused or the step before."""
    home = tmp_path / "full"
    if touched:
        (home / ALIVE).mkdir(parents=True)  # takes a touch, but no file in its place
    monkeypatch.setenv(FOLDER_VARIABLE, str(home))
    assert list(Loop(alone(), checkpoint_minutes=0, model=nn.Linear(3, 2)).steps(3)) == [0, 1, 2]
    said = capfd.readouterr().err
    assert said.startswith(f"unisono: rank 0: copies in memory go on, but {home} does not tell of them: ")
    assert said.count("\n") == 1
    assert max(map(step_of, checkpoint_names(Path(os.environ[MEMORY_VARIABLE])))) > 0


@pytest.mark.launches
def test_a_loop_goes_on_from_the_state_that_was_kept(tmp_path: Path, unisono: Run, mpiexec: Run) -> None:
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "whole"
    for folder in (disturbed, undisturbed):
        folder.mkdir()
    done = unisono("run", "--elastic", "--ranks", "2", str(PROGRAM), str(disturbed), "8")
    assert done.returncode == 0, done.stderr
    assert "goes on" in done.stderr
    steps = [int(line) for line in (disturbed / "steps").read_text().split()]
    assert steps[: steps.index(8) + 1] == list(range(9))
    assert steps[steps.index(8) + 1] in range(1, 9), "a copy was kept after the first step at the latest"
    assert steps[-1] == 11
    plain = mpiexec(1, str(PROGRAM), str(undisturbed), "-1")
    assert plain.returncode == 0, plain.stderr
    assert (disturbed / "hash").read_text() == (undisturbed / "hash").read_text()


@pytest.mark.launches
def test_samples_are_handed_over_to_the_next_ranks(tmp_path: Path, unisono: Run, mpiexec: Run) -> None:
    disturbed, undisturbed, pack = tmp_path / "disturbed", tmp_path / "whole", tmp_path / "pack"
    for folder in (disturbed, undisturbed):
        folder.mkdir()
    samples = [np.random.default_rng(index).integers(0, 256, 64, np.uint8).tobytes() for index in range(60)]
    for name in ("train", "test"):
        known(samples, pack / name, RAW, (8, 8))
    done = unisono("run", "--elastic", "--ranks", "2", str(READING), str(pack), str(disturbed), "8")
    assert done.returncode == 0, done.stderr
    assert "goes on" in done.stderr
    assert (disturbed / "notes").read_text() == "storage: 60 of 60 samples were left in memory"
    plain = mpiexec(1, str(READING), str(pack), str(undisturbed), "-1")
    assert plain.returncode == 0, plain.stderr
    assert (undisturbed / "notes").read_text() == ""
    assert (disturbed / "hash").read_text() == (undisturbed / "hash").read_text()

"""Decisions of an elastic run: what follows after a generation, and the command that starts it."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.elastic import generations
from unisono.elastic.attach import BAD_INPUT
from unisono.elastic.generations import MAX_FRUITLESS, ElasticRun, End, Generation, decide
from unisono.errors import CheckpointError
from unisono.launch import SURVIVAL
from unisono.training.recipe import Recipe
from unisono.training.run_directory import ALIVE
from unisono.uncaught import EXCEPTION_CODE


def run_in(folder: Path, mpiexec: str = "/bin/true") -> ElasticRun:
    return ElasticRun(folder, ("train", "digits"), ("train", "--resume", "x"), 2, ("a", "b"), Path(mpiexec))


def test_a_death_is_followed_by_the_ranks_that_there_are() -> None:
    assert decide(Generation(4, 3, 10, fruitless=2), End(137, 12, 3), 1) == Generation(3, 4, 12, made=4)
    assert decide(Generation(4, 3, 10), End(143, 10, 5, joins=True), 1) == Generation(5, 4, 10)


@pytest.mark.parametrize("joined", [5, 3])
def test_ranks_that_refuse_to_begin_are_followed_by_as_many_as_trained_before(joined: int) -> None:
    back = decide(Generation(joined, 4, 12, made=4), End(BAD_INPUT, 12, joined), 1)
    assert back == Generation(4, 5, 12, fruitless=1, made=4)
    assert decide(back, End(BAD_INPUT, 12, joined), 1) == "", "the others refuse it, too"
    assert decide(Generation(joined, 4, 12, made=4), End(BAD_INPUT, 13, joined), 1) == "", "they have trained"


@pytest.mark.parametrize("end", [End(0, 9, 4), End(BAD_INPUT, -1, 4), End(143, 9, 4, stopped=True)])
def test_the_end_bad_input_and_a_signal_of_the_user_end_the_run(end: End) -> None:
    assert decide(Generation(4), end, 1) == ""


def test_too_few_ranks_end_the_run() -> None:
    assert "--min-ranks is 4" in str(decide(Generation(4), End(137, 5, 3), 4))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_it_gives_up_only_after_generations_in_a_row_without_a_new_step(ends: list[tuple[int, bool]]) -> None:
    """Each generation keeps so many new steps, or is ended by a join."""
    generation, fruitless = Generation(2), 0
    for steps, joins in ends:
        fruitless = 0 if steps or joins else fruitless + 1
        following = decide(generation, End(137, generation.step + steps, 2, joins), 1)
        assert isinstance(following, str) == (fruitless == MAX_FRUITLESS)
        if isinstance(following, str):
            return
        assert (following.number, following.fruitless) == (generation.number + 1, fruitless)
        generation = following


def test_a_program_that_fails_before_its_first_step_is_started_twice() -> None:
    again = decide(Generation(4), End(EXCEPTION_CODE, -1, 4), 1)
    assert again == Generation(4, 2, fruitless=1, failed=1)
    assert "2 generations" in str(decide(again, End(EXCEPTION_CODE, -1, 4), 1))
    assert decide(again, End(137, -1, 4), 1) == Generation(4, 3, fruitless=2), "a rank was killed"
    killed = decide(Generation(4), End(137, -1, 4), 1)
    assert decide(killed, End(EXCEPTION_CODE, -1, 4), 1) == Generation(4, 3, fruitless=2, failed=1), "it failed once"
    assert decide(Generation(4, 3, 10, 1, made=4), End(EXCEPTION_CODE, 10, 4), 1) == Generation(4, 4, 10, 2, made=4)


def test_ranks_resume_once_the_folder_has_a_recipe(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    assert run.command(4, ["b"], begun=False)[-2:] == ["train", "digits"]
    (tmp_path / "recipe.toml").touch()
    assert run.command(4, ["b"], begun=False)[-3:] == ["train", "--resume", "x"]
    changed = replace(run, first=("train", "--resume", "x", "--set", "y"))
    assert changed.command(4, ["b"], begun=False)[-2:] == ["--set", "y"]
    assert changed.command(4, ["b"], begun=True)[-3:] == ["train", "--resume", "x"]


def test_hosts_are_given_as_the_launcher_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path)
    assert run.command(4, ["a", "b"], begun=False)[1:7] == ["-hosts", "a,b", "-ppn", "2", "-n", "4"]
    assert run.command(3, ["a", "b"], begun=False)[3:7] == ["-ppn", "2", "-n", "3"], "as the recipe allows"
    assert run.question("b") == ["/bin/true", "-hosts", "b", "-ppn", "1", "-n", "1", "true"]
    assert not run.survives
    monkeypatch.setattr(generations, "is_open_mpi", lambda _: True)
    run = run_in(tmp_path)
    assert run.survives
    command = run.command(4, ["a", "b"], begun=False)
    assert command[1:5] == ["--host", "a:2,b:2", "-n", "4"]
    names = ["UNISONO_MEMORY", "UNISONO_GENERATION", "UNISONO_FOLDER", "UNISONO_SURVIVORS"]
    assert command[5:13] == [word for name in names for word in ("-x", name)], "other hosts have no others"
    assert command[13 : 13 + len(SURVIVAL)] == [*SURVIVAL]
    assert "-x" not in run.command(4, [], begun=False)
    assert not run_in(tmp_path, "/bin/false").survives, "an Open MPI without ULFM"


def test_what_is_kept_is_the_newest_step_of_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path / "run")
    monkeypatch.setattr(ElasticRun, "memory", tmp_path / "memory")
    assert run.kept() == -1
    (tmp_path / "run" / "checkpoints" / "step-000000007").mkdir(parents=True)
    assert run.kept() == 7
    (tmp_path / "memory" / "step-000000009").mkdir(parents=True)
    assert run.kept() == 9


def test_the_newest_copy_is_a_checkpoint_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, checkpoints = tmp_path / "memory", tmp_path / "run" / "checkpoints"
    monkeypatch.setattr(ElasticRun, "memory", memory)
    program = replace(run_in(tmp_path / "run"), later=("run", "t.py", "a b"), hosts=(), least=1)
    assert (program.store(), program.remedy()) == (False, "")
    for step in (8, 9):
        (memory / f"step-00000000{step}").mkdir(parents=True)
        (memory / f"step-00000000{step}" / "manifest.json").write_text(f"{step}")
    assert (program.store(), program.store()) == (True, False)
    assert [path.name for path in checkpoints.iterdir()] == ["step-000000009"]
    assert (checkpoints / "step-000000009" / "manifest.json").read_text() == "9"
    assert program.remedy() == f"; resume with: unisono run --elastic --resume {tmp_path / 'run'} t.py 'a b'"
    there = replace(program, hosts=("a", "b"), least=2).remedy()
    assert there.startswith("; resume with: unisono run --elastic --hosts=a,b --min-ranks=2 --resume ")
    assert " --elastic --ranks=2 --resume " in replace(program, ranks=2).remedy()
    assert (
        replace(program, recipe=Recipe(), later=("train", "--resume", "x")).remedy().endswith(" --elastic --resume x")
    )


def test_a_copy_that_the_disk_refuses_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that neither this command nor the standby removes at its end, nor the next command."""
    memory, checkpoints = tmp_path / "shm" / "unisono-run-key-mine", tmp_path / "run" / "checkpoints"
    monkeypatch.setattr(ElasticRun, "memory", memory)
    program = replace(run_in(tmp_path / "run"), later=("run", "t.py"), hosts=(), least=1)
    (memory / "step-000000012").mkdir(parents=True)
    (memory / "step-000000012" / "manifest.json").write_text("12")
    (memory / "samples-0").touch()
    (memory / "step-000000009").mkdir()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(CheckpointError) as refused:
        program.store()
    (left,) = memory.parent.iterdir()
    assert not left.name.startswith("unisono-run-")
    assert [path.name for path in left.iterdir()] == ["step-000000012"]
    assert f"{refused.value}" == (
        f"cannot write a checkpoint into {checkpoints}: [Errno 28] No space left on device; the state is in "
        f"{left}/step-000000012: free space, mkdir -p {checkpoints}, mv {left}/step-000000012 {checkpoints}, "
        f"rm -r {left}, then resume with: unisono run --elastic --resume {tmp_path}/run t.py"
    )
    assert not [*checkpoints.iterdir()]


def test_a_copy_on_another_host_is_a_kept_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path)
    monkeypatch.setattr(ElasticRun, "memory", tmp_path / "memory")
    (tmp_path / "checkpoints" / "step-000000007").mkdir(parents=True)
    assert run.kept_anywhere() == 7
    (tmp_path / ALIVE).touch()
    assert run.kept_anywhere() == 7, "the first copy is being written"
    (tmp_path / ALIVE).write_text("11")
    assert (run.kept(), run.kept_anywhere()) == (7, 11)


def test_a_folder_of_checkpoints_that_cannot_be_listed_loses_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm" / "unisono-run-key-mine"
    monkeypatch.setattr(ElasticRun, "memory", memory)
    run = replace(run_in(tmp_path / "run"), later=("run", "t.py"))
    (memory / "step-000000012").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "a disk that is gone")
    assert run.kept_anywhere() == 12
    with pytest.raises(CheckpointError, match=r"the state is in .*step-000000012: "):
        run.store()
    (left,) = memory.parent.iterdir()
    assert [path.name for path in left.iterdir()] == ["step-000000012"]

"""Elastic runs: what their ranks are started with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono.elastic import supervisor
from unisono.elastic.generations import ElasticRun
from unisono.errors import UsageError

Started = Callable[[str], ElasticRun]


@pytest.fixture
def started(in_process: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Return a function that returns the run that a command plays."""
    (tmp_path / "t.py").touch()
    runs = list[ElasticRun]()
    monkeypatch.setattr(supervisor, "Supervisor", lambda run: SimpleNamespace(play=lambda: runs.append(run) or 0))

    def of(arguments: str) -> ElasticRun:
        done = in_process(*arguments.split())
        assert done.returncode == 0, done.stderr
        return runs[-1]

    return of


@pytest.mark.parametrize("command", ["train digits", "run t.py"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--hosts a,b", "--hosts a,b needs --elastic"),
        ("--min-ranks 2", "--min-ranks 2 needs --elastic"),
        ("--elastic --hosts ,", "--hosts ,: it names no host"),
    ],
)
def test_options_of_elastic_runs_are_not_ignored(
    in_process: Run, tmp_path: Path, command: str, options: str, message: str
) -> None:
    (tmp_path / "t.py").touch()
    name, what = command.split()
    assert_one_line_error(in_process(name, *options.split(), what), message)


@pytest.mark.parametrize(("answer", "code"), [("takes c", 0), (UsageError("it refuses"), 2)])
def test_the_answer_to_a_request_is_said(
    in_process: Run, monkeypatch: pytest.MonkeyPatch, answer: str | UsageError, code: int
) -> None:
    asked = list[tuple[object, ...]]()

    def join(*request: object) -> str:
        asked.append(request)
        if isinstance(answer, UsageError):
            raise answer
        return answer

    monkeypatch.setattr(supervisor, "join", join)
    done = in_process("join", "r", "--hosts", "c,c,d,")
    assert asked == [(Path("r"), 1, ["c", "d"])]
    assert done.returncode == code
    assert f"{answer}" in (done.stderr if code else done.stdout)
    assert_one_line_error(in_process("join", "r", "--hosts", "c", "-n", "2"), "--ranks 2 and --hosts c")
    assert_one_line_error(in_process("join", "r", "--hosts", ","), "it names no host")
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--elastic -n2 t.py -n 8", "--backend-for=gloo,mpi t.py -n 8"),
        ("--nproc-per-node 2 --elastic --min-ranks=2 t.py --elastic", "--backend-for=gloo,mpi t.py --elastic"),
        ("--elastic --nproc_per_node=2 --standalone --rdzv-id 1 t.py", "--backend-for=gloo,mpi t.py"),
        ("--backend-for gloo -m --ranks 2 --elastic t x", "-m --backend-for=gloo t x"),
    ],
)
def test_ranks_of_a_program_have_its_arguments(started: Started, given: str, expected: str) -> None:
    run = started(f"run {given}")
    assert run.first == run.later == ["run", *expected.split()]
    assert run.ranks == 2


def test_a_program_goes_on_in_the_folder_of_its_run(started: Started, tmp_path: Path) -> None:
    (tmp_path / "r" / "checkpoints" / "step-000000007").mkdir(parents=True)
    run = started("run --elastic -n2 --resume r t.py")
    assert (run.home, run.first) == (Path("r"), ["run", "--backend-for=gloo,mpi", "t.py"])


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(("hosts", "more"), [("", "unisono join r"), ("--hosts a,b", "unisono join r --hosts NAME")])
def test_a_run_says_how_it_is_joined(in_process: Run, hosts: str, more: str) -> None:
    said = in_process(*f"train digits --elastic -n2 {hosts} --run r".split()).stdout
    assert f"elastic, into r; more ranks: {more}; without" in said


@pytest.mark.parametrize(
    ("given", "first", "later"),
    [
        ("digits --elastic -n2 --set training.batch=8 --run r", "digits --set=training.batch=8 --run r", "--resume r"),
        (
            "-v --machine endeavor digits --ledger=l --elastic -n 2 --run r",
            "digits --machine=endeavor --ledger=l --verbose --run r",
            "--ledger=l --verbose --resume r",
        ),
    ],
)
def test_ranks_that_go_on_say_and_write_what_the_first_ones_do(
    started: Started, given: str, first: str, later: str
) -> None:
    run = started(f"train {given}")
    assert (run.first, run.later) == (["train", *first.split()], ["train", *later.split()])

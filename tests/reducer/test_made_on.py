"""What the bits of ranks depend on: compared once, refused where bits are promised, and told where not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.progress import Run

from unisono.errors import UsageError
from unisono.reducer.made_on import MadeOnRanks, check_alike, code_of, difference, made_on, warn_of_difference
from unisono.step.rule import RankState

PROGRAM = Path(__file__).with_name("unlike_ranks.py")

KERNELS = torch.backends.cpu.get_cpu_capability()


class Ranks:
    """World of this rank and others."""

    def __init__(self, rank: int, *others: str) -> None:
        self.rank, self.size, self.gathered = rank, 1 + len(others), 0
        self._others, self._resources = others, dict[Any, Any]()

    def all_gather_object(self, own: str) -> list[str]:
        self.gathered += 1
        return [own, *self._others]

    def resource(self, make: Callable[[Any], Any]) -> Any:
        if make not in self._resources:
            self._resources[make] = make(self)
        return self._resources[make]


def ranks(*others: str, rank: int = 0) -> Any:
    return Ranks(rank, *others)


def test_only_what_differs_is_named() -> None:
    made = {"rank 0": "Xeon (AVX2), PyTorch 2", "rank 1": "Xeon (AVX2), PyTorch 2", "rank 2": "EPYC (AVX2), PyTorch 2"}
    assert difference(made) == "rank 0 computes with Xeon (AVX2), and rank 2 with EPYC (AVX2)"
    assert difference(dict.fromkeys(made, "Xeon")) == ""
    assert difference({"rank 0": "Xeon, a.py (1)", "rank 1": "Xeon"}).endswith("and rank 1 with nothing else")


def test_promised_bits_are_refused_on_every_rank() -> None:
    same = MadeOnRanks(ranks()).own
    check_alike(ranks(same), "virtual_ranks = 4")
    for rank in range(3):
        world = ranks(same, "Xeon", rank=rank)
        with pytest.raises(UsageError, match=r"^virtual_ranks = 4 promises .* rank 2 with Xeon; use one kind"):
            check_alike(world, "virtual_ranks = 4")


@pytest.mark.parametrize("state", RankState)
def test_without_a_promise_rank_0_says_it_once(caplog: pytest.LogCaptureFixture, state: RankState) -> None:
    worlds = ranks("Xeon"), ranks("Xeon", rank=1)
    with caplog.at_level(logging.WARNING, "unisono"):
        for world in (*worlds, *worlds):
            warn_of_difference(world, torch.device("cpu"), state)
        warn_of_difference(ranks("Xeon"), torch.device("cuda"), state)  # other arithmetic
    (line,) = caplog.messages
    assert "rank 1 with Xeon" in line
    assert ("drift apart" in line) == (state not in (RankState.SHARDED, RankState.OWN))
    assert [world.gathered for world in worlds] == [1, 1]


def test_one_rank_is_compared_with_none() -> None:
    world = ranks()
    check_alike(world, "virtual_ranks = 4")
    assert world.gathered == 0


def test_code_is_named_by_its_content(tmp_path: Path) -> None:
    program, package = tmp_path / "train.py", tmp_path / "nets"
    package.mkdir()
    for file in (program, package / "wide.py"):
        file.write_text("1")
    before = code_of(program), code_of(package)
    assert before[0].startswith("train.py (")
    (package / "notes.txt").write_text("no code")
    assert (code_of(program), code_of(package)) == before
    for file in (program, package / "wide.py"):
        file.write_text("2")
    after = code_of(program), code_of(package)
    assert not {*after} & set(before)
    (package / ".#wide.py").symlink_to(tmp_path / "nowhere")  # an editor's lock
    (package / ".ipynb_checkpoints").mkdir()
    (package / ".ipynb_checkpoints" / "wide.py").write_text("3")
    (package / "folder.py").mkdir()
    assert (code_of(program), code_of(package)) == after
    assert code_of(tmp_path / "nowhere.py") == ""


def test_sources_that_are_not_installed_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr("unisono.reducer.made_on.version", absent)
    assert made_on.__wrapped__().endswith("unisono not installed")  # type: ignore[attr-defined]


@pytest.mark.skipif(KERNELS == "DEFAULT", reason="this processor has no vector instructions to leave out")
def test_ranks_with_other_instructions_are_told_and_refused(mpiexec: Run) -> None:
    done = mpiexec(2, str(PROGRAM))
    (line,) = [line for line in done.stderr.splitlines() if "computes with" in line]
    assert "drift apart" in line
    assert f"({KERNELS}), and rank 1 with " in line
    refusals = done.stdout.splitlines()
    assert len(refusals) == 2
    assert all("virtual_ranks = 2 promises the same bits, but rank 0 computes with" in line for line in refusals)
    assert all(line.endswith("or train without virtual ranks") for line in refusals)

"""Candidates of a collective: each has the bits of the built-in choice; classes; the file of choices."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono import processor
from unisono.collectives.trials import (
    MAX_TRIED_BYTES,
    candidates,
    choices_file,
    keep_choice,
    read_choices,
    size_class,
)
from unisono.network.choice import LIBRARY, Choice

LIBRARY_CHOICE = Choice(LIBRARY, LIBRARY)


def test_the_library_is_a_candidate_where_the_order_of_a_sum_is_no_matter() -> None:
    assert LIBRARY_CHOICE in candidates("allreduce", 2, "sum", floating=True)
    assert LIBRARY_CHOICE not in candidates("allreduce", 3, "sum", floating=True)
    assert LIBRARY_CHOICE in candidates("allreduce", 3, "sum", floating=False)
    assert LIBRARY_CHOICE in candidates("allreduce", 3, "maximum", floating=True)
    assert LIBRARY_CHOICE in candidates("all_gather", 8, None, floating=True)


def test_at_most_20_calls_are_tried() -> None:
    from unisono.collectives.trials import ROUNDS

    for collective in ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        assert ROUNDS * len(candidates(collective, 2, "sum", floating=False)) <= 20


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(33 << 10, 64 << 10), (64 << 10, 64 << 10), (1 << 40, MAX_TRIED_BYTES)]
)
def test_classes(nbytes: int, expected: int) -> None:
    assert size_class(nbytes) == expected


def test_the_file_of_choices(tmp_path: Path) -> None:
    path = tmp_path / "unisono" / "choices.json"
    assert read_choices(path) == {}
    keep_choice(path, "allreduce float32 sum 65536", None, ["direct", "cma"])
    assert read_choices(path) == {"allreduce float32 sum 65536": ["direct", "cma"]}
    assert [*path.parent.iterdir()] == [path]
    for damaged in ("{", "[1]"):
        path.write_text(damaged)
        assert read_choices(path) == {}
    keep_choice(Path("/proc/choices.json"), "any", None, ["library"])  # no place to write: measured again by later runs


def test_choices_are_kept_by_machine_and_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    no_or_yes = (False, True)
    paths = {choices_file(ranks, reads, compiled) for ranks in (2, 4) for reads in no_or_yes for compiled in no_or_yes}
    assert len(paths) == 8
    assert {path.parent for path in paths} == {tmp_path / "unisono"}
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    processor.CPUINFO.write_text("processor : 0\nmodel name : another\n")
    assert choices_file(2, reads=True, compiled=True) not in paths


def test_a_user_without_a_home_keeps_no_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    keep_choice(choices_file(2, reads=True, compiled=True), "allreduce float32 sum 65536", None, ["direct", "cma"])
    assert read_choices(choices_file(2, reads=True, compiled=True)) == {}

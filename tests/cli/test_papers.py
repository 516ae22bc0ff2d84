"""The command `unisono papers`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono.papers.figures import counted


def test_without_a_figure_all_are_listed(in_process: Run) -> None:
    done = in_process("papers")
    assert done.returncode == 0, done.stderr
    assert all(figure.id in done.stdout for figure in counted())


def test_figures_are_printed_and_one_is_drawn(in_process: Run, tmp_path: Path) -> None:
    picture = tmp_path / "a.svg"
    done = in_process("papers", "swcaffe-figure-10", "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    assert "715.45 x" in done.stdout
    assert "<svg" in picture.read_text()
    assert in_process("papers", "dimd-figure-7", "dimd-figure-9").stdout.count("section 5.2") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dimd-figure-70",), "did you mean dimd-figure-7"),
        (("--picture", "a.svg"), "a picture is of one figure"),
        (("dimd-figure-7", "--picture", "a.bmp"), "a.bmp"),
    ],
)
def test_what_is_wrong_is_one_line(in_process: Run, arguments: tuple[str, ...], message: str) -> None:
    assert_one_line_error(in_process("papers", *arguments), message)


@pytest.mark.launches
def test_measuring_writes_into_the_folder_and_is_not_repeated(command: Run, tmp_path: Path) -> None:
    arguments = ("papers", "swcaffe-figure-2", "--measure", "--folder", str(tmp_path))
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    assert "copies of 4 KiB" in done.stdout
    assert "1 of 1  swcaffe-figure-2" in done.stderr, "a log has no bar"
    (rows,) = tmp_path.glob("runs/*/rows.json")
    before = rows.stat().st_mtime_ns
    assert command(*arguments).returncode == 0
    assert rows.stat().st_mtime_ns == before


def test_what_cannot_be_measured_is_said(in_process: Run, tmp_path: Path) -> None:
    done = in_process("papers", "dimd-figure-12", "--measure", "--folder", str(tmp_path))
    assert done.returncode == 0
    assert "has no measurement" in done.stderr

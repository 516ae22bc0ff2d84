import subprocess
import sys
from pathlib import Path

import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono.placement import regular
from unisono.rules import BSP, EASGD, LocalSGD
from unisono.schedules import find
from unisono.schedules.ring import ring
from unisono.step.layout import even_layout
from unisono.view.schedule import draw, draw_svg
from unisono.view.step import draw as draw_step
from unisono.view.step import draw_svg as draw_step_svg
from unisono.view.step import picture_of


def test_draw(in_process: Run) -> None:
    assert in_process("draw", "ring", "--ranks", "3").stdout == draw(ring, 3, "ring") + "\n"


def test_output_that_cannot_be_written(command: Run, tmp_path: Path) -> None:
    done = command("draw", "ring", "--ranks", "3", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout
    arguments = [sys.executable, "-m", "unisono", "draw", "ring"]
    with Path("/dev/full").open("w") as full:
        lost = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (lost.returncode, lost.stderr) == (1, "unisono: output is lost: No space left on device\n")


def test_where_ranks_sit(in_process: Run) -> None:
    placement = regular(2, 1, 2)
    placed = find("halving/round-robin", placement).allreduce
    done = in_process("draw", "halving/round-robin", "--ranks", "4", "--nodes", "2", "--supernodes", "2")
    assert done.stdout == draw(placed, 4, "halving/round-robin", placement) + "\n"
    assert done.stdout != in_process("draw", "halving/round-robin").stdout


def test_svg(in_process: Run, tmp_path: Path) -> None:
    placement = regular(1, 2, 2)
    done = in_process("draw", "hierarchical", "--nodes", "2", "--svg", str(tmp_path / "picture.svg"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    drawn = draw_svg(find("hierarchical", placement).allreduce, 4, "hierarchical", placement)
    assert (tmp_path / "picture.svg").read_text(encoding="utf-8") == drawn


def test_a_step(in_process: Run, tmp_path: Path) -> None:
    done = in_process("draw", "step", "--rule", "bsp", "--overlap", "chain", "--buckets", "4", "--steps", "2")
    picture = picture_of(BSP(overlap="chain"), even_layout(4, 4), 2, "bsp, chain, 4 buckets, 2 steps")
    assert done.stdout == draw_step(picture) + "\n"
    path = tmp_path / "step.svg"
    assert in_process("draw", "step", "--rule", "local_sgd", "--steps", "1", "--svg", str(path)).stdout == ""
    local = picture_of(LocalSGD(overlap="chain", every=2), even_layout(4, 4), 1, "local_sgd, chain, 4 buckets, 1 step")
    assert path.read_text(encoding="utf-8") == draw_step_svg(local)
    done = in_process("draw", "step", "--rule", "easgd", "--every", "3", "--steps", "1")
    worker = picture_of(EASGD(overlap="chain", period=3), even_layout(4, 4), 1, "easgd, chain, 4 buckets, 1 step")
    assert done.stdout == draw_step(worker) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rong"], "there is no schedule 'rong'"),
        (["ring", "--ranks", "0"], "the number of ranks must be at least 1"),
        (["ring", "--ranks", "4", "--nodes", "3"], "--nodes 3: 4 ranks do not spread evenly over 3 nodes"),
        (["ring", "--nodes", "0"], "--nodes 0: "),
        (["ring", "--nodes", "2", "--supernodes", "4"], "--supernodes 4: 2 nodes do not spread evenly"),
        (["ring", "--supernodes", "0"], "--supernodes 0: "),
        (["step", "--rule", "easy"], "there is no rule 'easy'; there are bsp, sharded, easgd, local_sgd, diloco"),
        (["step", "--overlap", "tunnel"], "there is no overlap 'tunnel'"),
        (["step", "--buckets", "0"], "--buckets 0: a picture of steps has at least 1"),
        (["ring", f"--ranks={10**18}"], "--ranks 1,000,000,000,000,000,000: the limit is 1,024"),
        (["step", "--ranks=2000"], "--ranks 2,000: the limit is 1,024"),
        (["step", f"--buckets={10**9}"], "--buckets 1,000,000,000: the limit is 10,000"),
        (["step", "--buckets=100", "--steps=101"], "--steps 101: the limit is 100"),
        (["step", "--rule=diloco", f"--fragments={10**9}"], "--fragments 1,000,000,000: the limit is 10,000"),
        (["ring", "--svg", "/nowhere/picture.svg"], "--svg /nowhere/picture.svg: No such file"),
    ],
)
def test_bad_input(in_process: Run, arguments: list[str], message: str) -> None:
    assert_one_line_error(in_process("draw", *arguments), message)

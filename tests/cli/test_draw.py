import subprocess
from collections.abc import Callable

from unisono.schedules.picture import draw
from unisono.schedules.ring import ring

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_draw(unisono: Run) -> None:
    assert unisono("draw", "ring", "--ranks", "3").stdout == draw(ring, 3, "ring") + "\n"


def test_bad_input(unisono: Run) -> None:
    for arguments, words in ((["rong"], "there is no schedule 'rong'"), (["ring", "--ranks", "0"], "at least 1 rank")):
        done = unisono("draw", *arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert words in done.stderr

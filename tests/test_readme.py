"""What README shows is run."""

import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from unisono.schedules.ring import ring
from unisono.view.schedule import draw

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_ten_lines(mpiexec: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    program = re.search(r"```python title=\"program.py\"\n(.*?)```", README, re.DOTALL).group(1)
    assert len(program.splitlines()) <= 11
    (tmp_path / "program.py").write_text(program)
    done = mpiexec(2, str(tmp_path / "program.py"))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    said = dict(re.findall(r"(rank \d of 2): (\d\.\d{6})", done.stdout))  # lines of ranks may run into each other
    assert sorted(said) == ["rank 0 of 2", "rank 1 of 2"]
    assert len(set(said.values())) == 1
    assert 0.9 < float(said["rank 0 of 2"]) < 1.1


def test_the_backend(mpiexec: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    program = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    done = mpiexec(
        2, "-c", program + "dist.barrier()\nassert (dist.get_backend(), dist.get_world_size()) == ('unisono', 2)"
    )
    assert done.returncode == 0, done.stderr


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_the_picture() -> None:
    assert draw(ring, 4, "ring") in (ROOT / "docs" / "collectives.md").read_text()


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        path, _, section = target.partition("#")
        page = ROOT / (path or "README.md")
        assert page.exists(), target
        titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE) if section else []
        assert not section or section in [title.lower().replace(" ", "-") for title in titles], target


def test_the_list_of_figures_is_that_of_the_results() -> None:
    path = ROOT / "benchmarks" / "front_page" / "draw.py"
    spec = importlib.util.spec_from_file_location("front_page", path)
    assert spec is not None
    assert spec.loader is not None
    front_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(front_page)
    assert "\n".join(front_page.listed()) in (ROOT / "docs" / "figures.md").read_text()

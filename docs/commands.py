"""Runs the commands that README and the pages show: python docs/commands.py [PAGE...]

    ```python title="train.py"     written to train.py in the page's folder
    ```sh                          commands, run there in order; a failure ends the check
    <!-- prints: a, b -->          below commands: their output has `a`, and `b` after it
    ```console                     not run here: ELSEWHERE names the test that runs it

Each page has an empty folder, with what `docs/setup/NAME.py` makes in it, where there is one. `srun` there is
mpiexec; `tests/docs/test_slurm.py` runs the page about Slurm under Slurm.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

LIMIT_SECONDS = 900
"""Longest time of a script: a page about hangs must not hang the check."""

ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "make test": (".ci/run", "make check test"),
    "make check": (".ci/run", "make check test"),
    "make .venv/.dev": ("Makefile", "test: $(VENV)/.dev"),
    "make train": ("tests/cli/test_train.py", '"train"'),
    "make docs-check": ("tests/docs/test_commands.py", "commands.run"),
    "make docs": ("tests/docs/test_site.py", "mkdocs"),
    "pip install": ("tests/test_wheel.py", '"pip", "install"'),
    "EPOCHS=500 sbatch": ("tests/docs/test_slurm.py", '"sbatch"'),
    "sbatch": ("tests/docs/test_slurm.py", '"sbatch"'),
    "unisono train digits --elastic": ("tests/elastic/test_supervisor.py", '"--elastic"'),
    "unisono train recipe.toml --elastic": ("tests/elastic/test_supervisor.py", '"--elastic"'),
    "unisono join": ("tests/elastic/test_supervisor.py", '"join"'),
    "unisono audit": ("tests/cli/test_audit.py", '"audit"'),
    "unisono train RECIPE --set data.files=": ("tests/data/storage/test_files.py", 'storage="files"'),
    "unisono predict": ("tests/cli/test_predict.py", '"predict"'),
    "unisono lab": ("tests/cli/test_lab.py", '"lab"'),
    "unisono run --ranks 2 train_": ("tests/examples/test_frameworks.py", '"run", "--ranks", "2"'),
    "unisono probe gpus.toml": ("tests/mpi/measure/test_player.py", "test_a_device_has_rates_of_its_own"),
    "mpiexec -n 8 -ppn 1 -hosts": ("tests/cli/test_tune.py", '"tune"'),
    "mpiexec -n 4 -ppn 1 -hosts": ("tests/cli/test_probe.py", '"probe"'),
}
"""Beginnings of commands that are run elsewhere: the file that runs them, and a text of it."""

FENCE = re.compile(
    r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$(?:\n<!-- prints: (.*?) -->$)?', re.MULTILINE | re.DOTALL
)

LAUNCHER = """#!/bin/sh
shift # --mpi=pmi2
exec mpiexec "$@"
"""


class Program(NamedTuple):
    """File that a page shows."""

    name: str
    text: str


class Command(NamedTuple):
    """Commands that a page shows together, as one script of bash."""

    text: str
    prints: tuple[str, ...] = ()
    """Texts that its output has, in this order."""


def pages() -> list[Path]:
    """Return README and all pages of the docs."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def steps_of(text: str) -> Iterator[Program | Command]:
    """Yield the programs and the commands of a page, in order."""
    for language, title, body, prints in FENCE.findall(text):
        if title:
            yield Program(title, body)
        elif language == "sh":
            yield Command(body, tuple(filter(None, prints.split(", "))))


def run(page: Path, folder: Path) -> int:
    """Carry out a page in an empty folder; return the number of scripts. End the check where one fails."""
    commands = folder / ".bin"
    commands.mkdir()
    (commands / "srun").write_text(LAUNCHER, encoding="utf-8")
    (commands / "srun").chmod(0o755)
    path = os.pathsep.join((str(commands), str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "HOME": str(folder)}
    name = page.relative_to(ROOT / "docs" if page.is_relative_to(ROOT / "docs") else ROOT).with_suffix("")
    setup = ROOT / "docs" / "setup" / f"{str(name).replace('/', '_')}.py"
    if setup.exists():
        subprocess.run([sys.executable, str(setup)], cwd=folder, env=environment, check=True)
    count = 0
    for step in steps_of(page.read_text(encoding="utf-8")):
        if isinstance(step, Program):
            (folder / step.name).write_text(step.text, encoding="utf-8")
            continue
        began = time.perf_counter()
        shell = ["bash", "-e", "-o", "pipefail", "-c", step.text]
        done = subprocess.run(
            shell, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
        )
        print(
            f"{page.relative_to(ROOT)}: {time.perf_counter() - began:5.1f} s  {step.text.splitlines()[0]}", flush=True
        )
        output = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        if done.returncode:
            sys.exit(f"exit code {done.returncode}\n{output}")
        if not re.search(".*".join(map(re.escape, step.prints)), done.stdout + done.stderr, re.DOTALL):
            sys.exit(f"the output has not {', '.join(step.prints)}\n{output}")
        count += 1
    return count


def main(names: list[str]) -> None:
    """Run the pages of the given names, or all."""
    count = 0
    for page in [ROOT / name for name in names] or pages():
        with tempfile.TemporaryDirectory() as folder:
            count += run(page, Path(folder))
    print(f"{count} scripts ran")


if __name__ == "__main__":
    main(sys.argv[1:])

"""A rank that stays, and carries out one `unisono` command after another: what tests/staying.py starts.

mpiexec -n 2 python tests/carry_out.py FOLDER

Command N is FOLDER/N.json. All ranks append to FOLDER/N.out and FOLDER/N.err what they say, and rank R says with
FOLDER/N.R.code that it is done. FOLDER/end ends all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from unisono.cli import main
from unisono.launch import RANK_VARIABLES

PAUSE = 0.01
"""Seconds between two looks for a command."""


def carry_out(arguments: list[str], folder: str, environment: dict[str, str]) -> int:
    """The exit code of a command in a folder."""
    os.chdir(folder)
    before = dict(os.environ)
    os.environ.update(environment)
    sys.argv = ["unisono", *arguments]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        for name in environment.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        forget(folder)
    return 0


def forget(folder: str) -> None:
    """Forget the modules of a folder, as the end of a program does."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
            del sys.modules[name]


def turn(name: Path, file: int) -> None:
    """Have a file of this process be the end of another one."""
    sys.stdout.flush()
    sys.stderr.flush()
    opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, file)
    os.close(opened)


def stay(home: Path, rank: str) -> None:
    """Carry out what comes until the end."""
    kept, number = [os.dup(file) for file in (1, 2)], 0
    while not (home / "end").exists():
        asked = home / f"{number}.json"
        if not asked.exists():
            time.sleep(PAUSE)
            continue
        turn(home / f"{number}.out", 1)
        turn(home / f"{number}.err", 2)
        code = carry_out(**json.loads(asked.read_text()))
        sys.stdout.flush()
        sys.stderr.flush()
        for file, before in enumerate(kept, 1):
            os.dup2(before, file)
        said = home / f"{number}.{rank}"
        said.write_text(str(code))
        said.rename(f"{said}.code")
        number += 1


if __name__ == "__main__":
    stay(Path(sys.argv[1]), next(os.environ[name] for name in RANK_VARIABLES if name in os.environ))

"""Run one `unisono` command after another on a rank that keeps running; started by tests/persistent_ranks.py.

mpiexec -n 2 python tests/command_runner.py FOLDER PROCESS

Command N is FOLDER/N.json. All ranks append to FOLDER/N.out and FOLDER/N.err, and rank R writes its exit
code into FOLDER/N.R.code. FOLDER/end ends all, and so does the end of PROCESS, which writes them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from unisono.cli import main
from unisono.launch import RANK_VARIABLES

POLL_SECONDS = 0.01
"""Seconds between two polls for a command."""


def run_command(arguments: list[str], folder: str, environment: dict[str, str]) -> int:
    """Run a command in a folder; return its exit code."""
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
        forget_modules(folder)
    return 0


def forget_modules(folder: str) -> None:
    """Remove the modules of a folder from sys.modules, as the end of a program does."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
            del sys.modules[name]


def redirect(name: Path, file: int) -> None:
    """Redirect a file descriptor of this process to the end of a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, file)
    os.close(opened)


def run_commands(home: Path, process: str, rank: str) -> None:
    """Run commands until FOLDER/end exists, or the process that asks for them is gone."""
    kept, index = [os.dup(file) for file in (1, 2)], 0
    while Path("/proc", process).exists() and not (home / "end").exists():
        request = home / f"{index}.json"
        if not request.exists():
            time.sleep(POLL_SECONDS)
            continue
        redirect(home / f"{index}.out", 1)
        redirect(home / f"{index}.err", 2)
        code = run_command(**json.loads(request.read_text()))
        sys.stdout.flush()
        sys.stderr.flush()
        for file, before in enumerate(kept, 1):
            os.dup2(before, file)
        answer = home / f"{index}.{rank}"
        answer.write_text(str(code))
        answer.rename(f"{answer}.code")
        index += 1


if __name__ == "__main__":
    own_rank = next(os.environ[name] for name in RANK_VARIABLES if name in os.environ)
    run_commands(Path(sys.argv[1]), sys.argv[2], own_rank)

"""Runs programs one after another on the same ranks, which import PyTorch once; a line `== NAME` goes before each.

mpiexec -n 4 python tests/torch_backend/one_after_another.py 'random_operations.py 400' parity.py
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from unisono.initialize import init

if __name__ == "__main__":
    rank, programs = init().rank, sys.argv[1:]
    for command in programs:
        name, *arguments = command.split()
        if rank == 0:
            print(f"== {name}", flush=True)
        path = str(Path(__file__).with_name(name))
        sys.argv = [path, *arguments]
        runpy.run_path(path, run_name="__main__")

"""Ranks that stay: they import PyTorch once, and carry out one `unisono` command after another.

Starting ranks takes seconds, most commands none. What a launcher makes of how ranks end is not seen here: tests of that
start ranks of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.progress import SILENCE, Watched, settle

from unisono.launch import find_mpiexec, launch_environment

PROGRAM = Path(__file__).with_name("carry_out.py")


class Ranks:
    """So many ranks, which talk to this process by files in a folder."""

    def __init__(self, count: int, folder: Path, timeout: float = SILENCE) -> None:
        self._count, self._folder, self._timeout, self._number = count, folder, timeout, 0
        command = [str(find_mpiexec()), "-n", str(count), sys.executable, "-P", str(PROGRAM), str(folder)]
        self.watched = Watched(command, env=launch_environment(os.environ, terminal=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        (self._folder / "end").touch()
        with self.watched:
            code = settle(self.watched.process.poll, lambda seen: seen is not None, self._timeout)
        assert code == 0, f"the ranks that stayed have not ended in order, but with {code}"

    def __call__(self, arguments: tuple[str, ...], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Carry out `unisono ARGUMENTS`; fails where the ranks write nothing for long, end, or differ in how it went.

        What one rank says follows what the others have said before.
        """
        base = f"{self._folder}/{self._number}"
        self._number += 1
        out, errors, asked = Path(f"{base}.out"), Path(f"{base}.err"), Path(f"{base}.asked")
        codes = [Path(f"{base}.{rank}.code") for rank in range(self._count)]
        asked.write_text(json.dumps({"arguments": arguments, "folder": str(cwd), "environment": environment}))
        asked.rename(f"{base}.json")

        def look() -> tuple[object, ...]:
            ended = self.watched.process.poll()
            return ended, [path.exists() for path in codes], *(size(path) for path in (out, errors))

        ended, done, *_ = settle(look, lambda seen: seen[0] is not None or all(seen[1]), self._timeout)
        said, told = (path.read_text() if path.exists() else "" for path in (out, errors))
        if not all(done):
            self.watched.kill()
            how = "said nothing for long" if ended is None else "ended"
            raise AssertionError(f"unisono {' '.join(arguments)}: the ranks have {how}\n{said}{told}")
        (code,) = {path.read_text() for path in codes}
        return subprocess.CompletedProcess(arguments, int(code), said, told)


def size(path: Path) -> int:
    """The bytes of a file, none where there is none."""
    return path.stat().st_size if path.exists() else 0

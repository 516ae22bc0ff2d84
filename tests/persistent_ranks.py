"""Ranks that keep running: they import PyTorch once, and run one `unisono` command after another.

Starting ranks takes seconds, most commands none. How a launcher reports the end of ranks is not visible here; tests of
that start ranks of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.progress import SILENCE_SECONDS, Watched, poll_until

from unisono.launch import find_mpiexec, launch_environment

PROGRAM = Path(__file__).with_name("command_runner.py")


class PersistentRanks:
    """Ranks that communicate with this process by files in a folder.

    All end a command with one exit code; unless it is `one_code`, the largest counts, as with a launcher.
    """

    def __init__(self, count: int, folder: Path, timeout: float = SILENCE_SECONDS, *, one_code: bool = True) -> None:
        self._count, self._folder, self._timeout, self._number = count, folder, timeout, 0
        self._one_code = one_code
        command = [str(find_mpiexec()), "-n", str(count), sys.executable, "-P", str(PROGRAM), str(folder)]
        self.watched = Watched([*command, str(os.getpid())], env=launch_environment(os.environ, terminal=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        (self._folder / "end").touch()
        with self.watched:
            code = poll_until(self.watched.process.poll, lambda seen: seen is not None, self._timeout)
        assert code == 0, f"the ranks have not ended in order, but with exit code {code}"

    def __call__(self, arguments: tuple[str, ...], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `unisono ARGUMENTS`; fail if the ranks write nothing for long, end, or return different exit codes.

        The output of all ranks is concatenated in the order of writing.
        """
        base = f"{self._folder}/{self._number}"
        self._number += 1
        out, error_file, request = Path(f"{base}.out"), Path(f"{base}.err"), Path(f"{base}.request")
        codes = [Path(f"{base}.{rank}.code") for rank in range(self._count)]
        request.write_text(json.dumps({"arguments": arguments, "folder": str(cwd), "environment": environment}))
        request.rename(f"{base}.json")

        def poll() -> tuple[object, ...]:
            ended = self.watched.process.poll()
            return ended, [path.exists() for path in codes], *(size(path) for path in (out, error_file))

        ended, done, *_ = poll_until(poll, lambda seen: seen[0] is not None or all(seen[1]), self._timeout)
        stdout, stderr = (path.read_text() if path.exists() else "" for path in (out, error_file))
        if not all(done):
            self.watched.kill()
            how = "written nothing for long" if ended is None else "ended"
            raise AssertionError(f"unisono {' '.join(arguments)}: the ranks have {how}\n{stdout}{stderr}")
        exit_codes = {int(path.read_text()) for path in codes}
        assert len(exit_codes) == 1 or not self._one_code, f"exit codes {exit_codes}\n{stdout}{stderr}"
        return subprocess.CompletedProcess(arguments, max(exit_codes), stdout, stderr)


def size(path: Path) -> int:
    """The bytes of a file, none where there is none."""
    return path.stat().st_size if path.exists() else 0

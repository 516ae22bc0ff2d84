"""Commands with usage errors."""

from __future__ import annotations

import subprocess


def assert_one_line_error(done: subprocess.CompletedProcess[str], words: str) -> None:
    """Assert one clear line on stderr and exit code 2: no traceback, nothing from the launcher."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("unisono: ")
    assert words in lines[0]

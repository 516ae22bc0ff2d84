"""Commands with usage errors."""

from __future__ import annotations

import re
import subprocess

BEGINNING = re.compile(
    r"\w+: (training|resuming \S+|replaying \S+) on \d+ ranks?( of this machine)?(, which take turns on \d+ cores?)?"
)
"""First line of a run, which comes before its ranks find an error."""


def assert_one_line_error(done: subprocess.CompletedProcess[str], message: str) -> None:
    """Assert one clear line on stderr and exit code 2: no traceback, nothing from the launcher."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if not BEGINNING.fullmatch(line)] == []
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("unisono: ")
    assert message in lines[0]

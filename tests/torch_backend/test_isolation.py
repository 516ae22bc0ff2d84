"""Programs whose ranks have not communicated are told of, others are not."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.torch_backend.isolation import CommunicationRecord, describe_isolation
from unisono.torch_backend.process_group import ProcessGroup
from unisono.torch_backend.pytorch import GroupBase

ENDS = {
    "import torch\n": "the program made no process group; call",
    "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\nraise SystemExit\n": (
        "made a process group, but rank 0 exchanged no tensor"
    ),
    "import torch, unisono.horovod as hvd\nhvd.init()\nhvd.allreduce(torch.ones(1))\n": "",
}
"""Programs, and what is said at their end."""


@pytest.mark.parametrize("program", ENDS)
def test_what_is_said_at_the_end(
    unisono: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, program: str
) -> None:
    (tmp_path / "program.py").write_text(program)
    done = unisono("run", "--ranks", "2", str(tmp_path / "program.py"))
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "ran alone" in line]
    assert len(said) == bool(ENDS[program])
    assert all(line.startswith("unisono: 2 ranks ran alone: ") and ENDS[program] in line for line in said)


def group_of(kind: Any) -> Any:
    """A group as far as the record looks at it."""
    return kind.__new__(kind)


def test_a_group_of_another_backend_is_not_judged() -> None:
    communication = CommunicationRecord()
    communication.record(group_of(ProcessGroup))
    assert communication.describe(2) == describe_isolation(2, grouped=True)
    assert communication.describe(1) == ""
    communication.record(group_of(GroupBase))
    assert communication.describe(2) == ""


def test_one_group_that_is_used_is_enough() -> None:
    communication = CommunicationRecord()
    first, second = group_of(ProcessGroup), group_of(ProcessGroup)
    communication.record(first)
    communication.record(second)
    communication.record(SimpleNamespace())  # a group that this rank is no member of
    assert communication.describe(4).startswith("unisono: 4 ranks ran alone")
    first.exchanged = True
    assert communication.describe(4) == ""

"""One line names what is missing to build a lab."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.progress import run

from unisono.errors import LabError
from unisono.lab import cluster


def test_root_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="which takes root; try sudo"):
        cluster.check_machine()


@pytest.mark.parametrize("missing", ["ip", "tc", "unshare"])
def test_programs_are_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str) -> None:
    for program in set(cluster.PACKAGES) - {missing}:
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setattr(cluster.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match=f"there is no `{missing}` on PATH; install {cluster.PACKAGES[missing]}"):
        cluster.check_machine()


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
@pytest.mark.skipif(not all(map(shutil.which, cluster.PACKAGES)), reason="iproute2 or util-linux is missing")
def test_a_kernel_that_refuses() -> None:
    weaken = ("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin")
    lab = (sys.executable, "-m", "unisono", "lab", "--hosts", "2", "--rate", "1gbit", "--", "true")
    done = run([*weaken, *lab])
    assert done.returncode == 2
    assert done.stderr.startswith("unisono: the kernel refuses new namespaces (unshare: ")
    assert done.stderr.count("\n") == 1

"""How a process is that does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unisono.collectives.state_queries import process_state
from unisono.collectives.states import DEAD, SILENT, STOPPED


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
def test_state_of_a_stopped_or_dead_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        assert process_state(child.pid) == SILENT
        os.kill(child.pid, signal.SIGSTOP)
        while process_state(child.pid) == SILENT:
            time.sleep(0.01)
        assert process_state(child.pid) == STOPPED
        child.kill()
        while process_state(child.pid) == STOPPED:
            time.sleep(0.01)
    assert process_state(child.pid) == DEAD

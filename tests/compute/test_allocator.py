"""Release of free memory."""

import os
import platform
import sys

import pytest
from tests.progress import run

from unisono.launch import MALLOC_ENVIRONMENT

PROGRAM = """
import torch
from unisono.bench.contender import reset_peak, peak_bytes
from unisono.compute.allocator import release_free_memory

def held():
    reset_peak()
    return peak_bytes()

before = held()
tensors = [torch.ones(1 << 20) for _ in range(64)]
last = torch.ones(1 << 20)
del tensors
kept = held() - before
assert release_free_memory()
print(kept >> 20, (held() - before) >> 20, int(last.sum()) == 1 << 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory as it likes")
def test_free_memory_is_released() -> None:
    done = run([sys.executable, "-c", PROGRAM], env={**os.environ, **MALLOC_ENVIRONMENT})
    assert done.returncode == 0, done.stderr
    kept, after, whole = done.stdout.split()
    assert int(kept) >= 250
    assert int(after) < 50
    assert whole == "True"

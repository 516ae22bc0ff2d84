"""Session of Horovod's functions for each test, closed after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import unisono.horovod as hvd


@pytest.fixture(autouse=True)
def opened() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()

"""What the tests share: running commands, also on real MPI ranks, as long as they make progress, and pictures to pack.

`timeout` is the time without output after which a command fails; how long it may take in all is not limited.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image
from tests.persistent_ranks import PersistentRanks
from tests.progress import SILENCE_SECONDS, Run, run
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from unisono.launch import MALLOC_ENVIRONMENT, find_mpiexec, launch_environment, ranks_started

for profile, examples in {"ci": 40, "dev": 10}.items():
    settings.register_profile(profile, deadline=None, max_examples=examples)  # how long one takes is no property of it
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

for name, value in {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "20"}.items():
    os.environ.setdefault(name, value)  # MPICH's waits sleep: ranks share cores with those of the test beside theirs

ROOT = Path(__file__).parent.parent
UNDER_MPIEXEC = ranks_started(os.environ) is not None

collect_ignore = [] if UNDER_MPIEXEC else ["mpi"]


LAUNCHING = {"ended", "four_ranks", "mpiexec", "persistent_ranks", "three_ranks", "unisono"}
"""Fixtures that start ranks."""

LONGEST = ("test_on_ranks[", "tests/training/test_worker.py", "test_four_ranks.py", "tests/faults/test_containers.py")
"""Parts of names of what takes longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts ranks, and what needs an accelerator.

    What takes longest comes first. What needs a device comes last: one that only pretends stays in the process.
    """
    for item in items:
        if {"device", "pretend"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("device")
        alone = hasattr(item, "callspec") and item.callspec.params.get("ranks") == 1
        if LAUNCHING & set(getattr(item, "fixturenames", ())) and not alone:
            item.add_marker("launches")

    def place(item: pytest.Item) -> tuple[bool, int]:
        last = next((place for place, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST))
        return item.get_closest_marker("device") is not None, last

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What is there before the first test is not looked through again whenever garbage is collected, and that is four
    times as rare: it was a seventh of the time of tests on ranks."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(3_000)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Give a file to one worker, whose fixtures start ranks once; but each number of ranks of tests/mpi to any."""

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if LONGEST[0] in nodeid else super()._split_scope(nodeid)

    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


def clean_environment() -> dict[str, str]:
    """This environment as a launcher would pass it on."""
    return launch_environment(os.environ, terminal=False)


@pytest.fixture
def mpiexec() -> Run:
    """Runs `python ARGUMENTS` on a number of ranks."""

    def start(
        ranks: int, *arguments: str, timeout: float = SILENCE_SECONDS, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, *arguments]
        return run(command, timeout, cwd, clean_environment())

    return start


@pytest.fixture
def unisono(command: Run) -> Run:
    """Runs `unisono ARGUMENTS`, which starts ranks, as a person would, in an empty folder."""
    return command


@pytest.fixture
def command(tmp_path: Path) -> Run:
    """Runs `unisono ARGUMENTS`, which starts no ranks, as a person would, in an empty folder."""

    def start(
        *arguments: str, timeout: float = SILENCE_SECONDS, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "unisono", *arguments]
        return run(command, timeout, tmp_path, {**clean_environment(), **environment})

    return start


@pytest.fixture(scope="session")
def persistent_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PersistentRanks]:
    """Two ranks that keep running during all tests: they import PyTorch once."""
    with PersistentRanks(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture
def on_ranks(persistent_ranks: PersistentRanks, tmp_path: Path) -> Run:
    """Runs `unisono ARGUMENTS` on two persistent ranks that a launcher has started, in an empty folder."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return persistent_ranks(arguments, tmp_path, **environment)

    return call


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore the handlers of signals afterwards: a command owns its process, but not that of the tests."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def nothing_ignored() -> Iterator[None]:
    """No signal is ignored, whatever started the tests: `nohup`, or a shell that runs them in the background."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    ignored = [signum for signum in numbers if signal.getsignal(signum) is signal.SIG_IGN]
    for signum in ignored:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    yield
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Carries out `unisono ARGUMENTS` in this process, in an empty folder; it must start no other process."""
    from unisono.cli import main

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        with handlers_restored(), monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["unisono", *arguments])
            for name, value in {**MALLOC_ENVIRONMENT, **environment}.items():
                patch.setenv(name, value)  # the first: else some commands start this program anew
            patch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process is started"))
            main()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def pretend() -> Callable[[int], torch.device]:
    """Function that chooses the order of streams of a device that only pretends, by a seed, and returns the device."""
    from unisono.testing.pretend import use_pretend

    use_pretend()
    try:
        torch.ones(1, device="pretend", requires_grad=True).backward()
    except RuntimeError:
        pytest.skip("PyTorch has begun its backward passes without this device: python -m pytest tests -m device")

    def chosen(seed: int) -> torch.device:
        use_pretend(seed)
        return torch.device("pretend", 0)

    return chosen


@pytest.fixture(params=[0, 1, 2])
def device(request: pytest.FixtureRequest) -> torch.device:
    """An accelerator of this machine; where there is none, one that only pretends, three times in another order."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "pretend":
        chosen: torch.device = request.getfixturevalue("pretend")(request.param)
        return chosen
    if request.param:
        pytest.skip("one order is enough on an accelerator")
    return torch.device(accelerator.type, 0)


@pytest.fixture
def recipe() -> str:
    """The path of the recipe that everybody runs first."""
    return str(ROOT / "src" / "unisono" / "recipes" / "digits.toml")


@pytest.fixture
def image_samples() -> Callable[..., Path]:
    """Writes a folder of JPEGs for each class: `count` each, in a colour of the class, with noise."""

    def write(
        folder: Path,
        classes: Sequence[str] = ("cat", "dog"),
        count: int = 6,
        size: tuple[int, int] = (40, 32),
        seed: int = 0,
    ) -> Path:
        rng = np.random.default_rng(seed)
        for name in classes:
            (folder / name).mkdir(parents=True, exist_ok=True)
            color = rng.integers(40, 216, 3)
            for index in range(count):
                noise = rng.integers(-40, 40, (size[1], size[0], 3))
                Image.fromarray((color + noise).astype(np.uint8)).save(folder / name / f"{index:03}.jpg")
        return folder

    return write

"""Training steps of networks, contender by contender."""

import subprocess
from pathlib import Path

import pytest
import torch

from unisono.bench import networks
from unisono.bench.networks import (
    CONTENDERS,
    OURS,
    STOCK,
    Contender,
    ContenderProcess,
    as_markdown,
    make,
    measure_networks,
    peak_bytes,
    reset_peak,
)
from unisono.compute import convolution_plan
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.errors import UsageError


def test_the_first_steps_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two contenders; `unisono bench networks` has all of them in its test."""
    two = STOCK, OURS
    monkeypatch.setattr(networks, "CONTENDERS", two)
    logged = list[str]()
    results = measure_networks(["small_convnet"], 2, 3, ConvolutionPlan(), logged.append)
    assert {name: len(seconds) for name, seconds in results[0]["seconds"].items()} == dict.fromkeys(two, 3)
    assert all(seconds > 0 for each in results[0]["seconds"].values() for seconds in each)
    assert all(0 < results[0]["scoring"][name][-1] < 10 for name in two)
    assert all(len(results[0]["scoring"][name]) == 3 for name in two)
    assert all(100e6 < peak < 4e9 for peak in results[0]["peak_bytes"].values()), "PyTorch alone takes 200 MB"
    assert logged[-2:] == [f"small_convnet: step 3 of 3, {name}" for name in two]


def test_a_contender_returns_its_timings_of_algorithms() -> None:
    known = {"1x1: a layer": {"library": 0.5}}
    with ContenderProcess("small_convnet", "ours", 2, known) as contender:
        contender.step()
        assert contender.plan() == known, "no layer of it is large enough to be timed"


def test_a_contender_leaves_no_shared_memory() -> None:
    with ContenderProcess("small_convnet", "stock", 2, {}) as contender:
        contender.step()
    assert not list(Path("/dev/shm").glob(f"mpich_shm_{contender.process.pid:x}_*"))


def test_a_contender_that_ends_early_is_reported() -> None:
    """Also one that has ended before it is asked for a step: nothing reads the request."""
    with (
        pytest.raises(UsageError, match="ours of no_such_network ended"),
        ContenderProcess("no_such_network", "ours", 2, {}) as contender,
    ):
        contender.process.wait()
        contender.step()


def test_table() -> None:
    seconds = {"stock": [4.0, 2.0, 3.0], "tuned": [6.0], "kept": [4.5], "ours": [1.5]}
    peak = {"stock": 4e9, "tuned": 3e9, "kept": 3.5e9, "ours": 2.5e9}
    scoring = {"scoring": {"stock": [3.0], "ours": [0.5, 1.0, 0.75]}}
    result = {"network": "vgg16", "batch": 6, "seconds": seconds, "peak_bytes": peak}
    lines = as_markdown([result | scoring, result]).splitlines()
    rates = "2.00 (1.50-3.00) | 1.00 (1.00-1.00) | 1.33 (1.33-1.33) | 4.00 (4.00-4.00)"
    start = f"| vgg16 | 6 | {rates} | 2.00 | 4.00 | 3.00 | 4.00 GB | 3.00 GB | 3.50 GB | 2.50 GB |"
    assert lines[2] == f"{start} 2.00 (2.00-2.00) | 8.00 (6.00-12.00) |"
    assert lines[3] == f"{start}  |  |", "measured without scoring"
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")


def test_contenders_with_kept_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    started = dict[str, bool]()

    def start(command: list[str], env: dict[str, str], **_: object) -> subprocess.Popen[str]:
        started[command[-2]] = "GLIBC_TUNABLES" in env
        raise OSError("enough")

    monkeypatch.setattr(subprocess, "Popen", start)
    for contender in CONTENDERS:
        with pytest.raises(OSError, match="enough"):
            ContenderProcess("small_convnet", contender, 2, {})
    assert started == {"stock": False, "tuned": False, "kept": True, "ours": True}


def test_all_make_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_plan, "MIN_AUTOTUNED_OPERATIONS", 0)
    plan = ConvolutionPlan()
    changes = []
    for name in CONTENDERS:
        contender = make("small_convnet", name, 4, plan)
        before = weights(contender)
        assert contender.step() > 0
        assert contender.step() > 0
        after = weights(contender)
        assert contender.score() > 0
        assert contender.model.training
        assert torch.equal(weights(contender), after)
        changes.append(weights(contender) - before)
    assert plan.measured
    stock, *others = changes
    for change in others:
        assert float((change - stock).norm()) < 0.1 * float(stock.norm())


def weights(contender: Contender) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in contender.model.parameters()])


def test_the_peak_of_memory_can_be_reset() -> None:
    held = torch.ones(60_000_000)
    before = peak_bytes()
    assert before > held.nbytes
    del held
    reset_peak()
    assert peak_bytes() < before - 200_000_000

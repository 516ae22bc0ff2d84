"""The device of a rank, by the name that a recipe or a program gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unisono import device as device_module
from unisono.device import choose_device, device_of, open_device, pieces_of
from unisono.errors import TensorError, UsageError
from unisono.launch import local_rank_started


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A node with so many GPUs."""
    count = getattr(request, "param", 2)
    kind = torch.device("cuda") if count else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: kind)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices on which memory was allocated."""
    devices: list[str] = []
    monkeypatch.setattr(torch, "zeros", lambda _, device: devices.append(device))
    return devices


@pytest.mark.usefixtures("accelerators")
def test_a_busy_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(_: int, device: str) -> None:
        raise torch.OutOfMemoryError(f"CUDA out of memory on {device}.\nMore lines")

    monkeypatch.setattr(torch, "zeros", busy)
    open_device("cuda", 0)  # the choice says it on all ranks
    with pytest.raises(UsageError, match=r"cannot use cuda:1, .*: CUDA out of memory on cuda:1.; end that process"):
        choose_device("cuda", 1, 2)
    assert str(choose_device("cpu", 1, 2)) == "cpu"


@pytest.mark.usefixtures("accelerators")
def test_ranks_of_a_node_take_one_after_another() -> None:
    assert [str(choose_device("auto", rank, 2)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert str(choose_device("cuda", 1, 2)) == "cuda:1"
    assert [str(choose_device("cuda:0", rank, 4)) for rank in range(4)] == ["cuda:0"] * 4
    assert str(choose_device("cpu", 1, 2)) == "cpu"


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("auto", 4, "rank 3 of this node's 4 has no accelerator, as the node has 2; start 2 on each node, share"),
        ("cuda:2", 1, "this node has 2, numbered from 0"),
        ("xpu", 1, 'PyTorch finds cuda alone here; take "auto", or "cpu"'),
        ("gpu", 1, "is no device of PyTorch's; take"),
    ],
)
def test_a_rank_without_a_device_learns_what_to_do(name: str, ranks: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_device(name, ranks - 1, ranks)
    assert message in str(caught.value)


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("accelerators", [0], indirect=True)
def test_without_accelerators_the_processor_computes() -> None:
    assert str(choose_device("auto", 3, 4)) == "cpu"
    with pytest.raises(UsageError, match="PyTorch finds no accelerator here"):
        choose_device("cuda", 0, 1)
    open_device("auto", 0)


@pytest.mark.usefixtures("accelerators")
def test_the_device_of_a_rank_is_opened_before_mpi_knows_ranks(opened: list[str]) -> None:
    for name in ("auto", "cuda", "cuda:0", "cpu", "xpu"):
        open_device(name, 3)
    assert opened == ["cuda:1", "cuda:1", "cuda:0"]


def test_launchers_number_the_ranks_of_a_node() -> None:
    assert local_rank_started({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}) == 3
    assert local_rank_started({"MPI_LOCALRANKID": "1", "SLURM_LOCALID": "0"}) == 1
    assert local_rank_started({}) == 0


def test_tensors_of_a_call_are_on_one_device() -> None:
    here, there = torch.empty(1), torch.empty(1, device="meta")
    assert device_of([here, here], "all_gather") == torch.device("cpu")
    with pytest.raises(TensorError, match="all_gather: tensors on cpu and on meta; move all to one device"):
        device_of([here, there], "all_gather")


def test_pieces_cover_a_tensor() -> None:
    for length in (0, 1, 1 << 20, (3 << 20) + 5):
        pieces = pieces_of(length, 8)
        assert [at for piece in pieces for at in (piece.start, piece.stop)][::2] == list(range(0, length, 1 << 19))
        assert sum(piece.stop - piece.start for piece in pieces) == length


def test_files_do_not_name_one_kind_of_device() -> None:
    """But for the registration of memory, and PyTorch's own table of process groups."""
    source = Path(device_module.__file__).parent
    named = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if '"cuda"' in path.read_text()}
    assert named == {"device.py", "torch_backend/process_group.py", "torch_backend/register.py"}

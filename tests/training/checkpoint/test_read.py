"""The newest whole checkpoint is used; only what was read to its end and is wrong is passed over; nothing is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from unisono.errors import CheckpointError
from unisono.training.checkpoint import Checkpoint, load_newest, rename_damaged, save

Trained = Callable[..., Checkpoint]

FILES = ["weights.safetensors", "optimizer.safetensors", "manifest.json"]


def same(one: Checkpoint, other: Checkpoint) -> bool:
    weights = all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    states = [checkpoint.optimizer["state"] for checkpoint in (one, other)]
    optimizer = all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][number][key]))
        for number, entries in states[0].items()
        for key, value in entries.items()
    )
    return weights and optimizer and (one.step, one.progress) == (other.step, other.progress)


def tree(folder: Path) -> dict[str, bytes]:
    """All files and links, by name: what must not change."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return {str(path): bytes(path.readlink()) if path.is_symlink() else path.read_bytes() for path in found}


def test_what_was_saved_is_loaded(tmp_path: Path, trained: Trained) -> None:
    save(tmp_path, trained(7))
    found, damaged = load_newest(tmp_path)
    assert same(found, trained(7))
    assert damaged == []
    assert found.optimizer["param_groups"] == trained(7).optimizer["param_groups"], "tuples too"
    fresh = torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
    fresh.load_state_dict(found.optimizer)
    assert fresh.param_groups[0]["lr"] == 0.1


def test_one_of_format_1_is_loaded() -> None:
    """`format_1` was written before there was a format 2: a Linear(3, 2) with seed 7, and Adam's third step."""
    found, damaged = load_newest(Path(__file__).parent / "format_1")
    assert (found.step, found.progress, damaged) == (7, {"epoch": 7, "loss": 0.1}, [])
    torch.manual_seed(7)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    again, fresh = torch.nn.Linear(3, 2), torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
    again.load_state_dict(found.weights)
    fresh.load_state_dict(found.optimizer)
    torch.testing.assert_close(again.state_dict(), model.state_dict())
    for number, entries in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(fresh.state_dict()["state"][number], entries)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "empty"])
def test_an_incomplete_checkpoint_is_skipped_and_reported(
    tmp_path: Path, trained: Trained, file: str, harm: str
) -> None:
    save(tmp_path, trained(1))
    path = save(tmp_path, trained(2)) / file
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif harm == "cut":
        path.write_bytes(content[:-5])
    elif harm == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    found, damaged = load_newest(tmp_path)
    assert found.step == 1
    assert len(damaged) == 1
    assert str(damaged[0]).startswith("step-000000002 is damaged: ")


def test_an_incomplete_checkpoint_is_renamed(tmp_path: Path, trained: Trained) -> None:
    save(tmp_path, trained(1))
    for new in ("step-000000002.torn", "step-000000002.torn-2"):
        (save(tmp_path, trained(2)) / "manifest.json").unlink()
        _, damaged = load_newest(tmp_path)
        assert rename_damaged(tmp_path, damaged) == [new]
        assert (tmp_path / new / "weights.safetensors").is_file()
        assert load_newest(tmp_path)[1] == []
    save(tmp_path, trained(2))
    assert load_newest(tmp_path)[0].step == 2


def not_there(path: Path) -> None:
    """A link to a disk that is not mounted."""
    path.unlink()
    path.symlink_to(f"/nowhere/mounted/{path.name}")


def input_output_error(path: Path) -> None:
    """The kernel answers EIO to whoever reads a process's memory at 0."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def newer(path: Path) -> None:
    manifest = path.with_name("manifest.json")
    body = {**json.loads(manifest.read_text()), "format": 3, "more": True}
    manifest.write_text(json.dumps(body))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [not_there, input_output_error, a_loop, a_folder, newer])
def test_one_that_may_be_whole_ends_the_command_and_nothing_changes(
    tmp_path: Path, trained: Trained, file: str, harm: Callable[[Path], None]
) -> None:
    save(tmp_path, trained(1))
    path = save(tmp_path, trained(2))
    harm(path / file)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match="nothing was changed") as reported:
        load_newest(tmp_path)
    assert str(path) in str(reported.value)
    assert ("newer release" if harm is newer else "cannot read") in str(reported.value)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("number", [5, 13, 116])
def test_an_error_of_the_disk_while_a_file_is_read(
    tmp_path: Path, trained: Trained, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO, EACCES, ESTALE."""
    save(tmp_path, trained(1))
    newest = save(tmp_path, trained(2))
    real = Path.open

    def refuse(path: Path, *arguments: object, **named: object) -> object:
        if path.name == "weights.safetensors" and path.parent == newest:
            raise OSError(number, "the disk says no", str(path))
        return real(path, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot read .*step-000000002/weights.safetensors: the disk says no"):
        load_newest(tmp_path)


def test_a_whole_checkpoint_that_is_a_link_to_nowhere(tmp_path: Path, trained: Trained) -> None:
    save(tmp_path, trained(1))
    shutil.move(save(tmp_path, trained(2)), tmp_path / "other")
    (tmp_path / "step-000000002").symlink_to("/nowhere/mounted")
    with pytest.raises(CheckpointError, match="a link to /nowhere/mounted: No such file or directory"):
        load_newest(tmp_path)


def test_no_checkpoint_and_a_folder_that_is_a_link_to_nowhere(tmp_path: Path, trained: Trained) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        load_newest(tmp_path)
    (tmp_path / "link").symlink_to("/nowhere/mounted")
    with pytest.raises(CheckpointError, match="link, a link to /nowhere/mounted: No such file or directory"):
        load_newest(tmp_path / "link")


def test_none_whole(tmp_path: Path, trained: Trained) -> None:
    (save(tmp_path, trained(1)) / "manifest.json").unlink()
    before = tree(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* is complete: step-000000001 is damaged: .*nothing was"
    ):
        load_newest(tmp_path)
    assert tree(tmp_path) == before

"""The newest whole checkpoint is used; only what was read to its end and is wrong is passed over; nothing is lost."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from unisono.errors import CheckpointError
from unisono.training.checkpoint.files import discard_newer, load_first, load_newest, remove_newer, save
from unisono.training.checkpoint.layout import CHECKPOINTS_KEPT, Checkpoint, checkpoint_names

Trained = Callable[..., Checkpoint]

FILES = ["weights.safetensors", "optimizer.safetensors", "manifest.json"]


def same(checkpoint: Checkpoint, other: Checkpoint) -> bool:
    weights = all(torch.equal(checkpoint.weights[name], other.weights[name]) for name in checkpoint.weights)
    states = [each.optimizer["state"] for each in (checkpoint, other)]
    optimizer = all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][parameter][key]))
        for parameter, entries in states[0].items()
        for key, value in entries.items()
    )
    return weights and optimizer and (checkpoint.step, checkpoint.progress) == (other.step, other.progress)


def tree(folder: Path) -> dict[str, bytes]:
    """All files and links, by name: what must not change."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return {str(path): bytes(path.readlink()) if path.is_symlink() else path.read_bytes() for path in paths}


def test_what_was_saved_is_loaded(tmp_path: Path, trained: Trained) -> None:
    save(tmp_path, trained(7))
    loaded, damaged = load_newest(tmp_path)
    assert same(loaded, trained(7))
    assert damaged == []
    assert loaded.optimizer["param_groups"] == trained(7).optimizer["param_groups"], "tuples too"
    fresh = torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
    fresh.load_state_dict(loaded.optimizer)
    assert fresh.param_groups[0]["lr"] == 0.1


def test_one_of_format_1_is_loaded() -> None:
    """`format_1` was written before there was a format 2: a Linear(3, 2) with seed 7, and Adam's third step."""
    loaded, damaged = load_newest(Path(__file__).parent / "format_1")
    assert (loaded.step, loaded.progress, damaged) == (7, {"epoch": 7, "loss": 0.1}, [])
    torch.manual_seed(7)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    again, fresh = torch.nn.Linear(3, 2), torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
    again.load_state_dict(loaded.weights)
    fresh.load_state_dict(loaded.optimizer)
    torch.testing.assert_close(again.state_dict(), model.state_dict())
    for parameter, entries in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(fresh.state_dict()["state"][parameter], entries)


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
    loaded, damaged = load_newest(tmp_path)
    assert loaded.step == 1
    assert len(damaged) == 1
    assert str(damaged[0]).startswith("step-000000002 is damaged: ")


def test_an_incomplete_checkpoint_is_renamed(tmp_path: Path, trained: Trained) -> None:
    save(tmp_path, trained(1))
    for new in ("step-000000002.torn", "step-000000002.torn-2"):
        (save(tmp_path, trained(2)) / "manifest.json").unlink()
        _, damaged = load_newest(tmp_path)
        assert f"it is now {new}, " in discard_newer(tmp_path, 1, damaged)[0]
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
    body = {**json.loads(manifest.read_text()), "format": 4, "more": True}
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


@pytest.mark.parametrize("errno", [5, 13, 116])
def test_an_error_of_the_disk_while_a_file_is_read(
    tmp_path: Path, trained: Trained, errno: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO, EACCES, ESTALE."""
    save(tmp_path, trained(1))
    newest = save(tmp_path, trained(2))
    real = Path.open

    def refuse(path: Path, *arguments: object, **named: object) -> object:
        if path.name == "weights.safetensors" and path.parent == newest:
            raise OSError(errno, "the disk says no", str(path))
        return real(path, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot read .*step-000000002/weights.safetensors: the disk says no"):
        load_newest(tmp_path)


def test_a_folder_of_which_nothing_can_be_known(tmp_path: Path) -> None:
    """As one within a folder that is closed to this user: not even whether it is a link."""
    with pytest.raises(CheckpointError, match=r"cannot read .*File name too long"):
        checkpoint_names(tmp_path / ("x" * 300))


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


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full, for whoever writes more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_newest_three_are_kept_and_nothing_else(tmp_path: Path, trained: Trained) -> None:
    for step in range(CHECKPOINTS_KEPT + 3):
        save(tmp_path, trained(step))
    assert entries(tmp_path) == ["step-000000003", "step-000000004", "step-000000005"]


def test_newer_ones_are_left_alone(tmp_path: Path, trained: Trained) -> None:
    """They are no older ones that are too many: whoever wants them away removes them."""
    for step in (1, 2, 3, 10, 20, 30):
        (tmp_path / f"step-{step:09d}").mkdir()
    save(tmp_path, trained(5))
    assert [int(name[5:]) for name in checkpoint_names(tmp_path)] == [2, 3, 5, 10, 20, 30]


def test_what_was_set_aside_stays(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "step-000000001.torn").mkdir()
    for step in range(2, 7):
        save(tmp_path, trained(step))
    assert entries(tmp_path) == ["step-000000001.torn", *(f"step-00000000{step}" for step in (4, 5, 6))]


def test_one_of_the_same_step_is_replaced(tmp_path: Path, trained: Trained) -> None:
    save(tmp_path, trained(7, done=23))
    save(tmp_path, trained(7, done=0))
    assert load_newest(tmp_path)[0].progress["done"] == 0
    assert entries(tmp_path) == ["step-000000007"]


def test_killed_while_one_is_replaced(tmp_path: Path, trained: Trained) -> None:
    """Between the two renames: the one that was to be replaced is used, and settled when the run resumes."""
    save(tmp_path, trained(3))
    save(tmp_path, trained(7)).rename(tmp_path / "step-000000007.replaced")
    assert load_newest(tmp_path)[0].step == 7
    assert remove_newer(tmp_path, 7) == []
    assert entries(tmp_path) == ["step-000000003", "step-000000007"]
    (tmp_path / "step-000000007.replaced").mkdir()
    (tmp_path / ".step-000000009.tmp").mkdir()
    assert remove_newer(tmp_path, 3) == ["step-000000007"]
    assert entries(tmp_path) == ["step-000000003"]


@pytest.mark.parametrize("left", [".step-000000007.tmp", "step-000000007.replaced"])
def test_killed_while_one_of_the_same_step_was_written(tmp_path: Path, trained: Trained, left: str) -> None:
    save(tmp_path, trained(7, done=23))
    (tmp_path / left).mkdir()
    (tmp_path / left / "weights.safetensors").touch()
    save(tmp_path, trained(7, done=0))
    assert load_newest(tmp_path)[0].progress["done"] == 0
    assert entries(tmp_path) == ["step-000000007"]


def test_others_that_write_at_the_same_time_are_left_alone(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / ".step-000000007.tmp").mkdir(parents=True)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda checkpoint: save(tmp_path, checkpoint), [trained(step) for step in range(10, 90, 5)]))
    assert checkpoint_names(tmp_path)[-3:] == ["step-000000075", "step-000000080", "step-000000085"]
    assert all(load_first(tmp_path, [name])[0] is not None for name in checkpoint_names(tmp_path))
    assert [path.name for path in tmp_path.glob(".*")] == [".step-000000007.tmp"]


def test_a_full_disk_is_reported_and_older_ones_stay(tmp_path: Path, trained: Trained) -> None:
    save(tmp_path, trained(1))
    large = Checkpoint(2, {"weight": torch.zeros(100_000)}, {"state": {}, "param_groups": []}, {})
    with (
        files_of_at_most(100_000),
        pytest.raises(CheckpointError, match="cannot write the checkpoint of step 2") as reported,
    ):
        save(tmp_path, large)
    assert "resume with --resume" in str(reported.value)
    assert entries(tmp_path) == ["step-000000001"]
    assert load_newest(tmp_path)[0].step == 1


def test_a_disk_that_refuses(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 1"):
        save(tmp_path / "file" / "checkpoints", trained(1))
    (tmp_path / "away").symlink_to("/nowhere/mounted")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 1"):
        save(tmp_path / "away", trained(1))


def test_a_checkpoint_that_is_a_link_gives_way_without_its_target(tmp_path: Path, trained: Trained) -> None:
    other = tmp_path / "other"
    save(tmp_path / "checkpoints", trained(1)).rename(other)
    (tmp_path / "checkpoints/step-000000001").symlink_to(other)
    assert load_newest(tmp_path / "checkpoints")[0].step == 1
    for step in (2, 3, 4):
        save(tmp_path / "checkpoints", trained(step))
    assert entries(tmp_path / "checkpoints") == [f"step-00000000{step}" for step in (2, 3, 4)]
    assert "manifest.json" in entries(other)


def test_all_checkpoints_behind_a_link(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "other")
    for step in range(5):
        save(tmp_path / "checkpoints", trained(step))
    assert len(entries(tmp_path / "other")) == CHECKPOINTS_KEPT
    assert load_newest(tmp_path / "checkpoints")[0].step == 4

from pathlib import Path

import pytest
import torch

from unisono.errors import CheckpointError
from unisono.training.checkpoint import KEPT, Checkpoint, forget_newer, load_newest, save


def trained(step: int) -> Checkpoint:
    torch.manual_seed(step)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return Checkpoint(step, model.state_dict(), optimizer.state_dict(), {"epoch": step, "loss": 0.1})


def same(one: Checkpoint, other: Checkpoint) -> bool:
    weights = all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    states = [checkpoint.optimizer["state"] for checkpoint in (one, other)]
    optimizer = all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][number][key]))
        for number, entries in states[0].items()
        for key, value in entries.items()
    )
    return weights and optimizer and (one.step, one.progress) == (other.step, other.progress)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, trained(7))
    found, torn = load_newest(tmp_path)
    assert same(found, trained(7))
    assert torn == []
    fresh = torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
    fresh.load_state_dict(found.optimizer)
    assert fresh.param_groups[0]["lr"] == 0.1


def test_the_newest_three_are_kept_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".step-000000003.tmp").mkdir()
    for step in range(KEPT + 3):
        save(tmp_path, trained(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000003", "step-000000004", "step-000000005"]


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "empty"])
def test_a_torn_one_is_passed_over_and_said(tmp_path: Path, file: str, harm: str) -> None:
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
    found, torn = load_newest(tmp_path)
    assert found.step == 1
    assert len(torn) == 1
    assert torn[0].startswith("step-000000002 is torn: ")


def test_none_whole(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        load_newest(tmp_path)
    (save(tmp_path, trained(1)) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: step-000000001 is torn"):
        load_newest(tmp_path)


def test_one_that_was_torn_is_written_again(tmp_path: Path) -> None:
    (save(tmp_path, trained(1)) / "manifest.json").unlink()
    save(tmp_path, trained(1))
    assert load_newest(tmp_path)[0].step == 1


def test_whole_ones_are_not_given_up_for_torn_ones(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        (save(tmp_path, trained(step)) / "manifest.json").unlink()
    save(tmp_path, trained(5))
    assert load_newest(tmp_path)[0].step == 5
    forget_newer(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000005"]


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 1"):
        save(tmp_path / "file" / "checkpoints", trained(1))

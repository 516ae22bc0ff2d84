"""Checkpoints that are whole or not there: written aside, synced to the disk, then renamed.

    RUN/checkpoints/
    ├── step-000046/
    │   ├── weights.safetensors      the model's state_dict
    │   ├── optimizer.safetensors    the tensors of the optimizer's state
    │   └── manifest.json            step, progress, the rest of the optimizer's state, size and SHA-256 of each file
    └── step-000069/

Whoever reads takes the newest that is whole. The newest three are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from unisono.errors import CheckpointError

KEPT = 3
MANIFEST = "manifest.json"
TENSORS = ("weights", "optimizer")
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on."""

    step: int
    """Steps that were made."""
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    """The optimizer's state_dict."""
    progress: dict[str, Any]
    """What else the run wants to know; JSON values."""


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into `folder`, and take away those that are too many.

    Raises CheckpointError when the disk refuses; what was written before is there still.
    """
    try:
        return _save(folder, checkpoint)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint of step {checkpoint.step} into {folder}: {error}"
        ) from error


def _save(folder: Path, checkpoint: Checkpoint) -> Path:
    target = folder / _name(checkpoint.step)
    aside = folder / f".{target.name}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    for left in (*folder.glob(".step-*.tmp"), target):
        shutil.rmtree(left, ignore_errors=True)
    aside.mkdir()
    tensors, rest = _take_apart(checkpoint.optimizer)
    files = {}
    for name, content in zip(TENSORS, (checkpoint.weights, tensors), strict=True):
        path = aside / f"{name}.safetensors"
        save_file({key: tensor.detach().contiguous() for key, tensor in content.items()}, path)
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    body = {
        "format": FORMAT,
        "step": checkpoint.step,
        "progress": checkpoint.progress,
        "optimizer": rest,
        "files": files,
    }
    manifest = aside / MANIFEST
    manifest.write_text(json.dumps({**body, "sha256": _digest_of(body)}, indent=1) + "\n")
    _sync(manifest)
    _sync(aside)
    aside.rename(target)
    _sync(folder)
    for old in [name for name in _whole_names(folder) if name != target.name][: 1 - KEPT]:
        shutil.rmtree(folder / old)
    return target


def forget_newer(folder: Path, step: int) -> None:
    """Take away what is newer than the checkpoint that a run goes on from: it was torn."""
    for name in _whole_names(folder):
        if name > _name(step):
            shutil.rmtree(folder / name)


def load_newest(folder: Path) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint in `folder` that is whole, and a line on each newer one that is not.

    Raises CheckpointError when none is whole.
    """
    torn: list[str] = []
    for name in reversed(_whole_names(folder)):
        try:
            return _load(folder / name), torn
        except CheckpointError as error:
            torn.append(str(error))
    if torn:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {'; '.join(torn)}")
    raise CheckpointError(f"there is no checkpoint in {folder}")


def _name(step: int) -> str:
    return f"step-{step:09d}"


def _load(path: Path) -> Checkpoint:
    try:
        body = json.loads((path / MANIFEST).read_text())
        if body.pop("sha256") != _digest_of(body) or body["format"] != FORMAT:
            raise CheckpointError(f"{path.name} is torn: its manifest does not match its checksum")
        for name, expected in body["files"].items():
            if (path / name).stat().st_size != expected["bytes"] or _digest(path / name) != expected["sha256"]:
                raise CheckpointError(f"{path.name} is torn: {name} does not match its checksum")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path.name} is torn: {error}") from error
    weights, tensors = (load_file(path / f"{name}.safetensors") for name in TENSORS)
    return Checkpoint(body["step"], weights, _put_together(tensors, body["optimizer"]), body["progress"])


def _whole_names(folder: Path) -> list[str]:
    """The names of the checkpoints that were renamed into place, oldest first."""
    return sorted(path.name for path in folder.glob("step-*") if path.is_dir())


def _take_apart(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimizer's state_dict as tensors by name and JSON."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{number}.{key}"] = value
            else:
                values.setdefault(str(number), {})[key] = value
    return tensors, {"values": values, "param_groups": state["param_groups"]}


def _put_together(tensors: dict[str, torch.Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(number): dict(entries) for number, entries in rest["values"].items()}
    for name, tensor in tensors.items():
        number, key = name.split(".", 1)
        state.setdefault(int(number), {})[key] = tensor
    return {"state": state, "param_groups": rest["param_groups"]}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

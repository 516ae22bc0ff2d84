"""Reads the newest complete checkpoint: each file is read to its end and compared with its checksum."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from unisono.errors import CheckpointError
from unisono.training.checkpoint.layout import (
    DAMAGED_SUFFIX,
    TENSORS,
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_name,
    checkpoint_names,
    read_manifest,
    unreadable,
)
from unisono.training.checkpoint.state import unflatten_state


def load_newest(folder: Path) -> tuple[Checkpoint, list[DamagedCheckpoint]]:
    """Return the newest complete checkpoint in `folder`, and the newer, damaged ones. The disk is not changed.

    Raises CheckpointError when none is complete, or a newer one cannot be read or was written by a newer release.
    """
    return load_first(folder, reversed(checkpoint_names(folder)))


def load_first(folder: Path, names: Iterable[str]) -> tuple[Checkpoint, list[DamagedCheckpoint]]:
    """Return the first complete checkpoint of those with these names, and the damaged ones before it.

    Raises CheckpointError as `load_newest` does.
    """
    damaged: list[DamagedCheckpoint] = []
    for name in names:
        found = _load(folder / name)
        if isinstance(found, Checkpoint):
            return found, damaged
        damaged.append(found)
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {folder} is complete: {'; '.join(map(str, damaged))}; nothing was changed"
        )
    raise CheckpointError(f"there is no checkpoint in {folder}")


def load_step(folder: Path, step: int) -> Checkpoint | None:
    """Return the checkpoint of a step in `folder`; None where it is absent or damaged. Raises CheckpointError where it
    cannot be read."""
    if checkpoint_name(step) not in checkpoint_names(folder):
        return None
    found = _load(folder / checkpoint_name(step))
    return found if isinstance(found, Checkpoint) else None


def rename_damaged(folder: Path, damaged: Sequence[DamagedCheckpoint]) -> list[str]:
    """Rename damaged checkpoints, so that none is read as a checkpoint again. Return their new names."""
    renamed = []
    for one in damaged:
        new, number = f"{one.name}{DAMAGED_SUFFIX}", 1
        while os.path.lexists(folder / new):
            number += 1
            new = f"{one.name}{DAMAGED_SUFFIX}-{number}"
        (folder / one.name).rename(folder / new)
        renamed.append(new)
    return renamed


def _load(path: Path) -> Checkpoint | DamagedCheckpoint:
    """Read a checkpoint to its end. Raises CheckpointError where it cannot be read."""
    body = read_manifest(path)
    if isinstance(body, DamagedCheckpoint):
        return body
    try:
        tensors = {name: load_file(path / f"{name}.safetensors") for name in TENSORS}
    except (OSError, SafetensorError) as error:
        raise unreadable(error, path) from error
    weights, optimizer = (tensors[name] for name in TENSORS)
    if body["format"] == 1:
        return Checkpoint(body["step"], weights, _optimizer_of_format_1(optimizer, body["optimizer"]), body["progress"])
    states = unflatten_state(body["weights"], weights), unflatten_state(body["optimizer"], optimizer)
    return Checkpoint(body["step"], *states, body["progress"])


def _optimizer_of_format_1(tensors: dict[str, torch.Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(number): dict(entries) for number, entries in rest["values"].items()}
    for name, tensor in tensors.items():
        number, key = name.split(".", 1)
        state.setdefault(int(number), {})[key] = tensor
    return {"state": state, "param_groups": rest["param_groups"]}

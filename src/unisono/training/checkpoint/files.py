"""Checkpoints on the disk: written into a temporary folder, synced and renamed; read to the end, with their checksums.

The newest three are kept.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from unisono.errors import CheckpointError
from unisono.files import sync
from unisono.training.checkpoint.layout import (
    CHECKPOINTS_KEPT,
    DAMAGED_SUFFIX,
    FORMAT,
    MANIFEST,
    REPLACED_SUFFIX,
    TENSORS,
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_name,
    checkpoint_names,
    digest,
    manifest_digest,
    read_manifest,
    step_of,
    unreadable,
)
from unisono.training.checkpoint.state import flatten_state, unflatten_state


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


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into `folder`, and remove older ones beyond the newest three. Return its path.

    Other processes may be writing other checkpoints into it. Raises CheckpointError when the disk refuses; earlier
    checkpoints are still there.
    """
    aside = folder / f".{checkpoint_name(checkpoint.step)}.tmp"
    try:
        return _save(folder, aside, checkpoint)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint of step {checkpoint.step} into {folder}: {error}; older ones are "
            "unchanged: free space or repair the disk, then resume with --resume"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_newer(folder: Path, step: int) -> list[str]:
    """Remove checkpoints newer than that of `step`, and what a killed run has left half written. Return their names.

    The run's folder is locked: no other process writes. Raises CheckpointError where the disk refuses.
    """
    try:
        for left in folder.glob(".step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        for left in folder.glob(f"step-*{REPLACED_SUFFIX}"):
            place = left.with_name(left.name.removesuffix(REPLACED_SUFFIX))
            if os.path.lexists(place):
                _remove(left)
            else:
                left.rename(place)
        newer = [name for name in checkpoint_names(folder) if step_of(name) > step]
        for name in newer:
            _remove(folder / name)
    except OSError as error:
        raise CheckpointError(
            f"cannot remove what is newer than the checkpoint of step {step} in {folder}: {error.strerror or error}; "
            "remove it, then resume again"
        ) from error
    return newer


def _save(folder: Path, aside: Path, checkpoint: Checkpoint) -> Path:
    target = folder / checkpoint_name(checkpoint.step)
    states = [flatten_state(getattr(checkpoint, name), f"the run's {name}") for name in TENSORS]
    folder.mkdir(parents=True, exist_ok=True)
    aside.mkdir()
    files = {}
    for name, (tensors, _) in zip(TENSORS, states, strict=True):
        path = aside / f"{name}.safetensors"
        save_file(_without_shared_memory(tensors), path)
        sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
    body = {
        "format": FORMAT,
        "step": checkpoint.step,
        "progress": checkpoint.progress,
        **{name: outline for name, (_, outline) in zip(TENSORS, states, strict=True)},
        "files": files,
    }
    manifest = aside / MANIFEST
    manifest.write_text(json.dumps({**body, "sha256": manifest_digest(body)}, indent=1) + "\n")
    sync(manifest)
    sync(aside)
    replaced = target.with_name(target.name + REPLACED_SUFFIX)
    if os.path.lexists(target):  # an epoch's last step, which has its metrics now
        target.rename(replaced)
    aside.rename(target)
    sync(folder)
    _remove(replaced)
    for old in [name for name in checkpoint_names(folder) if name < target.name][: 1 - CHECKPOINTS_KEPT]:
        _remove_surplus(folder / old)
    return target


def _without_shared_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors on the host, of which no two share memory; those that overlap others are copied."""
    seen, apart = set[int](), {}
    for name, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        memory = plain.untyped_storage().data_ptr()
        apart[name] = (plain.clone() if memory in seen else plain).cpu()
        seen.add(memory)
    return apart


def _remove_surplus(path: Path) -> None:
    """Remove a checkpoint that another process may remove at the same time; none is ever seen in part."""
    aside = path.with_name(f".{path.name}.surplus.tmp")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    _remove(aside)


def _remove(path: Path) -> None:
    """Remove a checkpoint; of a link only the link, since others may use its target."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)

"""Writes a checkpoint into a temporary folder, syncs and renames it, and removes surplus older ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from unisono.errors import CheckpointError
from unisono.files import sync
from unisono.training.checkpoint.layout import (
    CHECKPOINTS_KEPT,
    FORMAT,
    MANIFEST,
    REPLACED_SUFFIX,
    TENSORS,
    Checkpoint,
    checkpoint_name,
    checkpoint_names,
    digest,
    manifest_digest,
)
from unisono.training.checkpoint.state import flatten_state


def save(folder: Path, checkpoint: Checkpoint, alone: bool = True) -> Path:
    """Write a checkpoint into `folder`, and remove older ones beyond the newest three. Return its path.

    `alone`: False where other processes may be writing other checkpoints into it; then `tidy` has to be called before.
    Raises CheckpointError when the disk refuses; earlier checkpoints are still there.
    """
    aside = folder / f".{checkpoint_name(checkpoint.step)}.tmp"
    try:
        if alone:
            tidy(folder)
        return _save(folder, aside, checkpoint)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint of step {checkpoint.step} into {folder}: {error}; older ones are "
            "unchanged: free space or repair the disk, then resume with --resume"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Remove what a killed run has left half written, and finish a replacement. The run's folder is locked: no other
    process writes."""
    for left in folder.glob(".step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.glob(f"step-*{REPLACED_SUFFIX}"):
        name = left.with_name(left.name.removesuffix(REPLACED_SUFFIX))
        if os.path.lexists(name):
            _remove(left)
        else:
            left.rename(name)


def remove(path: Path) -> None:
    """Remove a checkpoint. Raises CheckpointError where the disk refuses."""
    try:
        _remove(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot remove {path}, which is newer than the checkpoint to resume from: {error.strerror or error}; "
            "remove it, then resume again"
        ) from error


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
    """Return tensors of which no two share memory; those that overlap others are copied."""
    seen, apart = set[int](), {}
    for name, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        memory = plain.untyped_storage().data_ptr()
        apart[name] = plain.clone() if memory in seen else plain
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

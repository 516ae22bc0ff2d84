"""Reads the newest whole checkpoint: each file is read to its end and compared with its checksum."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from unisono.errors import CheckpointError
from unisono.training.checkpoint.layout import (
    FORMAT,
    MANIFEST,
    TENSORS,
    TORN,
    Checkpoint,
    Torn,
    digest,
    digest_of,
    names,
    unreadable,
)
from unisono.training.checkpoint.state import put_together


def load_newest(folder: Path) -> tuple[Checkpoint, list[Torn]]:
    """Return the newest whole checkpoint in `folder`, and the newer ones that are torn. Nothing is changed on the disk.

    Raises CheckpointError when none is whole, or a newer one cannot be read or was written by a newer release.
    """
    torn: list[Torn] = []
    for name in reversed(names(folder)):
        found = _load(folder / name)
        if isinstance(found, Checkpoint):
            return found, torn
        torn.append(found)
    if torn:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {'; '.join(map(str, torn))}; nothing was changed")
    raise CheckpointError(f"there is no checkpoint in {folder}")


def set_aside(folder: Path, torn: list[Torn]) -> list[str]:
    """Rename torn checkpoints, so that none is read as a checkpoint again. Return their new names."""
    renamed = []
    for one in torn:
        new, number = f"{one.name}{TORN}", 1
        while os.path.lexists(folder / new):
            number += 1
            new = f"{one.name}{TORN}-{number}"
        (folder / one.name).rename(folder / new)
        renamed.append(new)
    return renamed


def _load(path: Path) -> Checkpoint | Torn:
    """Read a checkpoint to its end. Raises CheckpointError where it cannot be read."""
    try:
        present = {entry.name for entry in path.iterdir()}
        if MANIFEST not in present:
            return Torn(path.name, f"it has no {MANIFEST}")
        body = _manifest((path / MANIFEST).read_bytes())
        if isinstance(body, str):
            return Torn(path.name, body)
        if body["format"] > FORMAT:
            raise CheckpointError(
                f"{path} was written by a newer release (format {body['format']}; this one reads up to {FORMAT}); "
                "nothing was changed: use that release, or rename the folder to go on from the one before"
            )
        for name, expected in body["files"].items():
            if name not in present:
                return Torn(path.name, f"it has no {name}")
            if digest(path / name) != expected["sha256"]:
                return Torn(path.name, f"{name} does not match its checksum")
        tensors = {name: load_file(path / f"{name}.safetensors") for name in TENSORS}
    except (OSError, SafetensorError) as error:
        raise unreadable(error, path) from error
    weights, optimizer = (tensors[name] for name in TENSORS)
    if body["format"] == 1:
        return Checkpoint(body["step"], weights, _optimizer_of_format_1(optimizer, body["optimizer"]), body["progress"])
    states = put_together(body["weights"], weights), put_together(body["optimizer"], optimizer)
    return Checkpoint(body["step"], *states, body["progress"])


def _manifest(content: bytes) -> dict[str, Any] | str:
    """Return a manifest's entries, or the reason why it is torn. A manifest of a newer format is returned unchecked."""
    try:
        body = json.loads(content)
    except ValueError as error:
        return f"{MANIFEST} is not JSON: {error}"
    if not isinstance(body, dict) or not isinstance(body.get("format"), int):
        return f"{MANIFEST} is none of a checkpoint"
    expected = body.pop("sha256", None)
    if body["format"] <= FORMAT and expected != digest_of(body):
        return "its manifest does not match its checksum"
    return body


def _optimizer_of_format_1(tensors: dict[str, torch.Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(number): dict(entries) for number, entries in rest["values"].items()}
    for name, tensor in tensors.items():
        number, key = name.split(".", 1)
        state.setdefault(int(number), {})[key] = tensor
    return {"state": state, "param_groups": rest["param_groups"]}

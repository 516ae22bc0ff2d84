"""Names and files of checkpoints, their manifests, and the errors of reading one. Needs no PyTorch.

    RUN/checkpoints/
    ├── step-000000046/
    │   ├── weights.safetensors      the tensors of the model's state_dict, each memory once
    │   ├── optimizer.safetensors    the tensors of the optimizer's state
    │   └── manifest.json            step, progress, outlines of both states, size and SHA-256 of each file
    ├── step-000000069/
    └── step-000000092.torn/         damaged: renamed when the run resumed from 69

The newest complete one is used. The newest three are kept; one that could not be read is never removed or renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import CheckpointError

CHECKPOINTS_KEPT = 3
MANIFEST = "manifest.json"
TENSORS = ("weights", "optimizer")
FORMAT = 3
"""Format that is written. Older ones can be read. Format 2 had no versions of modules, and format 1 no outline of the
weights and another one of the optimizer."""

NAME = re.compile(r"step-\d{9,}")
DAMAGED_SUFFIX, REPLACED_SUFFIX = ".torn", ".replaced"


@dataclass(frozen=True)
class Checkpoint:
    """The state that a run needs to resume."""

    step: int
    """Number of steps made."""
    weights: dict[str, Any]
    """The model's state_dict: tensors, and the results of its modules' `get_extra_state`."""
    optimizer: dict[str, Any]
    progress: dict[str, Any]
    """Further state of the run, as JSON values."""


class DamagedCheckpointError(CheckpointError):
    """Checkpoint `name` was read to its end and differs from the one written."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name} is damaged: {self.reason}"


def checkpoint_name(step: int) -> str:
    return f"step-{step:09d}"


def step_of(name: str) -> int:
    return int(name.removesuffix(REPLACED_SUFFIX).removeprefix("step-"))


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in `folder`, oldest first: those that were renamed into place.

    A checkpoint that was being replaced when its run was killed counts if its successor does not exist.
    Raises CheckpointError where the folder cannot be read, or is a link to nowhere.
    """
    with reading(folder):
        if not folder.is_symlink() and not folder.exists():
            return []
        names = {path.name for path in folder.iterdir()}
    plain = ((name, name.removesuffix(REPLACED_SUFFIX)) for name in names)
    return sorted(name for name, step in plain if NAME.fullmatch(step) and (step == name or step not in names))


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, whose files are read to their end. Raises DamagedCheckpointError where they
    differ from it, and CheckpointError where one cannot be read."""
    with reading(path):
        present = {entry.name for entry in path.iterdir()}
        if MANIFEST not in present:
            raise DamagedCheckpointError(path.name, f"it has no {MANIFEST}")
        manifest = _manifest(path)
        if manifest["format"] > FORMAT:
            raise CheckpointError(
                f"{path} was written by a newer release (format {manifest['format']}; this one reads up to {FORMAT}); "
                "nothing was changed: use that release, or rename the folder to resume from the previous one"
            )
        for name, expected in manifest["files"].items():
            if name not in present:
                raise DamagedCheckpointError(path.name, f"it has no {name}")
            if digest(path / name) != expected["sha256"]:
                raise DamagedCheckpointError(path.name, f"{name} does not match its checksum")
    return manifest


def read_progress(path: Path) -> dict[str, Any] | None:
    """Return the progress of a checkpoint, without its tensors; None where its manifest is damaged."""
    with reading(path):
        try:
            return _manifest(path).get("progress")
        except (FileNotFoundError, DamagedCheckpointError):
            return None


def _manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; that of a newer format is returned unchecked."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except ValueError as error:
        raise DamagedCheckpointError(path.name, f"{MANIFEST} is not JSON: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise DamagedCheckpointError(path.name, f"{MANIFEST} is no manifest of a checkpoint")
    expected = manifest.pop("sha256", None)
    if manifest["format"] <= FORMAT and expected != manifest_digest(manifest):
        raise DamagedCheckpointError(path.name, "its manifest does not match its checksum")
    return manifest


@contextmanager
def reading(path: Path, errors: type[Exception] = OSError) -> Iterator[None]:
    """Within the block, turn an OSError, or one of `errors`, into the error for a checkpoint, or a folder of them, that
    cannot be read but may be whole."""
    try:
        yield
    except (OSError, errors) as error:
        place = Path(getattr(error, "filename", None) or path)
        away = f", a link to {place.readlink()}" if os.path.islink(place) else ""  # noqa: PTH114  that one raises
        raise CheckpointError(
            f"cannot read {place}{away}: {getattr(error, 'strerror', None) or error}; it may be complete, and nothing "
            "was changed: mount its disk or make it readable, then resume with --resume, or rename "
            f"{path} to resume without it"
        ) from error


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()

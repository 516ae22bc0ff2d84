"""Checkpoints, written atomically: into a temporary folder, synced to the disk, then renamed.

    RUN/checkpoints/
    ├── step-000000046/
    │   ├── weights.safetensors      the tensors of the model's state_dict, each memory once
    │   ├── optimizer.safetensors    the tensors of the optimizer's state
    │   └── manifest.json            step, progress, outlines of both states, size and SHA-256 of each file
    ├── step-000000069/
    └── step-000000092.torn/         damaged: renamed when the run resumed from 69

The newest complete one is used. The newest three are kept; one that could not be read is never removed or renamed.
"""

from typing import TYPE_CHECKING

from unisono.registry import lazy_attributes

if TYPE_CHECKING:
    from unisono.training.checkpoint.layout import (
        CHECKPOINTS_KEPT,
        Checkpoint,
        DamagedCheckpoint,
        checkpoint_names,
        read_manifest,
        read_progress,
        step_of,
    )
    from unisono.training.checkpoint.read import load_first, load_newest, load_step, rename_damaged
    from unisono.training.checkpoint.state import check_state
    from unisono.training.checkpoint.write import remove, save, tidy

__all__ = [
    "CHECKPOINTS_KEPT",
    "Checkpoint",
    "DamagedCheckpoint",
    "check_state",
    "checkpoint_names",
    "load_first",
    "load_newest",
    "load_step",
    "read_manifest",
    "read_progress",
    "remove",
    "rename_damaged",
    "save",
    "step_of",
    "tidy",
]

_IN_LAYOUT = (
    *("CHECKPOINTS_KEPT", "Checkpoint", "DamagedCheckpoint"),
    *("checkpoint_names", "read_manifest", "read_progress", "step_of"),
)
_HOMES = {
    **dict.fromkeys(_IN_LAYOUT, "unisono.training.checkpoint.layout"),
    **dict.fromkeys(("load_first", "load_newest", "load_step", "rename_damaged"), "unisono.training.checkpoint.read"),
    "check_state": "unisono.training.checkpoint.state",
    **dict.fromkeys(("remove", "save", "tidy"), "unisono.training.checkpoint.write"),
}

__getattr__ = lazy_attributes(__name__, _HOMES)  # the command line looks for finished runs without PyTorch

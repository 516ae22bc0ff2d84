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

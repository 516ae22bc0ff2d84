"""Checkpoints, written atomically: into a temporary folder, synced to the disk, then renamed."""

"""Packs: data sets as few big files, Arrow IPC stripes, with an index of every sample's place."""

"""A data set as few big files: Arrow IPC stripes, and an index of every sample's place."""

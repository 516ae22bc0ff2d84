"""Data sets, loading of batches, and the order of samples."""

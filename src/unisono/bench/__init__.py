"""Benchmarks of Unisono beside its peers and its bounds, in one run, interleaved."""

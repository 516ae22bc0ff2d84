"""Measures what is here beside its peers and its bounds, in one run, interleaved."""

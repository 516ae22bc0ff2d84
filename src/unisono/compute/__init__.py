"""Computation of a network on a processor: number format, cores, and convolution algorithms."""

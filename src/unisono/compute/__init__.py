"""Computation of a network on a processor: number format, cores, and the way of each convolution."""

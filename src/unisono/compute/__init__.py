"""How a network is computed on the processor that there is: number format, cores, and the way of each convolution."""

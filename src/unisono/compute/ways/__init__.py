"""The ways in which a convolution can be computed, one file each (swCaffe 4.2 and 6.1)."""

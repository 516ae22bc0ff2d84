"""Convolution algorithms, one file each (swCaffe 4.2 and 6.1)."""
